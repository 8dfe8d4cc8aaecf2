"""Notice ranks that stay the same although they train: gossip then has nothing to do."""

from __future__ import annotations

import warnings

import torch

from decent_optim_wrapper._bucket import Bucket
from decent_optim_wrapper._flat import Flat

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
        self._rounds_left = _LONGEST_SEARCH if rank == 0 else 0
        self._suspicious = 0
        self._before: list[int] = []
        self._now: list[int] = []

    def compare(self, bucket: Bucket, arriving: Flat, rounded: Flat | None, size: int) -> None:
        """Look at a bucket before it is mixed.

        Args:
            bucket: the own values, as they were sent.
            arriving: the peer's values, or the mean of a larger group.
            rounded: the own values as a peer gets them, where that differs.
            size: of the group.
        """
        if not self._rounds_left:
            return
        if rounded is None:
            same = bucket.equals(arriving, ulps=0 if size == 2 else size)
        else:
            same = torch.equal(arriving.data, rounded.data)
        if same:
            self._now.append(bucket.fingerprint())
        else:
            self._rounds_left = 0

    def end_round(self) -> None:
        """Count the round, all of whose buckets have been compared."""
        if not self._rounds_left or not self._now:
            return
        self._rounds_left -= 1
        self._suspicious += self._now != self._before
        self._before, self._now = self._now, []
        if self._suspicious == _SUSPICIOUS:
            self._rounds_left = 0
            warnings.warn(
                f"rank 0: in {_SUSPICIOUS} rounds of training the peers have sent what this rank "
                f"has itself, so that gossip does nothing: take DistributedDataParallel off the "
                f"model, and give every rank its own part of the data, or its own seed",
                stacklevel=2,
            )
