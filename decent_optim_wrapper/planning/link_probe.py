"""Tests the links between the ranks: all pairs, one after the other, and an all-reduce."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable
from functools import partial
from itertools import combinations
from timeit import repeat

import torch
import torch.distributed as dist
from torch import Tensor

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.report import table
from decent_optim_wrapper.start.launch import init_distributed

_MIB = 1024 * 1024
_LEAST_MIB = 0.001
# The most values of a message, as in a bucket: gloo deals messages to the connections of a pair.
_PART = 1 << 18


def run(mib: float, repeats: int) -> str | None:
    """Time messages between all pairs, one pair at a time, and an all-reduce; collective.

    Args:
        mib: size of the large message in MiB; latency is measured with 8 bytes.
        repeats: number of measurements, of which the median counts.

    Returns:
        The report on rank 0, None on the others.

    Raises:
        ValueError: an argument is out of range, or there is only one rank, as without torchrun.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if not _LEAST_MIB <= mib < math.inf or repeats < 1 or ranks < 2:
        raise ValueError(
            f"expected a finite size of {_LEAST_MIB} MiB or more, 1 repeat or more, and 2 ranks or "
            f"more (`torchrun --nproc-per-node 4 -m decent_optim_wrapper comm`), "
            f"got {mib=}, {repeats=}, {ranks=}"
        )
    device = init_distributed().device
    try:
        return _measure(mib, repeats, device)
    finally:
        dist.destroy_process_group()


def _measure(mib: float, repeats: int, device: torch.device) -> str | None:
    transport = Transport.over(dist.group.WORLD)
    n = transport.world_size
    messages = torch.zeros(2, device=device), torch.zeros(int(mib * _MIB / 4), device=device)
    seconds = torch.zeros(2, n, n, dtype=torch.float64, device="cpu")
    for a, b in combinations(range(n), 2):
        # The others rest.
        peer = {a: b, b: a}.get(transport.rank)
        for of_size, message in zip(seconds, messages, strict=True):
            if peer is not None:
                action = partial(_exchange, transport, message, peer)
                of_size[a, b] = of_size[b, a] = _median_seconds(action, repeats)
            dist.barrier()
    reduced = _median_seconds(partial(transport.sum_, messages[1]), repeats)
    # Only the two ends of a pair have its figures, the others have zeros.
    latency, transfer = transport.all_gather(seconds).amax(dim=0)
    if transport.rank:
        return None
    nbytes = messages[1].nbytes
    return _report((nbytes / transfer).fill_diagonal_(0), latency, nbytes / reduced)


def _exchange(transport: Transport, message: Tensor, peer: int) -> None:
    """Exchange a message with a peer, over gloo in several parts, and wait for all of them."""
    size = message.numel() if transport.coalesces(message.device) else _PART
    parts = [(part, torch.empty_like(part)) for part in torch.split(message, size)]
    for work in [w for tag, pair in enumerate(parts) for w in transport.exchange(*pair, peer, tag)]:
        work.wait()


def _median_seconds(action: Callable[[], None], repeats: int) -> float:
    """The median of several measurements, after one that does not count."""

    def complete() -> None:
        action()
        if torch.cuda.is_available():
            # With NCCL, a wait orders the stream only.
            torch.cuda.synchronize()

    return statistics.median(repeat(complete, number=1, repeat=repeats + 1)[1:])


def _report(bandwidth: Tensor, latency: Tensor, all_reduce: float) -> str:
    n = len(bandwidth)
    pairs = list(combinations(range(n), 2))
    typical = statistics.median(bandwidth[pair].item() for pair in pairs)
    microseconds = 1e6 * statistics.median(latency[pair].item() for pair in pairs)
    rows = [
        {"MB/s": f"rank {a}"} | {f"rank {b}": f"{bandwidth[a, b] / 1e6:.0f}" for b in range(n)}
        for a in range(n)
    ]
    lines = [
        table(rows),
        f"median of a pair: {typical / 1e6:.0f} MB/s both ways at once, {microseconds:.0f} us",
        f"all-reduce of all ranks: {all_reduce / 1e6:.0f} MB/s",
    ]
    return "\n".join(lines)
