"""torch's process groups from inside: their backends and stores, and communicators of our own."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store

from decent_optim_wrapper.comm.store import within

# Of a receive that nobody sends for.
_ABORT_TAG = (1 << 20) - 1
# How much later than at its timeout gloo may say which rank did not come.
_CONNECT_SLACK_SECONDS = 1.0


def backend_of(group: Any, device: torch.device) -> Any:
    """The backend that serves `device`; a raw backend serves whatever it serves.

    Raises:
        RuntimeError: there is none.
    """
    return group._get_backend(device) if isinstance(group, dist.ProcessGroup) else group


def serves(group: Any, device: torch.device) -> bool:
    """Whether the group has a backend for `device`."""
    try:
        backend = backend_of(group, device)
    except RuntimeError:
        return False
    return device.type == "cpu" or isinstance(group, dist.ProcessGroup) or backend.name() != "gloo"


def exchange_device(group: Any) -> torch.device:
    """The kind of device whose tensors are exchanged: the GPU where the group serves it."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    return cuda if torch.cuda.is_available() and serves(group, cuda) else cpu


def timeout_of(group: Any) -> timedelta:
    """What the group's own operations are bounded by."""
    return backend_of(group, exchange_device(group)).options._timeout  # type: ignore[no-any-return]


def store_of(group: Any) -> Any | None:
    """The store that the group was built on; None where torch does not tell."""
    if is_registered(group):
        return _get_process_group_store(group)
    return group.get_group_store() if hasattr(group, "get_group_store") else None


def is_registered(group: Any) -> bool:
    """Whether torch.distributed knows the group."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True


def is_closed(group: Any) -> bool:
    """Whether the group has been destroyed: it has the name of a registered one and is none."""
    if not isinstance(group, dist.ProcessGroup) or is_registered(group):
        return False
    try:
        return bool(group.group_name)
    except RuntimeError:
        return False


def new_backend(like: Any, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A communicator of the kind of `like` that torch does not register.

    Not dist.new_group: it salts the name with the number of groups that this process has made, and
    waits for ever where ranks have made different numbers.

    Args:
        like: gloo or nccl.
        store: where its members meet, under a prefix of their own.
        rank: this rank's place among the members.
        size: number of members.
        timeout: bounds the meeting and every operation.

    Raises:
        ValueError: another backend.
        RuntimeError: not all members came.
        TimeoutError: a link is dead, or the store does not answer.
    """
    if like.name() == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    if like.name() == "gloo":
        # Where a link is dead, or the store does not answer, gloo's own bound does not hold.
        seconds = timeout.total_seconds() + _CONNECT_SLACK_SECONDS
        return within(seconds, lambda: connect_gloo(store, rank, size, timeout))
    raise ValueError(
        f"rank {rank} of {size}: communicators of our own work with gloo and nccl, not with "
        f"{like.name()}; use a topology of pairs, or complete, and no timeout"
    )


def connect_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo group, once all its members are in it.

    A member that leaves early, as where its training ends, would close the connections to one that
    is still making its own.

    Args:
        store: where its members meet, under a prefix of their own.
        rank: this rank's place among the members.
        size: number of members.
        timeout: bounds the meeting, the proof that all are there, and every operation.

    Raises:
        RuntimeError: not all members came; what was connected is closed.
    """
    group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
    try:
        group.allreduce([torch.ones(1, device="cpu")]).wait(timeout)
    except RuntimeError:
        # A collective that hangs would hold the group until the timeout.
        abort(group)
        raise
    return group


def abort(communicator: Any) -> None:
    """End everything in flight on a communicator made by `new_backend`, here and at the other ends.

    gloo's own `abort` does nothing, but a receive that is given up closes the connections to all
    ranks: works that wait on them raise at once, on other threads too.
    """
    if communicator.name() != "gloo":
        communicator.abort()
        return
    for peer in range(communicator.size()):
        # Each peer is tried: a connection that is closed already says nothing to the other ones.
        if peer != communicator.rank():
            with suppress(RuntimeError):
                nothing = torch.empty(1, device="cpu")
                communicator.recv([nothing], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))


def prefixed(prefix: str, store: Any) -> Any:
    """The store, with every key under `prefix`."""
    return PrefixStore(prefix, store)
