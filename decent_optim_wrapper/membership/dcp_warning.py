"""A warning if torch.distributed.checkpoint would mix values that differ between ranks.

It stores a tensor whose key is the same on several ranks only once, from any of them.
"""

from __future__ import annotations

import re
import sys
import warnings
import weakref
from typing import Any

from torch.optim import Optimizer

from decent_optim_wrapper.gossip.gossip import Gossip

_PACKAGE = "torch.distributed.checkpoint."
_SAVERS = ("save", "async_save")
_GETTERS = ("get_optimizer_state_dict", "get_state_dict")


def warn_of_mixtures(optimizer: Optimizer, gossip: Gossip) -> None:
    """Warn when the state dict of `optimizer` is requested for a checkpoint that mixes the ranks.

    The caller of `state_dict()` is inspected. A model that is saved alone, or a dict that was made
    before, is therefore not noticed. A function that also takes `gossip_state_dict()`
    saves each replica under a key of its own.

    Args:
        optimizer: the optimizer whose `state_dict()` is watched.
        gossip: knows whether the ranks' values differ; its end ends the watch.
    """
    alive = weakref.ref(gossip)

    def warn(_: Optimizer) -> None:
        gossip = alive()
        if gossip is not None and gossip.differs and _takes_one_for_all():
            warnings.warn(
                "torch.distributed.checkpoint takes equal keys on several ranks for replicas of "
                "one value, but the ranks' values differ: it would store a mixture of them, "
                "without the round in flight. Save the average, inside `with "
                "optimizer.averaged():`, or save each rank's values under a key of its own: "
                'dcp.save({f"rank_{rank}": {"model": model.state_dict(), "optimizer": '
                "optimizer.state_dict()}}); for replicas that are spread over a mesh, one key for "
                "each of them, with optimizer.gossip_state_dict() beside the base's state",
                stacklevel=2,
            )

    handle = optimizer.register_state_dict_pre_hook(warn)
    weakref.finalize(gossip, handle.remove)


def _takes_one_for_all() -> bool:
    """Whether the caller is torch.distributed.checkpoint, with no rank number in its keys."""
    gets = False
    by_replica = False
    frame: Any = sys._getframe()
    while (frame := frame.f_back) is not None:
        function = frame.f_code.co_name
        if str(frame.f_globals.get("__name__")).startswith(_PACKAGE):
            if function in _SAVERS:
                return not any(re.search(r"\d", str(key)) for key in frame.f_locals["state_dict"])
            gets = gets or function in _GETTERS
        by_replica = by_replica or "gossip_state_dict" in frame.f_code.co_names
    return gets and not by_replica
