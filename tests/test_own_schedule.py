"""The schedule of one rank of a large world, without those of the others."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from listed_topologies import LISTED

from decent_optim_wrapper import Group, Topology, TopologyFactory
from decent_optim_wrapper.topo import Base2, Hierarchical, RandomMatching, Ring

KINDS = dict(TopologyFactory.registered())
# `random` has 128 phases, of which each looks like the others.
SIZES = {"random": [*range(2, 9), 64, 65]}
NODES = ("alternating-exp-ring", "hierarchical")


def sizes(name: str) -> list[tuple[int, int]]:
    """World sizes that fit, with numbers of ranks per node."""
    worlds = SIZES.get(name, [*range(2, 41), 60, 64, 65, 96, 127])
    return [
        (n, local)
        for n in worlds
        for local in ((1, 2, 3, 4, 8) if name in NODES else (1,))
        if n % local == 0 and KINDS[name].fits(n, local)
    ]


@pytest.mark.parametrize("name", LISTED)
def test_every_rank_alone_has_the_groups_of_the_whole_table(name: str) -> None:
    """Ranks and weights are exactly equal."""
    compared = 0
    for n, local in sizes(name):
        topology = TopologyFactory.create(name, n, local)
        phases = LISTED[name](n, local)
        assert topology.period == len(phases)
        expected = [dict.fromkeys(range(n)) for _ in phases]
        for phase, groups in enumerate(phases):
            expected[phase].update({rank: group for group in groups for rank in group.ranks})
            alone = [Group([rank]) for rank, group in expected[phase].items() if group is None]
            ordered = sorted([*groups, *alone], key=lambda group: group.ranks)
            assert topology.groups(phase) == tuple(ordered)
        for rank in range(n):
            own = tuple(each[rank] or Group([rank]) for each in expected)
            assert topology.schedule(rank) == own
            compared += len(own)
    assert compared > 300


# Worlds of about 100,000 ranks in nodes of 8: one that fits, and one of an odd shape.
LARGE = {
    "one-peer-exp": [131_072],
    "alternating-exp-ring": [131_072],
    "ring": [100_000],
    "bipartite-exp": [100_000],
    "hierarchical": [100_000, 100_024],
    # Where a group has all ranks, as with a prime, its time and its memory grow with them.
    "complete": [10_000],
    "hypercuboid": [100_000, 9_973],
}


@pytest.mark.parametrize("name", [name for name in LISTED if name != "random"])
def test_a_rank_of_100_000_computes_its_own_groups_only(name: str) -> None:
    """Counted, not timed: calls of the formula, and bytes."""
    for world_size in LARGE.get(name, [100_000, 99_999]):
        calls = 0

        class Counted(KINDS[name]):  # type: ignore[misc, valid-type]
            def own_group(self, rank: int, phase: int) -> Group | Sequence[int]:
                nonlocal calls
                calls += 1
                own: Group | Sequence[int] = super().own_group(rank, phase)
                return own

        tracemalloc.start()
        topology = Counted(world_size, 8 if world_size % 8 == 0 else 1)
        schedule = topology.schedule(world_size // 3)
        assert len(topology.digest) == 16
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(schedule) == topology.period
        assert any(group.size > 1 for group in schedule)
        # Each group is compared with those of two of its ranks, and 64 ranks make the digest.
        assert calls <= 67 * topology.period
        assert peak < 50e6


def test_digests_of_large_worlds_tell_schedules_apart() -> None:
    topologies = [
        Ring(1000),
        Ring(1002),
        Base2(1000),
        RandomMatching(1000, period=4),
        RandomMatching(1000, period=4, seed=1),
        RandomMatching(1000, period=5),
        Hierarchical(1000, 10),
        Hierarchical(1000, 20),
        Hierarchical(1000, 10, inner="ring"),
    ]
    digests = [each.digest for each in topologies]
    assert len({*digests}) == len(topologies)
    assert RandomMatching(1000, period=4).digest == digests[3]


class Opposite(Topology):
    """Pairs rank i with rank n - 1 - i, and idles in every second phase."""

    def phase_count(self) -> int:
        return 2

    def own_group(self, rank: int, phase: int) -> list[int]:
        return [rank] if phase else [rank, self.world_size - 1 - rank]


def test_a_formula_of_a_users_class_is_all_that_it_needs() -> None:
    small, large = Opposite(4), Opposite(10_000)
    assert small.groups(2) == (Group([0, 3]), Group([1, 2]))
    assert [len(small.groups(phase)) for phase in range(2)] == [2, 4]
    assert large.schedule(17) == (Group([17, 9_982]), Group([17]))
    assert small.phases() == [list(small.groups(0)), list(small.groups(1))]


OF_ONE_GROUP: list[tuple[Any, str]] = [
    (lambda self, rank, phase: [0, rank][: rank + 1], "phase 0: rank 0 is in two groups"),
    (lambda self, rank, phase: [rank, (rank + 1) % self.world_size], r"two groups, .*own_gr"),
    (lambda self, rank, phase: [0], "phase 0, rank 1: not a member of its group"),
    (lambda self, rank, phase: [rank, rank], "a group needs distinct ranks"),
    (lambda self, rank, phase: [rank, 1000], "expected ranks below the world size"),
    (lambda self, rank, phase: rank, "expected a Group or a list of ranks"),
]


@pytest.mark.parametrize(
    ("base", "methods", "error", "words"),
    [
        *((Opposite, {"own_group": each}, ValueError, words) for each, words in OF_ONE_GROUP),
        (Opposite, {"phase_count": lambda self: 0}, ValueError, "1 or more phases, got 0"),
        (Topology, {"own_group": Opposite.own_group}, TypeError, r"or phase_count\(\) and own"),
        (Topology, {"phase_count": lambda self: 1}, TypeError, r"must define own_group\(\)"),
    ],
)
@pytest.mark.parametrize("world_size", [4, 100])
def test_a_formula_that_contradicts_itself_is_refused(
    base: type, methods: dict[str, Any], error: type[Exception], words: str, world_size: int
) -> None:
    """In a small world by the constructor, in a large one for the ranks that are asked for."""
    kind = type("Derived", (base,), methods)
    with pytest.raises(error, match=words):
        kind(world_size).schedule(1)


def test_the_most_derived_class_decides_how_a_topology_is_defined() -> None:
    class Longer(Ring):
        def phases(self) -> list[Any]:
            return [*super().phases(), [[0, 2]]]

    class Back(Longer):
        def phase_count(self) -> int:
            return 1

        def own_group(self, rank: int, phase: int) -> list[int]:
            return [rank]

    assert Longer(4).period == 3
    assert Longer(4).schedule(2) == (*Ring(4).schedule(2), Group([0, 2]))
    assert Back(4).schedule(2) == (Group([2]),)
