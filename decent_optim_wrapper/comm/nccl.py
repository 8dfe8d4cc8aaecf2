"""What only NCCL needs, the backend of torch that exchanges tensors between GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor

from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.waiting import Waitable, raise_if_closed

CUDA = torch.device("cuda")
_NAME = "nccl"


def is_nccl(name: str) -> bool:
    """Return whether a backend of this name is NCCL: torch has several, such as "nccl2"."""
    return name.startswith(_NAME)


def new_backend(like: Any, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Create a backend that connects in its first collective.

    Torch has two implementations: "nccl" builds ProcessGroupNCCL2 since torch 2.15, whose name is
    "nccl2", and ProcessGroupNCCL before and with TORCH_DIST_USE_NCCL2=0.

    Args:
        like: a backend of the same implementation. With "nccl-lazy" too, pairs get no communicators
            of their own.
        store: where the members meet.
        rank: the position of this rank among the members.
        size: number of members.
        timeout: bound of every operation.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    if like.name() == _NAME:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options.lazy_init = True
    # It serves one GPU only.
    gpu = like.bound_device_id or torch.device("cuda", torch.cuda.current_device())
    return dist.ProcessGroupNCCL2(store, rank, size, options, gpu)


def backends(communicators: Iterable[Any]) -> list[Any]:
    """The backends of NCCL in communicators made here, of which only these are process groups."""
    groups = (each for each in communicators if isinstance(each, dist.ProcessGroup))
    return [group._get_backend(CUDA) for group in groups]


def set_timeout(communicators: Iterable[Any], timeout: timedelta) -> None:
    """Set the time after which the watchdog of communicators made here ends an operation."""
    for backend in backends(communicators):
        # Read whenever an operation starts, from which it counts.
        backend.options._timeout = timeout


def shut_down(communicators: Iterable[Any], devices: Iterable[torch.device]) -> None:
    """Wait for what is under way, and release the communicators.

    NCCL would abort it when it is released: others would mix what has half arrived.
    """
    for device in devices:
        torch.cuda.synchronize(device)
    for backend in backends(communicators):
        backend.shutdown()


def abort(aborted: Iterable[Any], seconds: float) -> None:
    """End the kernels of these backends.

    They are aborted all together: one by one, the first may wait for a kernel that waits for a
    kernel of the next (pytorch#119797). Some aborts never end (NVIDIA/nccl#1777).
    """
    # Their errors are ignored: they would hide the error for which they are aborted.
    aborts = [in_background(each.abort) for each in aborted]
    if unfinished := wait(aborts, seconds).not_done:
        logger.warning(
            "{} of {} communicators of NCCL were not aborted within {:.0f} s; kernels that wait "
            "for other ranks may still run on the GPU: end this process",
            *(len(unfinished), len(aborts), seconds),
        )


class OnStream:
    """A work of a GPU, for which a stream waits in place of the host.

    Torch's own wait for such a work within a timeout keeps the host busy until the work is done.
    Without one it orders the current stream behind the work, whose own timeout the watchdog of the
    communicator watches.

    Args:
        work: the work of torch.
    """

    def __init__(self, work: Waitable) -> None:
        self._work = work

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        """Order the current stream behind it; any number of times, at once."""
        self._work.wait()

    def is_completed(self) -> bool:
        """Return whether the GPU has finished it."""
        return self._work.is_completed()


def exchange(
    world: Any, outgoing: Tensor, incoming: Tensor, peer: int, fail: Callable[[BaseException], None]
) -> Waitable:
    """Start an exchange with a peer as one kernel, as `dist.batch_isend_irecv` does.

    Args:
        world: the communicator.
        outgoing: the tensor to send.
        incoming: the tensor to overwrite.
        peer: the position of the peer.
        fail: called with an error after which the peer would wait for ever.
    """
    is_half = False
    try:
        world._start_coalescing(outgoing.device)
        world.send([outgoing], peer, 0)
        is_half = True
        world.recv([incoming], peer, 0)
        is_half = False
        return OnStream(world._end_coalescing(outgoing.device))
    except BaseException as error:
        # No communicator is aborted in the middle of a kernel's operations.
        with suppress(RuntimeError):
            world._end_coalescing(outgoing.device)
        # The error holds this frame: to drop the last reference may take long.
        del world
        if is_half:
            # Nothing but an abort ends the wait of the peer.
            fail(error)
        elif isinstance(error, RuntimeError):
            raise_if_closed(error)
        raise
