"""Which ranks of a group have sent finite values, bucket by bucket."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from loguru import logger

from decent_optim_wrapper.comm.waiting import PendingMessage
from decent_optim_wrapper.wire.checked_on_gpu import CheckedOnGpu
from decent_optim_wrapper.wire.exchange import Exchange, Wire
from decent_optim_wrapper.wire.messages import Messages
from decent_optim_wrapper.wire.nonfinite import nonfinite_error

_FLAGS_TAG = 1
# The tags of the flags of single buckets, by position.
_FIRST_FLAG_TAG = 1 << 19


class Flags(NamedTuple):
    """The flags of some buckets.

    Args:
        positions: the positions of their buckets.
        pending: the flags of the other ranks, 1 for a bucket with finite values, otherwise 0.
        on_gpu: the flags of the buckets that a GPU checks. The GPU uses them at once, and the host
            reads them later.
    """

    positions: Sequence[int]
    pending: list[PendingMessage]
    on_gpu: CheckedOnGpu | None


class FiniteFlags:
    """The flags of one round, read before its buckets are mixed.

    Args:
        wire: what the buckets of the round have in common.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        # One message for all buckets, or one for each.
        self.messages: list[Flags] = []
        self._by_position: dict[int, Flags] = {}
        # By the position of a bucket, the positions of the ranks with values that are not finite.
        self.refused: dict[int, set[int]] = {}
        # Whether a GPU checks some of the buckets.
        self.on_gpu = False

    def send(
        self, exchanges: Collection[Exchange], messages: Messages, alone: bool = False
    ) -> None:
        """Tell the group which buckets of this rank had finite values.

        Args:
            exchanges: all buckets of the round, in their order; or one.
            messages: the messages of the round.
            alone: whether each bucket has its own message.
        """
        exchanges = [each for each in exchanges if not each.tells_finite]
        wire = self._wire
        if not (exchanges and wire.nonfinite.checks) or messages.failure or wire.group.size == 1:
            return
        positions = [each.position for each in exchanges]
        tag = _FIRST_FLAG_TAG + positions[0] if alone else _FLAGS_TAG
        on_gpu = [each for each in exchanges if each.on_gpu]
        checked = CheckedOnGpu.gather(self._wire, on_gpu, tag) if on_gpu else None
        pending: list[PendingMessage] = []
        if len(on_gpu) < len(exchanges):
            own = [float(each.on_gpu or bool(each.finite)) for each in exchanges]
            if not all(own):
                self._refuse(self._wire.transport.rank, positions, own)
            pending = messages.send(own, tag, positions[-1])
        self.on_gpu |= bool(on_gpu)
        flags = Flags(positions=positions, pending=pending, on_gpu=checked)
        self._by_position.update(dict.fromkeys(positions, flags))
        self.messages.append(flags)

    def of(self, exchange: Exchange) -> Flags | None:
        """The flags of a bucket; None if there are none."""
        return self._by_position.get(exchange.position)

    def read_pair(self, exchange: Exchange) -> None:
        """Read what a message that `tells_finite` says, once it has arrived."""
        position, found = [exchange.position], exchange.received_finite()
        if exchange.position not in self.refused and not (found and exchange.finite):
            self._refuse(self._wire.transport.rank, position, [bool(exchange.finite)])
            self._refuse(self._wire.peer, position, [found])
            self._warn_of(self.nonfinite)

    def read(self, flags: Flags) -> None:
        """Read the flags of the others, once they have arrived."""
        for each in flags.pending:
            finite = each.message.tolist()
            if not all(finite):
                self._refuse(each.rank, flags.positions, finite)
        if flags.pending and not self.refused.keys().isdisjoint(flags.positions):
            self._warn_of(self.nonfinite)
        flags.pending.clear()

    def _refuse(self, rank: int, positions: Sequence[int], finite: Sequence[float]) -> None:
        for position, is_finite in zip(positions, finite, strict=True):
            if not is_finite:
                self.refused.setdefault(position, set()).add(rank)

    @property
    def nonfinite(self) -> list[int]:
        """The ranks with values that are not finite, as far as known, as numbered at the start."""
        members = self._wire.transport.members
        return sorted({members[rank] for ranks in [*self.refused.values()] for rank in ranks})

    def check(self) -> None:
        """Check that what has arrived may be mixed.

        Raises:
            NonFiniteError: parameters are not finite, and the policy does not allow it;
                raised at every call.
        """
        if self.refused:
            self._raise_of(self.nonfinite)

    def check_on_gpu(self) -> None:
        """Check the findings of a GPU one step after the mixing, which it has not made then.

        Raises:
            NonFiniteError: as in `check`.
        """
        members = self._wire.transport.members
        checked = [flags.on_gpu for flags in self.messages if flags.on_gpu is not None]
        bad = sorted({members[place] for each in checked for place in each.nonfinite_ranks()})
        self._raise_of(bad)
        self._warn_of(bad)

    def drop(self) -> None:
        """Stop waiting."""
        for flags in self.messages:
            flags.pending.clear()

    def _raise_of(self, bad: list[int]) -> None:
        if bad and self._wire.nonfinite.on_nonfinite == "raise":
            rank = self._wire.transport.initial_rank
            raise nonfinite_error(bad, rank, f"round {self._wire.round}")

    def _warn_of(self, bad: list[int]) -> None:
        if bad and self._wire.nonfinite.replaces:
            logger.warning(
                "rank {} round {}: the parameters of ranks {} are not finite and are left out",
                *(self._wire.transport.initial_rank, self._wire.round, bad),
            )
