"""Which ranks of a group have sent finite values, bucket by bucket."""

from __future__ import annotations

from collections.abc import Collection

from loguru import logger

from decent_optim_wrapper.comm.waiting import PendingMessage
from decent_optim_wrapper.gossip.sender import Sender
from decent_optim_wrapper.wire.checked_on_gpu import CheckedOnGpu
from decent_optim_wrapper.wire.exchange import Exchange, Wire
from decent_optim_wrapper.wire.nonfinite import nonfinite_error

_FLAGS_TAG = 1


class FiniteFlags:
    """The flags of one round: sent behind its buckets, and read before they are mixed.

    Args:
        wire: what the buckets of the round have in common.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.pending: list[PendingMessage] = []
        # Of the buckets that a GPU checks: it chooses by them, and the host reads them later.
        self.on_gpu: CheckedOnGpu | None = None
        # For every rank, by position, 1 for each bucket with finite values, else 0.
        self._finite_of: dict[int, list[float]] = {}
        # The ranks with other values, as numbered at the start.
        self.nonfinite: list[int] = []

    def send(self, exchanges: Collection[Exchange], sender: Sender) -> None:
        """Tell the group which buckets of this rank had finite values."""
        if not exchanges or not self._wire.checks or sender.failure or self._wire.group.size == 1:
            return
        on_gpu = [each for each in exchanges if each.on_gpu]
        if on_gpu:
            self.on_gpu = CheckedOnGpu(self._wire, on_gpu, _FLAGS_TAG)
        if len(on_gpu) < len(exchanges):
            own = [float(each.on_gpu or bool(each.finite)) for each in exchanges]
            self._finite_of[self._wire.transport.rank] = own
            self.pending = sender.send(own, _FLAGS_TAG, len(own) - 1)

    def read(self) -> None:
        """Read the flags of the others, once they have arrived."""
        for each in self.pending:
            self._finite_of[each.rank] = each.message.tolist()
        self.pending = []
        members = self._wire.transport.members
        for rank in sorted(self._finite_of):
            if not all(self._finite_of[rank]):
                self.nonfinite.append(members[rank])
        if self.nonfinite:
            self._warn_of(self.nonfinite)

    def check(self) -> None:
        """Check that what has arrived may be mixed.

        Raises:
            NonFiniteError: parameters are not finite, and the policy does not allow it;
                raised at every call.
        """
        if self.nonfinite:
            self._raise_of(self.nonfinite)

    def check_on_gpu(self) -> None:
        """Check, a step after the mixing, what a GPU has found: it has mixed nothing of it.

        Raises:
            NonFiniteError: as in `check`, once.
        """
        checked, self.on_gpu = self.on_gpu, None
        if checked is not None:
            members = self._wire.transport.members
            bad = sorted(members[place] for place in checked.nonfinite_ranks())
            self._raise_of(bad)
            self._warn_of(bad)

    def left_out(self, exchange: Exchange) -> list[int]:
        """The ranks, by position, whose values of a bucket are not mixed."""
        if not self.nonfinite:
            return []
        flags = self._finite_of.items()
        return [rank for rank, finite in flags if not finite[exchange.position]]

    def _raise_of(self, bad: list[int]) -> None:
        if bad and self._wire.on_nonfinite == "raise":
            rank = self._wire.transport.initial_rank
            raise nonfinite_error(bad, rank, f"round {self._wire.round}")

    def _warn_of(self, bad: list[int]) -> None:
        if bad and self._wire.on_nonfinite == "skip":
            logger.warning(
                "rank {} round {}: the parameters of ranks {} are not finite and are left out",
                *(self._wire.transport.initial_rank, self._wire.round, bad),
            )
