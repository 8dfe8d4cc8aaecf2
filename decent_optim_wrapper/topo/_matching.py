"""Disjoint pairs that cover as much of a table as a greedy choice and swaps find.

Every result is a function of the table alone: ties go to the lower ranks, and nothing is summed
in an order that a machine could choose.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import torch
from torch import Tensor

Matching = tuple[tuple[int, ...], ...]

DIGITS = 9
_GAIN = 1e-9


def match(table: Tensor) -> Matching:
    """Greedy pairs, improved by swaps, with a triple where the number of ranks is odd.

    Args:
        table: float64 of shape (ranks, ranks) on the CPU, symmetric; what a pair is worth, above
            0 off the diagonal and 0 on it.

    Returns:
        The groups in the order of their ranks.
    """
    pairs = _Pairs(_greedy_pairs(table), table).swap()
    groups: list[tuple[int, ...]] = list(pairs)
    if len(table) % 2:
        last = ({*range(len(table))} - {rank for pair in pairs for rank in pair}).pop()
        best = _pair_to_join(pairs, last, table)
        groups[best] = (*pairs[best], last)
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _greedy_pairs(table: Tensor) -> list[tuple[int, int]]:
    """Take (i, j) with i < j in the order (-table, i, j), as long as both are free.

    The heap holds for every i its best j > i of those that were free when last looked up. What is
    free only shrinks, so the top of the heap is the next pair unless its j has been taken since.
    """
    n = len(table)
    values, partners = table.triu(1)[:-1].max(dim=1)
    heap = list(zip((-values).tolist(), range(n - 1), partners.tolist(), strict=True))
    heapify(heap)
    pairs: list[tuple[int, int]] = []
    # The same bytes as Python's, which writes them quickly, and as torch's, which masks with them.
    taken = bytearray(n)
    mask = torch.frombuffer(taken, dtype=torch.bool)
    while len(pairs) < n // 2:
        _, i, j = heappop(heap)
        if taken[i]:
            continue
        if not taken[j]:
            pairs.append((i, j))
            taken[i] = taken[j] = True
        elif taken.find(False, i + 1) >= 0:
            row = table[i, i + 1 :].masked_fill(mask[i + 1 :], -torch.inf)
            best = int(row.argmax())
            heappush(heap, (-row[best].item(), i, i + 1 + best))
    return pairs


class _Pairs:
    """Pairs that exchange partners while the total that they cover grows.

    Args:
        pairs: disjoint pairs of ranks.
        table: float64 of shape (ranks, ranks), symmetric; what it is worth to pair two ranks.
    """

    def __init__(self, pairs: list[tuple[int, int]], table: Tensor) -> None:
        self._table = table
        self._first, self._second = torch.tensor(pairs, dtype=torch.int64, device="cpu").T
        self._covered = table[self._first, self._second]
        # Shared bytes again. Every pair that gains by a swap with a later one is among these.
        self._hopeful = bytearray(len(pairs))
        self._mask = torch.frombuffer(self._hopeful, dtype=torch.bool)

    def swap(self) -> list[tuple[int, int]]:
        """Compare every pair with all later ones, in order, until no swap is a gain any more."""
        self._mask.copy_(self._gains([*range(len(self._covered))]).any(dim=1))
        while any(self._hopeful):
            for one, hope in enumerate(self._hopeful):
                if hope:
                    self._hopeful[one] = False
                    self._swap_with_later(one)
        return list(zip(self._first.tolist(), self._second.tolist(), strict=True))

    def _swap_with_later(self, one: int) -> None:
        (gains,) = self._gains([one])
        other = one
        while gains[other + 1 :].any():
            other += 1 + int(gains[other + 1 :].byte().argmax())
            self._exchange(one, other)
            both = self._gains([one, other])
            self._mask |= both.any(dim=0)
            self._hopeful[one] = self._hopeful[other] = True
            gains = both[0]

    def _gains(self, pairs: list[int]) -> Tensor:
        """Whether a swap of these pairs with any is a gain: bool of shape (pairs, all pairs)."""
        rows = torch.tensor(pairs, device="cpu")
        a = self._table.index_select(0, self._first[rows])
        b = self._table.index_select(0, self._second[rows])
        c, d = (ends.expand(len(pairs), -1) for ends in (self._first, self._second))
        straight = a.gather(1, c).add_(b.gather(1, d))
        crossed = a.gather(1, d).add_(b.gather(1, c))
        now = self._covered[rows].unsqueeze(1) + self._covered
        return torch.maximum(straight, crossed) > now.add_(_GAIN)

    def _exchange(self, one: int, other: int) -> None:
        a, b, c, d = (int(e[pair]) for pair in (one, other) for e in (self._first, self._second))
        straight = self._table[a, c] + self._table[b, d]
        crossed = self._table[a, d] + self._table[b, c]
        swapped = ((a, c), (b, d)) if straight >= crossed else ((a, d), (b, c))
        for pair, (first, second) in zip((one, other), swapped, strict=True):
            self._first[pair] = first
            self._second[pair] = second
            self._covered[pair] = self._table[first, second]


def _pair_to_join(pairs: list[tuple[int, int]], last: int, table: Tensor) -> int:
    """The pair that gains most if the rank left over joins it."""
    a, b = torch.tensor(pairs, dtype=torch.int64, device="cpu").T
    worth = zip(*(table[ends].tolist() for ends in ((a, b), (a, last), (b, last))), strict=True)
    gains = [round(2 * (ab + ak + bk) / 3 - ab, DIGITS) for ab, ak, bk in worth]
    return gains.index(max(gains))
