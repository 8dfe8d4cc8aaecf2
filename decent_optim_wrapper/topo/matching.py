"""Disjoint pairs of ranks with a large total gain, found greedily and improved by swaps.

The result depends on the table only: ties go to the lower ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

Matching = list[tuple[int, ...]]
Table = Sequence[Sequence[float]]

DIGITS = 9
_GAIN = 1e-9


def match(table: Table) -> Matching:
    """Greedy pairs, improved by swaps, and one triple if the number of ranks is odd.

    Args:
        table: symmetric; ``table[i][j]`` is the gain of pairing ranks i and j.

    Returns:
        The groups in the order of their ranks.
    """
    pairs = _greedy_pairs(table)
    _swap_partners_(pairs, table)
    groups: Matching = list(pairs)
    paired = {rank for pair in pairs for rank in pair}
    for last in {*range(len(table))} - paired:
        gains = [
            round(2 * (table[a][b] + table[a][last] + table[b][last]) / 3 - table[a][b], DIGITS)
            for a, b in pairs
        ]
        groups[gains.index(max(gains))] += (last,)
    return sorted(tuple(sorted(group)) for group in groups)


def _greedy_pairs(table: Table) -> list[tuple[int, int]]:
    """Take the pairs i < j in the order (-table, i, j) whose ranks are both free."""
    # A stable sort: pairs of equal gain stay in the order of their ranks.
    order = sorted(combinations(range(len(table)), 2), key=lambda pair: -table[pair[0]][pair[1]])
    free = set(range(len(table)))
    pairs = []
    for i, j in order:
        if i in free and j in free:
            free -= {i, j}
            pairs.append((i, j))
    return pairs


def _swap_partners_(pairs: list[tuple[int, int]], table: Table) -> None:
    """Exchange the partners of two pairs as long as the total gain grows (2-opt)."""
    swapped = True
    while swapped:
        swapped = False
        for one, other in combinations(range(len(pairs)), 2):
            (a, b), (c, d) = pairs[one], pairs[other]
            straight = table[a][c] + table[b][d]
            crossed = table[a][d] + table[b][c]
            if max(straight, crossed) > table[a][b] + table[c][d] + _GAIN:
                better = ((a, c), (b, d)) if straight >= crossed else ((a, d), (b, c))
                pairs[one], pairs[other] = better
                swapped = True
