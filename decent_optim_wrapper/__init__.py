"""Decentralised data-parallel training for PyTorch: an optimizer wrapper that gossips."""

from decent_optim_wrapper.codecs import Codec
from decent_optim_wrapper.config import Schedule
from decent_optim_wrapper.ddp import DecentralizedDataParallel
from decent_optim_wrapper.elastic.membership.elastic import Elastic
from decent_optim_wrapper.elastic.stores.etcd_store import EtcdStore
from decent_optim_wrapper.errors import CallOrderError, NonFiniteError, PeerError
from decent_optim_wrapper.extensions.gradient_tracking import GradientTracking
from decent_optim_wrapper.extensions.outer_optimizer import OuterOptimizer
from decent_optim_wrapper.extensions.state_average import StateAverage
from decent_optim_wrapper.extensions.state_gossip import StateGossip
from decent_optim_wrapper.gossip.extension import Extension
from decent_optim_wrapper.gossip.schedule import AsItArrives, Late, Pacing
from decent_optim_wrapper.log import configure as _configure_log
from decent_optim_wrapper.start.setup import __version__
from decent_optim_wrapper.topo import Group, Topology, TopologyFactory
from decent_optim_wrapper.wrapper import DecentOptimWrapper

__all__ = [
    "AsItArrives",
    "CallOrderError",
    "Codec",
    "DecentOptimWrapper",
    "DecentralizedDataParallel",
    "Elastic",
    "EtcdStore",
    "Extension",
    "GradientTracking",
    "Group",
    "Late",
    "NonFiniteError",
    "OuterOptimizer",
    "Pacing",
    "PeerError",
    "Schedule",
    "StateAverage",
    "StateGossip",
    "Topology",
    "TopologyFactory",
    "__version__",
]

_configure_log()
