"""The duration of an exchange, as the median of several."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.comm.waiting import Waitable


def pair_seconds(transport: Transport, data: Tensor, peer: int, repeats: int) -> float:
    """Seconds of a send and receive with a peer; collective over all ranks, which start together.

    Args:
        transport: connects this rank with the peer.
        data: the message.
        peer: the rank of the peer; this rank for none.
        repeats: number of measurements, of which the median counts.

    Returns:
        The seconds, 0 without a peer.
    """
    seconds = 0.0
    if peer != transport.rank:
        incoming = torch.empty_like(data)
        seconds = median_seconds(
            lambda: _wait(transport.exchange(data, incoming, peer, 0)), repeats
        )
    dist.barrier()
    return seconds


def median_seconds(action: Callable[[], None], repeats: int) -> float:
    """The median of several measurements, after one that does not count."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        action()
        if torch.cuda.is_available():
            # With NCCL, a wait orders the stream only.
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _wait(works: list[Waitable]) -> None:
    for work in works:
        work.wait()
