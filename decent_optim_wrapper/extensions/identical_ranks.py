"""Notices ranks that stay the same while they train, so that gossip has no effect."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from decent_optim_wrapper.comm.streams import AsyncHostCopy
from decent_optim_wrapper.gossip.extension import Extension, ExtensionContext, ReceivedBucket
from decent_optim_wrapper.gossip.schedule import RoundKind
from decent_optim_wrapper.warn import warn

# The number of rounds with changed but identical parameters before there is a warning.
_SUSPICIOUS = 3
# The search ends after this many rounds if parameters do not change, as at a learning rate of 0.
LONGEST_SEARCH = 20


class IdenticalRanks(Extension):
    """Compares received values with this rank's in the first rounds, until they differ once.

    A round counts only if this rank's values have changed since the previous round: at a learning
    rate of 0, or without gradients, ranks stay the same for a good reason. Only rank 0 compares
    and warns.
    """

    def __init__(self) -> None:
        # Number of rounds that are still to be compared.
        self._rounds_left = LONGEST_SEARCH
        self._suspicious = 0
        # For each bucket, whether it was the same, and a checksum of it as it was sent: in the
        # previous round, which the host reads now, and so far in this one.
        self._last: AsyncHostCopy | None = None
        self._now: list[Tensor] = []
        self._before: list[int] = []

    def attach(self, context: ExtensionContext) -> None:
        """Compare on rank 0 only."""
        self._detach = context.detach
        if context.rank != 0:
            self._detach()

    def mixing(self, received: ReceivedBucket) -> AbstractContextManager[None]:
        """Compare a bucket before it is mixed."""
        if self._rounds_left and (compared := received.compare()):
            self._note(*compared)
        return nullcontext()

    def end_round(self, kind: RoundKind) -> None:
        """Count the round after its buckets were compared; on a GPU, one round later."""
        last, self._last = self._last, None
        if last is not None:
            self._count(last.read())
        elif not self._now:
            # Nothing could be compared, as in a world of one.
            self._rounds_left -= bool(self._rounds_left)
        if self._now:
            # On a GPU if there is one; otherwise the host would wait for its values here.
            device = max((each.device for each in self._now), key=lambda each: each.type == "cuda")
            self._last = AsyncHostCopy(torch.stack([each.to(device) for each in self._now]))
            self._now = []
            if not self._last.waits:
                self._count(self._last.read())
                self._last = None
        if not self._rounds_left:
            self._detach()

    def _note(self, equal: Tensor, sent: Tensor) -> None:
        """Note whether a bucket is the same on all ranks.

        Args:
            equal: whether it is, of shape ().
            sent: the values that this rank has sent, after rounding.
        """
        if not equal.is_cuda and not equal:
            self._rounds_left = 0
            self._now.clear()
            return
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[sent.itemsize]
        checksum = sent.detach().view(bits).sum()
        self._now.append(torch.stack((equal.to(torch.int64), checksum)))

    def _count(self, buckets: list[list[int]]) -> None:
        if not all(equal for equal, _ in buckets):
            self._rounds_left = 0
            return
        self._rounds_left -= 1
        sums = [checksum for _, checksum in buckets]
        self._suspicious += sums != self._before
        self._before = sums
        if self._suspicious == _SUSPICIOUS:
            self._rounds_left = 0
            warn(
                f"rank 0: in {_SUSPICIOUS} rounds of training the peers have sent the same values "
                f"as this rank, so gossip has no effect: remove DistributedDataParallel from the "
                f"model, and give every rank its own part of the data, or its own seed"
            )
