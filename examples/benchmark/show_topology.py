"""Prints the groups of every phase of a topology, and draws them.

    python examples/benchmark/show_topology.py hypercuboid --world-size 12 --out picture.png

A picture needs matplotlib, from the extra `plot`.
"""

from __future__ import annotations

import argparse
import math
from itertools import combinations
from pathlib import Path

from matplotlib.figure import Figure

from decent_optim_wrapper.topo import Topology, TopologyFactory

_MOST_PHASES = 8
_PER_ROW = 4


def draw(topology: Topology, name: str, path: Path) -> None:
    """Draw the phases side by side: ranks on a circle, a line between ranks that mix."""
    n = topology.world_size
    angles = [math.pi / 2 - 2 * math.pi * rank / n for rank in range(n)]
    places = [(math.cos(angle), math.sin(angle)) for angle in angles]
    shown = min(topology.period, _MOST_PHASES)
    wide, high = min(shown, _PER_ROW), math.ceil(shown / _PER_ROW)
    figure = Figure(figsize=(3 * wide, 3.2 * high), layout="constrained")
    for phase, axis in enumerate(figure.subplots(high, wide, squeeze=False).flat):
        axis.set_aspect("equal")
        axis.axis("off")
        if phase >= shown:
            continue
        axis.set_title(f"phase {phase}")
        for index, group in enumerate(topology.groups(phase)):
            for a, b in combinations(group.ranks, 2):
                ends = zip(places[a], places[b], strict=True)
                axis.plot(*ends, color=f"C{index % 10}", zorder=1)
        axis.scatter(*zip(*places, strict=True), s=240, color="white", edgecolor="black", zorder=2)
        for rank, (x, y) in enumerate(places):
            axis.text(x, y, str(rank), ha="center", va="center", fontsize=8, zorder=3)
    more = f", the first {shown} of {topology.period} phases" if topology.period > shown else ""
    figure.suptitle(f"{name}, {n} ranks{more}")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=TopologyFactory.names())
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--local-world-size", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a picture")
    args = parser.parse_args()
    topology = TopologyFactory.create(args.name, args.world_size, args.local_world_size)
    for phase in range(topology.period):
        groups = ("-".join(map(str, group.ranks)) for group in topology.groups(phase))
        print(f"phase {phase}: {'  '.join(groups)}")
    if args.out is not None:
        draw(topology, args.name, args.out)


if __name__ == "__main__":
    main()
