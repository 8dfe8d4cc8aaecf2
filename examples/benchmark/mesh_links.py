"""Measures the links along each dimension of a mesh, to choose the one for gossip.

    torchrun --nproc-per-node 8 examples/benchmark/mesh_links.py data=2,pipe=2,tensor=2

All groups of a dimension exchange at once. The names and sizes are of the dimensions, outermost
first.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.planning.link_probe import exchange_once, median_seconds
from decent_optim_wrapper.planning.tables import table
from decent_optim_wrapper.utils import init_distributed

# Two dimensions count as equally fast if the slower one has at least this share of the bandwidth
# of the other.
_SLOW = 0.7


def measure(sizes: dict[str, int], mib: float, repeats: int, device: torch.device) -> str | None:
    """Time messages along each dimension of the mesh, in all its groups at once; collective.

    Args:
        sizes: of the dimensions by name.
        mib: size of the large message in MiB; latency is measured with 8 bytes.
        repeats: number of measurements, of which the median counts.
        device: of the messages.

    Returns:
        The report on rank 0, None on the others.
    """
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    messages = torch.zeros(2, device=device), torch.zeros(int(mib * (1 << 18)), device=device)
    world = Transport.over(dist.group.WORLD)
    found = {}
    for at, name in enumerate(sizes):
        mine = _measure_group(Transport.over(mesh.get_group(name)), messages, repeats)
        everyone = world.all_gather(mine)
        # The ranks of each group in a row.
        groups = mesh.mesh.movedim(at, -1).reshape(-1, sizes[name]).tolist()
        found[name] = [_group(everyone[ranks], ranks, messages[1].nbytes) for ranks in groups]
    return None if world.rank else report(sizes, found)


def _measure_group(transport: Transport, messages: Sequence[Tensor], repeats: int) -> Tensor:
    """Seconds on this rank, of a small and a large message: with every rank, and of a sum.

    Returns:
        shape (2, ranks of the group + 1), float64 on the CPU; the sum is last.
    """
    n = transport.world_size
    seconds = torch.zeros(2, n + 1, dtype=torch.float64, device="cpu")
    for of_size, message in zip(seconds, messages, strict=True):
        for peers in pairings(n):
            peer = peers[transport.rank]
            if peer != transport.rank:
                exchange = partial(exchange_once, transport, message, peer)
                of_size[peer] = median_seconds(exchange, repeats)
            dist.barrier()
        of_size[n] = median_seconds(partial(transport.sum_, message), repeats)
        dist.barrier()
    return seconds


def pairings(n: int) -> list[list[int]]:
    """The peer of each rank in each round, so that all pairs meet once; itself if it rests.

    These are the rounds of a tournament, with as many pairs at the same time as possible.
    """
    places = n + n % 2
    rounds = []
    for shift in range(places - 1):
        order = [0, *((i + shift) % (places - 1) + 1 for i in range(places - 1))]
        peers = dict(zip(order, reversed(order), strict=True))
        rounds.append([peers[rank] if peers[rank] < n else rank for rank in range(n)])
    return rounds


def _group(seconds: Tensor, ranks: list[int], nbytes: int) -> dict[str, Any]:
    """The figures of a group from the seconds on its ranks."""
    n = len(ranks)
    # A pair has taken as long as the later of its two ranks.
    latency, transfer = torch.maximum(seconds[:, :, :n], seconds[:, :, :n].permute(2, 1, 0)).unbind(
        dim=1
    )
    pairs = list(combinations(range(n), 2))
    slowest = max(pairs, key=lambda pair: transfer[pair].item())
    return {
        "ranks": ranks,
        "bandwidth": statistics.median(nbytes / transfer[pair].item() for pair in pairs),
        "latency": statistics.median(latency[pair].item() for pair in pairs),
        "all_reduce_bytes_per_second": nbytes / seconds[:, 1, n].max().item(),
        "slowest_pair": [ranks[at] for at in slowest],
        "slowest_bandwidth": nbytes / transfer[slowest].item(),
    }


def report(sizes: dict[str, int], found: dict[str, list[dict[str, Any]]]) -> str:
    """A table for each dimension, and the slowest dimension."""
    # A step waits for the slowest link of a dimension.
    speeds = {name: min(g["slowest_bandwidth"] for g in groups) for name, groups in found.items()}
    order = sorted(speeds, key=speeds.__getitem__)
    slowest = order[0]
    lines = []
    for name, groups in found.items():
        lines += [f"{name}: groups of {sizes[name]}, all at once", table(list(map(_row, groups)))]
        lines += [f"slowest pair of {name}: {speeds[name] / 1e6:.0f} MB/s", ""]
    lines.append(f"slowest dimension: {slowest}, {speeds[slowest] / 1e6:.0f} MB/s")
    if len(order) > 1 and speeds[slowest] > _SLOW * speeds[order[1]]:
        lines.append(f"{order[1]} is about as fast, {speeds[order[1]] / 1e6:.0f} MB/s")
    lines.append(f'gossip on it: DecentOptimWrapper(..., mesh=mesh, gossip_dim="{slowest}")')
    return "\n".join(lines)


def _row(group: dict[str, Any]) -> dict[str, Any]:
    return {
        "ranks": group["ranks"],
        "MB/s of a pair": f"{group['bandwidth'] / 1e6:.0f}",
        "slowest pair": "{:.0f} ({}-{})".format(
            group["slowest_bandwidth"] / 1e6, *group["slowest_pair"]
        ),
        "latency in us": f"{group['latency'] * 1e6:.0f}",
        "all-reduce MB/s": f"{group['all_reduce_bytes_per_second'] / 1e6:.0f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("mesh", metavar="NAME=SIZE,...")
    parser.add_argument("--mib", type=float, default=8, help="size of the large message")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    parts = [part.partition("=") for part in args.mesh.split(",")]
    sizes = {name: int(size) for name, _, size in parts}
    _, _, _, device, _ = init_distributed()
    text = measure(sizes, args.mib, args.repeats, device)
    if text is not None:
        print(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
