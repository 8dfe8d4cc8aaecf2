"""Warns of checkpoints of torch.distributed.checkpoint that do not hold the ranks' own values.

It stores a tensor with the same key on several ranks only once, from any of them. Its functions for
state dicts read only the entries of torch's own optimizers.
"""

from __future__ import annotations

import dis
import re
import sys
import weakref
from types import FrameType

import torch.distributed as dist
from torch.optim import Optimizer

from decent_optim_wrapper.gossip.gossip import Gossip
from decent_optim_wrapper.warn import warn

_PACKAGE = "torch.distributed.checkpoint."
_SAVERS = ("save", "async_save")
_GETTERS = ("get_optimizer_state_dict", "get_state_dict")

_MIXTURE = (
    "torch.distributed.checkpoint takes equal keys on several ranks for replicas of one value, but "
    "the ranks' values differ: it would store a mixture of them, without the round in flight. Save "
    "the average, inside `with optimizer.averaged():`, or save each rank's values under a key of "
    'its own: dcp.save({f"rank_{rank}": {"model": model.state_dict(), "optimizer": '
    "optimizer.state_dict()}}); for replicas that are spread over a mesh, one key for each of "
    "them, with optimizer.gossip_state_dict() beside the base's state"
)
_NO_ROUND = (
    "{}() leaves out what the wrapper adds to the optimizer's state: a run that loads it starts at "
    "round 0, without the round in flight. Save optimizer.gossip_state_dict() beside it and load "
    "that with optimizer.load_gossip_state_dict(), or save optimizer.state_dict() instead"
)
_SAME_KEYS = (
    ". Save it under a key for each rank, or inside `with optimizer.averaged():`. Under keys that "
    "are the same on all ranks torch.distributed.checkpoint would store a mixture of their values, "
    "which differ"
)


def warn_of_checkpoints(optimizer: Optimizer, gossip: Gossip) -> None:
    """Warn if the state dict of `optimizer` is requested for a checkpoint that mixes the ranks.

    It also warns if the checkpoint lacks the round. It inspects the caller of `state_dict()`, so it
    does not notice a model that is saved alone, or a dict that was made before. A function that
    also calls `gossip_state_dict()` saves each replica under its own key, with the round.

    Args:
        optimizer: the optimizer whose `state_dict()` is watched.
        gossip: knows whether the ranks' values differ; the watch ends when it is freed.
    """
    alive = weakref.ref(gossip)

    def inspect(_: Optimizer) -> None:
        gossip = alive()
        if gossip is None or not _differ(gossip):
            return
        transport = gossip.pipeline.session.transport
        # The numbers in the keys of this rank: its own, or that of its replica.
        own = {transport.rank, transport.initial_rank}
        if dist.is_initialized():
            own.add(dist.get_rank())
        if text := _what_is_wrong(own):
            warn(text)

    handle = optimizer.register_state_dict_pre_hook(inspect)
    weakref.finalize(gossip, handle.remove)


def _differ(gossip: Gossip) -> bool:
    """Whether a round is in flight while the values in place differ between ranks."""
    pipeline = gossip.pipeline
    if pipeline.session.transport.world_size == 1 or gossip.average.snapshot is not None:
        return False
    return not pipeline.in_flight.is_empty


def _what_is_wrong(own: set[int]) -> str:
    """What is wrong with the checkpoint that the caller makes; empty if there is nothing.

    Args:
        own: the numbers that mark keys of this rank.
    """
    getter, by_replica = "", False
    frame = sys._getframe().f_back
    while frame is not None:
        function = frame.f_code.co_name
        if str(frame.f_globals.get("__name__")).startswith(_PACKAGE):
            if function == "load":
                return ""
            if function in _SAVERS:
                keys = " ".join(map(str, frame.f_locals["state_dict"]))
                if own.isdisjoint(map(int, re.findall(r"\d+", keys))):
                    return _MIXTURE
                return _NO_ROUND.format(getter) if getter and not by_replica else ""
            if function in _GETTERS:
                if _is_discarded(frame):
                    return ""
                getter = function
        by_replica = by_replica or "gossip_state_dict" in frame.f_code.co_names
        frame = frame.f_back
    return _NO_ROUND.format(getter) + _SAME_KEYS if getter and not by_replica else ""


def _is_discarded(call: FrameType) -> bool:
    """Whether the caller ignores the result, as when it only lets torch create the state."""
    caller = call.f_back
    if caller is None:
        return False
    following = (i for i in dis.get_instructions(caller.f_code) if i.offset > caller.f_lasti)
    return next(following).opname == "POP_TOP"
