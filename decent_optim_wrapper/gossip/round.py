"""One round on the wire: posted bucket by bucket, received as a whole, mixed bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from loguru import logger
from torch import Tensor

from decent_optim_wrapper.codecs import Codec
from decent_optim_wrapper.comm.background import Ongoing
from decent_optim_wrapper.comm.streams import PostingThread, Waitable
from decent_optim_wrapper.comm.waiting import Arrival, Awaited, PendingMessage, WireError
from decent_optim_wrapper.errors import CallOrderError, PeerError
from decent_optim_wrapper.gossip.header import Header
from decent_optim_wrapper.gossip.schedule import Kind, Pacing, RoundPlan, Session
from decent_optim_wrapper.gossip.timing import Meter
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.checked_on_gpu import CheckedOnGpu
from decent_optim_wrapper.wire.coded import CodedGroup, CodedPair
from decent_optim_wrapper.wire.exchange import (
    Exchange,
    KeptStart,
    PlainGroup,
    PlainPair,
    Wire,
)
from decent_optim_wrapper.wire.nonfinite import NonFinitePolicy, nonfinite_error
from decent_optim_wrapper.wire.storage import Flat

# Tags of an exchange: two for small messages, then one for each bucket.
_HEADER_TAG, _FLAGS_TAG, _FIRST_BUCKET_TAG = 0, 1, 2
# For each bucket again: the means of coded buckets.
_FIRST_MEAN_TAG = 1 << 18


class _Wait(NamedTuple):
    """Works to wait for, and what is lost with them: a bucket, and one of some ranks."""

    works: list[Waitable]
    bucket: int
    suspects: tuple[int, ...]
    on_gpu: bool = False


class Round:
    """One round of one rank, from its launch to its mixing.

    Args:
        header: the method that launches it, and its number; the same on all ranks.
        plan: the ranks that mix, and the mixing rate.
        session: connects them.
        pacing: when the round is mixed.
        nonfinite: what happens to values that are not finite.
        meter: counts every wait, every copy and all bytes.
    """

    def __init__(
        self,
        header: Header,
        plan: RoundPlan,
        session: Session,
        pacing: Pacing,
        nonfinite: NonFinitePolicy,
        meter: Meter,
    ) -> None:
        self.plan = plan
        self._group = plan.group
        self._size = len(plan.group.ranks)
        self._edge = session.references.edges.get(self._group.ranks)
        self._header = header._replace(meetings=self._edge.meetings if self._edge else 0)
        # That of all ranks of the group.
        self._rate = plan.mixing_rate
        self._topology = session.topology
        self._transport = session.transport
        self._peers = tuple(rank for rank in self._group.ranks if rank != self._transport.rank)
        # Whether the parameters may change before they are mixed.
        self._freezes = pacing.needs_snapshot
        self._same_rate = pacing.synchronous
        self._wire = Wire(
            transport=self._transport,
            group=self._group,
            round=header.round,
            edge=self._edge,
            freezes=self._freezes,
            on_nonfinite=nonfinite.on_nonfinite,
        )
        self._nonfinite = nonfinite
        self._meter = meter
        # An exact average is the same on all ranks, even on two, and is not rounded: it is a sum.
        self._sums = self._size > 2 or plan.kind is Kind.AVERAGE
        self._unmixed: list[Bucket] = []
        self._behind: dict[Bucket, tuple[Bucket, ...]] = {}
        self._exchanges: dict[Bucket, Exchange] = {}
        self._moves_references = False
        # For every rank, 1 for each bucket sent with finite values, else 0.
        self._finite_of: dict[int, list[float]] = {}
        # The same where a GPU checks them.
        self._checked_on_gpu: CheckedOnGpu | None = None
        # Posts what has to reach the CPU, or to be coded there, before.
        self._posting: PostingThread | None = None
        self._holds_back = False
        self._held_back: list[Exchange] = []
        # What a thread waits for, work by work, if the round may take several steps.
        self._arrival: Arrival | None = None
        self._watched: list[_Wait] = []
        # Parameters whose own memory is being sent, with their version counters.
        self._posted: list[tuple[Tensor, int]] = []
        # A connection that is closed already is reported when the round is received, where it can
        # be handled. Everything else that fails here is this rank's own error.
        self._failure: WireError | None = None
        self._failed_bucket = 0
        # Before the buckets: a group that sums would add up whatever comes first.
        self._headers = self._send_control(self._header, _HEADER_TAG)
        self._flags: list[PendingMessage] = []

    @property
    def unmixed(self) -> list[Bucket]:
        """The buckets that were posted and are not mixed yet."""
        return list(self._unmixed)

    def hold_back(self) -> None:
        """Let a thread code all buckets but the first, once the round is sealed.

        For buckets that are posted one right after the other.
        """
        self._holds_back = True

    @property
    def was_held_back(self) -> bool:
        """Whether `hold_back` was called."""
        return self._holds_back

    def post(
        self,
        bucket: Bucket,
        starts: Mapping[Tensor, Tensor] | None = None,
        behind: Iterable[Bucket] = (),
    ) -> None:
        """Pack a bucket and start its exchange; a group of one rank exchanges nothing.

        Args:
            bucket: the bucket.
            starts: what is sent in place of its members' values, by member; None for nothing.
            behind: buckets that are exchanged and mixed together with it.
        """
        self._unmixed.append(bucket)
        self._behind[bucket] = tuple(behind)
        self._post(bucket, starts or {})
        for each in self._behind[bucket]:
            self._post(each, {})

    def _post(self, bucket: Bucket, starts: Mapping[Tensor, Tensor]) -> None:
        if not bucket.numel or self._failure or (self._size == 1 and not self._freezes):
            return
        with self._meter.launch:
            exchange = self._exchange(bucket, starts)
            self._exchanges[bucket] = exchange
            self._moves_references |= exchange.uses_reference
            if not self._freezes:
                self._posted += bucket.versions()
            self._meter.bytes_sent += exchange.bytes_sent
            if exchange.crosses and self._posting is None:
                self._posting = PostingThread()
                self._transport.collectives_wait_for(self._posting)
            if self._posting is not None:
                # What comes behind, too: sums must have the same order on all ranks.
                device = exchange.device if exchange.crosses else None
                self._posting.add(partial(self._start, exchange), device)
            elif self._holds_back and exchange.codes_late and exchange.position > 0:
                self._held_back.append(exchange)
            else:
                self._start(exchange)

    def _start(self, exchange: Exchange) -> None:
        if self._failure:
            return
        try:
            exchange.post()
        except WireError as error:
            self._failure, self._failed_bucket = error, exchange.position

    def seal(self) -> None:
        """Post what was held back, and then tell the group which buckets had finite values."""
        if self._held_back:
            self._posting = self._posting or PostingThread()
            self._transport.collectives_wait_for(self._posting)
            for exchange in self._held_back:
                self._posting.add(partial(self._start, exchange))
            self._held_back = []
        if self._posting is None:
            self._send_flags()
        else:
            self._posting.end(self._send_flags)

    def _send_flags(self) -> None:
        if not self._exchanges or not self._wire.checks or self._failure or self._size == 1:
            return
        on_gpu = [each for each in self._exchanges.values() if each.on_gpu]
        if on_gpu:
            self._checked_on_gpu = CheckedOnGpu(self._wire, on_gpu, _FLAGS_TAG)
        if len(on_gpu) < len(self._exchanges):
            self._flags = self._send_control(self._finite_here(), _FLAGS_TAG)

    def _finite_here(self) -> list[float]:
        return [float(each.on_gpu or bool(each.finite)) for each in self._exchanges.values()]

    def watch(self) -> None:
        """Begin to wait on a thread, once the round is sealed."""
        posting, headers = self._posting, self._headers
        works = self._watched_works([_Wait(each.works, 0, each.suspects) for each in headers])
        posted = [] if posting else self._watched_works(self._waits())

        def further() -> list[Awaited]:
            if any(int(each.message[0]) != self._header.call for each in headers):
                # `receive` raises: that rank sends no buckets.
                return []
            if posting is None:
                return posted
            posting.future.result()
            return self._watched_works(self._waits())

        self._arrival = Arrival(works, further if works else None)

    def _waits(self) -> list[_Wait]:
        waits = []
        for index, exchange in enumerate(self._exchanges.values()):
            waits.append(_Wait(exchange.works, index, self._peers, exchange.on_gpu))
        last = max(0, len(self._exchanges) - 1)
        if self._checked_on_gpu is not None:
            waits.append(_Wait(self._checked_on_gpu.works, last, self._peers, on_gpu=True))
        return waits + [_Wait(each.works, last, each.suspects) for each in self._flags]

    def _watched_works(self, waits: list[_Wait]) -> list[Awaited]:
        """Leave works to the thread."""
        self._watched += [each for each in waits for _ in each.works]
        awaited = [Awaited(work, each.on_gpu) for each in waits for work in each.works]
        for each in waits:
            # Nobody else waits for them: a second wait for a work of gloo would last forever.
            if not each.on_gpu:
                each.works.clear()
        return awaited

    def has_arrived(self) -> bool:
        """Whether nothing is left to wait for, as far as a thread has watched."""
        return self._arrival is not None and self._arrival.is_over

    def receive(self) -> None:
        """Wait until everything has arrived; nothing is mixed. A second call returns at once.

        What arrives on a GPU is waited for by its stream.

        Raises:
            PeerError: the data of a peer did not arrive.
            CallOrderError: a peer is in another method or round.
        """
        with self._meter.wait:
            self._wait_for_posting()
            if self._failure:
                raise self._lost(
                    self._failed_bucket, self._peers, self._failure.silent
                ) from self._failure
            if self._arrival is not None:
                self._wait_for_arrival(self._arrival)
            for rank, message in self._receive_control(self._headers, 0).items():
                if message != [*self._header]:
                    self._compare(message, rank)
                    _, _, rate, _ = message
                    self._rate = min(self._rate, rate)
            self._headers = []
            for index, exchange in enumerate(self._exchanges.values()):
                self._wait(exchange.works, index, self._peers, exchange.on_gpu)
            self._posted.clear()
            if self._moves_references and self._edge is not None:
                # Not when they are mixed: some ranks begin the next round before that, and say so.
                self._edge.meetings += 1
                self._moves_references = False
            if self._flags:
                self._finite_of = self._receive_control(self._flags, len(self._exchanges) - 1)
                self._finite_of[self._transport.rank] = self._finite_here()
                self._flags = []
                self._warn_of(self._nonfinite_ranks())

    def check_finite(self) -> None:
        """Check that what has arrived may be mixed.

        Raises:
            NonFiniteError: parameters are not finite, and the policy does not allow it;
                raised at every call.
        """
        self._raise_of(self._nonfinite_ranks())

    @property
    def is_checked_on_gpu(self) -> bool:
        """Whether there is something to ask for in `check_on_gpu`."""
        return self._checked_on_gpu is not None

    def check_on_gpu(self) -> None:
        """Check, a step after the mixing, what a GPU has found: it has mixed nothing of it.

        Raises:
            NonFiniteError: as in `check_finite`, once.
        """
        checked, self._checked_on_gpu = self._checked_on_gpu, None
        if checked is not None:
            bad = sorted(self._transport.members[place] for place in checked.nonfinite_ranks())
            self._raise_of(bad)
            self._warn_of(bad)

    def _raise_of(self, bad: list[int]) -> None:
        if bad and self._nonfinite.on_nonfinite == "raise":
            raise nonfinite_error(bad, self._transport.initial_rank, f"round {self._header.round}")

    def changed_in_flight(self) -> list[Tensor]:
        """Parameters that are being sent from their own memory and have changed since."""
        return [param for param, version in self._posted if param._version != version]

    def mix(self, bucket: Bucket) -> None:
        """Mix what has arrived for a posted bucket and for those behind it, once."""
        self._unmixed.remove(bucket)
        for each in (bucket, *self._behind[bucket]):
            exchange = self._exchanges.get(each)
            if exchange is not None:
                with self._meter.mix:
                    self._mix(each, exchange)

    def _mix(self, bucket: Bucket, exchange: Exchange) -> None:
        # The stream that mixes need not be the one that has received.
        for work in exchange.works if exchange.on_gpu else ():
            work.wait()
        rate, left_out = self._rate * bucket.rate, self._left_out(exchange)
        present = [rank for rank in self._group.ranks if rank not in left_out]
        if self._checked_on_gpu is not None and exchange.on_gpu:
            exchange.mix_usable(rate, self._checked_on_gpu.usable(exchange))
        elif present:
            exchange.mix(rate, present)

    def compare(self, bucket: Bucket) -> tuple[Tensor, Tensor] | None:
        """Whether this rank has what has arrived for a bucket, of shape (), and what it has sent.

        Returns:
            None if that cannot be told, as where a rank is left out.
        """
        exchange = self._exchanges.get(bucket)
        if self._size == 1 or exchange is None or self._left_out(exchange):
            return None
        return exchange.compare()

    def _left_out(self, exchange: Exchange) -> list[int]:
        flags = self._finite_of.items()
        return [rank for rank, finite in flags if not finite[exchange.position]]

    def abandon(self) -> None:
        """Drop everything on the wire without waiting for the peers."""
        if self._posting is not None:
            # What a thread still codes lies in memory that the next round uses.
            self._posting.drop()
        self._held_back = []
        self._unmixed.clear()
        self._exchanges.clear()
        self._posted.clear()
        self._headers = self._flags = []

    def _exchange(self, bucket: Bucket, starts: Mapping[Tensor, Tensor]) -> Exchange:
        """Pack a bucket in the form in which it travels."""
        position = len(self._exchanges)
        tag, mean_tag = _FIRST_BUCKET_TAG + position, _FIRST_MEAN_TAG + position
        if self._size == 1:
            return KeptStart(self._wire, bucket, starts, position)
        codec = self._codec_of(bucket)
        if codec is not None and self._size == 2:
            return CodedPair(self._wire, bucket, codec, starts, position, tag)
        if codec is not None:
            return CodedGroup(self._wire, bucket, codec, starts, position, (tag, mean_tag))
        if self._sums:
            return PlainGroup(self._wire, bucket, starts, position)
        return PlainPair(self._wire, bucket, starts, position, tag)

    def _codec_of(self, bucket: Bucket) -> Codec | None:
        """The codec with which a bucket travels; None for its values as they are."""
        if self._edge is None or self.plan.kind is Kind.AVERAGE:
            return None
        if self._size > 2 and not self._transport.sends_alone(bucket.wire_device):
            return None
        return bucket.codec(self._size)

    def _nonfinite_ranks(self) -> list[int]:
        places = sorted(rank for rank, finite in self._finite_of.items() if not all(finite))
        return [self._transport.members[place] for place in places]

    def _warn_of(self, bad: list[int]) -> None:
        if bad and self._nonfinite.on_nonfinite == "skip":
            logger.warning(
                "rank {} round {}: the parameters of ranks {} are not finite and are left out",
                *(self._transport.initial_rank, self._header.round, bad),
            )

    def _send_control(self, numbers: Sequence[float], tag: int) -> list[PendingMessage]:
        if self._size == 1 or self._failure:
            return []
        # Exact for counts below 2**53.
        message = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        try:
            return self._transport.send_control(message, self._group.ranks, tag)
        except WireError as error:
            self._failure, self._failed_bucket = error, max(0, len(self._exchanges) - 1)
            return []

    def _receive_control(
        self, pending: list[PendingMessage], bucket: int
    ) -> dict[int, list[float]]:
        for each in pending:
            self._wait(each.works, bucket, each.suspects)
        return {each.rank: each.message.tolist() for each in pending}

    def _compare(self, message: list[float], rank: int) -> None:
        try:
            transport = self._transport
            self._header.check(
                message, transport.members[rank], transport.initial_rank, self._same_rate
            )
        except CallOrderError as error:
            # This rank takes no further part: the others must notice, or they would wait for it.
            self.abandon()
            self._transport.disagree(error)
            raise

    def start_of(self, bucket: Bucket) -> Flat | None:
        """The bucket's parameters when the round was launched, if they may have changed since."""
        self._wait_for_posting()
        exchange = self._exchanges.get(bucket)
        return exchange.start if exchange is not None and self._freezes else None

    def arrives(self, other: Arrival) -> bool:
        """Wait until the round has arrived or the other arrival is over; whether it has arrived.

        Raises:
            PeerError: the data of a peer did not arrive.
        """
        if self._arrival is None:
            return True
        self._wait_for_arrival(self._arrival, other)
        return self._arrival.is_over

    def _wait_for_posting(self) -> None:
        """Wait until everything is on the wire.

        Raises:
            PeerError: that took too long, or a peer was lost.
            Exception: what has failed on the thread, unless that was the wire: an error of this
                rank, as if it had posted here.
        """
        if self._posting is None or self._posting.ended_well:
            return
        try:
            self._transport.wait_for_any(self._posting)
        except WireError as error:
            raise self._lost(0, self._peers, error.silent) from error
        self._posting.future.result()

    def _wait_for_arrival(self, ongoing: Arrival, other: Ongoing | None = None) -> None:
        try:
            self._transport.finish(ongoing, other)
        except WireError as error:
            lost = _Wait([], 0, self._peers)
            if self._watched:
                # The last work may have ended since the wait was given up.
                lost = self._watched[min(ongoing.finished, len(self._watched) - 1)]
            raise self._lost(lost.bucket, lost.suspects, error.silent) from error

    def _wait(
        self,
        works: list[Waitable],
        bucket: int,
        suspects: tuple[int, ...],
        on_gpu: bool = False,
    ) -> None:
        try:
            # Another stream may wait again for those of a GPU.
            self._transport.wait(works[:] if on_gpu else works)
        except WireError as error:
            raise self._lost(bucket, suspects, error.silent) from error

    def _lost(
        self, bucket: int, suspects: tuple[int, ...], silent: bool
    ) -> PeerError | CallOrderError:
        """The error of a round whose bucket did not arrive."""
        self.abandon()
        loss = self._transport.lose(suspects, silent)
        if loss.error.startswith(CallOrderError.__name__):
            # That rank closed its connections before this one had read its header.
            return CallOrderError(f"rank {self._transport.initial_rank}: {loss.error}")
        group = tuple(self._transport.members[rank] for rank in self._group.ranks)
        return PeerError(
            f"rank {self._transport.initial_rank}: lost {loss} in round {self._header.round}, "
            f"bucket {bucket}, group {group} of {self._topology!r}; {loss.advice}. The parameters "
            f"are as they were before this round was mixed: restart from a checkpoint, or let the "
            f"others go on with elastic=Elastic()",
            rank=loss.ranks[0] if len(loss.ranks) == 1 else None,
            round=self._header.round,
            bucket=bucket,
        )
