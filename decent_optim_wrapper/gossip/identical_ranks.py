"""Notice ranks that stay the same while they train: gossip then has no effect."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

# Rounds of changed parameters that are the same on all ranks before there is a warning.
_SUSPICIOUS = 3
# The search ends after these rounds if parameters do not change, as at a learning rate of 0.
_LONGEST_SEARCH = 20


class IdenticalRanks:
    """Compares what arrives in the first rounds with this rank's values, until they differ once.

    A round counts only if this rank's values have changed since the round before: at a learning
    rate of 0, or without gradients, ranks stay the same for a good reason.

    Args:
        rank: this rank; only rank 0 compares, and warns.
    """

    def __init__(self, rank: int) -> None:
        # Number of rounds that are still compared.
        self.rounds_left = _LONGEST_SEARCH if rank == 0 else 0
        self._suspicious = 0
        # A checksum of each bucket as it was sent: in the round before, and so far in this one.
        self._before: list[int] = []
        self._now: list[int] = []

    def compare(self, sent: Tensor, arriving: Tensor, dtype: torch.dtype, size: int) -> None:
        """Compare a bucket.

        Args:
            sent: this rank's values, in the form of `arriving`.
            arriving: the peer's values, or the mean of a larger group.
            dtype: the dtype on the wire between pairs.
            size: number of ranks in the group.
        """
        # A sum of more than two values is rounded.
        slack = size * torch.finfo(sent.dtype).eps if size > 2 else 0.0
        self.note(torch.allclose(arriving, sent, rtol=slack, atol=0.0), sent, dtype)

    def note(self, equal: bool, values: Tensor, dtype: torch.dtype) -> None:
        """Note whether a bucket is the same on all ranks.

        Args:
            equal: whether it is.
            values: this rank's values.
            dtype: the dtype in which they are compared with those of the round before.
        """
        if equal:
            bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
            self._now.append(int(values.detach().to(dtype).view(bits).sum()))
        else:
            self.rounds_left = 0

    def end_round(self) -> None:
        """Count the round, once all its buckets have been compared."""
        if not self._now:
            return
        self.rounds_left -= 1
        self._suspicious += self._now != self._before
        self._before, self._now = self._now, []
        if self._suspicious == _SUSPICIOUS:
            self.rounds_left = 0
            warnings.warn(
                f"rank 0: in {_SUSPICIOUS} rounds of training the peers have sent what this rank "
                f"has itself, so that gossip does nothing: remove DistributedDataParallel from "
                f"the model, and give every rank its own part of the data, or its own seed",
                stacklevel=2,
            )
