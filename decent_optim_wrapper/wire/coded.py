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
from functools import partial
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
# Up to so many values, coding takes less time than starting it on a thread.
FEW = 2**14


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
        numel, size = bucket.wire.numel, round.group.size
        self.on_thread = not self.on_gpu and (self.via_cpu or numel > FEW)
        references = round.references
        self._reference = None if references is None else references.of(bucket)
        self.uses_reference = self._reference is not None
        first = codec.of_first_rounds() if self.uses_reference else None
        if references is not None and first is not None and references.is_far(bucket):
            self._weight, codec = 0.0, first
        self._codec = codec
        # Equal chunks of whole blocks are coded, a row for each. The last ones may not be full, or
        # be empty.
        self._count = size if self.sums else 1
        self._length = -(-numel // (codec.block * self._count)) * codec.block
        # The codec of received messages, which are means in larger groups.
        self._incoming_codec = codec.of_means(size) if self.sums else codec
        self._nbytes = codec.nbytes(self._length)
        self._incoming_nbytes = self._incoming_codec.nbytes(self._length)
        # Behind the codes of a chunk comes a flag, of the rank or of all whose mean it is.
        row = aligned(max(self._nbytes, self._incoming_nbytes) + size)
        # The messages to send, and as much memory for received ones.
        self._messages, self._room = bucket.wire.vectors(2, row * self._count, torch.uint8)

    def pack(self, snapshot: Mapping[Tensor, Tensor]) -> None:
        """Keep the values that are sent, and code those of a GPU."""
        self._values = self._bucket.values(snapshot, self._round.needs_snapshot)
        self.snapshot = self._values if self._round.needs_snapshot else None
        if self.snapshot is None and not (self._round.may_change or self._bucket.is_sent_in_place):
            self.packed = self._values
        if self.device.type != "cpu":
            # On the stream that has computed them.
            self._encode()

    def _encode(self) -> None:
        messages, values = self._messages, self._values.data
        on_device = torch.empty_like(messages, device=self.device) if self.via_cpu else messages
        rows = self._rows(on_device, self._codec)
        if self.sums and (full := len(values) // max(1, self._length)) < self._count:
            # Nothing is coded into the end of the last rows, and `is_finite` reads all rows.
            rows[full:].zero_()
        self._codec.encode(values, rows, self._reference)
        if self.via_cpu:
            messages.copy_(on_device, non_blocking=True)

    def code(self) -> None:
        """Code what is on the CPU, and check the codes."""
        if self.device.type == "cpu":
            self._encode()
        if self._round.nonfinite.checks:
            finite = self._codec.is_finite(self._rows(self._messages, self._codec))
            self.finite = finite if self.on_gpu else bool(finite)
            # A larger group would spread them.
            if not self.on_gpu and not finite and self._round.nonfinite.replaces:
                self._messages.zero_()

    def _mix(self, rate: float, mask: MixMask) -> None:
        arrived, own = mask.arrived, mask.own
        taken = self._room if own is None else self._received(1).data.clone()
        if arrived is not None:
            # Both ranks treat a message that is not mixed as zeros.
            refused = (arrived if own is None else arrived.logical_and(own)).logical_not()
            for messages in (self._room, self._messages):
                messages.masked_fill_(refused, 0)
        self._bucket.absorb_(self._changes(mask.ranks), self._weight * rate, bool(self.packed))
        if self._round.references is not None and self._reference is not None:
            self._round.references.settle(self._bucket, self._reference)
        if arrived is not None and own is not None:
            self._replace(arrived.logical_not().logical_or_(own), taken)

    @abstractmethod
    def _changes(self, present: Sequence[int]) -> Iterator[Part]:
        """The changes before the weight, by slice; moves the reference if all ranks are present."""

    def _received(self, present: Tensor | int) -> Flat:
        return self._bucket.joined(self._means_of(present), bool(self.packed))

    def _means_of(self, present: Tensor | int) -> Iterator[Part]:
        """The received values, as the mean of the ranks that are present, by slice."""
        for place, (values,) in self._decode(self._incoming_codec, self._room):
            if self.sums:
                values.mul_(self._round.group.size / present)
            reference = self._reference
            yield place, values if reference is None else values.add_(reference[place])

    def _decode(self, codec: Codec, *memory: Tensor) -> Iterator[Parts]:
        """The values of the messages in some memory, by slice of the vector."""
        on_device = (each.to(self._bucket.device, non_blocking=True) for each in memory)
        rows = [self._rows(each, codec) for each in on_device]
        return codec.decode(*rows, numel=self._bucket.wire.numel, dtype=wide(self._bucket.dtype))

    def _rows(self, memory: Tensor, codec: Codec) -> Tensor:
        """The messages without their flags, in larger groups with a row for each chunk."""
        nbytes = codec.nbytes(self._length)
        return memory.view(self._count, -1)[:, :nbytes] if self.sums else memory[:nbytes]


class CodedPair(CodedExchange):
    """An exchange of codes between two ranks. The last byte says whether the values are finite.

    Arguments are as in `Exchange`, and the codec.
    """

    def __init__(self, round: RoundContext, bucket: Bucket, position: int, codec: Codec) -> None:
        super().__init__(round, bucket, position, codec)
        self._pair = self._messages[: self._nbytes + 1], self._room[: self._nbytes + 1]
        # Without the flag: only values are counted.
        self.bytes_sent = self._nbytes

    def received_finite(self) -> bool:
        """Return whether the peer says that its values are finite."""
        return bool(self._pair[1][-1])

    def start(self) -> None:
        """Code what is on the CPU, and start the exchange of the messages."""
        self.code()
        if self.has_own_flag:
            self._pair[0][-1] = bool(self.finite)
        self.works = self._swap(*self._pair)

    def _changes(self, present: Sequence[int]) -> Iterator[Part]:
        both: Tensor | None = None
        for place, (theirs, ours) in self._decode(self._codec, self._room, self._messages):
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
        size = self._count
        self._place = place = round.group.ranks.index(round.transport.rank)
        self.has_own_flag = round.nonfinite.checks and not self.on_gpu
        self._window = round.transport.windows[round.group.ranks]
        # The caller's own thread would wait for other ranks in the middle of a backward pass.
        self.turn = self._window.wait if self.on_thread else None
        # For each rank the row of the chunk that it owns, and the chunk.
        self._row_of = owned_rows(size, round.number)
        self._owned = [slice(row * self._length, (row + 1) * self._length) for row in self._row_of]
        others = [p for p in range(size) if p != place]
        # Empty chunks are not sent.
        self._owners = [p for p in others if self._owned[p].start < bucket.wire.numel]
        self._senders = others if self._owned[place].start < bucket.wire.numel else []
        # Memory that no other round uses: after a loss a new one may begin before the thread has
        # noticed.
        new = partial(new_vector, device=bucket.wire_device, pinned=bucket.via_cpu)
        # The mean of this rank's chunk, and behind it the flags of all ranks.
        self._mean = new(self._incoming_nbytes + size, torch.uint8)
        # This rank's mean less the one that it sends.
        self._error = new(self._length if self._senders else 0, wide(bucket.dtype))
        self.bytes_sent = len(self._owners) * self._nbytes
        self.bytes_sent += len(self._senders) * self._incoming_nbytes

    def start(self) -> None:
        """Start the exchange of the messages, and average on another thread what arrives."""
        if self.turn is None:
            self.code()
        transport, ranks = self._round.transport, self._round.group.ranks
        owners, senders, nbytes = self._owners, self._senders, self._nbytes + 1
        tag, mean_tag = tags.BUCKET + self.position, tags.MEAN + self.position
        messages, room = (each.view(len(ranks), -1) for each in (self._messages, self._room))
        messages[:, self._nbytes] = bool(self.finite)
        # A row of the memory first takes the message of a rank, in their order, and then a mean.
        room[self._place].copy_(messages[self._row_of[self._place]])
        # The receives first: the data is sent when their notices arrive.
        codes = [transport.receive(room[p, :nbytes], ranks[p], tag) for p in senders]
        sent = [transport.send(messages[self._row_of[p], :nbytes], ranks[p], tag) for p in owners]
        # Only now: what could not be sent would never leave.
        entry = self._window.enter(self._round.number)

        def average() -> None:
            try:
                if codes:
                    self._average(codes, room)
                works = [transport.receive(self._mean_of(p), ranks[p], mean_tag) for p in owners]
                works += [transport.send(self._mean, ranks[p], mean_tag) for p in senders]
            finally:
                self._window.leave(entry)
            # Of what has been sent: nobody waits for it.
            _add(self._incoming_codec, self._mean[: self._incoming_nbytes], self._error, -1.0)
            # The receives first: gloo may forget a send whose connection closes, but no receive.
            for work in (*works, *sent):
                _wait(work)
            self._window.note_arrival()

        self.works.append(_OnThread(in_background(average), transport.report_and_close))

    def _average(self, codes: Sequence[Waitable], messages: Tensor) -> None:
        total, size = self._error.zero_(), len(messages)
        for work in codes:
            _wait(work)
        _add(self._codec, messages[:, : self._nbytes], total)
        # The mean is padded with zeros, whatever a codec makes of those of the ranks.
        total[max(0, self._bucket.wire.numel - self._owned[self._place].start) :] = 0
        self._incoming_codec.encode(total.div_(size), self._mean[:-size])
        self._mean[-size:] = messages[:, self._nbytes]

    def _mean_of(self, place: int) -> Tensor:
        """The memory in which the mean of a rank's chunk is mixed, and the flags behind it."""
        return self._room.view(self._count, -1)[self._row_of[place], : len(self._mean)]

    def refused(self) -> set[int]:
        """The ranks with values that are not finite: the owner of a chunk tells all others."""
        ranks = self._round.group.ranks
        # Any owner: all tell the same.
        mean = self._mean if self._senders else self._mean_of(self._owners[0])
        flags = mean[-len(ranks) :].tolist()
        return {rank for rank, flag in zip(ranks, flags, strict=True) if not flag}

    def apply(self, rate: float, mask: MixMask) -> None:
        """Mix the received means, and this rank's own, which lies elsewhere until then."""
        self._mean_of(self._place).copy_(self._mean)
        super().apply(rate, mask)

    def _changes(self, present: Sequence[int]) -> Iterator[Part]:
        ranks, size = self._round.group.ranks, self._round.group.size
        error = self._error.to(self._bucket.device, non_blocking=True)
        means = self._decode(self._incoming_codec, self._room)
        codes = self._decode(self._codec, self._messages)
        for (place, (mean,)), (_, (ours,)) in zip(means, codes, strict=True):
            if len(present) < size:
                mean.mul_(size / len(present))
            elif self._reference is not None:
                self._reference[place].add_(mean)
            change = mean.sub_(ours)
            here, there = _overlap(place, self._owned[self._place])
            change[here].add_(error[there], alpha=size)
            for rank, chunk in zip(ranks, self._owned, strict=True):
                if rank not in present:
                    change[_overlap(place, chunk)[0]] = 0
            yield place, change


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
            # It may hold this frame: the connections are closed, and the round ends with it.
            self.fail(error)
            raise error

    def is_completed(self) -> bool:
        """Return whether it is done, or has failed."""
        return self.done.done()


def owned_rows(size: int, round: int) -> list[int]:
    """The chunk that each rank owns in a round.

    If a rank is left out of many rounds, it is not always the same chunk that stays unmixed.
    """
    # Drawn, not in turn: a group may meet in every fourth round only.
    first = int(Random(round).random() * size)
    return [*range(first, size), *range(first)]


def _overlap(one: slice, other: slice) -> tuple[slice, slice]:
    """What two slices have in common, as a slice of each."""
    start = max(one.start, other.start)
    stop = max(start, min(one.stop, other.stop))
    here, there = (slice(start - each.start, stop - each.start) for each in (one, other))
    return here, there


def _wait(work: Waitable) -> None:
    try:
        work.wait(LONGEST_WAIT)
    except RuntimeError as error:
        # Told from errors of codecs, which torch raises as RuntimeErrors, too.
        raise WireError(str(error)) from error


@torch.no_grad()
def _add(codec: Codec, messages: Tensor, total: Tensor, factor: float = 1.0) -> None:
    """Add the values of one or more messages to a vector, in their order and not as they arrive."""
    numel = len(total)
    whole = messages.shape[:-1].numel() * numel
    for place, (values,) in codec.decode(messages, numel=whole, dtype=total.dtype):
        start = place.start % numel
        # Some messages, or a part of one.
        for row in values.view(-1, min(len(values), numel)):
            total[start : start + len(row)].add_(row, alpha=factor)
