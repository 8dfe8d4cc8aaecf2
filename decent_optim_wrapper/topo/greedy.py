"""A schedule of pairs that disagree most, computed before training.

A round pairs greedily and improves the pairs by swaps. The result depends on the disagreement only:
ties go to the lower ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from decent_optim_wrapper.topo.base import Topology

Matching = list[tuple[int, ...]]
Table = Sequence[Sequence[float]]

_MOST_RANKS = 256
_MOST_ROUNDS = 200
_MOST_ROUNDS_OF_MANY = 32
_MANY = 64
_DIGITS, _GAIN = 9, 1e-9


class Greedy(Topology):
    """Pairs the ranks whose disagreement is expected to be largest, for up to 256 ranks.

    Under unit white noise the ranks' covariance follows C <- W C W' + (I - J) from C = I - J. Each
    round pairs greedily by D_ij = (C_ii + C_jj - 2 C_ij) / 2, improves the pairs by 2-opt swaps,
    and, if the number of ranks is odd, adds the last one to the pair that gains most. The schedule
    is cut where the matchings begin to repeat, at the latest after 200 rounds. Above 64 ranks it is
    cut after 32 rounds: a round takes long to compute, and the cut costs less than 0.2 % of steady
    error. All arithmetic is elementwise and rounded before it is compared, so every rank and
    machine gets the same schedule.
    """

    condition = f"at most {_MOST_RANKS} ranks"

    @classmethod
    def fits(cls, world_size: int, local_world_size: int = 1) -> bool:
        """Up to 256 ranks: a schedule for more takes minutes to compute."""
        return world_size <= _MOST_RANKS

    def phases(self) -> Sequence[Matching]:
        """The matchings of one period."""
        n = self._world_size
        noise = torch.eye(n, dtype=torch.float64, device="cpu") - 1 / n
        covariance = noise
        matchings: list[Matching] = []
        seen: list[Tensor] = []
        for _ in range(_MOST_ROUNDS if n <= _MANY else _MOST_ROUNDS_OF_MANY):
            own = covariance.diagonal()
            disagreement = (own.unsqueeze(0) + own.unsqueeze(1) - 2 * covariance) / 2
            rounded = disagreement.round(decimals=6)
            # The matching depends on the disagreement only: the first repeat closes a cycle.
            start = next((t for t, other in enumerate(seen) if torch.equal(rounded, other)), None)
            if start is not None:
                return matchings[start:]
            seen.append(rounded)
            matchings.append(match(disagreement.round(decimals=_DIGITS).tolist()))
            covariance = _mixed(covariance, matchings[-1]) + noise
        return matchings


def _mixed(covariance: Tensor, matching: Matching) -> Tensor:
    """W C W': a rank's row and column become the means over its group."""
    mixed = _group_means(_group_means(covariance, matching).T.contiguous(), matching)
    # Exactly symmetric: the sums above and below the diagonal are rounded in different orders.
    return (mixed + mixed.T) / 2


def _group_means(rows: Tensor, matching: Matching) -> Tensor:
    """The mean row of its group for every rank, summed in the order of the group's ranks."""
    means = torch.empty_like(rows)
    for group in matching:
        means[list(group)] = sum(rows[rank] for rank in group) / len(group)
    return means


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
            round(2 * (table[a][b] + table[a][last] + table[b][last]) / 3 - table[a][b], _DIGITS)
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
