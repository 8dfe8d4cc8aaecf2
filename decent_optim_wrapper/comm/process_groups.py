"""Backends and stores of torch's process groups, and communicators that we create."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store

from decent_optim_wrapper.comm.waiting import within

# Where small messages travel, whatever torch.set_default_device says.
CPU = torch.device("cpu")
_CUDA = torch.device("cuda")
_NCCL = "nccl"
# The tag of a receive without a matching send.
_ABORT_TAG = (1 << 20) - 1
# How much later than its timeout gloo may report which rank is missing.
_CONNECT_SLACK_SECONDS = 1.0


def backend_of(group: Any, device: torch.device) -> Any:
    """The backend for `device`; a raw backend is returned as it is.

    Raises:
        RuntimeError: the group has no backend for the device.
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
    """The kind of device whose tensors are exchanged: the GPU if the group serves it."""
    return _CUDA if torch.cuda.is_available() and serves(group, _CUDA) else CPU


def timeout_of(group: Any) -> timedelta:
    """The timeout of the group's own operations."""
    return backend_of(group, exchange_device(group)).options._timeout  # type: ignore[no-any-return]


def store_of(group: Any) -> Any | None:
    """The store that the group was built on; None if torch does not know it."""
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
    """Whether the group has been destroyed: it has a name, but is not registered."""
    if not isinstance(group, dist.ProcessGroup) or is_registered(group):
        return False
    try:
        return bool(group.group_name)
    except RuntimeError:
        return False


def new_communicator(like: Any, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Create a communicator of the kind of `like` that torch does not register.

    Small messages travel on the CPU: it has a gloo backend, and next to it one of NCCL if `like`
    has. dist.new_group does not do: its name depends on the number of groups that this process has
    made, and it waits forever if ranks have made different numbers.

    Args:
        like: a process group, or a gloo backend.
        store: where the members meet, under a prefix of their own.
        rank: the position of this rank among the members.
        size: number of members.
        timeout: bound of the connection and of every operation.

    Raises:
        ValueError: `like` has another backend.
        RuntimeError: a member is missing.
        TimeoutError: a link is dead, or the store does not answer.
    """
    kind = backend_of(like, exchange_device(like)).name()
    if kind != "gloo" and not is_nccl(kind):
        raise ValueError(
            f"rank {rank} of {size}: expected a gloo or nccl backend for a communicator of some "
            f"ranks, got {kind}; use a topology of pairs, or complete, and no timeout"
        )
    # gloo's own timeout does not hold if a link is dead or the store does not answer.
    seconds = timeout.total_seconds() + _CONNECT_SLACK_SECONDS
    gloo = within(seconds, lambda: connect_gloo(store, rank, size, timeout))
    if kind == "gloo":
        return gloo
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # It connects in its first collective.
    nccl = dist.ProcessGroupNCCL(PrefixStore(_NCCL, store), rank, size, options)
    group = dist.ProcessGroup(store, rank, size)
    kinds = dist.ProcessGroup.BackendType
    group._register_backend(CPU, kinds.GLOO, gloo)
    group._register_backend(_CUDA, kinds.NCCL, nccl)
    return group


def connect_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Create a gloo group, and wait until all its members are connected.

    Otherwise a member that leaves early, for example at the end of its training, would close the
    connections to one that is still connecting.

    Args:
        store: where the members meet, under a prefix of their own.
        rank: the position of this rank among the members.
        size: number of members.
        timeout: bound of the connection, of the first collective and of every operation.

    Raises:
        RuntimeError: a member is missing; the connections made are closed.
    """
    group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
    try:
        group.allreduce([torch.ones(1, device="cpu")]).wait(timeout)
    except RuntimeError:
        # A collective that hangs would keep the group alive until the timeout.
        abort(group)
        raise
    return group


def is_nccl(name: str) -> bool:
    """Whether a backend of this name is NCCL: torch has several, such as "nccl2"."""
    return name.startswith(_NCCL)


def close(communicator: Any, devices: Iterable[torch.device], seconds: float) -> None:
    """Release a communicator made by `new_communicator`; with gloo, that is its last reference.

    NCCL aborts what is under way when it is released: others would mix what has half arrived.

    Args:
        communicator: the communicator.
        devices: the GPUs that use it.
        seconds: bound of the wait for what is under way there.
    """
    if not isinstance(communicator, dist.ProcessGroup):
        return

    def end() -> None:
        for device in devices:
            torch.cuda.synchronize(device)
        backend_of(communicator, _CUDA).shutdown()

    try:
        within(seconds, end)
    except (RuntimeError, TimeoutError):
        abort(communicator)


def abort(communicator: Any) -> None:
    """Abort everything in flight on a communicator made here, on this rank and on the peers.

    gloo's own `abort` does nothing, but a receive that times out closes the connections to all
    ranks: works that wait on them raise at once, also on other threads.
    """
    if isinstance(communicator, dist.ProcessGroup):
        for device in (CPU, _CUDA):
            abort(backend_of(communicator, device))
        return
    if communicator.name() != "gloo":
        # Its own error would hide the one for which it is aborted.
        with suppress(RuntimeError):
            communicator.abort()
        return
    for peer in range(communicator.size()):
        # Try each peer: a connection that is closed already does not affect the others.
        if peer != communicator.rank():
            with suppress(RuntimeError):
                nothing = torch.empty(1, device="cpu")
                communicator.recv([nothing], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))


def exchange_coalesced(group: Any, outgoing: Tensor, incoming: Tensor, peer: int) -> Any:
    """Start a send and a receive as one work; as `dist.batch_isend_irecv` for any group."""
    group._start_coalescing(outgoing.device)
    try:
        group.send([outgoing], peer, 0)
        group.recv([incoming], peer, 0)
    finally:
        work = group._end_coalescing(outgoing.device)
    return work
