"""Matching the ranks that disagree most, worked out ahead of training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decent_optim_wrapper.topo._base import Topology, groups_by_rank
from decent_optim_wrapper.topo._group import Group

_DIGITS = 9
_GAIN = 1e-9
_LONGEST_PERIOD = 200

Matching = tuple[tuple[int, ...], ...]


class Greedy(Topology):
    """Pairs those ranks whose disagreement is expected to be largest, for any world size.

    Under unit white noise the ranks' covariance follows C <- W C W' + (I - J) from C = I - J. Each
    round pairs greedily by D_ij = (C_ii + C_jj - 2 C_ij) / 2, improves the pairs by 2-opt swaps,
    and lets the rank left over from an odd number join the pair that gains most. The schedule is
    cut where the matchings begin to repeat, at the latest after 200 rounds. All arithmetic is
    elementwise and rounded before it is compared, so every rank and machine gets the same one.
    """

    def assign_groups(self) -> Sequence[Sequence[Group]]:
        """The matchings of one period."""
        n = self._world_size
        identity = torch.eye(n, dtype=torch.float64)
        noise = identity - 1 / n
        covariance = noise.clone()
        matchings: list[Matching] = []
        seen: dict[bytes, int] = {}
        while len(matchings) < _LONGEST_PERIOD:
            # The matching is a function of the rounded disagreement: the first repeat is a cycle.
            disagreement = _disagreement(covariance)
            key = _key(disagreement)
            if key in seen:
                matchings = matchings[seen[key] :]
                break
            seen[key] = len(matchings)
            matching = _match(disagreement)
            matchings.append(matching)
            covariance = _mix(_mix(covariance, matching).T.contiguous(), matching) + noise
        return groups_by_rank(matchings, n)


def _disagreement(covariance: Tensor) -> Tensor:
    own = covariance.diagonal()
    return torch.round((own.unsqueeze(0) + own.unsqueeze(1) - 2 * covariance) / 2, decimals=_DIGITS)


def _key(disagreement: Tensor) -> bytes:
    return repr(torch.round(disagreement * 1e6).long().tolist()).encode()


def _mix(rows: Tensor, matching: Matching) -> Tensor:
    """W rows, for the W of the matching."""
    mixed = rows.clone()
    for size in {len(group) for group in matching}:
        index = torch.tensor([group for group in matching if len(group) == size])
        total = rows[index[:, 0]]
        for column in range(1, size):
            total = total + rows[index[:, column]]
        for column in range(size):
            mixed[index[:, column]] = total / size
    return mixed


def _match(disagreement: Tensor) -> Matching:
    """Greedy pairs, improved by swaps, with a triple where the number of ranks is odd."""
    n = len(disagreement)
    table: list[list[float]] = disagreement.tolist()
    upper = torch.triu_indices(n, n, offset=1)
    order = torch.sort(disagreement[upper[0], upper[1]], descending=True, stable=True).indices
    free = [True] * n
    pairs: list[tuple[int, int]] = []
    for i, j in upper[:, order].T.tolist():
        if free[i] and free[j]:
            free[i] = free[j] = False
            pairs.append((i, j))
    _swap(pairs, table)
    groups: list[tuple[int, ...]] = list(pairs)
    if n % 2:
        k = free.index(True)

        def gain(pair: int) -> float:
            i, j = pairs[pair]
            return round(2 * (table[i][j] + table[i][k] + table[j][k]) / 3 - table[i][j], _DIGITS)

        best = max(range(len(pairs)), key=gain)
        groups[best] = (*pairs[best], k)
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _swap(pairs: list[tuple[int, int]], table: list[list[float]]) -> None:
    """Exchange partners between two pairs while the total disagreement covered grows."""
    improved = True
    while improved:
        improved = False
        for one in range(len(pairs)):
            for other in range(one + 1, len(pairs)):
                (a, b), (c, d) = pairs[one], pairs[other]
                now = table[a][b] + table[c][d]
                straight, crossed = table[a][c] + table[b][d], table[a][d] + table[b][c]
                if max(straight, crossed) > now + _GAIN:
                    swapped = ((a, c), (b, d)) if straight >= crossed else ((a, d), (b, c))
                    pairs[one], pairs[other] = swapped
                    improved = True
