"""The mixing of a round as an operation on rows, one per rank, without the matrix."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.topo import Group, Topology

# The product of two numbers below it fits into int64.
PRIME = 2**31 - 1
_LARGEST_DENOMINATOR = 10**6
_ROUNDING = 1e-12


class _Weights(NamedTuple):
    """What a member's own row and those of the others count: of shape (groups, 1, 1)."""

    own: Tensor
    other: Tensor


class _Alike(NamedTuple):
    """The groups of a phase that have the same size.

    Args:
        ranks: int64 of shape (groups, size).
        weights: float64.
        residues: the same fractions modulo `PRIME`, int64.
    """

    ranks: Tensor
    weights: _Weights
    residues: _Weights


class Mixing:
    """x <- W x for one phase.

    Args:
        groups: all groups of the phase.
    """

    def __init__(self, groups: Iterable[Group]) -> None:
        by_size: dict[int, list[Group]] = {}
        for group in groups:
            if group.size > 1:
                by_size.setdefault(group.size, []).append(group)
        self._alike = [_alike(size, alike) for size, alike in by_size.items()]

    def __call__(self, rows: Tensor) -> Tensor:
        """W rows, for float64 rows of shape (ranks, columns)."""
        mixed = rows.clone()
        for ranks, (own, other), _ in self._alike:
            members = rows.index_select(0, ranks.flatten()).view(*ranks.shape, -1)
            total = members.sum(dim=1, keepdim=True)
            new = members * (own - other) + total * other
            mixed.index_copy_(0, ranks.flatten(), new.flatten(0, 1))
        return mixed

    def both_sides(self, covariance: Tensor) -> Tensor:
        """W C W', for a symmetric C of shape (ranks, ranks)."""
        return self(self(covariance).T.contiguous())

    def exactly(self, rows: Tensor) -> Tensor:
        """W rows modulo `PRIME`, for int64 rows of shape (ranks, columns): nothing is rounded."""
        mixed = rows.clone()
        for ranks, _, (own, other) in self._alike:
            members = rows.index_select(0, ranks.flatten()).view(*ranks.shape, -1)
            rest = (members.sum(dim=1, keepdim=True) - members) % PRIME
            new = (members * own % PRIME + rest * other % PRIME) % PRIME
            mixed.index_copy_(0, ranks.flatten(), new.flatten(0, 1))
        return mixed


def mixings(topology: Topology) -> list[Mixing]:
    """Those of one period."""
    return [Mixing(topology.groups(phase)) for phase in range(topology.period)]


def _alike(size: int, groups: list[Group]) -> _Alike:
    ranks = torch.tensor([group.ranks for group in groups], dtype=torch.int64, device="cpu")
    own = [group.self_weight for group in groups]
    shape = (len(groups), 1, 1)
    weights = torch.tensor(own, dtype=torch.float64, device="cpu").view(shape)
    pairs = [_residues(weight, size) for weight in own]
    residues = torch.tensor(pairs, dtype=torch.int64, device="cpu").T.view(2, *shape)
    return _Alike(
        ranks, _Weights(weights, (1 - weights) / (size - 1)), _Weights(residues[0], residues[1])
    )


@lru_cache
def _residues(self_weight: float, size: int) -> tuple[int, int]:
    """The weights of a member itself and of another, of the fraction that `self_weight` rounds."""
    own = Fraction(self_weight).limit_denominator(_LARGEST_DENOMINATOR)
    if abs(own - Fraction(self_weight)) > _ROUNDING:
        own = Fraction(self_weight)
    other = (1 - own) / (size - 1)
    return _modulo(own), _modulo(other)


def _modulo(fraction: Fraction) -> int:
    return fraction.numerator * pow(fraction.denominator, -1, PRIME) % PRIME
