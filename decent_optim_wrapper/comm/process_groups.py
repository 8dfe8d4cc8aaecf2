"""Backends and stores of torch's process groups, and communicators that we create."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store, _world

from decent_optim_wrapper.comm import nccl
from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.secret import prove
from decent_optim_wrapper.comm.waiting import never, within
from decent_optim_wrapper.forks import leave_to_parent

# Where small messages travel, whatever torch.set_default_device says.
CPU = torch.device("cpu")
# How much later than its timeout gloo may report which rank is missing.
_CONNECT_SLACK_SECONDS = 1.0
# How long NCCL may take to abort what a GPU does.
_ABORT_SECONDS = 10.0


def backend_of(group: Any, device: torch.device) -> Any:
    """The backend for `device`; a raw backend is returned as it is.

    Raises:
        RuntimeError: the group has no backend for the device.
    """
    return group._get_backend(device) if isinstance(group, dist.ProcessGroup) else group


def serves(group: Any, device: torch.device) -> bool:
    """Return whether the group has a backend for `device`."""
    try:
        backend = backend_of(group, device)
    except RuntimeError:
        return False
    return device.type == "cpu" or isinstance(group, dist.ProcessGroup) or backend.name() != "gloo"


def exchange_backend(group: Any) -> Any:
    """The backend that exchanges tensors: the GPU's if the group serves it."""
    device = nccl.CUDA if torch.cuda.is_available() and serves(group, nccl.CUDA) else CPU
    return backend_of(group, device)


def timeout_of(group: Any) -> timedelta:
    """The timeout of the group's own operations."""
    return exchange_backend(group).options._timeout  # type: ignore[no-any-return]


def store_of(group: Any) -> Any | None:
    """The store that the group was built on; None if torch does not know it."""
    # Torch 2.8 has only this for the groups that it knows.
    if is_registered(group):
        return _get_process_group_store(group)
    return group.get_group_store() if hasattr(group, "get_group_store") else None


def is_registered(group: Any) -> bool:
    """Return whether torch.distributed knows the group."""
    return group in _world.pg_map


def new_communicator(
    like: Any,
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    should_stop: Callable[[], bool] = never,
) -> Any:
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
        should_stop: returns True to give up earlier.

    Raises:
        ValueError: `like` has another backend, or the secret of this rank is empty.
        RuntimeError: a member is missing, or has another secret.
        TimeoutError: a link is dead, the store does not answer, or `should_stop` has ended it.
    """
    theirs = exchange_backend(like)
    kind = theirs.name()
    if kind != "gloo" and not nccl.is_nccl(kind):
        raise ValueError(
            f"rank {rank} of {size}: expected a gloo or nccl backend for a communicator of some "
            f"ranks, got {kind}; use a topology of pairs, or complete, and no timeout"
        )
    # gloo's own timeout does not apply if a link is dead or the store does not answer.
    seconds = timeout.total_seconds() + _CONNECT_SLACK_SECONDS
    gloo = within(seconds, lambda: connect_gloo(store, rank, size, timeout), should_stop)
    if kind == "gloo":
        return gloo
    on_gpus = nccl.new_backend(theirs, PrefixStore("nccl", store), rank, size, timeout)
    group = dist.ProcessGroup(store, rank, size)
    kinds = dist.ProcessGroup.BackendType
    group._register_backend(CPU, kinds.GLOO, gloo)
    group._register_backend(nccl.CUDA, kinds.NCCL, on_gpus)
    leave_to_parent(group)
    return group


def connect_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Create a gloo group, and wait until all its members are connected.

    Otherwise a member that leaves early, for example at the end of its training, would close the
    connections to one that is still connecting.

    Args:
        store: where the members meet, under a prefix of their own.
        rank: the position of this rank among the members.
        size: number of members.
        timeout: bound of each connection, first message and operation. With an interface, the wait
            for the addresses of the others has the store's own timeout.

    Raises:
        RuntimeError: a member is missing, or has another secret; the connections are closed.
        ValueError: the secret of this rank is empty.
    """
    # In a list, so that the error, which holds this frame, does not hold the group.
    made: list[Any] = []
    # gloo's thread tries a lock again and again while a send holds it. Woken by that send, it would
    # preempt the sender, and try for milliseconds. Threads of SCHED_BATCH preempt no other.
    changed = _replace_policy("SCHED_OTHER", "SCHED_BATCH")
    try:
        made.append(dist.ProcessGroupGloo(store, rank, size, timeout))
    finally:
        if changed:
            _replace_policy("SCHED_BATCH", "SCHED_OTHER")
    leave_to_parent(made[0])
    try:
        prove(made[0], timeout)
    except (RuntimeError, ValueError):
        # The frames of the error refer to the group. The peers notice at once.
        abort(made)
        raise
    return made[0]


def _replace_policy(old: str, new: str) -> bool:
    """Replace the scheduling policy of this thread and of what it starts, if it is `old`."""
    # Linux has policies, but not every sandbox.
    with suppress(AttributeError, OSError):
        if os.sched_getscheduler(0) == getattr(os, old):
            os.sched_setscheduler(0, getattr(os, new), os.sched_param(0))
            return True
    return False


def close(communicators: list[Any], devices: Iterable[torch.device], seconds: float) -> None:
    """Release communicators made by `new_communicator`; with gloo, that is its last reference.

    Args:
        communicators: the communicators; the list may be emptied, as in `abort`.
        devices: the GPUs that use them.
        seconds: bound of the wait for what is under way there.
    """
    try:
        if nccl.backends(communicators):
            within(seconds, lambda: nccl.shut_down(communicators, devices))
    except (RuntimeError, TimeoutError):
        abort(communicators)


def abort(communicators: list[Any], seconds: float = _ABORT_SECONDS) -> None:
    """Abort everything in flight on communicators made here, on this rank and on the peers.

    They are released on another thread. The destructor of gloo waits for collectives that have
    begun, and one of more than two ranks may go on until its timeout although the connections are
    closed: gloo forgets a send whose write fails when the receiver's notice arrives.

    Args:
        communicators: process groups or gloo backends. The list is emptied, and should have the
            only references: whoever drops the last one waits for the destructor.
        seconds: bound of the wait for NCCL's communicators.
    """
    _abort_all(communicators, seconds)
    # The frame above has ended, and this one refers to the list only.
    in_background(communicators.clear)


def _abort_all(communicators: list[Any], seconds: float) -> None:
    backends = [backend_of(each, CPU) for each in communicators] + nccl.backends(communicators)
    # The peers notice these at once.
    for backend in backends:
        if backend.name() == "gloo":
            _abort_gloo(backend)
    nccl.abort([each for each in backends if each.name() != "gloo"], seconds)


def _abort_gloo(backend: Any) -> None:
    """Close the connections of gloo.

    Its own `abort` does nothing, but a receive that times out closes the connections to all ranks:
    works that wait on them raise at once, also on other threads.
    """
    for peer in range(backend.size()):
        # Try each peer: a connection that is closed already does not affect the others.
        if peer != backend.rank():
            # gloo has connections over each interface in GLOO_SOCKET_IFNAME, which it takes in the
            # order of the tags. Nothing may be sent with these, as a longer message would end the
            # process: `prove` takes the tags below, and the rest of the library far higher ones.
            count = len(backend.options._devices)
            for tag in range(count, 2 * count):
                with suppress(RuntimeError):
                    nothing = torch.empty(1, device="cpu")
                    backend.recv([nothing], peer, tag).wait(timedelta(milliseconds=1))
