"""Pictures of topologies; they need matplotlib, from the extra `plot`."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

from decent_optim_wrapper.topo import Topology

_MOST_PHASES = 8
_PER_ROW = 4


def phases(topology: Topology, name: str, path: Path) -> None:
    """Draw the phases side by side: ranks on a circle, a line between ranks that mix.

    Args:
        topology: the topology whose phases are drawn.
        name: its name, for the title.
        path: the file to write, in any format of matplotlib.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
        ValueError: matplotlib does not know the format.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "pictures need matplotlib: pip install '.[plot]' in a clone of decent_optim_wrapper"
        ) from error
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
