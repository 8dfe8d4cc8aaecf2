"""Buckets that are sent as codes, and how they are mixed.

With q_i the decoded message of rank i,

    x_i <- x_i + weight (mean(q) - q_i),    r <- r + mean(q),

with r the reference that the ranks of a group share, to which q is a difference. The changes cancel
over the group whatever the rounding, so its mean does not move. If ranks are left out because their
values are not finite, this holds for the mean of the others, and r does not change.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from decent_optim_wrapper.codecs import Codec, wide
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.coded_mean import CodedMean
from decent_optim_wrapper.wire.exchange import Exchange, MixMask, Wire
from decent_optim_wrapper.wire.storage import new_vector

# A slice of a vector, and values there.
Part = tuple[slice, Tensor]


class CodedExchange(Exchange):
    """A bucket that is sent as codes.

    Args:
        wire: as in `Exchange`.
        bucket: the bucket.
        codec: the codec of the bucket.
        snapshot: the values that are sent in place of its members'.
        chunks: the parts of the vector that are coded separately.
        position: its number among the buckets of the round.
    """

    def __init__(
        self,
        wire: Wire,
        bucket: Bucket,
        codec: Codec,
        snapshot: Mapping[Tensor, Tensor],
        chunks: list[slice],
        position: int,
    ) -> None:
        super().__init__(wire, bucket, position)
        self._codec = codec
        self._chunks = chunks
        self._reference = None if wire.references is None else wire.references.of(bucket)
        self.uses_reference = self._reference is not None
        group = wire.group
        self._weight = group.size * (1 - group.self_weight) / (group.size - 1)
        self._values = bucket.values(snapshot, wire.needs_snapshot)
        self.snapshot = self._values if wire.needs_snapshot else None
        room = codec.nbytes(max(map(_length, chunks))) * len(chunks) + (group.size == 2)
        self._messages, self._room = bucket.messages(room)
        places = (slice(*map(codec.nbytes, (chunk.start, chunk.stop))) for chunk in chunks)
        self._outgoing = [self._messages[place] for place in places]
        # Here, and not in `start`: on the stream that has computed the values.
        self._encode()

    def _encode(self) -> None:
        for chunk, message in zip(self._chunks, self._outgoing, strict=True):
            near = torch.empty_like(message, device=self.device) if self.via_cpu else message
            reference = None if self._reference is None else self._reference[chunk]
            self._codec.encode(self._values.data[chunk], near, reference)
            if self.via_cpu:
                message.copy_(near, non_blocking=True)

    def start(self) -> None:
        """Check the codes and start the exchange."""
        if self._wire.checks:
            finite = _all([self._codec.is_finite(each) for each in self._outgoing])
            self.finite = finite if self.on_gpu else bool(finite)
            # A larger group would spread them.
            if not self.on_gpu and not finite and self._wire.on_nonfinite == "skip":
                self._messages.zero_()
        self._send()

    def apply(self, rate: float, present: Sequence[int]) -> None:
        """Mix in what has arrived."""
        if self._wire.transport.rank not in present:
            self._bucket.absorb_(self._absolute(self._means(len(present))), None)
        elif len(present) > 1:
            self._bucket.absorb_(self._changes(present), self._weight * rate)
            if self._wire.references is not None and self._reference is not None:
                self._wire.references.settle(self._bucket, self._reference)

    def apply_usable(self, rate: float, usable: MixMask) -> None:
        """Mix the received values if both ends' values are finite, which only the GPU knows.

        Otherwise both ranks treat the message as zeros. A rank whose own values are not finite
        takes the received ones.
        """
        if usable.own is None:
            self._apply_where(usable.arrived, rate)
            return
        bucket, theirs = self._bucket, self._bucket.new_flat(dtype=wide(self._bucket.dtype)).data
        for place, part in self._absolute(self._means(1)):
            theirs[place] = part
        self._apply_where(usable.arrived.logical_and(usable.own), rate)
        takes = usable.own.logical_not().logical_and(usable.arrived)
        now = bucket.pack(bucket.spare(bucket.dtype))
        torch.where(takes, theirs.to(bucket.dtype), now.data, out=now.data)
        bucket.unpack_(now)

    def _apply_where(self, condition: Tensor, rate: float) -> None:
        refused = condition.logical_not()
        for message in (*self._arrived, *self._outgoing):
            message.masked_fill_(refused, 0)
        self.apply(rate, self._wire.group.ranks)

    @abstractmethod
    def _send(self) -> None:
        """Start the exchange of the messages."""

    @property
    @abstractmethod
    def _arrived(self) -> list[Tensor]:
        """The received message of each chunk, from the peer or with the mean."""

    @abstractmethod
    def _changes(self, present: Sequence[int]) -> Iterator[Part]:
        """The changes before the weight, by slice; moves the reference if all ranks are present."""

    @abstractmethod
    def _means(self, present: int) -> Iterator[Part]:
        """mean(q) of the ranks that are present, by slice."""

    def _decode(self, chunk: slice, *messages: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        """The values of messages in a chunk, by slice of the whole vector."""
        near = (message.to(self._bucket.device, non_blocking=True) for message in messages)
        dtype = wide(self._bucket.dtype)
        for place, values in self._codec.decode(*near, numel=_length(chunk), dtype=dtype):
            yield slice(chunk.start + place.start, chunk.start + place.stop), values

    def _absolute(self, parts: Iterable[Part]) -> Iterator[Part]:
        for place, part in parts:
            yield place, part if self._reference is None else part.add_(self._reference[place])


class CodedPair(CodedExchange):
    """An exchange of codes between two ranks. The last byte says whether the values are finite.

    Args:
        wire: as in `CodedExchange`.
        bucket: the bucket.
        codec: the codec of the bucket.
        snapshot: what is sent in place of its members' values.
        position: its number among the buckets of the round.
        tag: the tag of its messages.
    """

    def __init__(
        self,
        wire: Wire,
        bucket: Bucket,
        codec: Codec,
        snapshot: Mapping[Tensor, Tensor],
        position: int,
        tag: int,
    ) -> None:
        super().__init__(wire, bucket, codec, snapshot, [slice(0, bucket.flat_numel)], position)
        self._tag = tag
        self.tells_finite = wire.checks and not self.on_gpu
        # For q_j - q_i, which is twice mean(q) - q_i: a pass less over the values.
        self._weight /= 2
        # Without the flag: only values are counted.
        self.bytes_sent = self._messages.nbytes - 1

    def received_finite(self) -> bool:
        """Return whether the peer says that its values are finite."""
        return bool(self._room[-1])

    def _send(self) -> None:
        if self.tells_finite:
            self._messages[-1] = bool(self.finite)
        self.works += self._wire.exchange(self._messages, self._room, self._tag, self.position)

    @property
    def _arrived(self) -> list[Tensor]:
        return [self._room[:-1]]

    def _changes(self, present: Sequence[int]) -> Iterator[Part]:
        (chunk,) = self._chunks
        both: Tensor | None = None
        for place, (theirs, ours) in self._decode(chunk, *self._arrived, *self._outgoing):
            if self._reference is not None:
                # The same bits at both ends: a sum of two does not depend on their order.
                both = torch.add(theirs, ours, out=None if both is None else both[: len(theirs)])
                self._reference[place].add_(both, alpha=0.5)
            yield place, theirs.sub_(ours)

    def _means(self, present: int) -> Iterator[Part]:
        (chunk,) = self._chunks
        for place, (theirs,) in self._decode(chunk, *self._arrived):
            yield place, theirs


class CodedGroup(CodedExchange):
    """An exchange of codes in a larger group, each rank of which averages the chunk that it owns.

    A mean is rounded once more on its way from its owner. With e the error that this makes in the
    sum, the changes of the ranks that are present add up to -e, and the owner adds e to its own
    values. An owner that is left out cannot: the others leave its chunk as it is in this round.

    Args:
        wire: as in `CodedExchange`.
        bucket: the bucket.
        codec: the codec of the bucket.
        snapshot: what is sent in place of its members' values.
        position: its number among the buckets of the round.
        tags: of the messages to the owners, and of those from them.
    """

    def __init__(
        self,
        wire: Wire,
        bucket: Bucket,
        codec: Codec,
        snapshot: Mapping[Tensor, Tensor],
        position: int,
        tags: tuple[int, int],
    ) -> None:
        chunks = _shares(bucket.flat_numel, codec.block, wire.group.size, wire.round)
        super().__init__(wire, bucket, codec, snapshot, chunks, position)
        self._tags = tags
        owned = wire.group.ranks.index(wire.transport.rank)
        self._own = self._new_vector(self._outgoing[owned].numel(), torch.uint8)
        self._error = self._new_vector(_length(chunks[owned]), wide(bucket.dtype)).zero_()
        others = sum(message.nbytes for message in self._outgoing) - self._own.nbytes
        self.bytes_sent = others + (wire.group.size - 1) * self._own.nbytes

    def _new_vector(self, numel: int, dtype: torch.dtype) -> Tensor:
        bucket = self._bucket
        return new_vector(numel, dtype, bucket.wire_device, bucket.via_cpu)

    def _send(self) -> None:
        self._mean = CodedMean(
            self._wire.transport,
            self._wire.group.ranks,
            self._codec,
            outgoing=self._outgoing,
            room=self._room,
            own=self._own,
            error=self._error,
            tags=self._tags,
        ).start()
        self.works.append(self._mean)

    @property
    def _arrived(self) -> list[Tensor]:
        return self._mean.means

    def _changes(self, present: Sequence[int]) -> Iterator[Part]:
        ranks, size = self._wire.group.ranks, self._wire.group.size
        error = self._mean.error.to(self._bucket.device, non_blocking=True)
        for owner, chunk in enumerate(self._chunks):
            messages = self._mean.means[owner], self._outgoing[owner]
            for place, (mean, ours) in self._decode(chunk, *messages):
                if len(present) < size:
                    mean.mul_(size / len(present))
                elif self._reference is not None:
                    self._reference[place].add_(mean)
                change = mean.sub_(ours)
                if owner == self._mean.position:
                    here = slice(place.start - chunk.start, place.stop - chunk.start)
                    change.add_(error[here], alpha=size)
                yield place, change if ranks[owner] in present else change.zero_()

    def _means(self, present: int) -> Iterator[Part]:
        for chunk, message in zip(self._chunks, self._mean.means, strict=True):
            for place, (mean,) in self._decode(chunk, message):
                yield place, mean.mul_(self._wire.group.size / present)


def _shares(numel: int, block: int, count: int, round: int) -> list[slice]:
    """Cut a vector into almost equal chunks of whole blocks, some perhaps empty.

    Returns:
        The chunk of each rank, in an order that is drawn by the round: if a rank is left out of
        many, it is not always the same chunk that stays unmixed.
    """
    blocks = -(-numel // block)
    ends = [min(numel, index * blocks // count * block) for index in range(count + 1)]
    chunks = [slice(start, stop) for start, stop in pairwise(ends)]
    # Not in turn: a group may meet in every fourth round only.
    first = int(Random(round).random() * count)
    return chunks[first:] + chunks[:first]


def _all(flags: list[Tensor]) -> Tensor:
    return flags[0] if len(flags) == 1 else torch.stack(flags).all()


def _length(place: slice) -> int:
    return int(place.stop - place.start)
