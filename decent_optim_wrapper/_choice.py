"""Which topologies a command looks at, and why it does not look at others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from decent_optim_wrapper.topo import Topology, TopologyFactory

# Working it out takes half a minute for 4,096 ranks, and minutes where there is no period.
_SLOW_ABOVE = {"greedy": 1024}


class Misfit(NamedTuple):
    """A topology that is not in a table."""

    name: str
    needs: str

    def reason(self) -> str:
        """In one line."""
        return f"{self.name} does not fit: it needs {self.needs}"


class LeftOut(NamedTuple):
    """A topology that would fit, but takes long to work out."""

    name: str
    above: int

    def reason(self) -> str:
        """In one line."""
        return (
            f"{self.name} is left out above {self.above} ranks, where it takes long to work out: "
            f"ask for it with --topology {self.name}"
        )


class Choice(NamedTuple):
    """What of the topologies asked for can be had at some world size."""

    fitting: list[tuple[str, Topology]]
    misfits: list[Misfit]
    left_out: list[LeftOut]

    def reasons(self) -> list[str]:
        """Why the others are not there, a line each."""
        return [*(m.reason() for m in self.misfits), *(slow.reason() for slow in self.left_out)]


def choose(world_size: int, local_world_size: int, names: Sequence[str] | None) -> Choice:
    """Build what fits.

    Args:
        world_size: number of ranks.
        local_world_size: ranks per node.
        names: of the topologies; None takes all that are not too slow to work out.

    Raises:
        ValueError: the sizes make no world, or a name is unknown.
    """
    kinds = dict(TopologyFactory.registered())
    choice = Choice([], [], [])
    for name in kinds if names is None else dict.fromkeys(names):
        slow_above = _SLOW_ABOVE.get(name)
        kind = kinds.get(name)
        if kind is not None and not kind.accepts(world_size, local_world_size):
            choice.misfits.append(Misfit(name, kind.condition))
        elif names is None and slow_above is not None and world_size > slow_above:
            choice.left_out.append(LeftOut(name, slow_above))
        else:
            topology = TopologyFactory.create(name, world_size, local_world_size)
            choice.fitting.append((name, topology))
    return choice
