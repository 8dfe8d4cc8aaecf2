"""CPU seconds until a rank of a large world can gossip: its topology and its communication.

    python examples/benchmark/startup.py

Builds every built-in topology that fits, takes the schedule of one rank out of it and counts the
communicators that this rank would make. Pairs make none.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

from decent_optim_wrapper import TopologyFactory

RANKS_PER_NODE = 8
# Its matching is quadratic in the ranks, in every round: 17 s for 1,024 ranks.
GREEDY_UP_TO = 256


class Start(NamedTuple):
    """What one rank has after its start."""

    topology_seconds: float
    communicators: int


def start(name: str, world_size: int) -> Start:
    begun = time.process_time()
    topology = TopologyFactory.create(name, world_size, RANKS_PER_NODE)
    schedule = topology.schedule(world_size // 2)
    # As in Transport.connect: pairs need none, and all ranks together use the group there is.
    large = {group.ranks for group in schedule if 2 < group.size < world_size}
    return Start(time.process_time() - begun, len(large))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[16, 64, 256, 1024, 4096])
    args = parser.parse_args()
    kinds = dict(TopologyFactory.registered())
    print("| topology | " + " | ".join(f"{n} ranks" for n in args.world_sizes) + " |")
    print("|---" * (len(args.world_sizes) + 1) + "|")
    for name, kind in kinds.items():
        cells = []
        for world_size in args.world_sizes:
            slow = name == "greedy" and world_size > GREEDY_UP_TO
            if slow or not kind.fits(world_size, RANKS_PER_NODE):
                cells.append("-")
                continue
            figures = start(name, world_size)
            cells.append(f"{figures.topology_seconds:.3f} s, {figures.communicators} comm.")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
