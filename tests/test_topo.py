"""Topologies: definitions, validation, and the factory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from decent_optim_wrapper import Group, Topology, TopologyFactory
from decent_optim_wrapper.topo import Hierarchical, RandomMatching
from decent_optim_wrapper.topo.base import REGISTRY

BUILT_IN = ("complete", "ring", "one-peer-exp", "alternating-exp-ring")


@pytest.fixture
def registry() -> Iterator[None]:
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def table_topology(table: list[list[object]]) -> Topology:
    class FromTable(Topology):
        def assign_groups(self) -> list[list[object]]:  # type: ignore[override]
            return table

    return FromTable(len(table))


def test_every_phase_of_every_topology_is_symmetric_and_doubly_stochastic() -> None:
    checked = 0
    for name, kind in TopologyFactory.registered():
        uses_nodes = name in ("alternating-exp-ring", "hierarchical")
        for n in range(1, 17):
            for local in (d for d in range(1, n + 1 if uses_nodes else 2) if n % d == 0):
                if not kind.fits(n, local):
                    continue
                topology = TopologyFactory.create(name, n, local)
                phases = range(min(topology.period, 16))
                matrices = torch.stack([topology.mixing_matrix(phase) for phase in phases])
                assert torch.equal(matrices, matrices.mT)
                torch.testing.assert_close(matrices.sum(1), torch.ones_like(matrices[:, 0]))
                assert (matrices >= 0).all()
                checked += len(phases)
    assert checked > 500


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_world_of_one_rank_is_idle_on_every_topology(name: str) -> None:
    topology = TopologyFactory.create(name, 1)
    assert topology.period == 1
    assert topology.group_of(0, 7) == Group([0])
    assert torch.equal(topology.mixing_matrix(0), torch.ones(1, 1, dtype=torch.float64))


@pytest.mark.parametrize(("n", "radius"), [(6, 0.25), (8, 0.5), (16, 0.853553)])
def test_the_ring_contracts_by_the_known_factor_in_two_rounds(n: int, radius: float) -> None:
    ring = TopologyFactory.create("ring", n)
    away = ring.mixing_matrix(1) @ ring.mixing_matrix(0) - 1 / n
    assert torch.linalg.eigvals(away).abs().max().item() == pytest.approx(radius, abs=1e-6)


def test_alternating_exp_ring_alternates_nodes_and_pairs_of_nodes() -> None:
    topology = TopologyFactory.create("alternating-exp-ring", 8, 2)
    ranks = [[group.ranks for group in topology.groups(t)] for t in range(topology.period)]
    assert ranks == [
        [(0, 1), (2, 3), (4, 5, 6, 7)],
        [(0, 1, 2, 3), (4, 5), (6, 7)],
        [(0, 1), (2, 3, 6, 7), (4, 5)],
        [(0, 1, 4, 5), (2, 3), (6, 7)],
    ]


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("ring", (5, 1), "even world size, got world_size=5"),
        ("one-peer-exp", (6, 1), "power of two, got world_size=6"),
        ("alternating-exp-ring", (6, 2), "number of nodes"),
        ("alternating-exp-ring", (4, 4), "number of nodes"),
    ],
)
def test_a_misfit_names_condition_value_and_topologies_that_fit(
    name: str, size: tuple[int, int], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        TopologyFactory.create(name, *size)
    assert "that fit: complete" in str(caught.value)
    assert name not in str(caught.value).split("that fit:")[1]


def test_local_world_size_must_divide_world_size() -> None:
    with pytest.raises(ValueError, match="3 and 8"):
        TopologyFactory.create("complete", 8, 3)


def test_a_custom_topology_mixes_with_its_own_weights(registry: None) -> None:
    class Star(Topology):
        def assign_groups(self) -> list[list[Group | list[int]]]:
            groups: list[list[Group | list[int]]] = [[] for _ in range(self._world_size)]
            for leaf in range(1, self._world_size):
                for rank in range(self._world_size):
                    pair = rank in (0, leaf)
                    groups[rank].append(Group([0, leaf], 0.7) if pair else [rank])
            return groups

    TopologyFactory.add_topology("star", Star)
    star = TopologyFactory.create("star", 4)
    assert "star" in TopologyFactory.names()
    assert star.period == 3
    assert star.group_of(0, 4) == Group([0, 2], 0.7)
    assert star.group_of(1, 4) == Group([1])
    expected = torch.tensor([0.7, 0, 0.3, 0], dtype=torch.float64)
    torch.testing.assert_close(star.mixing_matrix(4)[0], expected)


def topology_of(phases: object, world_size: int) -> Topology:
    class FromPhases(Topology):
        def phases(self) -> object:  # type: ignore[override]
            return phases

    return FromPhases(world_size)


def test_phases_are_the_table_seen_from_the_other_side() -> None:
    pair = Group([0, 2], 0.7)
    by_phase = topology_of([[pair, (3, 1)], [range(1, 4)]], 4)
    by_rank = table_topology(
        [[pair, [0]], [[1, 3], [1, 2, 3]], [pair, [1, 2, 3]], [[1, 3], [1, 2, 3]]]
    )
    for rank in range(4):
        assert by_phase.schedule(rank) == by_rank.schedule(rank)
    assert by_phase.digest == by_rank.digest
    assert by_phase.group_of(0, 1) == Group([0])
    star = topology_of([[[0, leaf]] for leaf in range(1, 4)], 4)
    assert (star.period, star.groups(4)) == (3, (Group([0, 2]), Group([1]), Group([3])))


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        (
            [[[0, 1], [1, 2]]],
            r"phase 0: rank 1 is in two groups, Group.*\(0, 1\).* and Group.*\(1, 2\)",
        ),
        ([[[0, 1]], [[0, 1], [0, 1]]], "phase 1: rank 0 is in two groups"),
        ([[[0, 3]]], r"phase 0: expected ranks below the world size 3, got \(0, 3\)"),
        ([[[0, -1]]], "phase 0: a group needs distinct ranks"),
        ([[[0, 0]]], "phase 0: a group needs distinct ranks"),
        ([[[]]], "phase 0: a group needs distinct ranks"),
        ([[0, 1]], "phase 0: expected a Group or a list of ranks, got 0"),
        ([[[0.5, 1]]], "phase 0: expected a Group or a list of ranks"),
        ([Group([0, 1])], "phase 0: expected a list of groups, got Group"),
        ([], "1 or more"),
    ],
)
def test_phases_that_are_no_partitions_are_refused(phases: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        topology_of(phases, 3)


def test_a_topology_is_defined_in_exactly_one_way() -> None:
    class Neither(Topology):
        pass

    with pytest.raises(TypeError, match=r"Neither must define phases\(\), .* or own_group\(\)"):
        Neither(2)

    class Lonely(Topology):
        def assign_groups(self) -> list[list[list[int]]]:
            return [[[rank]] for rank in range(self.world_size)]

    with pytest.raises(TypeError, match="Both defines phases"):

        class Both(Lonely):
            def phases(self) -> list[list[list[int]]]:
                return [[[0, 1]]]

    class LonelyRing(dict(TopologyFactory.registered())["ring"]):  # type: ignore[misc]
        def assign_groups(self) -> list[list[list[int]]]:
            return [[[rank]] for rank in range(self.world_size)]

    assert LonelyRing(2).groups(0) == (Group([0]), Group([1]))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([[[0, 1]], [[1, 0], [1]]], "same number of phases"),
        ([[[0, 2]], [[0, 1]]], "phase 0, rank 0: expected ranks below .* got .0, 2."),
        ([[[1]], [[1]]], "phase 0, rank 0: not a member"),
        ([[[0, 1]], [[1]]], r"phase 0: rank 1 is in two groups, .*\(0, 1\).* and .*\(1,\)"),
        ([[[0, 1]], [[0, 1]], [[0, 2]]], "rank 0 is in two groups"),
        ([[[0]], [[0, 1]]], r"phase 0: rank 0 is in two groups, .*\(0,\).* and .*\(0, 1\)"),
        (
            [[[0], [0, 1]], [[1], Group([0, 1], 0.3)]],
            "phase 1: rank 0 is in two groups, .*0.5.*0.3",
        ),
        ([[[0, 0]], [[1]]], "phase 0, rank 0: a group needs distinct ranks"),
        ([[[0, 1], []], [[0, 1], [1]]], "phase 1, rank 0"),
        ([[], []], "1 or more"),
    ],
)
def test_an_invalid_table_is_refused_with_phase_and_ranks(
    table: list[list[object]], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        table_topology(table)


@pytest.mark.parametrize("weight", [0.0, 1.0, -0.1, float("nan")])
def test_a_weight_outside_the_open_unit_interval_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="self_weight"):
        Group([0, 1], weight)


def test_a_taken_name_is_refused_unless_overwritten(registry: None) -> None:
    ring = dict(TopologyFactory.registered())["ring"]
    with pytest.raises(ValueError, match="'complete' exists"):
        TopologyFactory.add_topology("complete", ring)
    TopologyFactory.add_topology("complete", ring, overwrite=True)
    assert isinstance(TopologyFactory.create("complete", 4), ring)
    with pytest.raises(TypeError, match="subclass of Topology"):
        TopologyFactory.add_topology("mine", int)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(REGISTRY))
def test_a_topology_that_has_let_go_of_its_schedules_builds_the_same_ones_again(name: str) -> None:
    topology = TopologyFactory.create(name, 8, 2)

    def everything() -> list[object]:
        phases = range(topology.period)
        return [
            [topology.schedule(rank) for rank in range(8)],
            [topology.groups(phase) for phase in phases],
            [topology.mixing_matrix(phase).tolist() for phase in phases],
            topology.digest,
        ]

    before = everything()
    for _ in range(2):
        topology.release()
        assert not [value for value in vars(topology).values() if isinstance(value, tuple | list)]
        assert (topology.period, topology.world_size) == (len(topology.schedule(0)), 8)
        assert everything() == before


def test_a_digest_tells_ranks_and_weights_of_groups_apart() -> None:
    def pair(weight: float) -> list[list[object]]:
        return [[Group([0, 1], weight)], [Group([0, 1], weight)]]

    tables: list[list[list[object]]] = [
        pair(0.5),
        pair(0.25),
        [[[0]], [[1]]],
        [[[0, 1], [0]], [[0, 1], [1]]],
    ]
    digests = [table_topology(table).digest for table in tables]
    assert len(set(digests)) == len(tables)
    assert table_topology(pair(0.5)).digest == digests[0]


def test_repr_shows_the_parameters_that_make_a_schedule() -> None:
    assert repr(TopologyFactory.create("ring", 4)) == "Ring(world_size=4, local_world_size=1)"
    assert repr(RandomMatching(4, seed=7, period=3)).endswith("size=1, seed=7, period=3)")
    assert repr(Hierarchical(8, 2, inner="ring")).endswith("local_world_size=2, inner='ring')")
    inner = RandomMatching(4, seed=7)
    assert repr(Hierarchical(8, 2, inner=inner)).endswith(f"inner={inner!r})")


def test_hierarchical_takes_an_instance_over_the_nodes() -> None:
    inner = RandomMatching(4, seed=7, period=3)
    topology = Hierarchical(8, 2, inner=inner)
    assert topology.period == 6
    for phase in range(3):
        across = [group.ranks for group in topology.groups(2 * phase + 1)]
        assert across == sorted(
            tuple(2 * node + rank for node in group.ranks)
            for group in inner.groups(phase)
            for rank in range(2)
        )
    assert topology.digest != Hierarchical(8, 2, inner=RandomMatching(4, seed=8, period=3)).digest
    with pytest.raises(ValueError, match="inner must be a topology of 4 nodes, got Random"):
        Hierarchical(8, 2, inner=RandomMatching(8))


def test_a_subclass_may_keep_a_table_and_a_period_of_its_own() -> None:
    class Kept(Topology):
        def __init__(self, table: list[list[Group]]) -> None:
            self._table = table
            self._period = "mine"
            super().__init__(len(table))

        def assign_groups(self) -> list[list[Group]]:
            return self._table

    kept = Kept([[Group([0, 1])], [Group([0, 1])]])
    assert (kept.period, vars(kept)["_period"]) == (1, "mine")
    assert kept.schedule(1) == (Group([0, 1]),)
