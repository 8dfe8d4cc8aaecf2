"""Measures the links between the ranks; the results are the options of a simulation."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.planning.tables import Report, columns

_MIB = 1024 * 1024
_LEAST_MIB = 0.001
# A pair below this share of the median bandwidth is called slow.
_SLOW = 0.7


class _AllReduce(NamedTuple):
    """An all-reduce of all ranks.

    Args:
        bytes_per_second: bytes of the reduced tensor per second.
        latency: seconds for 8 bytes.
    """

    bytes_per_second: float
    latency: float


def run(mib: float, repeats: int) -> Report | None:
    """Time messages between all pairs, one pair at a time, and an all-reduce; collective.

    Args:
        mib: size of the large message in MiB; latency is that of 8 bytes.
        repeats: number of measurements, of which the median counts.

    Returns:
        The report on rank 0, None on the others.

    Raises:
        ValueError: a size or a number of repeats is out of range, or there is a single rank,
            as without torchrun.
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
    large = torch.zeros(int(mib * _MIB / 4), device=device)
    small = torch.zeros(2, device=device)
    bandwidth = torch.zeros(n, n, dtype=torch.float64, device="cpu")
    latency = torch.zeros(n, n, dtype=torch.float64, device="cpu")
    for a in range(n):
        for b in range(a + 1, n):
            seconds = [_pair_seconds(transport, t, a, b, repeats) for t in (small, large)]
            latency[a, b] = latency[b, a] = seconds[0]
            if seconds[1]:
                bandwidth[a, b] = bandwidth[b, a] = large.nbytes / seconds[1]
    reduce_small = _median(lambda: transport.sum_(small), repeats)
    reduce_large = _median(lambda: transport.sum_(large), repeats)
    # Only the two ends of a pair have its figures, the others have zeros.
    everything = transport.all_gather(torch.stack([bandwidth, latency]))
    bandwidth, latency = (everything[:, k].amax(dim=0) for k in (0, 1))
    if transport.rank:
        return None
    all_reduce = _AllReduce(bytes_per_second=large.nbytes / reduce_large, latency=reduce_small)
    return _report(bandwidth, latency, all_reduce)


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
            # With NCCL, a wait orders the stream only.
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _report(bandwidth: torch.Tensor, latency: torch.Tensor, all_reduce: _AllReduce) -> Report:
    n = len(bandwidth)
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
    typical = statistics.median(bandwidth[pair].item() for pair in pairs)
    slow = [pair for pair in pairs if bandwidth[pair] < _SLOW * typical]
    header = ("MB/s", *(f"rank {b}" for b in range(n)))
    body = [
        (f"rank {a}", *("-" if a == b else f"{bandwidth[a, b] / 1e6:.0f}" for b in range(n)))
        for a in range(n)
    ]
    latencies = [latency[pair].item() for pair in pairs]
    lines = [
        columns([header, *body]),
        f"median bandwidth of a pair, both ways at once: {typical / 1e6:.0f} MB/s",
        f"median latency of a pair: {1e6 * statistics.median(latencies):.0f} us",
        f"all-reduce of all ranks: {all_reduce.bytes_per_second / 1e6:.0f} MB/s, "
        f"latency {1e6 * all_reduce.latency:.0f} us",
        *(f"slow pair: ranks {a} and {b}, {bandwidth[a, b] / 1e6:.0f} MB/s" for a, b in slow),
        f"simulate --bandwidth {typical:.3g} --latency {statistics.median(latencies):.3g}",
    ]
    data = {
        "bandwidth": bandwidth.tolist(),
        "latency": [[0.0 if a == b else latency[a, b].item() for b in range(n)] for a in range(n)],
        "all_reduce_bytes_per_second": all_reduce.bytes_per_second,
        "all_reduce_latency": all_reduce.latency,
        "slow_pairs": slow,
    }
    return Report(text="\n".join(lines), data=data)
