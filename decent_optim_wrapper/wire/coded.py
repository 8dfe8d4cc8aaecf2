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
        # The equal parts of the vector that are coded separately, a row for each.
        self._chunks = shares(numel, codec.block, size) if self.sums else [slice(0, numel)]
        self._length = _length(self._chunks[0])
        # The codec of received messages, which are means in larger groups.
        self._incoming_codec = codec.of_means(size) if self.sums else codec
        self._nbytes = codec.nbytes(self._length)
        self._incoming_nbytes = self._incoming_codec.nbytes(self._length)
        # Behind the codes of a chunk comes a flag, of the rank or of all whose mean it is.
        row = aligned(max(self._nbytes, self._incoming_nbytes) + size)
        # The messages to send, and as much memory for received ones.
        self._messages, self._room = bucket.wire.vectors(2, row * len(self._chunks), torch.uint8)

    def pack(self, snapshot: Mapping[Tensor, Tensor]) -> None:
        """Keep the values that are sent, and code those of a GPU."""
        self._values = self._bucket.values(snapshot, self._round.needs_snapshot)
        self.snapshot = self._values if self._round.needs_snapshot else None
        if self.device.type != "cpu":
            # On the stream that has computed them.
            self._encode()

    def _encode(self) -> None:
        messages, values = self._messages, self._values.data
        on_device = torch.empty_like(messages, device=self.device) if self.via_cpu else messages
        rows = self._rows(on_device, self._codec)
        if (full := len(values) // max(1, self._length)) < len(self._chunks):
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
        self._bucket.absorb_(self._changes(mask.ranks), self._weight * rate)
        if self._round.references is not None and self._reference is not None:
            self._round.references.settle(self._bucket, self._reference)
        if arrived is not None and own is not None:
            self._replace(arrived.logical_not().logical_or_(own), taken)

    @abstractmethod
    def _changes(self, present: Sequence[int]) -> Iterator[Part]:
        """The changes before the weight, by slice; moves the reference if all ranks are present."""

    def _received(self, present: Tensor | int) -> Flat:
        return self._bucket.joined(self._means_of(present))

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
        return memory.view(len(self._chunks), -1)[:, :nbytes] if self.sums else memory[:nbytes]


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
        size, place = round.group.size, round.group.ranks.index(round.transport.rank)
        self._place = place
        self.has_own_flag = round.nonfinite.checks and not self.on_gpu
        self._window = round.transport.windows[round.group.ranks]
        # The caller's own thread would wait for other ranks in the middle of a backward pass.
        self.turn = self._window.wait if self.on_thread else None
        # For each rank the row of the chunk that it owns, and the chunk.
        rows = owned_rows(size, round.number)
        self._owned = [self._chunks[row] for row in rows]
        messages, room = self._messages.view(size, -1), self._room.view(size, -1)
        # The codes of each chunk, and behind them whether this rank's values are finite.
        self._sent = [messages[row, : self._nbytes + 1] for row in rows]
        # For each rank a row, which first takes its message of this rank's chunk, and then the mean
        # of its own chunk, with the flags of all ranks behind it.
        self._codes = [room[row, : self._nbytes + 1] for row in rows]
        self._codes[place] = self._sent[place]
        self._means = [room[row, : self._incoming_nbytes + size] for row in rows]
        self._own_mean = self._means[place]
        # Memory that no other round uses: after a loss a new one may begin before the thread has
        # noticed.
        new = partial(new_vector, device=bucket.wire_device, pinned=bucket.via_cpu)
        self._means[place] = new(self._own_mean.numel(), torch.uint8)
        # This rank's mean less the one that it sends.
        self._error = new(_length(self._owned[place]), wide(bucket.dtype)).zero_()
        # Chunks of a small vector may be empty; they are not sent.
        self._owners = [p for p, chunk in enumerate(self._owned) if p != place and _length(chunk)]
        self._senders = [p for p in range(size) if p != place and len(self._error)]
        self.bytes_sent = len(self._owners) * self._nbytes
        self.bytes_sent += len(self._senders) * self._incoming_nbytes

    def start(self) -> None:
        """Start the exchange of the messages, and average on another thread what arrives."""
        if self.turn is None:
            self.code()
        transport, ranks = self._round.transport, self._round.group.ranks
        owners, senders, mean = self._owners, self._senders, self._means[self._place]
        tag, mean_tag = tags.BUCKET + self.position, tags.MEAN + self.position
        for message in self._sent:
            message[-1] = bool(self.finite)
        # The receives first: the data is sent when their notices arrive.
        codes = {p: transport.receive(self._codes[p], ranks[p], tag) for p in senders}
        sent = [transport.send(self._sent[p], ranks[p], tag) for p in owners]
        # Only now: what could not be sent would never leave.
        entry = self._window.enter(self._round.number)

        def average() -> None:
            try:
                if codes:
                    self._average(codes)
                works = [transport.receive(self._means[p], ranks[p], mean_tag) for p in owners]
                works += [transport.send(mean, ranks[p], mean_tag) for p in senders]
            finally:
                self._window.leave(entry)
            for work in (*sent, *works):
                _wait(work)
            self._window.note_arrival()

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
        owner = next(owner for owner, chunk in enumerate(self._owned) if _length(chunk))
        flags = self._means[owner][-len(ranks) :].tolist()
        return {rank for rank, flag in zip(ranks, flags, strict=True) if not flag}

    def apply(self, rate: float, mask: MixMask) -> None:
        """Mix the received means, and this rank's own, which lies elsewhere until then."""
        self._own_mean.copy_(self._means[self._place])
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


def shares(numel: int, block: int, count: int) -> list[slice]:
    """Cut a vector into equal chunks of whole blocks; the last ones may be shorter, or empty."""
    length = -(-numel // (block * count)) * block
    ends = [min(numel, index * length) for index in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]


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


def _add(codec: Codec, message: Tensor, total: Tensor, factor: float = 1.0) -> None:
    for place, (values,) in codec.decode(message, numel=total.numel(), dtype=total.dtype):
        total[place].add_(values, alpha=factor)


def _length(place: slice) -> int:
    return int(place.stop - place.start)
