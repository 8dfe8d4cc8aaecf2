"""Topologies of any size, and what they do and cost."""

from __future__ import annotations

import math
from fractions import Fraction
from operator import mul

import pytest
import torch

from decent_optim_wrapper import Group, TopologyFactory
from decent_optim_wrapper.planning import (
    bytes_per_round,
    consensus_rate,
    rounds_to_consensus,
    steady_error,
    suggest,
)
from decent_optim_wrapper.topo import Hierarchical, RandomMatching, Topology


def mixing_matrices(topology: Topology) -> list[torch.Tensor]:
    return [topology.mixing_matrix(phase) for phase in range(topology.period)]


BASE_2_ROUNDS = [1, 3, 2, 5, 4, 5, 3, 7, 6, 7, 5, 7, 6, 7, 4, 9]


@pytest.mark.parametrize(
    ("name", "n", "error"),
    [
        ("complete", 5, 0.8),
        ("one-peer-exp", 8, 1.375),
        ("one-peer-exp", 32, 1.781),
        ("ring", 12, 1.889),
        ("greedy", 5, 1.006),
        ("greedy", 7, 1.195),
        ("greedy", 8, 1.375),
        ("greedy", 12, 1.558),
        ("greedy", 24, 1.738),
        ("hypercuboid", 12, 1.389),
        ("base-2", 12, 1.932),
        ("bipartite-exp", 10, 1.501),
    ],
)
def test_the_steady_error_is_the_known_one(name: str, n: int, error: float) -> None:
    assert steady_error(TopologyFactory.create(name, n)) == pytest.approx(error, abs=1e-3)


def test_without_overlap_the_error_is_that_after_mixing() -> None:
    assert steady_error(TopologyFactory.create("complete", 5), overlap=False) == pytest.approx(0)
    ring = TopologyFactory.create("ring", 6)
    assert 0 < steady_error(ring, overlap=False) < steady_error(ring)


def test_the_steady_error_is_what_noise_does() -> None:
    topology = TopologyFactory.create("greedy", 7)
    matrices = mixing_matrices(topology)
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(7, 20_000, dtype=torch.float64)
    errors = []
    for step in range(60):
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        x = matrices[step % len(matrices)] @ x + noise
        errors.append((x - x.mean(dim=0)).square().sum().item() / x.numel())
    assert sum(errors[20:]) / 40 == pytest.approx(steady_error(topology), rel=0.01)


@pytest.mark.parametrize(("n", "rounds"), list(zip(range(2, 18), BASE_2_ROUNDS, strict=True)))
def test_base_2_is_exact_after_the_known_number_of_rounds(n: int, rounds: int) -> None:
    topology = TopologyFactory.create("base-2", n)
    assert topology.period == rounds
    assert rounds_to_consensus(topology) == rounds
    largest = max(g.size for t in range(rounds) for g in topology.groups(t))
    assert largest == 2


@pytest.mark.parametrize(("n", "rounds"), [(7, 1), (8, 3), (12, 3), (30, 3), (36, 4)])
def test_the_hypercuboid_is_exact_after_its_prime_factors(n: int, rounds: int) -> None:
    assert rounds_to_consensus(TopologyFactory.create("hypercuboid", n)) == rounds


def test_random_matchings_follow_their_seed_and_contract_as_theory_has_it() -> None:
    def groups(seed: int) -> list[object]:
        topology = RandomMatching(7, seed=seed)
        return [topology.groups(t) for t in range(topology.period)]

    assert groups(3) == groups(3) != groups(4)
    for n in (6, 7):
        topology = RandomMatching(n, seed=1, period=2000)
        x = torch.randn(n, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x -= x.mean(dim=0)
        left = [
            ((w @ x).square().sum() / x.square().sum()).item() for w in mixing_matrices(topology)
        ]
        expected = (n // 2 - 1) / (n - 1)
        assert sum(left) / len(left) == pytest.approx(expected, abs=0.02)


def test_hierarchical_averages_nodes_and_then_gossips_between_them() -> None:
    topology = Hierarchical(8, 2, inner="ring")
    ranks = [[group.ranks for group in topology.groups(t)] for t in range(topology.period)]
    inside = [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert ranks == [
        inside,
        [(0, 2), (1, 3), (4, 6), (5, 7)],
        inside,
        [(0, 6), (1, 7), (2, 4), (3, 5)],
    ]
    assert rounds_to_consensus(Hierarchical(12, 3)) == 4
    with pytest.raises(ValueError, match="more than one node"):
        Hierarchical(4, 4)


def test_rates_rounds_and_bytes_of_known_topologies() -> None:
    ring = TopologyFactory.create("ring", 8)
    assert consensus_rate(ring) == pytest.approx(0.5**0.5, abs=1e-6)
    assert rounds_to_consensus(ring) is None
    assert consensus_rate(TopologyFactory.create("one-peer-exp", 8)) == 0
    long = RandomMatching(12, period=400)
    assert rounds_to_consensus(long) is None
    assert consensus_rate(long) == pytest.approx(math.sqrt(5 / 11), abs=0.05)
    assert bytes_per_round(ring, 1000) == (1000, 1000)
    assert bytes_per_round(TopologyFactory.create("complete", 4), 1000) == (1500, 1500)
    alone = TopologyFactory.create("alternating-exp-ring", 4, 1)
    assert bytes_per_round(alone, 1000) == (500, 500)


def test_ranks_that_never_hear_of_each_other_drift_apart() -> None:
    apart = RandomMatching(8, period=1)
    assert steady_error(apart) == math.inf
    assert consensus_rate(apart) == pytest.approx(1)
    with pytest.raises(ValueError, match="unknown topology 'rign'"):
        Hierarchical(8, 2, inner="rign")


def test_suggestions_fit_and_start_with_the_best_per_byte() -> None:
    for sizes in ((7, 1), (8, 2), (12, 4)):
        names = suggest(*sizes)
        kinds = dict(TopologyFactory.registered())
        assert set(names) == {name for name, kind in kinds.items() if kind.fits(*sizes)}
        costs = []
        for name in names:
            topology = TopologyFactory.create(name, *sizes)
            costs.append(steady_error(topology) * bytes_per_round(topology, 1).mean)
        assert costs == sorted(costs)


class Listed(Topology):
    """The phases that a test writes down."""

    def __init__(self, world_size: int, *phases: list[Group | list[int]]) -> None:
        self._listed = phases
        super().__init__(world_size)

    def phases(self) -> tuple[list[Group | list[int]], ...]:
        return self._listed


def dense_rounds(topology: Topology, most: int) -> int | None:
    """Exact averaging by matrices of fractions."""
    n = topology.world_size
    phases = []
    for phase in range(topology.period):
        matrix = [[Fraction(int(i == j)) for j in range(n)] for i in range(n)]
        for group in topology.groups(phase):
            own = Fraction(group.self_weight).limit_denominator(1000)
            for i in group.ranks:
                for j in group.ranks:
                    matrix[i][j] = own if i == j else (1 - own) / (group.size - 1)
        phases.append(matrix)
    left = [[Fraction(int(i == j)) for j in range(n)] for i in range(n)]
    for done in range(1, most + 1):
        w = phases[(done - 1) % topology.period]
        columns = list(zip(*left, strict=True))
        left = [[sum(map(mul, row, column)) for column in columns] for row in w]
        if all(value == Fraction(1, n) for row in left for value in row):
            return done
    return None


def test_an_average_reached_over_more_than_a_period_counts_as_exact() -> None:
    topology = Listed(4, [[0, 2], [1, 3]], [[0, 3]], [[0, 1], [2, 3]])
    assert topology.period == 3
    assert dense_rounds(topology, 10) == 4
    assert rounds_to_consensus(topology) == 4
    assert consensus_rate(topology) == 0
    assert math.isfinite(steady_error(topology))


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("ring", 4),
        ("ring", 6),
        ("hypercuboid", 6),
        ("base-2", 5),
        ("base-2", 6),
        ("greedy", 5),
        ("greedy", 8),
        ("bipartite-exp", 6),
        ("bipartite-exp", 8),
    ],
)
def test_rounds_to_consensus_are_those_of_fractions(name: str, n: int) -> None:
    topology = TopologyFactory.create(name, n)
    assert rounds_to_consensus(topology) == dense_rounds(topology, 4 * topology.period + n)
    assert (consensus_rate(topology) == 0) == (rounds_to_consensus(topology) is not None)


def test_the_rate_is_found_where_eigenvalues_do_not_converge() -> None:
    assert consensus_rate(TopologyFactory.create("greedy", 48)) == pytest.approx(math.sqrt(0.5))


@pytest.mark.parametrize("weight", [0.5 + 1e-7, 0.5 - 1e-4, 0.501])
def test_a_fast_contraction_is_not_taken_for_an_exact_average(weight: float) -> None:
    pair = Listed(2, [Group([0, 1], weight)])
    assert rounds_to_consensus(pair) is None
    assert consensus_rate(pair) == pytest.approx(abs(2 * weight - 1), rel=1e-6)
    assert rounds_to_consensus(Listed(2, [[0, 1]])) == 1


def test_groups_with_weights_of_their_own_mix_as_their_matrices_do() -> None:
    topology = Listed(
        6,
        [Group([0, 3], 0.7), Group([1, 2, 4], 0.2)],
        [Group([0, 1, 5], 0.5), [2, 3]],
    )
    matrices = mixing_matrices(topology)
    noise = torch.eye(6, dtype=torch.float64) - 1 / 6
    covariance, errors = noise, []
    for step in range(400):
        w = matrices[step % 2]
        covariance = w @ covariance @ w.T + noise
        errors.append(covariance.trace().item() / 6)
    assert steady_error(topology) == pytest.approx(sum(errors[-2:]) / 2, rel=1e-9)
    away = matrices[1] @ matrices[0] - 1 / 6
    radius = torch.linalg.eigvals(away).abs().max().item()
    assert consensus_rate(topology) == pytest.approx(radius**0.5, rel=1e-9)


def test_256_ranks_that_are_matched_at_random_have_figures() -> None:
    topology = RandomMatching(256, period=32)
    assert rounds_to_consensus(topology) is None
    assert 0 < consensus_rate(topology) < 1 < steady_error(topology) < 2


def test_analysis_works_whatever_the_default_device() -> None:
    torch.set_default_device("meta")
    try:
        assert steady_error(TopologyFactory.create("greedy", 7)) == pytest.approx(1.195, abs=1e-3)
        assert consensus_rate(TopologyFactory.create("ring", 8)) == pytest.approx(0.5**0.5)
        assert suggest(7)[0] == "greedy"
    finally:
        torch.set_default_device(None)
