"""Matching the ranks that disagree most, worked out ahead of training."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from decent_optim_wrapper.topo._base import Topology, groups_by_rank
from decent_optim_wrapper.topo._group import Group
from decent_optim_wrapper.topo._matching import DIGITS, Matching, match

_MOST_ROUNDS = 200
_MOST_ROUNDS_OF_MANY = 32
_MANY = 64
_CACHED = 2**15


class Greedy(Topology):
    """Pairs those ranks whose disagreement is expected to be largest, for any world size.

    Under unit white noise the ranks' covariance follows C <- W C W' + (I - J) from C = I - J. Each
    round pairs greedily by D_ij = (C_ii + C_jj - 2 C_ij) / 2, improves the pairs by 2-opt swaps,
    and lets the rank left over from an odd number join the pair that gains most. The schedule is
    cut where the matchings begin to repeat, at the latest after 200 rounds, or 32 above 64 ranks,
    where a round takes long to work out and the seam costs less than 0.2 % of steady error. All
    arithmetic is elementwise and rounded before it is compared, so every rank and machine gets the
    same schedule.
    """

    def assign_groups(self) -> Sequence[Sequence[Group]]:
        """The matchings of one period."""
        n = self._world_size
        covariance = torch.eye(n, dtype=torch.float64, device="cpu") - 1 / n
        matchings: list[Matching] = []
        seen: dict[bytes, int] = {}
        longest = _MOST_ROUNDS if n <= _MANY else _MOST_ROUNDS_OF_MANY
        while len(matchings) < longest:
            # The matching is a function of the rounded disagreement: the first repeat is a cycle.
            disagreement = _disagreement(covariance)
            key = _key(disagreement)
            if key in seen:
                matchings = matchings[seen[key] :]
                break
            seen[key] = len(matchings)
            matchings.append(match(disagreement))
            covariance = _mixed(covariance, matchings[-1])
        return groups_by_rank(matchings, n)


def _disagreement(covariance: Tensor) -> Tensor:
    own = covariance.diagonal()
    total = (own.unsqueeze(0) + own.unsqueeze(1)).sub_(covariance, alpha=2)
    return total.div_(2).round_(decimals=DIGITS)


def _key(disagreement: Tensor) -> bytes:
    """A digest of the disagreement in millionths.

    A round adds at most 1 to a variance: those of 200 rounds stay within 32 bits.
    """
    digest = hashlib.sha256()
    # A few rows at a time stay in the processor's cache.
    few = max(1, _CACHED // len(disagreement))
    for start in range(0, len(disagreement), few):
        millionths = (disagreement[start : start + few] * 1e6).round_().to(torch.int32)
        memory = ctypes.c_char * millionths.nbytes
        digest.update(memory.from_address(millionths.data_ptr()))
    return digest.digest()


def _mixed(covariance: Tensor, matching: Matching) -> Tensor:
    """W C W' + (I - J): one row and column per group are worked out, and repeated for its ranks."""
    n = len(covariance)
    means = _group_means(_group_means(covariance, matching).T.contiguous(), matching)
    # Four numbers were summed in one order on this side of the diagonal, in another on that.
    means = (means + means.T).div_(2)
    numbers = [(rank, number) for number, group in enumerate(matching) for rank in group]
    group_of = torch.tensor([number for _, number in sorted(numbers)], device="cpu")
    repeated = means.gather(1, group_of.expand(len(means), n)).index_select(0, group_of)
    own = repeated.diagonal() + (1 - 1 / n)
    repeated.sub_(1 / n).diagonal().copy_(own)
    return repeated


def _group_means(rows: Tensor, matching: Matching) -> Tensor:
    """The mean row of every group, summed in the order of its ranks."""
    first, second = torch.tensor([group[:2] for group in matching], device="cpu").T
    total = rows.index_select(0, first).add_(rows.index_select(0, second))
    for number, group in enumerate(matching):
        for rank in group[2:]:
            total[number] += rows[rank]
    sizes = torch.tensor([[len(group)] for group in matching], dtype=torch.float64, device="cpu")
    return total.div_(sizes)
