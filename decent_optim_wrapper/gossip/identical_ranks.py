"""Notice ranks that stay the same although they train: gossip then has nothing to do."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

# Rounds of changed parameters that are the same on all ranks before there is a warning.
_SUSPICIOUS = 3
# Where parameters do not change, as at a learning rate of 0, the search is given up after these.
_LONGEST_SEARCH = 20


class IdenticalRanks:
    """Compares what arrives in the first rounds with the own values, until they differ once.

    A round counts only if the own values have changed since the round before: at a learning rate
    of 0, or without gradients, ranks stay the same for a good reason.

    Args:
        rank: this rank; only rank 0 compares, and warns.
    """

    def __init__(self, rank: int) -> None:
        # Whether, and for how many rounds, there is still something to compare.
        self.rounds_left = _LONGEST_SEARCH if rank == 0 else 0
        self._suspicious = 0
        # A checksum of what was sent of each bucket: in the round before, and so far in this one.
        self._before: list[int] = []
        self._now: list[int] = []

    def compare(self, sent: Tensor, arriving: Tensor, dtype: torch.dtype, size: int) -> None:
        """Look at a bucket.

        Args:
            sent: the own values, in the form of `arriving`.
            arriving: the peer's values, or the mean of a larger group.
            dtype: of the wire between pairs.
            size: of the group.
        """
        # A sum over more than two rounds.
        slack = size * torch.finfo(sent.dtype).eps if size > 2 else 0.0
        if torch.allclose(arriving, sent, rtol=slack, atol=0.0):
            bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
            self._now.append(int(sent.detach().to(dtype).view(bits).sum()))
        else:
            self.rounds_left = 0

    def end_round(self) -> None:
        """Count the round, all of whose buckets have been compared."""
        if not self._now:
            return
        self.rounds_left -= 1
        self._suspicious += self._now != self._before
        self._before, self._now = self._now, []
        if self._suspicious == _SUSPICIOUS:
            self.rounds_left = 0
            warnings.warn(
                f"rank 0: in {_SUSPICIOUS} rounds of training the peers have sent what this rank "
                f"has itself, so that gossip does nothing: take DistributedDataParallel off the "
                f"model, and give every rank its own part of the data, or its own seed",
                stacklevel=2,
            )
