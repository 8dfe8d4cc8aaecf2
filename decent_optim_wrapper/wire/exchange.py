"""One bucket on the wire, and how it is mixed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.codecs import is_finite_on_device
from decent_optim_wrapper.comm.send_queue import SendQueue
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.comm.waiting import Waitable
from decent_optim_wrapper.topo import Group
from decent_optim_wrapper.wire.bucket import Bucket, is_finite
from decent_optim_wrapper.wire.nonfinite import OnNonfinite
from decent_optim_wrapper.wire.references import GroupReference
from decent_optim_wrapper.wire.storage import Flat

# Messages are cut into pieces of at least this size if more urgent ones may overtake them. A piece
# is short on a slow link, and long on a fast one compared with the time to start sending.
_PIECE_BYTES = 1 << 19


class Wire(NamedTuple):
    """What the buckets of one round have in common.

    Args:
        transport: connects the ranks.
        group: the ranks that mix.
        peers: the other ranks of the group.
        round: the number of the round.
        is_average: whether the mean is exact: the same on all ranks, even on two, and not rounded.
        references: the references of the group; None if it has none.
        needs_snapshot: whether the values may change before they are mixed.
        on_nonfinite: what happens to values that are not finite.
        checks: whether values are checked before they are sent.
        sends: sends to the peer of a pair in the order of need; None sends in the order of posting.
    """

    transport: Transport
    group: Group
    peers: tuple[int, ...]
    round: int
    is_average: bool
    references: GroupReference | None
    needs_snapshot: bool
    on_nonfinite: OnNonfinite
    checks: bool
    sends: SendQueue | None = None

    def exchange(
        self, outgoing: Tensor, incoming: Tensor, tag: int, position: int
    ) -> list[Waitable]:
        """Start an exchange with the peer of a pair, as `Transport.exchange` does.

        The peer's message is received from now on, whenever this rank's own message is sent.

        Args:
            outgoing: as in `Transport.exchange`.
            incoming: as in `Transport.exchange`.
            tag: as in `Transport.exchange`.
            position: the number of the bucket in the round.
        """
        sends = self.sends
        if sends is None or not self.transport.sends_alone(outgoing.device):
            return self.transport.exchange(outgoing, incoming, self.peer, tag)
        works = sends.received.pop(position, None) or self.receive(incoming, tag)
        for piece in _pieces(outgoing):
            start = partial(self.transport.send, piece, self.peer, tag)
            works.append(sends.add(start, position))
        return works

    def receive(self, incoming: Tensor, tag: int) -> list[Waitable]:
        """Start receiving what the peer sends with `exchange`."""
        # Messages of one tag arrive in the order in which they are sent.
        return [self.transport.receive(piece, self.peer, tag) for piece in _pieces(incoming)]

    @property
    def peer(self) -> int:
        """The other rank of a pair."""
        return self.peers[0]


def _pieces(message: Tensor) -> tuple[Tensor, ...]:
    # No small pieces: each costs as much as a separate message.
    return torch.tensor_split(message, max(1, message.nbytes // _PIECE_BYTES))


class MixMask(NamedTuple):
    """The values that may be mixed, as known on a GPU: tensors of shape ().

    Args:
        arrived: whether the received values may be mixed.
        present: number of ranks of the group that have sent finite values.
        own: whether this rank takes part; otherwise it takes the received values. None if it takes
            part in any case.
    """

    arrived: Tensor
    present: Tensor | int
    own: Tensor | None = None

    def on(self, device: torch.device) -> MixMask:
        """The same on another GPU."""
        if self.arrived.device == device:
            return self
        return MixMask(
            arrived=self.arrived.to(device, non_blocking=True),
            present=self.present
            if isinstance(self.present, int)
            else self.present.to(device, non_blocking=True),
            own=None if self.own is None else self.own.to(device, non_blocking=True),
        )


class Exchange(ABC):
    """A bucket in flight, from its packing to its mixing.

    Args:
        wire: the ranks, and what the buckets of the round have in common.
        bucket: the bucket.
        position: its number among the buckets of the round.
    """

    # Whether the mean of all ranks is received, and not the values of the peer.
    sums = False
    # Whether the received values move a reference.
    uses_reference = False
    # Whether the received message itself says if the values of the peer are finite.
    tells_finite = False

    def __init__(self, wire: Wire, bucket: Bucket, position: int) -> None:
        self.position = position
        self._wire = wire
        self._bucket = bucket
        self.device = bucket.device
        # Whether the works belong to a GPU, for which a stream waits.
        self.on_gpu = bucket.on_gpu
        # Whether the values are copied between a GPU and the CPU before they are sent.
        self.via_cpu = bucket.via_cpu
        # The sent values, if the tensors may change before the mixing, or are rounded on the wire.
        self.snapshot: Flat | None = None
        # Whether the values are finite: of shape () if a GPU has checked them.
        self.finite: bool | Tensor = True
        self.works: list[Waitable] = []
        self.bytes_sent = 0

    @property
    def launched(self) -> Flat | None:
        """This rank's values as they were packed; None if they are not kept."""
        return None

    @abstractmethod
    def start(self) -> None:
        """Check the values and start the exchange.

        Values that are sent from the CPU are there already.

        Raises:
            WireError: the connection is closed already.
        """

    @abstractmethod
    def apply(self, rate: float, present: Sequence[int]) -> None:
        """Mix the received values.

        Args:
            rate: the mixing rate.
            present: the ranks of the group that have sent finite values, at least one. All other
                ranks take the mean of these.
        """

    @abstractmethod
    def apply_usable(self, rate: float, usable: MixMask) -> None:
        """Mix in what has arrived if it may be, which only the GPU knows."""

    def received_finite(self) -> bool:
        """Return whether the values of the peer are finite, if `tells_finite`."""
        return True

    def _check(self, data: Tensor) -> None:
        if self._wire.checks:
            self.finite = is_finite_on_device(data) if self.on_gpu else is_finite(data)


class LaunchSnapshot(Exchange):
    """The parameters at the launch in a group of one rank, for extensions that follow the mixing.

    Args:
        wire: as in `Exchange`.
        bucket: the bucket.
        snapshot: the values that are kept in place of its members'.
        position: its number among the buckets of the round.
    """

    def __init__(
        self, wire: Wire, bucket: Bucket, snapshot: Mapping[Tensor, Tensor], position: int
    ) -> None:
        super().__init__(wire, bucket, position)
        # Nothing is sent.
        self.via_cpu = False
        (self.snapshot,) = bucket.summing()
        bucket.pack(self.snapshot, snapshot)

    def start(self) -> None:
        """Send nothing."""

    def apply(self, rate: float, present: Sequence[int]) -> None:
        """Mix nothing."""

    def apply_usable(self, rate: float, usable: MixMask) -> None:
        """Mix nothing."""


class PlainExchange(Exchange):
    """Values that are sent unchanged, or rounded to another dtype.

    Args:
        wire: as in `Exchange`.
        bucket: the bucket.
        position: its number among the buckets of the round.
        arriving: memory for the values of the peer, or for the sum of the group.
        weight: x <- x + rate * weight * (arriving - start), where start is x unless it is kept.
    """

    def __init__(
        self, wire: Wire, bucket: Bucket, position: int, arriving: Flat, weight: float
    ) -> None:
        super().__init__(wire, bucket, position)
        self._arriving = arriving
        self._weight = weight

    def apply_usable(self, rate: float, usable: MixMask) -> None:
        """Mix in what has arrived if it may be, which only the GPU knows."""
        bucket, arrived, own = self._bucket, self._mean(usable.present), self._sent()
        refused = usable.arrived.logical_not()
        # Values that are not finite would spread even with a weight of 0.
        if usable.own is None and self.snapshot is None:
            torch.where(usable.arrived, arrived.data, own.data, out=arrived.data)
            bucket.mix_(arrived, self._weight * rate)
            return
        change = bucket.difference(arrived.data, own.data).masked_fill_(refused, 0)
        if usable.own is None:
            bucket.add_(bucket.view(change), self._weight * rate)
            return
        now = bucket.pack(bucket.spare(bucket.dtype))
        moved = now.data.add(change, alpha=self._weight * rate)
        keeps = usable.own.logical_or(refused)
        torch.where(keeps, moved, arrived.data.to(bucket.dtype), out=now.data)
        bucket.unpack_(now)

    def _move(self, arrived: Flat, rate: float) -> None:
        if self.snapshot is None:
            self._bucket.mix_(arrived, self._weight * rate)
        else:
            self._bucket.shift_(arrived, self.snapshot, self._weight * rate)

    @abstractmethod
    def _sent(self) -> Flat:
        """This rank's values as they were sent, in the form of the received ones."""

    @abstractmethod
    def _mean(self, present: Tensor | int) -> Flat:
        """The values to mix, from so many ranks."""


class PlainPair(PlainExchange):
    """An exchange of values between two ranks.

    Args:
        wire: as in `Exchange`.
        bucket: the bucket.
        snapshot: what is sent in place of its members' values.
        position: its number among the buckets of the round.
        tag: the tag of its messages.
    """

    def __init__(
        self,
        wire: Wire,
        bucket: Bucket,
        snapshot: Mapping[Tensor, Tensor],
        position: int,
        tag: int,
    ) -> None:
        outgoing, incoming = bucket.pair(wire.needs_snapshot)
        super().__init__(wire, bucket, position, incoming, 1 - wire.group.self_weight)
        self._tag = tag
        self.tells_finite = wire.checks and not self.on_gpu
        self._outgoing = bucket.pack(outgoing, snapshot, waits=False)
        self.snapshot = outgoing if wire.needs_snapshot else None
        self.bytes_sent = outgoing.data.nbytes

    @property
    def launched(self) -> Flat | None:
        """This rank's values as they were packed; None if the tensors' own memory is sent."""
        return None if self._bucket.is_sent_in_place else self._outgoing

    def start(self) -> None:
        """Check the values and start the exchange."""
        outgoing = self._outgoing.data
        self._check(outgoing)
        if self.tells_finite and not self.finite:
            # The peer looks at the first value only. Not in place: the values are this rank's own.
            outgoing = outgoing.clone()
            outgoing[0] = torch.nan
        wire, arriving = self._wire, self._arriving.data
        if wire.sends is None:
            self.works += wire.transport.exchange(outgoing, arriving, wire.peer, self._tag)
        else:
            self.works += wire.exchange(outgoing, arriving, self._tag, self.position)

    def received_finite(self) -> bool:
        """Return whether the first value is finite: it is NaN if any of them is not."""
        return math.isfinite(self._arriving.data[0].item())

    def apply(self, rate: float, present: Sequence[int]) -> None:
        """Mix in what has arrived."""
        if self._wire.transport.rank not in present:
            self._bucket.unpack_(self._arriving)
        elif len(present) == 2:
            self._move(self._arriving, rate)

    def _sent(self) -> Flat:
        return self._outgoing

    def _mean(self, present: Tensor | int) -> Flat:
        return self._arriving


class PlainGroup(PlainExchange):
    """The sum over a group, whose mean is mixed in.

    w x_i + (1-w)/(m-1) * sum of the others  =  x_i + m(1-w)/(m-1) * (mean - x_i)

    Args:
        wire: as in `Exchange`.
        bucket: the bucket.
        snapshot: what is sent in place of its members' values.
        position: its number among the buckets of the round.
    """

    sums = True

    def __init__(
        self, wire: Wire, bucket: Bucket, snapshot: Mapping[Tensor, Tensor], position: int
    ) -> None:
        group = wire.group
        # The sum overwrites what is sent.
        copies = wire.needs_snapshot or (wire.checks and bucket.on_gpu)
        summed, *kept = bucket.summing(1 + copies)
        weight = group.size * (1 - group.self_weight) / (group.size - 1)
        super().__init__(wire, bucket, position, summed, weight)
        bucket.pack(summed, snapshot, waits=False)
        self._kept = kept[0] if kept else None
        self.snapshot = self._kept if wire.needs_snapshot else None
        self.bytes_sent = int(group.copies_sent * summed.data.nbytes)

    def start(self) -> None:
        """Check the values and start the sum."""
        summed, wire = self._arriving.data, self._wire
        self._check(summed)
        if self._kept is not None:
            self._kept.data.copy_(summed)
        if wire.on_nonfinite == "skip":
            self._leave_out(summed)
        self.works += wire.transport.all_reduce(summed, wire.group.ranks)

    def apply(self, rate: float, present: Sequence[int]) -> None:
        """Mix in what has arrived."""
        mean = self._mean(len(present))
        if self._wire.transport.rank in present:
            self._move(mean, rate)
        else:
            self._bucket.unpack_(mean)

    def _leave_out(self, summed: Tensor) -> None:
        if isinstance(self.finite, Tensor):
            summed.masked_fill_(self.finite.logical_not(), 0)
        elif not self.finite:
            summed.zero_()

    def _sent(self) -> Flat:
        if self._kept is not None:
            return self._kept
        # The values are still in the bucket itself.
        data = self._arriving.data
        return self._bucket.pack(self._bucket.new_flat(data.device, data.dtype))

    def _mean(self, present: Tensor | int) -> Flat:
        self._arriving.data.div_(present)
        return self._arriving
