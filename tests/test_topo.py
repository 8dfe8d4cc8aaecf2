"""Topologies: their schedules, also of one rank alone, validation, and the factory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from mixing import steady_error
from scripted_ranks import listed
from torch import Tensor

from decent_optim_wrapper import Group, Topology, TopologyFactory
from decent_optim_wrapper.elastic.membership.recovery import fitting
from decent_optim_wrapper.topo import (
    Base2,
    Greedy,
    Hierarchical,
    RandomMatching,
    Ring,
    default_name,
)
from decent_optim_wrapper.topo.base import REGISTRY

KINDS = dict(REGISTRY)
# A hash of the schedules of 2 to 24 ranks, in nodes of 1 to 3 of them.
SCHEDULES = {
    "complete": "43c267ba6a0fe324",
    "ring": "90bef7f9daf5de8d",
    "one-peer-exp": "7ef442c814fe8a0b",
    "alternating-exp-ring": "f9409ca72ed96936",
    "hypercuboid": "ef384cd167340a7e",
    "bipartite-exp": "7fcdcb45aa536dab",
    "base-2": "a148c66897d55264",
    "random": "bd7979f561805eb9",
    "greedy": "34f8b6a61e3c7f7d",
    "hierarchical": "7dd9ddb33a2ddc67",
}


@pytest.mark.parametrize("name", KINDS)
def test_a_name_stands_for_the_schedule_of_its_first_version(name: str) -> None:
    """The hash was taken of lists of all groups; a change of any group or weight changes it."""
    sizes = [(n, local) for n, local in product(range(2, 25), (1, 2, 3)) if n % local == 0]
    if name == "greedy":
        sizes = [(5, 1), (14, 1), (31, 1), (66, 1)]
    topologies = [TopologyFactory.create(name, *each) for each in sizes if KINDS[name].fits(*each)]
    digests = "".join(topology.digest for topology in topologies)
    assert sha256(digests.encode()).hexdigest()[:16] == SCHEDULES[name]


def matrix_of(groups: Sequence[Group], size: int) -> Tensor:
    """By definition: w on the diagonal, (1 - w) / (m - 1) elsewhere."""
    matrix = torch.eye(size, dtype=torch.float64)
    for group in (each for each in groups if each.size > 1):
        for i, j in product(group.ranks, group.ranks):
            own = group.self_weight
            matrix[i, j] = own if i == j else (1 - own) / (group.size - 1)
    return matrix


def test_every_phase_is_a_partition_that_mixes_by_the_definition_of_its_groups() -> None:
    for (name, kind), n, local in product(KINDS.items(), range(1, 10), (1, 2, 3)):
        if n % local or not kind.accepts(n, local):
            continue
        topology = TopologyFactory.create(name, n, local)
        by_rank = [topology.schedule(rank) for rank in range(n)]
        for phase in range(min(topology.period, 8)):
            groups = topology.groups(phase)
            assert sorted(rank for group in groups for rank in group.ranks) == list(range(n))
            assert {own[phase] for own in by_rank} == {*groups}
            matrix = topology.mixing_matrix(phase)
            torch.testing.assert_close(matrix, matrix_of(groups, n))
            assert torch.equal(matrix, matrix.mT)
            torch.testing.assert_close(matrix.sum(0), torch.ones_like(matrix[0]))
        if n == 1:
            assert topology.period == 1
            assert topology.schedule(0) == topology.groups(7) == (Group([0]),)


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("ring", (5, 1), "even world size, got world_size=5"),
        ("one-peer-exp", (6, 1), "power of two, got world_size=6"),
        ("alternating-exp-ring", (6, 2), "number of nodes"),
        ("alternating-exp-ring", (4, 4), "number of nodes"),
        ("hierarchical", (4, 4), "more than one node"),
        ("greedy", (257, 1), "at most 256 ranks, got world_size=257"),
    ],
)
def test_a_misfit_names_condition_value_and_topologies_that_fit(
    name: str, size: tuple[int, int], words: str
) -> None:
    with pytest.raises(ValueError, match=f"{words}.*that fit: complete, (?!.*{name})"):
        TopologyFactory.create(name, *size)


def over_nodes(inner: str | Topology) -> Topology:
    return Hierarchical(8, 2, inner=inner)


by_phase = partial(listed, 3)
by_rank = partial(listed, 2, method="assign_groups")


@pytest.mark.parametrize(
    ("make", "value", "words"),
    [
        (partial(TopologyFactory.create, "complete", 8), 3, "divide world_size, got 3 and 8"),
        (partial(TopologyFactory.create, "complete"), 0, "world_size must be 1 or more, got 0"),
        (over_nodes, "rign", "unknown topology 'rign' .did you mean 'ring'"),
        (over_nodes, RandomMatching(8), "inner must be a topology of 4 nodes, got Random"),
        *((partial(Group, [0, 1]), each, "self_weight") for each in (0, 1, -0.1, float("nan"))),
        (by_phase, [[[0, 1], [1, 2]]], r"phase 0: rank 1 .* two groups, .*\(0, 1\).*\(1, 2\)"),
        (by_phase, [[[0, 1]], [[0, 1], [0, 1]]], "phase 1: rank 0 is in two groups"),
        (by_phase, [[[0, 3]]], r"phase 0: expected ranks below the world size 3, got \(0, 3\)"),
        *((by_phase, [[ranks]], "a group needs distinct") for ranks in ([0, -1], [0, 0], [])),
        (by_phase, [[0, 1]], "phase 0: expected a Group or a list of ranks, got 0"),
        (by_phase, [[[0.5, 1]]], "phase 0: expected a Group or a list of ranks"),
        (by_phase, [Group([0, 1])], "phase 0: expected a list of groups, got Group"),
        (by_phase, [], "1 or more"),
        (by_rank, [[], []], "1 or more phases, got 0"),
        (by_rank, [[[0]]], r"a list for each of the 2 ranks, .*, got 1 lists with \[1\] groups"),
        (by_rank, [[[0, 1]], [[1, 0], [1]]], r"got 2 lists with \[1, 2\] groups"),
        (by_rank, [[[0, 2]], [[0, 1]]], "phase 0, rank 0: expected ranks below .* got .0, 2."),
        (by_rank, [[[1]], [[1]]], "phase 0, rank 0: not a member of its group"),
        (by_rank, [[[0, 1], []], [[0, 1], [1]]], "phase 1, rank 0: .*a group needs distinct"),
        (by_rank, [[[0, 1]], [[1]]], r"rank 1 is in two groups, .*\(0, 1\).*\(1,\).*assign_groups"),
        (by_rank, [[[0, 1]], [Group([0, 1], 0.3)]], "two groups, .*0.5.*0.3"),
    ],
)
def test_what_is_no_schedule_is_refused_with_phase_and_ranks(
    make: Callable[[Any], object], value: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make(value)


def test_groups_are_listed_by_phase_or_by_rank_in_any_form_and_order() -> None:
    pair, triple = Group([0, 2], 0.7), [1, 2, 3]
    by_rank = [[pair, [0]], ([3, 1], triple), [pair, range(1, 4)], [[1, 3], triple]]
    for topology in (
        listed(4, [[(3, 1), pair], [range(1, 4)]]),
        listed(4, by_rank, method="assign_groups"),
    ):
        assert topology.groups(2) == (pair, Group([1, 3]))
        assert topology.groups(3) == (Group([0]), Group(triple))
        assert topology.schedule(0) == (pair, Group([0]))
        assert topology.group_of(2, 3) == Group(triple)
        assert topology.digest == listed(4, [[pair, [1, 3]], [triple, [0]]]).digest
        assert listed(4, topology.phases()).digest == topology.digest
        assert listed(4, topology.assign_groups(), "assign_groups").digest == topology.digest


@pytest.mark.parametrize("base", [Ring, Greedy, Topology])
def test_the_most_derived_class_defines_the_schedule(base: type[Topology]) -> None:
    alone = type("Alone", (base,), {"assign_groups": lambda self: [[[0]], [[1]]]})
    paired = type("Paired", (alone,), {"phases": lambda self: [[[0, 1]]]})
    assert alone(2).groups(0) == (Group([0]), Group([1]))
    assert paired(2).groups(0) == (Group([0, 1]),)


@mock.patch.dict(REGISTRY)
def test_a_custom_topology_has_weights_and_a_name_of_its_own_until_it_is_overwritten() -> None:
    class Star(Topology):
        def phases(self) -> list[list[Group]]:
            return [[Group([0, leaf], 0.7)] for leaf in range(1, self.world_size)]

    TopologyFactory.add_topology("star", Star)
    star = TopologyFactory.create("star", 4)
    assert "star" in TopologyFactory.names()
    assert star.period == 3
    assert star.groups(4) == (Group([0, 2], 0.7), Group([1]), Group([3]))
    expected = torch.tensor([0.7, 0, 0.3, 0], dtype=torch.float64)
    torch.testing.assert_close(star.mixing_matrix(4)[0], expected)
    with pytest.raises(ValueError, match="'star' exists"):
        TopologyFactory.add_topology("star", Ring)
    TopologyFactory.add_topology("star", Ring, overwrite=True)
    assert isinstance(TopologyFactory.create("star", 4), Ring)


def test_hierarchical_averages_nodes_and_then_gossips_between_them() -> None:
    for inner, name in ((Ring(4), "ring"), (Base2(3), "base-2")):
        n = inner.world_size
        topology = Hierarchical(2 * n, 2, inner=inner)
        assert topology.digest == Hierarchical(2 * n, 2, inner=name).digest
        for phase, node, place in product(range(inner.period), range(n), range(2)):
            rank, group = 2 * node + place, inner.group_of(node, phase)
            assert topology.group_of(rank, 2 * phase) == Group((2 * node, 2 * node + 1))
            across = Group((2 * each + place for each in group.ranks), group.self_weight)
            assert topology.group_of(rank, 2 * phase + 1) == across


class ForFour(Topology):
    """A user's topology that looks beyond its table for any other number of ranks."""

    def phase_count(self) -> int:
        return 1

    def own_group(self, rank: int, phase: int) -> tuple[int, int]:
        return ((0, 1), (0, 1), (2, 3), (2, 3))[rank + 4 * (4 - self.world_size)]


def test_a_topology_that_does_not_fit_the_ranks_that_are_left_is_replaced() -> None:
    """By the default up to 8 of them. Of more, by pairs that take no time and no communicators."""
    assert steady_error(Greedy(7)) < steady_error(Greedy(14)) < steady_error(Ring(14))
    full = ForFour(4)
    for topology, left, kind in (
        *((Ring(260), range(7), Greedy), (Ring(260), range(259), Base2)),
        *(
            (Ring(32), range(31), Base2),
            (Greedy(14), range(13), Base2),
            (Greedy(9), range(7), Greedy),
        ),
        *((full, range(4), ForFour), (full, (0, 1, 3), Greedy)),
        (full, (0, 3), KINDS["one-peer-exp"]),
    ):
        found = fitting(topology, tuple(left))
        assert type(found) is kind
        assert found.world_size == len(left)
        assert len(left) <= 8 or max(found.group_of(0, t).size for t in range(found.period)) == 2


def test_a_topology_keeps_its_parameters_when_ranks_are_lost() -> None:
    whole, drawn = Hierarchical(20, 4, inner="complete"), RandomMatching(6, seed=7, period=16)
    assert repr(fitting(whole, (*range(8), *range(12, 20)))) == repr(whole.resized(16, 4))
    assert "inner='complete'" in repr(whole.resized(16, 4))
    assert repr(fitting(drawn, tuple(range(5)))) == repr(RandomMatching(5, seed=7, period=16))


# Their groups are all ranks, or their schedules are made as a whole.
AS_A_WHOLE = ("complete", "greedy", "random")


@pytest.mark.parametrize("name", [name for name in KINDS if name not in AS_A_WHOLE])
def test_a_rank_of_100_000_computes_its_own_groups_only(name: str) -> None:
    """Counted, not timed."""
    calls = 0

    class Counted(KINDS[name]):  # type: ignore[misc, valid-type]
        def own_group(self, rank: int, phase: int) -> Group | Sequence[int]:
            nonlocal calls
            calls += 1
            own: Group | Sequence[int] = super().own_group(rank, phase)
            return own

    topology = Counted(1 << 17, 8)
    schedule = topology.schedule(50_000)
    assert len(topology.digest) == 16
    assert len(schedule) == topology.period
    assert any(group.size > 1 for group in schedule)
    # Each group is compared with the groups of two of its ranks, and 64 ranks make the digest.
    assert calls <= 67 * topology.period


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


def test_the_default_follows_from_the_number_of_ranks() -> None:
    pairs, greedy, exact = (1, 2, 8, 512), (3, 6, 12, 255), (257, 510)
    for name, sizes in (("one-peer-exp", pairs), ("greedy", greedy), ("base-2", exact)):
        assert {*map(default_name, sizes)} == {name}
