"""Topologies: which ranks mix with which, round by round, and with what weight.

This package does not communicate and works without a process group.
"""

from decent_optim_wrapper.topo._any_size import (
    Base2,
    BipartiteExponential,
    Hierarchical,
    Hypercuboid,
    RandomMatching,
)
from decent_optim_wrapper.topo._base import Topology
from decent_optim_wrapper.topo._classic import (
    AlternatingExponentialRing,
    Complete,
    OnePeerExponential,
    Ring,
)
from decent_optim_wrapper.topo._factory import TopologyFactory
from decent_optim_wrapper.topo._greedy import Greedy
from decent_optim_wrapper.topo._group import Group

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
]
