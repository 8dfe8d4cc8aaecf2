"""One round on the wire: posted bucket by bucket, received as a whole, mixed bucket by bucket."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Literal, NamedTuple

import torch
from loguru import logger
from torch import Tensor

from decent_optim_wrapper.comm.transport import (
    Arrival,
    Awaited,
    PendingMessage,
    Transport,
    Waitable,
    WireError,
)
from decent_optim_wrapper.errors import CallOrderError, NonFiniteError, PeerError
from decent_optim_wrapper.gossip.bucket import Bucket, is_finite
from decent_optim_wrapper.gossip.coded import CodedExchange, CodedGroup, CodedPair, Wire
from decent_optim_wrapper.gossip.identical_ranks import IdenticalRanks
from decent_optim_wrapper.gossip.schedule import Kind, RoundPlan, Session
from decent_optim_wrapper.gossip.storage import Flat
from decent_optim_wrapper.gossip.timing import Meter

# Tags of an exchange: two for small messages, then one for each bucket.
_HEADER_TAG, _FLAGS_TAG, _FIRST_BUCKET_TAG = 0, 1, 2
# For each bucket again: the means of coded buckets.
_FIRST_MEAN_TAG = 1 << 18


OnNonfinite = Literal["raise", "skip", "ignore"]


class Call(IntEnum):
    """The collective methods."""

    STEP = 1
    GLOBAL_AVG = 2
    CONSENSUS_DISTANCE = 3
    REGROUP = 4
    KEEP_AVERAGE = 5
    SYNCHRONIZE = 6
    ALL_GATHER = 7
    STOP_TRACKING = 8

    def __str__(self) -> str:
        if self is Call.REGROUP:
            return "add_param_group() or rebuild_buckets()"
        if self is Call.STOP_TRACKING:
            return "gradient_tracking = False"
        if self is Call.KEEP_AVERAGE:
            return "step() after an average"
        return f"{self.name.lower()}()"


class Header(NamedTuple):
    """What a rank is about to do.

    Args:
        call: the method that the rank is in.
        round: the number of the round that the method launches, or of the next one.
        mixing_rate: that of the round; if it differed between two ranks, their mean would drift.
        meetings: how many rounds the group has coded as differences to its references.
    """

    call: Call
    round: int
    mixing_rate: float
    meetings: int = 0

    def encode(self) -> Tensor:
        """The message: int64 of shape (4,), with the bits of the rate."""
        numbers = [self.call, self.round, _bits(self.mixing_rate), self.meetings]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def check(self, message: list[int], rank: int, own_rank: int, auto: bool = False) -> None:
        """Compare with the message of another rank.

        Args:
            message: of the other rank.
            rank: the other rank.
            own_rank: this rank.
            auto: whether ranks may be at different steps, and so have different mixing rates: the
                group mixes with the lowest.

        Raises:
            CallOrderError: the rank is in another method or round, or has another rate or other
                references.
        """
        call, round, rate, meetings = message
        if (call, round) != (self.call, self.round):
            known = {int(call): str(call) for call in Call}
            theirs = f"{known.get(call, 'something unknown')} at round {round}"
            raise CallOrderError(
                f"rank {own_rank}: expected rank {rank} in {self.call} at round {self.round}, as "
                f"here, but it is in {theirs}; call the same methods in the same order on every "
                f"rank, and step() equally often (torch.distributed.algorithms.Join for uneven "
                f"data). Is one of the calls inside an `if rank == 0` branch?"
            )
        if rate != _bits(self.mixing_rate) and not auto:
            raise CallOrderError(
                f"rank {own_rank}: expected rank {rank} to mix round {self.round} with "
                f"mixing_rate={self.mixing_rate}, as here, but it has {_float(rate)}; set the same "
                f"rate on every rank before the same step()"
            )
        if meetings != self.meetings:
            raise CallOrderError(
                f"rank {own_rank}: expected rank {rank} to share the reference of {self.meetings} "
                f"coded rounds, as here, but it has that of {meetings}, and would decode other "
                f"values than are sent; load checkpoints of the same step on all ranks, or on none"
            )


class Rules(NamedTuple):
    """What every round checks.

    Args:
        on_nonfinite: what happens to parameters that are not finite: "raise", "skip" or "ignore".
        identical: notices ranks that stay the same.
    """

    on_nonfinite: OnNonfinite
    identical: IdenticalRanks

    @property
    def checks(self) -> bool:
        """Whether parameters are checked before they are mixed."""
        return self.on_nonfinite != "ignore"

    def for_transport(self, transport: Transport) -> Rules:
        """The rules that this transport allows: a check must be reported to the other ranks."""
        if not self.checks or transport.has_control:
            return self
        logger.warning(
            'rank {}: on_nonfinite needs a CPU backend in the process group ("cpu:gloo,cuda:nccl")'
            "; parameters are not checked",
            transport.initial_rank,
        )
        return self._replace(on_nonfinite="ignore")


class _Exchange(NamedTuple):
    """A bucket whose parameters are on the wire, and how to mix in what arrives.

    x <- x + mixing_rate * weight * (arriving - start), where start is x, unless x was rounded on
    the wire or may have changed since.
    """

    position: int
    works: list[Waitable]
    arriving: Flat
    weight: float
    sent: Flat | None = None
    start: Flat | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether the works belong to a GPU."""
        return self.arriving.data.is_cuda


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
        rules: what is checked.
        meter: counts every wait, every copy and all bytes.
    """

    def __init__(
        self, header: Header, plan: RoundPlan, session: Session, rules: Rules, meter: Meter
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
        self._rules = rules
        self._meter = meter
        # An exact average is the same on all ranks, even on two, and is not rounded: it is a sum.
        self._sums = self._size > 2 or plan.kind is Kind.AVERAGE
        self._unmixed: list[Bucket] = []
        self._behind: dict[Bucket, tuple[Bucket, ...]] = {}
        self._exchanges: dict[Bucket, _Exchange | CodedExchange] = {}
        self._moves_references = False
        # 1 for each bucket sent with finite values, else 0; then the same for every rank.
        self._finite: list[int] = []
        self._finite_of: dict[int, list[int]] = {}
        # Whether the parameters may change before they are mixed.
        self._auto, self._freezes = session.schedule.cadence.auto, session.schedule.cadence.freezes
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
        self._headers = self._send_control(self._header.encode(), _HEADER_TAG)
        self._flags: list[PendingMessage] = []

    @property
    def unmixed(self) -> list[Bucket]:
        """The buckets that were posted and are not mixed yet."""
        return list(self._unmixed)

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
            try:
                self._exchanges[bucket] = self._launch(bucket, starts)
                if not self._freezes:
                    self._posted += bucket.versions()
            except WireError as error:
                self._failure, self._failed_bucket = error, len(self._exchanges)

    def seal(self) -> None:
        """Send the group which buckets had finite values, once all are posted."""
        if self._exchanges and self._rules.checks and not self._failure:
            self._flags = self._send_control(torch.tensor(self._finite, device="cpu"), _FLAGS_TAG)

    def watch(self) -> None:
        """Begin to wait on a thread, once the round is sealed."""
        waits = [_Wait(each.works, 0, each.suspects) for each in self._headers]
        for index, exchange in enumerate(self._exchanges.values()):
            waits.append(_Wait(exchange.works, index, self._peers, exchange.on_gpu))
        last = max(0, len(self._exchanges) - 1)
        waits += [_Wait(each.works, last, each.suspects) for each in self._flags]
        self._watched = [each for each in waits for _ in each.works]
        awaited = [Awaited(work, each.on_gpu) for each in waits for work in each.works]
        self._arrival = self._transport.watch(awaited)
        for each in waits:
            # Nobody else waits for them: a second wait for a work of gloo would last forever.
            if not each.on_gpu:
                each.works.clear()

    @property
    def has_arrived(self) -> bool:
        """Whether nothing is left to wait for, as far as a thread has watched."""
        return self._arrival is not None and self._arrival.is_over

    def receive(self) -> None:
        """Wait until everything has arrived; nothing is mixed. A second call returns at once.

        Raises:
            PeerError: the data of a peer did not arrive.
            CallOrderError: a peer is in another method or round.
        """
        with self._meter.wait:
            if self._failure:
                raise self._lost(
                    self._failed_bucket, self._peers, self._failure.silent
                ) from self._failure
            if self._arrival is not None:
                self._wait_for_arrival(self._arrival)
            for rank, message in self._receive_control(self._headers, 0).items():
                self._compare(message, rank)
                self._rate = min(self._rate, rate_of(message))
            self._headers = []
            for index, exchange in enumerate(self._exchanges.values()):
                self._wait(exchange.works, index, self._peers)
            self._posted.clear()
            if self._moves_references and self._edge is not None:
                # Not when they are mixed: some ranks begin the next round before that, and say so.
                self._edge.meetings += 1
                self._moves_references = False
            if self._flags:
                self._finite_of = self._receive_control(self._flags, len(self._exchanges) - 1)
                self._finite_of[self._transport.rank] = self._finite
                self._flags = []
                self._warn_of_those_left_out()

    def check_finite(self) -> None:
        """Check that what has arrived may be mixed.

        Raises:
            NonFiniteError: parameters are not finite, and the rules do not allow it; at every call.
        """
        bad = self._nonfinite_ranks()
        if bad and self._rules.on_nonfinite == "raise":
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
                    flags = self._finite_of.items()
                    left_out = [rank for rank, finite in flags if not finite[exchange.position]]
                    if len(left_out) < self._size:
                        self._mix(each, exchange, left_out)
        if not self._unmixed and self._rules.identical.rounds_left:
            self._rules.identical.end_round()

    def _mix(
        self, bucket: Bucket, exchange: _Exchange | CodedExchange, left_out: list[int]
    ) -> None:
        if isinstance(exchange, CodedExchange):
            self._mix_coded(bucket, exchange, left_out)
            return
        if self._sums:
            exchange.arriving.data.div_(self._size - len(left_out))
        if self._watches_for_identical and not left_out:
            self._look(bucket, exchange)
        weight = exchange.weight * self._rate * bucket.rate
        if self._transport.rank in left_out:
            bucket.unpack_(exchange.arriving)
        elif (left_out and not self._sums) or self._size == 1:
            return
        elif exchange.start is None:
            bucket.mix_(exchange.arriving, weight)
        else:
            bucket.shift_(exchange.arriving, exchange.start, weight)

    def _mix_coded(self, bucket: Bucket, exchange: CodedExchange, left_out: list[int]) -> None:
        if self._watches_for_identical and not left_out and exchange.tells_equal:
            values = bucket.pack(bucket.new_flat()).data
            self._rules.identical.note(exchange.are_equal, values, bucket.wire_dtype)
        takes_part = self._transport.rank not in left_out
        exchange.mix(self._rate * bucket.rate, self._size - len(left_out), takes_part)

    @property
    def _watches_for_identical(self) -> bool:
        return self._rules.identical.rounds_left > 0 and self._size > 1

    def abandon(self) -> None:
        """Drop everything on the wire without waiting for it."""
        self._unmixed.clear()
        self._exchanges.clear()
        self._posted.clear()
        self._headers = self._flags = []

    def _look(self, bucket: Bucket, exchange: _Exchange) -> None:
        arriving = exchange.arriving.data
        # The sum has overwritten what was sent, which is still in the bucket itself.
        sent = exchange.sent or bucket.pack(bucket.new_flat(arriving.device, arriving.dtype))
        self._rules.identical.compare(sent.data, arriving, bucket.wire_dtype, self._size)

    def _launch(self, bucket: Bucket, starts: Mapping[Tensor, Tensor]) -> _Exchange | CodedExchange:
        if self._size == 1:
            return self._keep_start(bucket, starts)
        coded = self._post_coded(bucket, starts)
        if coded is not None:
            return coded
        return (self._post_group if self._sums else self._post_pair)(bucket, starts)

    def _post_coded(self, bucket: Bucket, starts: Mapping[Tensor, Tensor]) -> CodedExchange | None:
        """Start the exchange of codes; None if the bucket travels in another way."""
        if bucket.codec is None or self._edge is None or self.plan.kind is Kind.AVERAGE:
            return None
        alone = self._transport.sends_alone(bucket.wire_device)
        if not (bucket.codes_pairs if self._size == 2 else alone):
            return None
        skips = self._rules.on_nonfinite == "skip"
        wire = Wire(self._transport, self._group, self._edge, self._freezes, zeros_bad=skips)
        position = len(self._exchanges)
        tag, mean_tag = _FIRST_BUCKET_TAG + position, _FIRST_MEAN_TAG + position
        exchange: CodedExchange
        if self._size == 2:
            exchange = CodedPair(wire, bucket, bucket.codec, starts, position, tag)
        else:
            tags = (tag, mean_tag)
            exchange = CodedGroup(wire, bucket, bucket.codec, starts, position, tags)
        self._finite.append(int(not self._rules.checks or exchange.finite))
        self._meter.bytes_sent += exchange.bytes_sent
        self._moves_references |= self._edge.reference(bucket) is not None
        return exchange

    def _post_pair(self, bucket: Bucket, starts: Mapping[Tensor, Tensor]) -> _Exchange:
        outgoing, incoming = bucket.pair(self._freezes)
        bucket.pack(outgoing, starts)
        self._note_finite(outgoing)
        position = len(self._exchanges)
        (peer,) = self._peers
        works = self._transport.exchange(
            outgoing.data, incoming.data, peer, _FIRST_BUCKET_TAG + position
        )
        self._meter.bytes_sent += outgoing.data.nbytes
        start = outgoing if bucket.quantised or self._freezes else None
        weight = 1 - self._group.self_weight
        return _Exchange(position, works, incoming, weight, outgoing, start)

    def _post_group(self, bucket: Bucket, starts: Mapping[Tensor, Tensor]) -> _Exchange:
        """Start the sum over the group, whose mean is mixed in.

        w x_i + (1-w)/(m-1) * sum of the others  =  x_i + m(1-w)/(m-1) * (mean - x_i)
        """
        size = self._size
        flat, *copies = bucket.summing(1 + self._freezes)
        bucket.pack(flat, starts)
        # The sum overwrites what is sent.
        start = copies[0] if copies else None
        if start is not None:
            start.data.copy_(flat.data)
        if not self._note_finite(flat) and self._rules.on_nonfinite == "skip":
            flat.data.zero_()
        works = self._transport.all_reduce(flat.data, self._group.ranks)
        self._meter.bytes_sent += int(self._group.copies_sent * flat.data.nbytes)
        weight = size * (1 - self._group.self_weight) / (size - 1)
        return _Exchange(len(self._exchanges), works, flat, weight, start, start)

    def _keep_start(self, bucket: Bucket, starts: Mapping[Tensor, Tensor]) -> _Exchange:
        """Keep the parameters of the launch: what follows the mixing begins there."""
        (start,) = bucket.summing()
        bucket.pack(start, starts)
        return _Exchange(len(self._exchanges), [], start, 0.0, start, start)

    def _note_finite(self, flat: Flat) -> bool:
        finite = not self._rules.checks or is_finite(flat.data)
        self._finite.append(int(finite))
        return finite

    def _nonfinite_ranks(self) -> list[int]:
        places = sorted(rank for rank, finite in self._finite_of.items() if not all(finite))
        return [self._transport.members[place] for place in places]

    def _warn_of_those_left_out(self) -> None:
        bad = self._nonfinite_ranks()
        if bad and self._rules.on_nonfinite == "skip":
            logger.warning(
                "rank {} round {}: the parameters of ranks {} are not finite and are left out",
                *(self._transport.initial_rank, self._header.round, bad),
            )

    def _send_control(self, message: Tensor, tag: int) -> list[PendingMessage]:
        if self._size == 1 or self._failure or not self._transport.has_control:
            return []
        try:
            return self._transport.send_control(message, self._group.ranks, tag)
        except WireError as error:
            self._failure, self._failed_bucket = error, max(0, len(self._exchanges) - 1)
            return []

    def _receive_control(self, pending: list[PendingMessage], bucket: int) -> dict[int, list[int]]:
        for each in pending:
            self._wait(each.works, bucket, each.suspects)
        return {each.rank: each.message.tolist() for each in pending}

    def _compare(self, message: list[int], rank: int) -> None:
        try:
            transport = self._transport
            self._header.check(message, transport.members[rank], transport.initial_rank, self._auto)
        except CallOrderError as error:
            # This rank takes no further part: the others must notice, or they would wait for it.
            self.abandon()
            self._transport.disagree(error)
            raise

    def start_of(self, bucket: Bucket) -> Flat | None:
        """The bucket's parameters when the round was launched, if they may have changed since."""
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

    def _wait_for_arrival(self, arrival: Arrival, other: Arrival | None = None) -> None:
        try:
            self._transport.finish(arrival, other)
        except WireError as error:
            # The last work may have ended since the wait was given up.
            lost = self._watched[min(arrival.finished, len(self._watched) - 1)]
            raise self._lost(lost.bucket, lost.suspects, error.silent) from error

    def _wait(self, works: list[Waitable], bucket: int, suspects: tuple[int, ...]) -> None:
        try:
            self._transport.wait(works)
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
            f"bucket {bucket}, group {group} of {self._topology!r}; look there for the first "
            f"error. The parameters are as they were before this round was mixed: restart from a "
            f"checkpoint, or let the others go on with elastic=Elastic()",
            rank=loss.ranks[0] if len(loss.ranks) == 1 else None,
            round=self._header.round,
            bucket=bucket,
        )


def check_calls(own: Call, calls: dict[int, list[int]], transport: Transport) -> None:
    """Check that all ranks are in the same method.

    Args:
        own: the method of this rank.
        calls: those of the others, by position among the members.
        transport: connects the ranks.

    Raises:
        CallOrderError: on all ranks, if one is in another method.
    """
    others = {transport.members[rank]: Call(call) for rank, (call,) in calls.items() if call != own}
    if others:
        error = CallOrderError(
            f"rank {transport.initial_rank}: expected all ranks in {own}, as here, but "
            + ", ".join(f"rank {rank} is in {call}" for rank, call in others.items())
            + "; call the same methods in the same order and equally often on every rank, whatever "
            "the numbers of their steps. Is one of the calls inside an `if rank == 0` branch?"
        )
        transport.disagree(error)
        raise error


def nonfinite_error(
    bad: list[int], own_rank: int, where: str, what: str = "parameters"
) -> NonFiniteError:
    """The error on every rank that would have mixed these values in."""
    return NonFiniteError(
        f"rank {own_rank}: expected finite {what} in {where}, but those of ranks {bad} hold "
        f"NaN or infinity, or more than comm_dtype can; none of them were mixed. Look for the "
        f"overflow there (learning rate, loss scale, data), or leave such ranks out of a round "
        f'with on_nonfinite="skip"',
        bad,
    )


def rate_of(message: list[int]) -> float:
    """The mixing rate in a header."""
    return _float(message[2])


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
