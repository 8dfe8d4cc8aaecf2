"""Measure the links between the ranks; the results are options for a simulation."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import combinations

import torch
import torch.distributed as dist

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.planning.tables import Report, table

_MIB = 1024 * 1024
_LEAST_MIB = 0.001
# A pair whose bandwidth is below this share of the median is slow.
_SLOW = 0.7


def run(mib: float, repeats: int) -> Report | None:
    """Time messages between all pairs, one pair at a time, and an all-reduce; collective.

    Args:
        mib: size of the large message in MiB; latency is measured with 8 bytes.
        repeats: number of measurements; the report has their median.

    Returns:
        The report on rank 0, None on the others.

    Raises:
        ValueError: `mib` or `repeats` is out of range, or there is only one rank, as without
            torchrun.
    """
    if not _LEAST_MIB <= mib < math.inf or repeats < 1:
        raise ValueError(
            f"expected a finite size of {_LEAST_MIB} MiB or more and 1 repeat or more, "
            f"got {mib=}, {repeats=}"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ValueError(
            "comm measures between ranks: start it with "
            "`torchrun --nproc-per-node 4 -m decent_optim_wrapper comm`"
        )
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ.get("LOCAL_WORLD_SIZE", "1")
    )
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        return _measure(mib, repeats, torch.device("cuda" if cuda else "cpu"))
    finally:
        dist.destroy_process_group()


def _measure(mib: float, repeats: int, device: torch.device) -> Report | None:
    transport = Transport.over(dist.group.WORLD)
    n = transport.world_size
    messages = torch.zeros(2, device=device), torch.zeros(int(mib * _MIB / 4), device=device)
    seconds = torch.zeros(2, n, n, dtype=torch.float64, device="cpu")
    for a, b in combinations(range(n), 2):
        for of_size, message in zip(seconds, messages, strict=True):
            of_size[a, b] = of_size[b, a] = _pair_seconds(transport, message, a, b, repeats)
    reduce_small, reduce_large = (_median(partial(transport.sum_, m), repeats) for m in messages)
    # Only the two ranks of a pair have its figures; all others have zeros.
    latency, transfer = transport.all_gather(seconds).amax(dim=0)
    if transport.rank:
        return None
    nbytes = messages[1].nbytes
    bandwidth = (nbytes / transfer).fill_diagonal_(0)
    return _report(bandwidth, latency, nbytes / reduce_large, reduce_small)


def _pair_seconds(transport: Transport, data: torch.Tensor, a: int, b: int, repeats: int) -> float:
    """Seconds of a send and receive between a and b; 0 on the other ranks."""
    seconds = 0.0
    if transport.rank in (a, b):
        incoming, peer = torch.empty_like(data), a + b - transport.rank
        seconds = _median(lambda: _wait(transport.exchange(data, incoming, peer, 0)), repeats)
    dist.barrier()
    return seconds


def _median(action: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        action()
        if torch.cuda.is_available():
            # With NCCL, a wait only orders the stream.
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _report(
    bandwidth: torch.Tensor, latency: torch.Tensor, reduce_bandwidth: float, reduce_latency: float
) -> Report:
    n = len(bandwidth)
    pairs = list(combinations(range(n), 2))
    typical = statistics.median(bandwidth[pair].item() for pair in pairs)
    typical_latency = statistics.median(latency[pair].item() for pair in pairs)
    slow = [pair for pair in pairs if bandwidth[pair] < _SLOW * typical]
    rows = [
        {"MB/s": f"rank {a}"} | {f"rank {b}": f"{bandwidth[a, b] / 1e6:.0f}" for b in range(n)}
        for a in range(n)
    ]
    lines = [
        table(rows),
        f"median bandwidth of a pair, both ways at once: {typical / 1e6:.0f} MB/s",
        f"median latency of a pair: {1e6 * typical_latency:.0f} us",
        f"all-reduce of all ranks: {reduce_bandwidth / 1e6:.0f} MB/s, "
        f"latency {1e6 * reduce_latency:.0f} us",
        *(f"slow pair: ranks {a} and {b}, {bandwidth[a, b] / 1e6:.0f} MB/s" for a, b in slow),
        f"simulate --bandwidth {typical:.3g} --latency {typical_latency:.3g}",
    ]
    data = {
        "bandwidth": bandwidth.tolist(),
        "latency": latency.tolist(),
        "all_reduce_bytes_per_second": reduce_bandwidth,
        "all_reduce_latency": reduce_latency,
        "slow_pairs": slow,
    }
    return Report(text="\n".join(lines), data=data)
