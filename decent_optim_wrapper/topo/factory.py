"""Topologies by name."""

from __future__ import annotations

from decent_optim_wrapper.topo import any_size, classic
from decent_optim_wrapper.topo.base import REGISTRY, Topology, build
from decent_optim_wrapper.topo.greedy import Greedy

REGISTRY.update(
    {
        "complete": classic.Complete,
        "ring": classic.Ring,
        "one-peer-exp": classic.OnePeerExponential,
        "alternating-exp-ring": classic.AlternatingExponentialRing,
        "hypercuboid": any_size.Hypercuboid,
        "bipartite-exp": any_size.BipartiteExponential,
        "base-2": any_size.Base2,
        "random": any_size.RandomMatching,
        "greedy": Greedy,
        "hierarchical": any_size.Hierarchical,
    }
)

# Losses and times of rounds of all ranks were measured with up to so many.
_LARGEST_MEASURED = 16


class TopologyFactory:
    """Builds topologies by name."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The known names."""
        return tuple(REGISTRY)

    @classmethod
    def create(cls, name: str, world_size: int, local_world_size: int = 1) -> Topology:
        """Build the topology of that name.

        Raises:
            ValueError: the name is unknown, or the sizes do not fit the topology.
        """
        return build(name, world_size, local_world_size)

    @classmethod
    def add_topology(cls, name: str, kind: type[Topology], overwrite: bool = False) -> None:
        """Make `kind` available as `name`.

        Args:
            name: the name, as in ``topology=name``.
            kind: a subclass of `Topology` whose constructor takes the two sizes.
            overwrite: replace an existing topology of that name.

        Raises:
            ValueError: the name is taken and `overwrite` is False.
        """
        if name in REGISTRY and not overwrite:
            raise ValueError(
                f"a topology named {name!r} exists ({REGISTRY[name].__name__}); "
                f"choose another name or pass overwrite=True"
            )
        REGISTRY[name] = kind


def default_name(world_size: int, local_world_size: int = 1, mixes_all: bool = False) -> str:
    """The name of the default topology: all ranks, or the pairs that mix best for their bytes.

    Args:
        world_size: number of ranks. In larger worlds than were measured it is pairs.
        local_world_size: ranks per node.
        mixes_all: whether all ranks are to mix.
    """
    if mixes_all and world_size <= _LARGEST_MEASURED:
        return "complete"
    names = ("one-peer-exp", "greedy", "base-2")
    return next(name for name in names if REGISTRY[name].accepts(world_size, local_world_size))
