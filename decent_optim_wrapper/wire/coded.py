"""Buckets that are sent as codes, and how they are mixed.

With q_i the decoded message of rank i,

    x_i <- x_i + weight (mean(q) - q_i),    r <- r + mean(q),

with r the reference that the ranks of a group share, to which q is a difference. The changes cancel
over the group whatever the rounding, so its mean does not move. If ranks are left out because their
values are not finite, this is true of the mean of the others, and r does not change.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial, reduce
from itertools import pairwise
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.codecs import Codec, wide
from decent_optim_wrapper.comm import tags
from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.waiting import LONGEST_WAIT, Waitable, WireError
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.exchange import Exchange, MixMask, RoundContext
from decent_optim_wrapper.wire.storage import Flat, aligned, new_vector

# A slice of a vector, and values there.
Part = tuple[slice, Tensor]
Parts = tuple[slice, list[Tensor]]


class CodedExchange(Exchange):
    """A bucket that is sent as codes.

    Args:
        round: as in `Exchange`.
        bucket: the bucket.
        position: its number among the buckets of the round.
        codec: the codec of the bucket.
    """

    def __init__(self, round: RoundContext, bucket: Bucket, position: int, codec: Codec) -> None:
        super().__init__(round, bucket, position)
        self._codec = codec
        self.on_thread = not self.on_gpu
        # The parts of the vector that are coded separately.
        numel, size = bucket.wire.numel, round.group.size
        chunks = shares(numel, codec.block, size, round.number) if self.sums else [slice(0, numel)]
        self._chunks = chunks
        self._reference = None if round.references is None else round.references.of(bucket)
        self.uses_reference = self._reference is not None
        # The codec of received messages, which are means in larger groups.
        self._incoming_codec = codec.of_means(size) if self.sums else codec
        row = max(each.nbytes(max(map(_length, chunks))) for each in (codec, self._incoming_codec))
        # Behind the codes of a chunk comes a flag, of the rank or of all whose mean it is.
        row = aligned(row + size) if self.sums else row + 1
        # The messages to send, and as much memory for received ones.
        self._messages, self._room = bucket.wire.vectors(2, row * len(chunks), torch.uint8)
        rows = zip(self._messages.view(-1, row), map(_length, chunks), strict=True)
        # This rank's codes of each chunk.
        self._outgoing = [row[: codec.nbytes(numel)] for row, numel in rows]

    def pack(self, snapshot: Mapping[Tensor, Tensor]) -> None:
        """Keep the values that are sent, and code those of a GPU."""
        self._values = self._bucket.values(snapshot, self._round.needs_snapshot)
        self.snapshot = self._values if self._round.needs_snapshot else None
        if self.device.type != "cpu":
            # On the stream that has computed them.
            self._encode()

    def _encode(self) -> None:
        for chunk, message in zip(self._chunks, self._outgoing, strict=True):
            near = torch.empty_like(message, device=self.device) if self.via_cpu else message
            reference = None if self._reference is None else self._reference[chunk]
            self._codec.encode(self._values.data[chunk], near, reference)
            if self.via_cpu:
                message.copy_(near, non_blocking=True)

    def start(self) -> None:
        """Code what is on the CPU, check the codes and start the exchange."""
        if self.device.type == "cpu":
            self._encode()
        if self._round.nonfinite.checks:
            finite = reduce(torch.logical_and, map(self._codec.is_finite, self._outgoing))
            self.finite = finite if self.on_gpu else bool(finite)
            # A larger group would spread them.
            if not self.on_gpu and not finite and self._round.nonfinite.replaces:
                self._messages.zero_()
        self._send()

    def _mix(self, rate: float, mask: MixMask) -> None:
        arrived, own = mask.arrived, mask.own
        taken = self._room if own is None else self._received(1).data.clone()
        if arrived is not None:
            # Both ranks treat a message that is not mixed as zeros.
            refused = (arrived if own is None else arrived.logical_and(own)).logical_not()
            for message in (*self._arrived, *self._outgoing):
                message.masked_fill_(refused, 0)
        self._bucket.absorb_(self._changes(mask.ranks), self._weight * rate)
        if self._round.references is not None and self._reference is not None:
            self._round.references.settle(self._bucket, self._reference)
        if arrived is not None and own is not None:
            self._replace(arrived.logical_not().logical_or_(own), taken)

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

    def _received(self, present: Tensor | int) -> Flat:
        return self._bucket.joined(self._means_of(present))

    def _means_of(self, present: Tensor | int) -> Iterator[Part]:
        """The received values, as the mean of the ranks that are present, by slice."""
        for chunk, message in zip(self._chunks, self._arrived, strict=True):
            for place, (values,) in self._decode(self._incoming_codec, chunk, message):
                if self.sums:
                    values.mul_(self._round.group.size / present)
                reference = self._reference
                yield place, values if reference is None else values.add_(reference[place])

    def _decode(self, codec: Codec, chunk: slice, *messages: Tensor) -> Iterator[Parts]:
        """The values of messages in a chunk, by slice of the whole vector."""
        near = (message.to(self._bucket.device, non_blocking=True) for message in messages)
        dtype = wide(self._bucket.dtype)
        for place, values in codec.decode(*near, numel=_length(chunk), dtype=dtype):
            yield slice(chunk.start + place.start, chunk.start + place.stop), values


class CodedPair(CodedExchange):
    """An exchange of codes between two ranks. The last byte says whether the values are finite.

    Arguments are as in `Exchange`, and the codec.
    """

    def __init__(self, round: RoundContext, bucket: Bucket, position: int, codec: Codec) -> None:
        super().__init__(round, bucket, position, codec)
        # Without the flag: only values are counted.
        self.bytes_sent = self._messages.nbytes - 1

    def received_finite(self) -> bool:
        """Return whether the peer says that its values are finite."""
        return bool(self._room[-1])

    def _send(self) -> None:
        if self.has_own_flag:
            self._messages[-1] = bool(self.finite)
        self.works = self._swap(self._messages, self._room)

    @property
    def _arrived(self) -> list[Tensor]:
        return [self._room[:-1]]

    def _changes(self, present: Sequence[int]) -> Iterator[Part]:
        (chunk,) = self._chunks
        both: Tensor | None = None
        messages = *self._arrived, *self._outgoing
        for place, (theirs, ours) in self._decode(self._codec, chunk, *messages):
            if self._reference is not None:
                # The same bits at both ends: a sum of two does not depend on their order.
                both = torch.add(theirs, ours, out=None if both is None else both[: len(theirs)])
                self._reference[place].add_(both, alpha=0.5)
            yield place, theirs.sub_(ours)


class CodedGroup(CodedExchange):
    """An exchange of codes in a larger group: a reduce-scatter and an all-gather of codes.

    Each rank owns a chunk. All ranks send their codes of it to the owner, which decodes and
    averages them, codes the mean, and sends it to all. Messages are point to point, since
    collectives would have to come in the same order on all ranks, and on a separate thread, since
    the mean is due in the middle of a backward pass.

    A mean is rounded once more on its way from its owner. With e the error that this makes in the
    sum, the changes of the ranks that are present add up to -e, and the owner adds e to its own
    values. An owner that is left out cannot: the others leave its chunk as it is in this round.

    Arguments are as in `Exchange`, and the codec.
    """

    sums = True

    def __init__(self, round: RoundContext, bucket: Bucket, position: int, codec: Codec) -> None:
        super().__init__(round, bucket, position, codec)
        size, place = round.group.size, round.group.ranks.index(round.transport.rank)
        self._place = place
        self.has_own_flag = round.nonfinite.checks and not self.on_gpu
        new = partial(new_vector, device=bucket.wire_device, pinned=bucket.via_cpu)
        # The codes of each chunk, and behind them whether this rank's values are finite.
        rows = zip(self._messages.view(size, -1), map(len, self._outgoing), strict=True)
        self._sent = [row[: nbytes + 1] for row, nbytes in rows]
        # For each rank a row, which first takes its message of this rank's chunk, and then the mean
        # of its own chunk, with the flags of all ranks behind it.
        room, own = self._room.view(size, -1), self._sent[place]
        self._codes = [row[: len(own)] for row in room]
        self._codes[place] = own
        lengths = [self._incoming_codec.nbytes(_length(chunk)) + size for chunk in self._chunks]
        self._means = [row[:length] for row, length in zip(room, lengths, strict=True)]
        # Memory that no other round uses: after a loss a new one may begin before the thread has
        # noticed.
        self._means[place] = new(lengths[place], torch.uint8)
        # This rank's mean less the one that it sends.
        self._error = new(_length(self._chunks[place]), wide(bucket.dtype)).zero_()
        sent = sum(map(len, self._outgoing)) - len(self._outgoing[place])
        self.bytes_sent = sent + (size - 1) * (lengths[place] - size)

    def _send(self) -> None:
        transport, ranks = self._round.transport, self._round.group.ranks
        others = [place for place, rank in enumerate(ranks) if rank != transport.rank]
        # Chunks of a small vector may be empty; they are not sent.
        owners = [place for place in others if self._outgoing[place].numel()]
        senders = others if self._outgoing[self._place].numel() else []
        tag, mean_tag = tags.BUCKET + self.position, tags.MEAN + self.position
        for message in self._sent:
            message[-1] = bool(self.finite)
        # The receives first: the data is sent when their notices arrive.
        codes = {p: transport.receive(self._codes[p], ranks[p], tag) for p in senders}
        sent = [transport.send(self._sent[p], ranks[p], tag) for p in owners]

        def average() -> None:
            if codes:
                self._average(codes)
            works = [transport.receive(self._means[p], ranks[p], mean_tag) for p in owners]
            works += [transport.send(self._means[self._place], ranks[p], mean_tag) for p in senders]
            for work in (*sent, *works):
                _wait(work)

        self.works.append(_OnThread(in_background(average), transport.report_and_close))

    @torch.no_grad()
    def _average(self, codes: Mapping[int, Waitable]) -> None:
        total, size = self._error, len(self._codes)
        mean, flags = self._means[self._place].tensor_split([-size])
        # In the order of the ranks: the mean must not depend on the order of arrival.
        for place, message in enumerate(self._codes):
            if place in codes:
                _wait(codes[place])
            _add(self._codec, message[:-1], total)
        total.div_(size)
        self._incoming_codec.encode(total, mean)
        _add(self._incoming_codec, mean, total, -1.0)
        flags.copy_(torch.stack([message[-1] for message in self._codes]))

    def refused(self) -> set[int]:
        """The ranks with values that are not finite: the owner of a chunk tells all others."""
        ranks = self._round.group.ranks
        flags = next(mean for mean in self._means if len(mean) > len(ranks))[-len(ranks) :].tolist()
        return {rank for rank, flag in zip(ranks, flags, strict=True) if not flag}

    @property
    def _arrived(self) -> list[Tensor]:
        return [mean[: -len(self._means)] for mean in self._means]

    def _changes(self, present: Sequence[int]) -> Iterator[Part]:
        ranks, size = self._round.group.ranks, self._round.group.size
        error = self._error.to(self._bucket.device, non_blocking=True)
        for owner, chunk in enumerate(self._chunks):
            means = self._decode(self._incoming_codec, chunk, self._means[owner][:-size])
            codes = self._decode(self._codec, chunk, self._outgoing[owner])
            for (place, (mean,)), (_, (ours,)) in zip(means, codes, strict=True):
                if len(present) < size:
                    mean.mul_(size / len(present))
                elif self._reference is not None:
                    self._reference[place].add_(mean)
                change = mean.sub_(ours)
                if owner == self._place:
                    change.add_(error[place.start - chunk.start :][: len(change)], alpha=size)
                yield place, change if ranks[owner] in present else change.zero_()


class _OnThread(NamedTuple):
    """An action on a thread, as a work to wait for.

    Args:
        done: the action.
        fail: called with an error that is no `WireError`, before it is raised.
    """

    done: Future[None]
    fail: Callable[[BaseException], None]

    def wait(self, timeout: timedelta = LONGEST_WAIT) -> None:
        """Wait until it is done.

        Raises:
            RuntimeError: a rank is gone.
            TimeoutError: the wait timed out.
            Exception: a codec has failed.
        """
        error = self.done.exception(timeout.total_seconds())
        if isinstance(error, WireError):
            # The text only: the error itself would hold this frame, which holds the future.
            raise RuntimeError(str(error))
        if error is not None:
            self.fail(error)
            raise error

    def is_completed(self) -> bool:
        """Return whether it is done, or has failed."""
        return self.done.done()


def shares(numel: int, block: int, count: int, round: int) -> list[slice]:
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


def _wait(work: Waitable) -> None:
    try:
        work.wait(LONGEST_WAIT)
    except RuntimeError as error:
        # Told from errors of codecs, which torch raises as RuntimeErrors, too.
        raise WireError(str(error)) from error


def _add(codec: Codec, message: Tensor, total: Tensor, factor: float = 1.0) -> None:
    for place, (values,) in codec.decode(message, numel=total.numel(), dtype=total.dtype):
        total[place].add_(values, alpha=factor)


def _length(place: slice) -> int:
    return int(place.stop - place.start)
