"""Topologies: definitions, validation, the factory, and the schedules of greedy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations, product
from typing import Any
from unittest import mock

import pytest
import torch
from dense import matrix_of
from listed_topologies import listed
from scripted_ranks import Part

from decent_optim_wrapper import Group, Topology, TopologyFactory
from decent_optim_wrapper.elastic.recovery import fitting
from decent_optim_wrapper.planning import steady_error
from decent_optim_wrapper.topo import Base2, Greedy, Hierarchical, RandomMatching, Ring
from decent_optim_wrapper.topo.base import REGISTRY
from decent_optim_wrapper.topo.matching import match


def test_every_phase_is_a_partition_that_mixes_by_the_definition_of_its_groups() -> None:
    for (name, kind), n, local in product(TopologyFactory.registered(), range(1, 10), (1, 2, 3)):
        if n % local or not kind.accepts(n, local):
            continue
        topology = TopologyFactory.create(name, n, local)
        for phase in range(min(topology.period, 8)):
            groups = topology.groups(phase)
            assert sorted(rank for group in groups for rank in group.ranks) == list(range(n))
            matrix = topology.mixing_matrix(phase)
            parts = [Part(list(group.ranks), group.self_weight) for group in groups]
            torch.testing.assert_close(matrix, matrix_of(parts, n))
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
    ],
)
def test_what_is_no_schedule_is_refused_with_phase_and_ranks(
    make: Callable[[Any], object], value: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make(value)


def test_phases_list_groups_in_any_form_and_order() -> None:
    pair, triple = Group([0, 2], 0.7), [1, 2, 3]
    topology = listed(4, [[(3, 1), pair], [range(1, 4)]])
    assert topology.groups(2) == (pair, Group([1, 3]))
    assert topology.groups(3) == (Group([0]), Group(triple))
    assert topology.schedule(0) == (pair, Group([0]))
    assert topology.group_of(2, 3) == Group(triple)
    assert topology.digest == listed(4, [[pair, [1, 3]], [triple, [0]]]).digest


@mock.patch.dict(REGISTRY)
def test_a_custom_topology_has_a_name_weights_and_attributes_of_its_own() -> None:
    class Star(Topology):
        def __init__(self, world_size: int, local_world_size: int = 1) -> None:
            self._table, self._period = "mine", 1000
            super().__init__(world_size, local_world_size)

        def phases(self) -> list[list[Group]]:
            return [[Group([0, leaf], 0.7)] for leaf in range(1, self.world_size)]

    TopologyFactory.add_topology("star", Star)
    star = TopologyFactory.create("star", 4)
    assert "star" in TopologyFactory.names()
    assert (star.period, vars(star)["_period"]) == (3, 1000)
    assert star.groups(4) == (Group([0, 2], 0.7), Group([1]), Group([3]))
    expected = torch.tensor([0.7, 0, 0.3, 0], dtype=torch.float64)
    torch.testing.assert_close(star.mixing_matrix(4)[0], expected)


@mock.patch.dict(REGISTRY)
def test_a_taken_name_is_refused_unless_overwritten() -> None:
    with pytest.raises(ValueError, match="'complete' exists"):
        TopologyFactory.add_topology("complete", Ring)
    TopologyFactory.add_topology("complete", Ring, overwrite=True)
    assert isinstance(TopologyFactory.create("complete", 4), Ring)
    with pytest.raises(TypeError, match="subclass of Topology"):
        TopologyFactory.add_topology("mine", int)  # type: ignore[arg-type]


def test_a_topology_that_defines_no_schedule_says_how_to() -> None:
    with pytest.raises(TypeError, match=r"must define phases\(\), .* and own_group\(\)"):
        Topology(2)


def test_a_digest_tells_ranks_and_weights_of_groups_apart() -> None:
    schedules = [[[Group([0, 1], 0.5)]], [[Group([0, 1], 0.25)]], [[]], [[[0, 1]], []]]
    digests = [listed(2, phases).digest for phases in schedules]
    assert len(set(digests)) == len(schedules)
    assert listed(2, [[[0, 1]]]).digest == digests[0]


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


@pytest.mark.parametrize(
    ("n", "period", "digest"),
    [
        (5, 2, "fd23b6bd4f8b521f"),
        (14, 34, "d0c15387755ad343"),
        (31, 200, "01f1e84d31f450a2"),
        (66, 32, "660c63c093c6b99b"),
        (256, 8, "c535959d8368e48f"),
    ],
)
def test_greedy_has_the_schedules_of_its_first_version(n: int, period: int, digest: str) -> None:
    """A change of any group at all changes the digest."""
    greedy = Greedy(n)
    assert (greedy.period, greedy.digest) == (period, digest)


def test_greedy_beats_the_ring_and_beyond_256_ranks_base_2_takes_its_place() -> None:
    assert steady_error(Greedy(14)) < steady_error(Ring(14))
    for size, kind in ((7, Greedy), (259, Base2)):
        left = fitting(Ring(260), tuple(range(size)))
        assert type(left) is kind
        assert left.world_size == size


@pytest.mark.parametrize("levels", [3, 10**6])
@pytest.mark.parametrize("n", [2, 3, 8, 13, 20])
def test_no_swap_of_partners_improves_a_matching(n: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(n)
    upper = torch.randint(1, levels, (n, n), generator=generator).double().triu(1)
    gain = (upper + upper.T).tolist()
    groups = match(gain)
    assert sorted(rank for group in groups for rank in group) == list(range(n))
    assert sorted(map(len, groups))[:-1] == [2] * (n // 2 - 1)
    for (a, b), (c, d) in combinations([group for group in groups if len(group) == 2], 2):
        now = gain[a][b] + gain[c][d]
        assert now >= max(gain[a][c] + gain[b][d], gain[a][d] + gain[b][c]) - 1e-9
