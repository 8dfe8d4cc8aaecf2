"""Topologies: which ranks mix with which, round by round, and with what weight.

This package does not communicate and works without a process group.
"""

from decent_optim_wrapper.topo.any_size import (
    Base2,
    BipartiteExponential,
    Hierarchical,
    Hypercuboid,
    RandomMatching,
)
from decent_optim_wrapper.topo.base import Group, Topology
from decent_optim_wrapper.topo.classic import (
    AlternatingExponentialRing,
    Complete,
    OnePeerExponential,
    Ring,
)
from decent_optim_wrapper.topo.factory import TopologyFactory, default_name
from decent_optim_wrapper.topo.greedy import Greedy

__all__ = [
    "AlternatingExponentialRing",
    "Base2",
    "BipartiteExponential",
    "Complete",
    "Greedy",
    "Group",
    "Hierarchical",
    "Hypercuboid",
    "OnePeerExponential",
    "RandomMatching",
    "Ring",
    "Topology",
    "TopologyFactory",
    "default_name",
]
