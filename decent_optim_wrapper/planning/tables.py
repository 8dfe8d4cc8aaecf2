"""What the command line prints about topologies, as text and as data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from decent_optim_wrapper.planning.analysis import (
    bytes_per_round,
    consensus_rate,
    rounds_to_consensus,
    steady_error,
)
from decent_optim_wrapper.planning.simulation import simulate
from decent_optim_wrapper.topo import Group, Topology, TopologyFactory


class Report(NamedTuple):
    """The same content for a person and for a program."""

    text: str
    data: Any

    def json(self) -> str:
        """The data as JSON."""
        return json.dumps(self.data, indent=1, allow_nan=False)


class Cluster(NamedTuple):
    """What a simulation assumes, in seconds, bytes and bytes per second."""

    compute_time: float
    jitter: float
    bandwidth: float
    latency: float
    parameter_bytes: float
    steps: int
    seed: int


class Misfit(NamedTuple):
    """A topology that is not in a table, and the sizes that it needs."""

    name: str
    needs: str

    def reason(self) -> str:
        """Why it is not in the table, in one line."""
        return f"{self.name} does not fit: it needs {self.needs}"


class Choice(NamedTuple):
    """Those of the requested topologies that exist at some world size, and those that do not."""

    fitting: list[tuple[str, Topology]]
    misfits: list[Misfit]


def choose(world_size: int, local_world_size: int, names: Sequence[str] | None) -> Choice:
    """Build the topologies that fit.

    Args:
        world_size: number of ranks.
        local_world_size: ranks per node.
        names: names of topologies; None for all.

    Raises:
        ValueError: the sizes make no world, or a name is unknown.
    """
    kinds = dict(TopologyFactory.registered())
    choice = Choice(fitting=[], misfits=[])
    for name in kinds if names is None else dict.fromkeys(names):
        kind = kinds.get(name)
        if kind is not None and not kind.accepts(world_size, local_world_size):
            choice.misfits.append(Misfit(name=name, needs=kind.condition))
        else:
            topology = TopologyFactory.create(name, world_size, local_world_size)
            choice.fitting.append((name, topology))
    return choice


def topologies(
    world_size: int, local_world_size: int, names: Sequence[str] | None = None
) -> Report:
    """The topologies that fit, best first by mixing per byte, and why others do not.

    Args:
        world_size: number of ranks.
        local_world_size: ranks per node.
        names: names of topologies; None for all.
    """
    choice = choose(world_size, local_world_size, names)
    rows = sorted((_Row.of(name, topology) for name, topology in choice.fitting), key=_Row.cost)
    header = (
        *("topology", "period", "group sizes", "rate", "rounds to consensus", "steady error"),
        *("copies sent, mean", "maximum"),
    )
    table = columns([header, *(row.cells() for row in rows)])
    data = {
        "world_size": world_size,
        "local_world_size": local_world_size,
        "topologies": [row._asdict() for row in rows],
        "misfits": [misfit._asdict() for misfit in choice.misfits],
    }
    return Report(
        text="\n".join([table, *(misfit.reason() for misfit in choice.misfits)]), data=data
    )


def phases(topology: Topology, name: str) -> Report:
    """The groups of every phase."""
    listed = [topology.groups(phase) for phase in range(topology.period)]
    lines = [f"{name}, {topology.world_size} ranks, period {topology.period}"]
    lines += [
        f"phase {number}: {'  '.join(map(_group_text, phase))}"
        for number, phase in enumerate(listed)
    ]
    data = [
        [{"ranks": group.ranks, "self_weight": group.self_weight} for group in phase]
        for phase in listed
    ]
    return Report(text="\n".join(lines), data={"name": name, "phases": data})


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
    rows: list[_StepTimes] = []
    for world_size in world_sizes:
        choice = choose(world_size, local_world_size, names)
        if not choice.fitting:
            raise ValueError("; ".join(misfit.reason() for misfit in choice.misfits))
        rows += [_StepTimes.of(name, topology, cluster) for name, topology in choice.fitting]
    header = (
        *("ranks", "topology", "gossip, ms", "waiting", "overlap=False, ms", "DDP, ms"),
        "speed-up over DDP",
    )
    data = {"cluster": cluster._asdict(), "rows": [row._asdict() for row in rows]}
    return Report(text=columns([header, *(row.cells() for row in rows)]), data=data)


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
    def of(cls, name: str, topology: Topology) -> _Row:
        copies = bytes_per_round(topology, 1)
        return cls(
            name=name,
            period=topology.period,
            group_sizes=sorted(
                {group.size for t in range(topology.period) for group in topology.groups(t)}
            ),
            consensus_rate=consensus_rate(topology),
            rounds_to_consensus=rounds_to_consensus(topology),
            steady_error=_finite(steady_error(topology)),
            copies_mean=copies.mean,
            copies_maximum=copies.maximum,
        )

    def cost(self) -> float:
        """As `suggest` orders topologies: steady error times mean bytes per round."""
        return math.inf if self.steady_error is None else self.steady_error * self.copies_mean

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


class _StepTimes(NamedTuple):
    """A topology at a world size in the table of step times."""

    world_size: int
    topology: str
    overlap_seconds: float
    overlap_waiting: float
    no_overlap_seconds: float
    all_reduce_seconds: float
    speedup: float | None

    @classmethod
    def of(cls, name: str, topology: Topology, cluster: Cluster) -> _StepTimes:
        simulation = simulate(topology, **cluster._asdict())
        return cls(
            world_size=topology.world_size,
            topology=name,
            overlap_seconds=simulation.overlap.step_time,
            overlap_waiting=simulation.overlap.waiting_share,
            no_overlap_seconds=simulation.no_overlap.step_time,
            all_reduce_seconds=simulation.all_reduce.step_time,
            speedup=_finite(simulation.speedup),
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


def _group_text(group: Group) -> str:
    ranks = "-".join(map(str, group.ranks))
    is_mean = math.isclose(group.self_weight, 1 / group.size)
    return ranks if is_mean else f"{ranks} (self_weight {group.self_weight:.4g})"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
