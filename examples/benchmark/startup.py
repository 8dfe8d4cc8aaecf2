"""CPU seconds until a rank of a large world can gossip: its topology and its communication.

    python examples/benchmark/startup.py

Builds every built-in topology that fits, on one thread as under torchrun. Then it takes the
schedule of one rank and the digest that ranks compare, and counts the communicators that this rank
would make. Pairs need none.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import torch

from decent_optim_wrapper import TopologyFactory

RANKS_PER_NODE = 8


class Start(NamedTuple):
    """The cost of the start for one rank."""

    topology_seconds: float
    digest_seconds: float
    communicators: int


def start(name: str, world_size: int) -> Start:
    begun = time.process_time()
    topology = TopologyFactory.create(name, world_size, RANKS_PER_NODE)
    schedule = topology.schedule(world_size // 2)
    built = time.process_time()
    _ = topology.digest
    compared = time.process_time()
    # As in Transport.connect: pairs need none, and all ranks together use the existing group.
    large = {group.ranks for group in schedule if 2 < group.size < world_size}
    return Start(built - begun, compared - built, len(large))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sizes = [16, 64, 256, 1024, 4096, 100_000]
    parser.add_argument("--world-sizes", type=int, nargs="+", default=sizes)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = dict(TopologyFactory.registered())
    print("| topology | " + " | ".join(f"{n} ranks" for n in args.world_sizes) + " |")
    print("|---" * (len(args.world_sizes) + 1) + "|")
    for name, kind in kinds.items():
        cells = []
        for world_size in args.world_sizes:
            # The pairs of all ranks in 128 rounds take too much memory.
            too_many = name == "random" and world_size > 4096
            if too_many or not kind.fits(world_size, RANKS_PER_NODE):
                cells.append("-")
                continue
            topology, digest, communicators = start(name, world_size)
            cells.append(f"{topology:.3f} + {digest:.3f} s, {communicators} comm.")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
