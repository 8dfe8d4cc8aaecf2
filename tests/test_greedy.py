"""The greedy matching and the schedules that it gives."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from decent_optim_wrapper import TopologyFactory
from decent_optim_wrapper.elastic.recovery import fitting
from decent_optim_wrapper.planning import steady_error
from decent_optim_wrapper.topo import Base2, Greedy
from decent_optim_wrapper.topo.matching import match


@pytest.mark.parametrize(
    ("n", "period", "digest"),
    [
        (5, 2, "fd23b6bd4f8b521f"),
        (9, 10, "3c9648afaf4f664a"),
        (14, 34, "d0c15387755ad343"),
        (31, 200, "01f1e84d31f450a2"),
        (60, 200, "6e3be1bb077810c1"),
        (64, 6, "6578c39522914c0b"),
        (66, 32, "660c63c093c6b99b"),
        (100, 32, "15d799c0a5fb48af"),
        (128, 7, "00311c438b456e06"),
        (256, 8, "c535959d8368e48f"),
    ],
)
def test_the_schedules_are_those_of_the_first_version_and_beat_or_tie_the_ring(
    n: int, period: int, digest: str
) -> None:
    """A change of any group at all changes the digest."""
    greedy = Greedy(n)
    assert (greedy.period, greedy.digest) == (period, digest)
    if n % 2 == 0 and n < 64:
        ring = TopologyFactory.create("ring", n)
        assert steady_error(greedy) <= steady_error(ring) + 1e-9


def random_table(n: int, levels: int) -> list[list[float]]:
    generator = torch.Generator().manual_seed(n)
    table = torch.randint(1, levels, (n, n), generator=generator).double().triu(1)
    return (table + table.T).tolist()


def worth(table: list[list[float]], group: tuple[int, ...]) -> float:
    """What the mean of a group takes away: twice the sum over its pairs, by its size."""
    return 2 / len(group) * sum(table[a][b] for a, b in combinations(group, 2))


@pytest.mark.parametrize("n", [2, 3, 8, 13, 20])
@pytest.mark.parametrize("levels", [3, 10**6])
def test_no_swap_of_partners_improves_a_matching(n: int, levels: int) -> None:
    table = random_table(n, levels)
    groups = match(table)
    assert sorted(rank for group in groups for rank in group) == list(range(n))
    assert sorted(map(len, groups))[:-1] == [2] * (n // 2 - 1)
    for (a, b), (c, d) in combinations([group for group in groups if len(group) == 2], 2):
        now = table[a][b] + table[c][d]
        assert now >= max(table[a][c] + table[b][d], table[a][d] + table[b][c]) - 1e-9
    if n > 3:
        in_order = [(rank, rank + 1) for rank in range(0, n - 1, 2)]
        assert sum(worth(table, g) for g in groups) > sum(worth(table, g) for g in in_order)


def test_swaps_find_what_the_greedy_choice_misses() -> None:
    table = [[0.0] * 4 for _ in range(4)]
    for (i, j), gain in {(0, 1): 10.0, (0, 2): 9.0, (1, 3): 9.0, (2, 3): 1.0}.items():
        table[i][j] = table[j][i] = gain
    assert match(table) == [(0, 2), (1, 3)]


def test_ties_go_to_the_lower_ranks() -> None:
    equal = [[float(i != j) for j in range(7)] for i in range(7)]
    assert match(equal) == [(0, 1, 6), (2, 3), (4, 5)]


def test_beyond_256_ranks_other_topologies_take_its_place() -> None:
    text = r"Greedy needs at most 256 ranks, got world_size=257 .*fit: complete, .*, base-2"
    with pytest.raises(ValueError, match=text):
        Greedy(257)
    assert isinstance(fitting(TopologyFactory.create("ring", 8), tuple(range(7))), Greedy)
    large = fitting(TopologyFactory.create("ring", 260), tuple(range(259)))
    assert isinstance(large, Base2)
    assert large.world_size == 259
