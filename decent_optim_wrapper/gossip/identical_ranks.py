"""Notice ranks that stay the same while they train: gossip then has no effect."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from decent_optim_wrapper.comm.streams import LateValues

# Rounds of changed parameters that are the same on all ranks before there is a warning.
_SUSPICIOUS = 3
# The search ends after these rounds if parameters do not change, as at a learning rate of 0.
LONGEST_SEARCH = 20


class IdenticalRanks:
    """Compares what arrives in the first rounds with this rank's values, until they differ once.

    A round counts only if this rank's values have changed since the round before: at a learning
    rate of 0, or without gradients, ranks stay the same for a good reason.

    Args:
        rank: this rank; only rank 0 compares, and warns.
    """

    def __init__(self, rank: int) -> None:
        # Number of rounds that are still compared.
        self.rounds_left = LONGEST_SEARCH if rank == 0 else 0
        self._suspicious = 0
        # Whether each bucket was the same, and a checksum of it as it was sent: in the round
        # before, which the host reads only now, and so far in this one.
        self._last: LateValues | None = None
        self._now: list[Tensor] = []
        self._before: list[int] = []

    def note(self, equal: Tensor, values: Tensor, dtype: torch.dtype) -> None:
        """Note whether a bucket is the same on all ranks.

        Args:
            equal: whether it is, of shape ().
            values: this rank's values.
            dtype: the dtype in which they are compared with those of the round before.
        """
        if not equal.is_cuda and not equal:
            self.rounds_left = 0
            self._now.clear()
            return
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        checksum = values.detach().to(dtype).view(bits).sum()
        self._now.append(torch.stack((equal.to(torch.int64), checksum)))

    def end_round(self) -> None:
        """Count the round once all its buckets have been compared; one of a GPU in the next one."""
        last, self._last = self._last, None
        if last is not None:
            self._count(last.read())
        if self._now:
            # On a GPU if there is one, or its values would be waited for here.
            device = max((each.device for each in self._now), key=lambda each: each.type == "cuda")
            self._last = LateValues(torch.stack([each.to(device) for each in self._now]))
            self._now = []
            if not self._last.waits:
                self._count(self._last.read())
                self._last = None

    def _count(self, buckets: list[list[int]]) -> None:
        if not all(equal for equal, _ in buckets):
            self.rounds_left = 0
            return
        self.rounds_left -= 1
        sums = [checksum for _, checksum in buckets]
        self._suspicious += sums != self._before
        self._before = sums
        if self._suspicious == _SUSPICIOUS:
            self.rounds_left = 0
            warnings.warn(
                f"rank 0: in {_SUSPICIOUS} rounds of training the peers have sent what this rank "
                f"has itself, so that gossip does nothing: remove DistributedDataParallel from "
                f"the model, and give every rank its own part of the data, or its own seed",
                stacklevel=2,
            )
