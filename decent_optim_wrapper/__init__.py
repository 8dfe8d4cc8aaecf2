"""Decentralised data-parallel training for PyTorch: an optimizer wrapper that gossips."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from decent_optim_wrapper.codecs import Codec
from decent_optim_wrapper.config import Schedule
from decent_optim_wrapper.errors import CallOrderError, NonFiniteError, PeerError
from decent_optim_wrapper.gossip.extension import Extension
from decent_optim_wrapper.gossip.schedule import AsItArrives, BeforeForward, Late, Pacing
from decent_optim_wrapper.log import configure as _configure_log
from decent_optim_wrapper.start.build import __version__
from decent_optim_wrapper.topo import Group, Topology, TopologyFactory
from decent_optim_wrapper.wrapper import DecentOptimWrapper

if TYPE_CHECKING:
    from decent_optim_wrapper.ddp import DecentralizedDataParallel
    from decent_optim_wrapper.elastic.membership.elastic import Elastic
    from decent_optim_wrapper.elastic.stores.etcd_store import EtcdStore
    from decent_optim_wrapper.extensions.gradient_tracking import GradientTracking
    from decent_optim_wrapper.extensions.outer_optimizer import OuterOptimizer
    from decent_optim_wrapper.extensions.state_average import StateAverage
    from decent_optim_wrapper.extensions.state_gossip import StateGossip
else:
    # What most runs do not need is loaded when it is asked for (PEP 562): names, and modules.
    _LATE = {
        "DecentralizedDataParallel": "ddp.module:DecentralizedDataParallel",
        "Elastic": "elastic.membership.elastic:Elastic",
        "EtcdStore": "elastic.stores.etcd_store:EtcdStore",
        "GradientTracking": "extensions.gradient_tracking:GradientTracking",
        "OuterOptimizer": "extensions.outer_optimizer:OuterOptimizer",
        "StateAverage": "extensions.state_average:StateAverage",
        "StateGossip": "extensions.state_gossip:StateGossip",
        **{room: f"{room}:" for room in ("checkpoint", "data", "ddp", "planning", "utils")},
    }

    def __getattr__(name: str) -> Any:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return resolve_name(f"{__name__}.{_LATE[name]}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATE})


__all__ = [
    "AsItArrives",
    "BeforeForward",
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
