"""Topologies of any size, and what they do and cost."""

from __future__ import annotations

import math
from functools import reduce

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

BASE_2_ROUNDS = [1, 3, 2, 5, 4, 5, 3, 7, 6, 7, 5, 7, 6, 7, 4, 9]


class Listed(Topology):
    """The phases that a test writes down."""

    def __init__(self, world_size: int, *phases: list[Group | list[int]]) -> None:
        self._listed = phases
        super().__init__(world_size)

    def phases(self) -> tuple[list[Group | list[int]], ...]:
        return self._listed


WEIGHTED = Listed(
    6,
    [Group([0, 3], 0.7), Group([1, 2, 4], 0.2)],
    [Group([0, 1, 5], 0.5), [2, 3]],
)


def test_the_steady_error_of_a_ring_is_the_known_one() -> None:
    assert steady_error(TopologyFactory.create("ring", 12)) == pytest.approx(1.889, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("complete", 5),
        ("one-peer-exp", 8),
        ("ring", 12),
        ("greedy", 7),
        ("greedy", 12),
        ("hypercuboid", 12),
        ("base-2", 12),
        ("bipartite-exp", 10),
        ("weights of its own", 6),
    ],
)
@pytest.mark.parametrize("overlap", [True, False])
def test_the_steady_error_and_the_rate_are_those_of_dense_matrices(
    name: str, n: int, overlap: bool
) -> None:
    """Noise of variance 1 comes after the mixing with overlap, else before it."""
    topology = WEIGHTED if name == "weights of its own" else TopologyFactory.create(name, n)
    matrices = [topology.mixing_matrix(phase) for phase in range(topology.period)]
    noise = torch.eye(n, dtype=torch.float64) - 1 / n
    covariance, errors = torch.zeros_like(noise), []
    for step in range(600):
        w = matrices[step % topology.period]
        covariance = w @ covariance @ w.T + noise if overlap else w @ (covariance + noise) @ w.T
        errors.append(covariance.trace().item() / n)
    expected = sum(errors[-topology.period :]) / topology.period
    assert steady_error(topology, overlap=overlap) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    left = reduce(lambda done, matrix: matrix @ done, matrices) - 1 / n
    radius = torch.linalg.eigvals(left).abs().max().item()
    # The root of a rounding error is far above it.
    expected = radius ** (1 / topology.period) if radius > 1e-9 else 0.0
    assert consensus_rate(topology) == pytest.approx(expected, rel=1e-6)


# The rounds after which an average is exact, whichever phase comes first; None if it never is.
ROUNDS: dict[str, dict[tuple[int, int], int | None]] = {
    "complete": {(5, 1): 1},
    "ring": {(2, 1): 1, (4, 1): 2, (6, 1): None},
    "one-peer-exp": {(8, 1): 3, (16, 1): 4},
    "alternating-exp-ring": {(2, 1): 2, (8, 2): 4, (16, 2): 6, (12, 3): 4},
    "base-2": {(n, 1): rounds for n, rounds in enumerate(BASE_2_ROUNDS, start=2)},
    "hypercuboid": {(7, 1): 1, (8, 1): 3, (12, 1): 3, (30, 1): 3, (36, 1): 4},
    "hierarchical": {(12, 3): 4},
    "greedy": {(5, 1): None, (8, 1): 3},
    "bipartite-exp": {(6, 1): None, (8, 1): 3},
}


@pytest.mark.parametrize(
    ("name", "size", "rounds"),
    [(name, size, rounds) for name, of in ROUNDS.items() for size, rounds in of.items()],
)
def test_an_average_is_exact_after_the_known_number_of_rounds(
    name: str, size: tuple[int, int], rounds: int | None
) -> None:
    topology = TopologyFactory.create(name, *size)
    assert rounds_to_consensus(topology) == rounds == dense_rounds(topology)
    assert (consensus_rate(topology) == 0) == (rounds is not None)
    if name in ("complete", "ring", "one-peer-exp", "alternating-exp-ring"):
        pairs = 2 if name == "alternating-exp-ring" else 1
        starts = range(0, topology.period, pairs)
        assert {dense_rounds(topology, start) for start in starts} == {rounds}
    if name == "base-2":
        assert topology.period == rounds
        assert max(g.size for t in range(topology.period) for g in topology.groups(t)) == 2


def dense_rounds(topology: Topology, start: int = 0) -> int | None:
    """Exact averaging by products of matrices."""
    n = topology.world_size
    left = torch.eye(n, dtype=torch.float64)
    for done in range(1, 4 * topology.period + n):
        left = topology.mixing_matrix(start + done - 1) @ left
        if (left - 1 / n).abs().max() < 1e-12:
            return done
    return None


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
            ((topology.mixing_matrix(phase) @ x).square().sum() / x.square().sum()).item()
            for phase in range(topology.period)
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


def test_an_average_reached_over_more_than_a_period_counts_as_exact() -> None:
    topology = Listed(4, [[0, 2], [1, 3]], [[0, 3]], [[0, 1], [2, 3]])
    assert topology.period == 3
    assert dense_rounds(topology) == 4
    assert rounds_to_consensus(topology) == 4
    assert consensus_rate(topology) == 0
    assert math.isfinite(steady_error(topology))


def test_the_rate_is_found_where_eigenvalues_do_not_converge() -> None:
    assert consensus_rate(TopologyFactory.create("greedy", 48)) == pytest.approx(math.sqrt(0.5))


@pytest.mark.parametrize("weight", [0.5 + 1e-7, 0.5 - 1e-4, 0.501])
def test_a_fast_contraction_is_not_taken_for_an_exact_average(weight: float) -> None:
    pair = Listed(2, [Group([0, 1], weight)])
    assert rounds_to_consensus(pair) is None
    assert consensus_rate(pair) == pytest.approx(abs(2 * weight - 1), rel=1e-6)
    assert rounds_to_consensus(Listed(2, [[0, 1]])) == 1


def test_256_ranks_that_are_matched_at_random_have_figures() -> None:
    topology = RandomMatching(256, period=32)
    assert rounds_to_consensus(topology) is None
    assert 0 < consensus_rate(topology) < 1 < steady_error(topology) < 2
