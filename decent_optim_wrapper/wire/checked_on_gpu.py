"""Which ranks have finite values, without a wait of the host for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from decent_optim_wrapper.comm.streams import AsyncHostCopy
from decent_optim_wrapper.comm.waiting import Waitable
from decent_optim_wrapper.wire.exchange import Exchange, MixMask, RoundContext


class CheckedOnGpu:
    """The flags of all ranks of a round: the GPU chooses by them, and the host reads them later.

    Args:
        round: what the exchanges have in common.
        exchanges: the exchanges of the round whose values a GPU has checked.
        rows: which of them are finite on which rank, once `works` have ended: bool of shape (ranks
            of the group, exchanges), in the order of the group.
        works: the messages on their way.
    """

    def __init__(
        self, round: RoundContext, exchanges: list[Exchange], rows: Tensor, works: list[Waitable]
    ) -> None:
        self._round = round
        self._columns = {each: column for column, each in enumerate(exchanges)}
        self._rows = rows
        self.works = works
        self._late: AsyncHostCopy | None = None
        # Whether all values are finite.
        self._whole = rows

    @classmethod
    def gather(cls, round: RoundContext, exchanges: list[Exchange], tag: int) -> CheckedOnGpu:
        """Send this rank's flags to the group, and receive the others' flags.

        Args:
            round: what the exchanges have in common.
            exchanges: the exchanges of the round whose values a GPU has checked.
            tag: the tag of the message.
        """
        finite = [torch.as_tensor(each.finite, device=each.device) for each in exchanges]
        own = torch.stack([each.to(finite[0].device) for each in finite])
        rows, works = round.transport.gather(own, round.group, tag)
        return cls(round, exchanges, rows, works)

    def mask_of(self, exchange: Exchange) -> MixMask:
        """The part of an exchange that may be mixed, once the stream that mixes has waited."""
        if self._late is None:
            self._late, self._whole = AsyncHostCopy(self._rows), self._rows.all()
        group, transport, device = self._round.group, self._round.transport, exchange.device
        if self._round.nonfinite.on_nonfinite == "raise":
            # A round is mixed as a whole or not at all.
            whole = self._whole.to(device, non_blocking=True)
            return MixMask(ranks=group.ranks, present=group.size, arrived=whole)
        finite = self._rows[:, self._columns[exchange]].to(device, non_blocking=True)
        present, own = finite.sum(), finite[group.ranks.index(transport.rank)]
        arrived = present > 0 if exchange.sums else finite[group.ranks.index(self._round.peers[0])]
        return MixMask(ranks=group.ranks, present=present, arrived=arrived, own=own)

    def nonfinite_ranks(self) -> list[int]:
        """The positions of the ranks with values that are not finite, once a round is mixed."""
        rows = [] if self._late is None else self._late.read()
        return [r for r, row in zip(self._round.group.ranks, rows, strict=False) if not all(row)]
