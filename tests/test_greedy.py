"""The greedy matching: the schedules it gives, and how long they take to work out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import combinations

import pytest
import torch

from decent_optim_wrapper import TopologyFactory
from decent_optim_wrapper.planning import steady_error
from decent_optim_wrapper.topo import Greedy
from decent_optim_wrapper.topo._matching import match


@pytest.mark.parametrize(
    ("n", "period"),
    [(5, 2), (6, 2), (7, 2), (8, 3), (10, 5), (12, 8), (16, 4), (24, 10), (32, 5)],
)
def test_greedy_has_the_known_period_and_beats_or_ties_the_ring(n: int, period: int) -> None:
    greedy = Greedy(n)
    assert greedy.period == period
    if n % 2 == 0:
        ring = TopologyFactory.create("ring", n)
        assert steady_error(greedy) <= steady_error(ring) + 1e-9


@pytest.mark.parametrize(
    ("n", "period", "digest"),
    [
        (5, 2, "fd23b6bd4f8b521f"),
        (9, 10, "3c9648afaf4f664a"),
        (14, 34, "d0c15387755ad343"),
        (31, 200, "01f1e84d31f450a2"),
        (60, 200, "6e3be1bb077810c1"),
        (64, 6, "6578c39522914c0b"),
        (128, 7, "00311c438b456e06"),
    ],
)
def test_the_schedules_are_those_of_the_first_version(n: int, period: int, digest: str) -> None:
    """The digests come from a plain double loop over all pairs."""
    greedy = Greedy(n)
    assert (greedy.period, greedy.digest) == (period, digest)


def slow_match(table: list[list[float]]) -> list[tuple[int, ...]]:
    """The definition, word for word."""
    n = len(table)
    pairs: list[tuple[int, int]] = []
    free = set(range(n))
    for i, j in sorted(combinations(range(n), 2), key=lambda p: (-table[p[0]][p[1]], p)):
        if free >= {i, j}:
            free -= {i, j}
            pairs.append((i, j))
    swapped = True
    while swapped:
        swapped = False
        for one, other in combinations(range(len(pairs)), 2):
            (a, b), (c, d) = pairs[one], pairs[other]
            straight, crossed = table[a][c] + table[b][d], table[a][d] + table[b][c]
            if max(straight, crossed) > table[a][b] + table[c][d] + 1e-9:
                swapped = True
                new = ((a, c), (b, d)) if straight >= crossed else ((a, d), (b, c))
                pairs[one], pairs[other] = new
    groups: list[tuple[int, ...]] = [*pairs]
    for k in free:
        gains = [(table[a][k] + table[b][k]) * 2 / 3 - table[a][b] / 3 for a, b in pairs]
        groups[gains.index(max(gains))] += (k,)
    return sorted(tuple(sorted(group)) for group in groups)


@pytest.mark.parametrize("n", [2, 3, 8, 13, 20])
@pytest.mark.parametrize("levels", [3, 10**6])
def test_a_matching_is_that_of_the_plain_definition(n: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(n)
    unlike_greedy = 0
    for _ in range(20):
        table = torch.randint(1, levels, (n, n), generator=generator).double().triu(1)
        table = table + table.T
        expected = slow_match(table.tolist())
        assert list(match(table)) == expected
        unlike_greedy += expected[0] != (0, int(table[0].argmax()))
    assert unlike_greedy or n == 2


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As torchrun starts its ranks: a second thread counts as CPU time even while it waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_greedy_for_64_and_for_1024_ranks_is_built_in_time_and_alike(one_thread: None) -> None:
    start = time.process_time()
    assert Greedy(64).digest == Greedy(64).digest
    assert (time.process_time() - start) / 2 < 3
    start = time.process_time()
    large = Greedy(1024)
    # 0.8 s where nothing else runs; the double loop over all pairs took 17 s.
    assert time.process_time() - start < 3
    assert (large.period, large.digest) == (10, "368c938cc6e56ff4")


def test_of_many_ranks_at_most_32_rounds_are_worked_out() -> None:
    assert Greedy(66).period == 32
