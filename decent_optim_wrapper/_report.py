"""What the command line tells of topologies, as text and as data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from decent_optim_wrapper._choice import choose
from decent_optim_wrapper.analysis import Figures
from decent_optim_wrapper.simulation import Simulation, simulate
from decent_optim_wrapper.topo import Group, Topology


class Report(NamedTuple):
    """The same thing for a person and for a program."""

    text: str
    data: Any


class Cluster(NamedTuple):
    """What a simulation assumes; seconds, bytes and bytes per second."""

    compute_time: float
    jitter: float
    bandwidth: float
    latency: float
    parameter_bytes: float
    steps: int
    seed: int


def topologies(
    world_size: int, local_world_size: int, names: Sequence[str] | None = None
) -> Report:
    """The table of those that fit, best first, and the reasons of those that are not in it.

    Args:
        world_size: number of ranks.
        local_world_size: ranks per node.
        names: of the topologies; None takes all but the slow.
    """
    choice = choose(world_size, local_world_size, names)
    figures = [(name, topology, Figures(topology)) for name, topology in choice.fitting]
    rows = [_Row.of(*known) for known in sorted(figures, key=lambda known: known[-1].cost)]
    header = (
        *("topology", "period", "group sizes", "rate", "rounds to consensus", "steady error"),
        *("copies sent, mean", "maximum"),
    )
    table = columns([header, *(row.cells() for row in rows)])
    data = {
        "world_size": world_size,
        "local_world_size": local_world_size,
        "topologies": [row._asdict() for row in rows],
        "misfits": [absent._asdict() for absent in choice.misfits],
        "left_out": [absent._asdict() for absent in choice.left_out],
    }
    return Report("\n".join([table, *choice.reasons()]), data)


def phases(topology: Topology, name: str) -> Report:
    """The groups of every phase."""
    listed = [topology.groups(phase) for phase in range(topology.period)]
    lines = [f"{name}, {topology.world_size} ranks, period {topology.period}"]
    lines += [
        f"phase {number}: {'  '.join(map(_drawn, phase))}" for number, phase in enumerate(listed)
    ]
    data = [
        [{"ranks": group.ranks, "self_weight": group.self_weight} for group in phase]
        for phase in listed
    ]
    return Report("\n".join(lines), {"name": name, "phases": data})


def simulations(
    world_sizes: Sequence[int],
    local_world_size: int,
    cluster: Cluster,
    names: Sequence[str] | None = None,
) -> Report:
    """Step times of every topology that fits, and the speed-up over all-reduce.

    Args:
        world_sizes: numbers of ranks.
        local_world_size: ranks per node.
        cluster: what they run on.
        names: as in `topologies`.
    """
    rows: list[_Pace] = []
    reasons: dict[str, None] = {}
    for world_size in world_sizes:
        choice = choose(world_size, local_world_size, names)
        if not choice.fitting:
            raise ValueError("; ".join(choice.reasons()))
        reasons.update(dict.fromkeys(absent.reason() for absent in choice.left_out))
        rows += [
            _Pace.of(name, topology, simulate(topology, *cluster))
            for name, topology in choice.fitting
        ]
    header = (
        *("ranks", "topology", "gossip, ms", "waiting", "overlap=False, ms", "DDP, ms"),
        "speed-up over DDP",
    )
    table = columns([header, *(row.cells() for row in rows)])
    data = {"cluster": cluster._asdict(), "rows": [row._asdict() for row in rows]}
    return Report("\n".join([table, *reasons]), data)


def columns(rows: Iterable[Sequence[str]]) -> str:
    """Align rows of cells; the first row is the header."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in table]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


class _Row(NamedTuple):
    """A topology in the table; None for infinite."""

    name: str
    period: int
    group_sizes: list[int]
    consensus_rate: float
    rounds_to_consensus: int | None
    steady_error: float | None
    copies_mean: float
    copies_maximum: float

    @classmethod
    def of(cls, name: str, topology: Topology, figures: Figures) -> _Row:
        return cls(
            name,
            topology.period,
            sorted({group.size for t in range(topology.period) for group in topology.groups(t)}),
            figures.consensus_rate,
            figures.rounds_to_consensus,
            _finite(figures.steady_error),
            *figures.copies_sent,
        )

    def cells(self) -> tuple[str, ...]:
        exact, error = self.rounds_to_consensus, self.steady_error
        return (
            self.name,
            str(self.period),
            ", ".join(map(str, self.group_sizes)),
            f"{self.consensus_rate:.3f}",
            "never" if exact is None else str(exact),
            "diverges" if error is None else f"{error:.3f}",
            f"{self.copies_mean:.2f}",
            f"{self.copies_maximum:.2f}",
        )


class _Pace(NamedTuple):
    """A topology at a world size in the table of step times."""

    world_size: int
    topology: str
    overlap_seconds: float
    overlap_waiting: float
    no_overlap_seconds: float
    all_reduce_seconds: float
    speedup: float | None

    @classmethod
    def of(cls, name: str, topology: Topology, simulation: Simulation) -> _Pace:
        return cls(
            topology.world_size,
            name,
            *simulation.overlap,
            simulation.no_overlap.step_time,
            simulation.all_reduce.step_time,
            _finite(simulation.speedup),
        )

    def cells(self) -> tuple[str, ...]:
        return (
            str(self.world_size),
            self.topology,
            f"{1000 * self.overlap_seconds:.0f}",
            f"{self.overlap_waiting:.0%}",
            f"{1000 * self.no_overlap_seconds:.0f}",
            f"{1000 * self.all_reduce_seconds:.0f}",
            "-" if self.speedup is None else f"{self.speedup:.2f}",
        )


def _drawn(group: Group) -> str:
    ranks = "-".join(map(str, group.ranks))
    plain = math.isclose(group.self_weight, 1 / group.size)
    return ranks if plain else f"{ranks} (self_weight {group.self_weight:.4g})"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
