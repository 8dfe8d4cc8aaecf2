"""The tables of the command line: rows of figures as text."""

from __future__ import annotations

from collections.abc import Sequence

from decent_optim_wrapper.planning import analysis
from decent_optim_wrapper.report import Row, table
from decent_optim_wrapper.topo import Topology, TopologyFactory

# Printed below the table of topologies, on one line.
_LEGEND = (
    "best first by steady_error x copies_mean; consensus_rate: contraction of the distance to the "
    "average per round; rounds_to_consensus: until the average is exact; steady_error: mean "
    "squared distance under unit noise in every step; copies_mean, copies_maximum: copies of the "
    "parameters that a rank sends per round"
)


def topologies(world_size: int, local_world_size: int, names: Sequence[str] | None = None) -> str:
    """The topologies that fit, best first by mixing per byte, and why others do not.

    Args:
        world_size: number of ranks.
        local_world_size: ranks per node.
        names: names of topologies; None for all.

    Raises:
        ValueError: the sizes are wrong for every topology, or a name is unknown.
    """
    fitting, misfits = _choose(world_size, local_world_size, names)
    rows = [_figures(name, topology) for name, topology in fitting.items()]
    # As `suggest` orders them.
    rows.sort(key=lambda row: row["steady_error"] * row["copies_mean"])
    lines = [table(rows), _LEGEND] if rows else []
    lines += [f"{name} does not fit: it needs {needs}" for name, needs in misfits.items()]
    return "\n".join(lines)


def _choose(
    world_size: int, local_world_size: int, names: Sequence[str] | None
) -> tuple[dict[str, Topology], dict[str, str]]:
    """The topologies that fit, and the conditions of the others, by name."""
    kinds = dict(TopologyFactory.registered())
    fitting, misfits = {}, {}
    for name in names or kinds:
        kind = kinds.get(name)
        if kind is not None and not kind.accepts(world_size, local_world_size):
            misfits[name] = kind.condition
        else:
            fitting[name] = TopologyFactory.create(name, world_size, local_world_size)
    return fitting, misfits


def _figures(name: str, topology: Topology) -> Row:
    groups = [group for phase in range(topology.period) for group in topology.groups(phase)]
    copies = analysis.bytes_per_round(topology, 1)
    return {
        "name": name,
        "period": topology.period,
        "group_sizes": sorted({group.size for group in groups}),
        "consensus_rate": analysis.consensus_rate(topology),
        "rounds_to_consensus": analysis.rounds_to_consensus(topology),
        "steady_error": analysis.steady_error(topology),
        "copies_mean": copies.mean,
        "copies_maximum": copies.maximum,
    }
