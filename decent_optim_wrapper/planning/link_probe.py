"""Measure the links between the ranks; the results are options for a simulation."""

from __future__ import annotations

import math
import os
import statistics
from functools import partial
from itertools import combinations

import torch
import torch.distributed as dist

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.planning import mesh_probe
from decent_optim_wrapper.planning.stopwatch import median_seconds, pair_seconds
from decent_optim_wrapper.planning.tables import Report, table

_MIB = 1024 * 1024
_LEAST_MIB = 0.001
# A pair whose bandwidth is below this share of the median is slow.
_SLOW = 0.7


def run(mib: float, repeats: int, mesh: str | None = None) -> Report | None:
    """Time messages between all pairs, one pair at a time, and an all-reduce; collective.

    With a mesh, time them along each of its dimensions, in all groups of a dimension at once.

    Args:
        mib: size of the large message in MiB; latency is measured with 8 bytes.
        repeats: number of measurements, of which the median counts.
        mesh: names and sizes of the dimensions, such as ``data=2,tensor=4``; None for no mesh.

    Returns:
        The report on rank 0, None on the others.

    Raises:
        ValueError: a size or a number of repeats is out of range, there is only one rank, as
            without torchrun, or the mesh has another number of ranks.
    """
    if not _LEAST_MIB <= mib < math.inf or repeats < 1:
        raise ValueError(
            f"expected a finite size of {_LEAST_MIB} MiB or more and 1 repeat or more, "
            f"got {mib=}, {repeats=}"
        )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size < 2:
        raise ValueError(
            "comm measures between ranks: start it with "
            "`torchrun --nproc-per-node 4 -m decent_optim_wrapper comm`"
        )
    sizes = None if mesh is None else mesh_probe.parse_mesh(mesh, world_size)
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ.get("LOCAL_WORLD_SIZE", "1")
    )
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = torch.device("cuda" if cuda else "cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        if sizes is not None:
            return mesh_probe.measure(sizes, mib, repeats, device)
        return _measure(mib, repeats, device)
    finally:
        dist.destroy_process_group()


def _measure(mib: float, repeats: int, device: torch.device) -> Report | None:
    transport = Transport.over(dist.group.WORLD)
    n = transport.world_size
    messages = torch.zeros(2, device=device), torch.zeros(int(mib * _MIB / 4), device=device)
    seconds = torch.zeros(2, n, n, dtype=torch.float64, device="cpu")
    for a, b in combinations(range(n), 2):
        for of_size, message in zip(seconds, messages, strict=True):
            # The others rest.
            peer = {a: b, b: a}.get(transport.rank, transport.rank)
            of_size[a, b] = of_size[b, a] = pair_seconds(transport, message, peer, repeats)
    reduce_small, reduce_large = (
        median_seconds(partial(transport.sum_, m), repeats) for m in messages
    )
    # Only the two ends of a pair have its figures, the others have zeros.
    latency, transfer = transport.all_gather(seconds).amax(dim=0)
    if transport.rank:
        return None
    nbytes = messages[1].nbytes
    bandwidth = (nbytes / transfer).fill_diagonal_(0)
    return _report(bandwidth, latency, nbytes / reduce_large, reduce_small)


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
