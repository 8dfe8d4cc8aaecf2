"""What the command line tells of topologies, as text and as data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from decent_optim_wrapper.analysis import (
    bytes_per_round,
    consensus_rate,
    rounds_to_consensus,
    steady_error,
)
from decent_optim_wrapper.simulation import simulate
from decent_optim_wrapper.topo import Topology, TopologyFactory


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


def topologies(world_size: int, local_world_size: int) -> Report:
    """The table of those that fit, best first, and the reasons of those that do not."""
    if world_size < 1 or local_world_size < 1 or world_size % local_world_size:
        raise ValueError(
            f"local_world_size must divide world_size, got {local_world_size} and {world_size}"
        )
    names = TopologyFactory.suggest(world_size, local_world_size)
    rows = [_figures(n, TopologyFactory.create(n, world_size, local_world_size)) for n in names]
    misfits = [
        {"name": name, "needs": kind.condition}
        for name, kind in TopologyFactory.registered()
        if name not in names
    ]
    header = (
        *("topology", "period", "group sizes", "rate", "rounds to consensus", "steady error"),
        *("copies sent, mean", "maximum"),
    )
    table = columns([header, *(_cells(row) for row in rows)])
    reasons = [f"{misfit['name']} does not fit: it needs {misfit['needs']}" for misfit in misfits]
    data = {
        "world_size": world_size,
        "local_world_size": local_world_size,
        "topologies": rows,
        "misfits": misfits,
    }
    return Report("\n".join([table, *reasons]), data)


def phases(topology: Topology, name: str) -> Report:
    """The groups of every phase."""
    listed = [[list(group.ranks) for group in topology.groups(t)] for t in range(topology.period)]
    lines = [f"{name}, {topology.world_size} ranks, period {topology.period}"]
    for phase, groups in enumerate(listed):
        drawn = "  ".join("-".join(map(str, group)) for group in groups)
        lines.append(f"phase {phase}: {drawn}")
    return Report("\n".join(lines), {"name": name, "phases": listed})


def simulations(world_sizes: Sequence[int], local_world_size: int, cluster: Cluster) -> Report:
    """Step times of every topology that fits, and the speed-up over all-reduce."""
    rows: list[dict[str, Any]] = []
    for world_size in world_sizes:
        for name, kind in TopologyFactory.registered():
            if world_size < 1 or not kind.fits(world_size, local_world_size):
                continue
            topology = TopologyFactory.create(name, world_size, local_world_size)
            paces = simulate(topology, *cluster)
            rows.append(
                {
                    "world_size": world_size,
                    "topology": name,
                    "overlap_seconds": paces.overlap.step_time,
                    "overlap_waiting": paces.overlap.waiting_share,
                    "no_overlap_seconds": paces.no_overlap.step_time,
                    "all_reduce_seconds": paces.all_reduce.step_time,
                    "speedup": paces.all_reduce.step_time / paces.overlap.step_time,
                }
            )
    if not rows:
        raise ValueError(f"no topology fits world sizes {list(world_sizes)}")
    header = (
        *("ranks", "topology", "gossip, ms", "waiting", "overlap=False, ms", "DDP, ms"),
        "speed-up over DDP",
    )
    body = [
        (
            str(row["world_size"]),
            str(row["topology"]),
            f"{1000 * row['overlap_seconds']:.0f}",
            f"{row['overlap_waiting']:.0%}",
            f"{1000 * row['no_overlap_seconds']:.0f}",
            f"{1000 * row['all_reduce_seconds']:.0f}",
            f"{row['speedup']:.2f}",
        )
        for row in rows
    ]
    return Report(columns([header, *body]), {"cluster": cluster._asdict(), "rows": rows})


def columns(rows: Iterable[Sequence[str]]) -> str:
    """Align rows of cells; the first row is the header."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in table]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _figures(name: str, topology: Topology) -> dict[str, Any]:
    sent = bytes_per_round(topology, 1)
    sizes = {group.size for t in range(topology.period) for group in topology.groups(t)}
    return {
        "name": name,
        "period": topology.period,
        "group_sizes": sorted(sizes),
        "consensus_rate": consensus_rate(topology),
        "rounds_to_consensus": rounds_to_consensus(topology),
        "steady_error": steady_error(topology),
        "copies_mean": sent.mean,
        "copies_maximum": sent.maximum,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    exact = row["rounds_to_consensus"]
    return (
        str(row["name"]),
        str(row["period"]),
        ", ".join(map(str, row["group_sizes"])),
        f"{row['consensus_rate']:.3f}",
        "never" if exact is None else str(exact),
        f"{row['steady_error']:.3f}",
        f"{row['copies_mean']:.2f}",
        f"{row['copies_maximum']:.2f}",
    )
