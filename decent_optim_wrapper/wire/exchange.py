"""One bucket on the wire, and how it is mixed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.codecs import is_finite_on_device, wide
from decent_optim_wrapper.comm import tags
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.comm.waiting import Waitable
from decent_optim_wrapper.topo import Group
from decent_optim_wrapper.wire.bucket import Bucket, changed_since, is_finite
from decent_optim_wrapper.wire.nonfinite import NonFinitePolicy
from decent_optim_wrapper.wire.references import GroupReference
from decent_optim_wrapper.wire.storage import Flat


class RoundContext(NamedTuple):
    """The ranks and settings that all buckets of one round share.

    Args:
        transport: connects the ranks.
        group: the ranks that mix.
        peers: the other ranks of the group.
        number: the number of the round.
        is_average: whether the mean is exact: the same on all ranks, even on two, and not rounded.
        references: the references of the group; None if it has none.
        needs_snapshot: whether the values may change before they are mixed.
        may_change: whether others may change them before, which is noticed.
        nonfinite: what happens to values that are not finite.
    """

    transport: Transport
    group: Group
    peers: tuple[int, ...]
    number: int
    is_average: bool
    references: GroupReference | None
    needs_snapshot: bool
    may_change: bool
    nonfinite: NonFinitePolicy


class MixMask(NamedTuple):
    """The values that may be mixed, as the host knows or, in tensors of shape (), a GPU.

    Args:
        ranks: the ranks of the group that have sent finite values, as far as the host knows, at
            least one. All others take the mean of these.
        present: number of ranks that have sent finite values.
        arrived: whether the received values may be mixed; None if the host knows.
        own: whether this rank takes part; otherwise it takes the received values. None if it takes
            part in any case, or the host knows.
    """

    ranks: Sequence[int]
    present: Tensor | int
    arrived: Tensor | None = None
    own: Tensor | None = None


class Exchange:
    """A bucket in flight, from its packing to its mixing.

    This class itself is for a group of one rank: it keeps the values at the launch, for extensions
    that follow the mixing, and exchanges nothing.

    Args:
        round: the ranks, and what the buckets of the round have in common.
        bucket: the bucket.
        position: its number among the buckets of the round.
    """

    # Whether the mean of all ranks is received, and not the values of the peer.
    sums = False
    # Whether the received values move a reference.
    uses_reference = False
    # Whether others may change the members before they are mixed.
    may_change = False
    # What the ranks of a pair send and receive, and the function that starts it.
    _pair: tuple[Tensor, Tensor]
    _swap: Callable[[Tensor, Tensor], list[Waitable]]

    def __init__(self, round: RoundContext, bucket: Bucket, position: int) -> None:
        self.position = position
        self._round = round
        self._bucket = bucket
        self.device = bucket.device
        # Whether the works belong to a GPU, for which a stream waits.
        self.on_gpu = bucket.on_gpu
        group = round.group
        # Whether the values are copied between a GPU and the CPU before they are sent.
        self.via_cpu = bucket.via_cpu and group.size > 1
        # Whether another thread posts it: it waits for a copy, or codes.
        self.on_thread = self.via_cpu
        # What the thread waits for before it starts the exchange.
        self.turn: Callable[[], None] | None = None
        # The packed values, if the tensors may change before the mixing, which then needs them.
        self.snapshot: Flat | None = None
        # The packed values, if they are still in memory when the values of the peer arrive.
        self.packed: Flat | None = None
        # Whether the values are finite: of shape () if a GPU has checked them.
        self.finite: bool | Tensor = True
        self.works: list[Waitable] = []
        self.bytes_sent = 0
        # w x_i + (1-w)/(m-1) * sum of the others  =  x_i + m(1-w)/(m-1) * (mean - x_i)
        self._weight = group.size * (1 - group.self_weight) / max(1, group.size - 1)
        is_pair = group.size == 2 and not self.sums
        if is_pair:
            # For x_j - x_i, which is twice mean - x_i: a pass less over the values.
            self._weight /= 2
            tag = tags.BUCKET + position
            self._swap = partial(round.transport.exchange, peer=round.peers[0], tag=tag)
        # Whether the message itself says if its values are finite; otherwise a flag is sent.
        self.has_own_flag = is_pair and round.nonfinite.checks and not self.on_gpu

    def pack(self, snapshot: Mapping[Tensor, Tensor]) -> None:
        """Pack what is sent, on the stream that has computed it.

        Args:
            snapshot: values that are sent in place of the bucket's members.
        """
        flat = self._bucket.wire.flat(wide(self._bucket.dtype))
        self.snapshot = self._bucket.pack(flat, snapshot)

    def code(self) -> None:
        """Code what is on the CPU; `start` does it where the exchange has no turn to wait for."""

    def start(self) -> None:
        """Check the values and start the exchange.

        Values that are sent from the CPU are there already.

        Raises:
            WireError: the connection is closed already.
        """

    def apply(self, rate: float, mask: MixMask) -> None:
        """Mix the received values where a mask allows it; the host reads nothing from a GPU.

        Args:
            rate: the mixing rate.
            mask: the mask.
        """
        if self._round.transport.rank not in mask.ranks:
            self._bucket.unpack_(self._received(mask.present))
        elif len(mask.ranks) > 1:
            self._mix(rate, mask)

    def _mix(self, rate: float, mask: MixMask) -> None:
        """Mix the received values into this rank's own."""

    def _received(self, present: Tensor | int) -> Flat:
        """The mean of the values that `present` ranks have sent."""
        raise NotImplementedError

    def _replace(self, kept: Tensor, values: Tensor) -> None:
        """Put received values in place of the mixed ones, unless a GPU says to keep these."""
        mixed = self._bucket.copy()
        torch.where(kept, mixed.data, values, out=mixed.data)
        self._bucket.unpack_(mixed)

    def allow_changes(self) -> bool:
        """Return whether others may change the members from now on; then keep what is sent."""
        return False

    def note_changes(self, stamps: tuple[int, ...]) -> Sequence[Tensor]:
        """Note which members others have changed since the bucket had these stamps.

        Returns:
            The changed members, if they cannot be mixed any more.
        """
        return changed_since(stamps, self._bucket)

    def refused(self) -> set[int]:
        """The ranks, by position, whose values are not finite, as the messages themselves say."""
        refused = set() if self.finite else {self._round.transport.rank}
        return refused if self.received_finite() else refused.union(self._round.peers)

    def received_finite(self) -> bool:
        """Return whether the message of a pair says that its values are finite."""
        return True

    def _note_finite(self, data: Tensor) -> None:
        if self._round.nonfinite.checks:
            self.finite = is_finite_on_device(data) if self.on_gpu else is_finite(data)


class PlainExchange(Exchange):
    """Values that are sent unchanged.

    Members move towards the received ones. So others must not have changed them since, unless the
    values that were sent are kept: their difference may be added to anything.
    """

    # Memory for the values of the peer, or for the sum of the group.
    _arriving: Flat
    # This rank's values as they were sent; None if the sum overwrites them.
    _sent: Flat | None
    # The ids of the members that others have changed since; None if all may have changed.
    _changed: frozenset[int] | None = None

    def allow_changes(self) -> bool:
        """Keep the values that are packed, unless others have never changed the members."""
        self.may_change = self._round.may_change
        if self.may_change and self._bucket.changes_in_flight is not False and self._sent is None:
            self._sent = self._bucket.wire.new(self._arriving.data.dtype)
        return self.may_change

    def note_changes(self, stamps: tuple[int, ...]) -> Sequence[Tensor]:
        """Note which members others have changed; see `Exchange.note_changes`."""
        if self.may_change:
            self._bucket.note_flight(self._bucket.stamps != stamps)
        if self._sent is None or not self.may_change:
            return super().note_changes(stamps)
        changed = changed_since(stamps, self._bucket, self._sent)
        if changed:
            self.snapshot = self._sent
            self._changed = frozenset(map(id, changed)).union(self._changed or ())
        return ()

    def _mix(self, rate: float, mask: MixMask) -> None:
        bucket, arrived = self._bucket, self._received(mask.present)
        if mask.arrived is not None and self._sent is not None:
            # Values that are not finite would spread even with a weight of 0.
            torch.where(mask.arrived, arrived.data, self._sent.data, out=arrived.data)
        taken = arrived.data if mask.own is None else arrived.data.to(bucket.dtype, copy=True)
        if self.snapshot is None:
            bucket.mix_(arrived, self._weight * rate)
        else:
            bucket.shift_(arrived, self.snapshot, self._weight * rate, self._changed)
        if mask.own is not None:
            self._replace(mask.own, taken)

    def _received(self, present: Tensor | int) -> Flat:
        # In place, so it is called once.
        if self.sums:
            self._arriving.data.div_(present)
        return self._arriving


class PlainPair(PlainExchange):
    """An exchange of values between two ranks; arguments as of `Exchange`."""

    _sent: Flat

    def __init__(self, round: RoundContext, bucket: Bucket, position: int) -> None:
        super().__init__(round, bucket, position)
        self._sent, self._arriving = bucket.pair(round.needs_snapshot)
        self._pair = self._sent.data, self._arriving.data
        self.snapshot = self._sent if round.needs_snapshot else None
        self.packed = None if bucket.is_sent_in_place else self._sent
        self.bytes_sent = self._arriving.data.nbytes

    def pack(self, snapshot: Mapping[Tensor, Tensor]) -> None:
        """Pack what is sent."""
        self._bucket.pack(self._sent, snapshot, waits=False)

    def start(self) -> None:
        """Check the values and start the exchange."""
        outgoing, incoming = self._sent.data, self._arriving.data
        self._note_finite(outgoing)
        if self.has_own_flag and not self.finite:
            # The peer looks at the first value only. Not in place: the values are this rank's own.
            self._pair = outgoing.clone().index_fill_(0, torch.tensor(0), torch.nan), incoming
        self.works = self._swap(*self._pair)

    def received_finite(self) -> bool:
        """Return whether the first value is finite: it is NaN if any of them is not."""
        return math.isfinite(self._arriving.data[0].item())


class PlainGroup(PlainExchange):
    """The sum over a group, whose mean is mixed in; arguments as of `Exchange`."""

    sums = True

    def __init__(self, round: RoundContext, bucket: Bucket, position: int) -> None:
        super().__init__(round, bucket, position)
        copies = round.needs_snapshot or (round.nonfinite.checks and bucket.on_gpu)
        # Half precision is summed in float32: rounding would otherwise change values that are the
        # same on all ranks.
        self._arriving, *kept = bucket.wire.flats(1 + copies, wide(bucket.dtype))
        self._sent = kept[0] if kept else None
        self.snapshot = self._sent if round.needs_snapshot else None
        self.bytes_sent = int(round.group.copies_sent * self._arriving.data.nbytes)

    def pack(self, snapshot: Mapping[Tensor, Tensor]) -> None:
        """Pack what is sent."""
        self._bucket.pack(self._arriving, snapshot, waits=False)

    def start(self) -> None:
        """Check the values and start the sum."""
        summed, round = self._arriving.data, self._round
        self._note_finite(summed)
        if self._sent is not None:
            self._sent.data.copy_(summed)
        if round.nonfinite.replaces:
            if isinstance(self.finite, Tensor):
                summed.masked_fill_(self.finite.logical_not(), 0)
            elif not self.finite:
                summed.zero_()
        self.works += round.transport.all_reduce(summed, round.group.ranks)
