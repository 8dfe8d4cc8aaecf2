"""One round on the wire: posted by bucket, received as a whole or by bucket, mixed by bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

from torch import Tensor

from decent_optim_wrapper.comm import tags
from decent_optim_wrapper.comm.waiting import Arrival, Expected, PendingMessage
from decent_optim_wrapper.errors import CallOrderError, PeerError
from decent_optim_wrapper.gossip.extension import Extensions, ReceivedBucket
from decent_optim_wrapper.gossip.header import RoundHeader
from decent_optim_wrapper.gossip.schedule import Pacing, RoundKind, RoundPlan
from decent_optim_wrapper.gossip.session import Session
from decent_optim_wrapper.gossip.timing import Meter
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.exchange import Exchange, MixMask, RoundContext
from decent_optim_wrapper.wire.messages import FiniteFlags, Messages, exchange_of
from decent_optim_wrapper.wire.nonfinite import NonFinitePolicy
from decent_optim_wrapper.wire.storage import Flat
from decent_optim_wrapper.wire.sum_order import GIVEN_ORDER, SumOrder


class RoundPolicy(NamedTuple):
    """The settings that all rounds of a wrapper share.

    Args:
        pacing: when a round is mixed.
        nonfinite: what happens to values that are not finite.
        meter: counts every wait, every copy and all bytes.
        extensions: the extensions that take part.
        in_backward_order: whether buckets are listed in the order in which a backward pass
            completes them, and a forward pass waits for them in reverse.
    """

    pacing: Pacing
    nonfinite: NonFinitePolicy
    meter: Meter
    extensions: Extensions
    in_backward_order: bool = False


class RoundState(Enum):
    """How far a round is.

    Attributes:
        LAUNCHED: announced; its buckets are posted one by one.
        RECEIVED: the headers and at least a bucket have arrived.
        MIXING: at least a bucket is mixed.
    """

    LAUNCHED = "launched"
    RECEIVED = "received"
    MIXING = "mixing"


class Round:
    """One round of one rank, from its launch to its mixing.

    Args:
        header: the method that launches it, and its number; the same on all ranks.
        plan: the ranks that mix, and the mixing rate.
        session: connects them.
        policy: the settings that all rounds share.
    """

    def __init__(
        self, header: RoundHeader, plan: RoundPlan, session: Session, policy: RoundPolicy
    ) -> None:
        group, transport = plan.group, session.transport
        references = session.references.groups.get(group.ranks)
        mixes_now = policy.pacing.mixes_early or policy.pacing.mixes_in_step(header.round)
        self.plan = plan
        self.state = RoundState.LAUNCHED
        # The order in which buckets are posted.
        self.order = GIVEN_ORDER
        if policy.in_backward_order and group.size > 2:
            self.order = session.sum_orders.setdefault(group.ranks, SumOrder())
        self._header = header._replace(
            coded_rounds=0 if references is None else references.coded_rounds,
            sums_first=self.order.first,
            summed=self.order.summed,
        )
        self._policy = policy
        self._context = RoundContext(
            transport=transport,
            group=group,
            peers=tuple(filter(transport.rank.__ne__, group.ranks)),
            number=header.round,
            is_average=plan.kind is RoundKind.AVERAGE,
            references=references,
            needs_snapshot=policy.pacing.needs_snapshot,
            may_change=not (mixes_now or policy.pacing.needs_snapshot),
            nonfinite=policy.nonfinite,
        )
        self.messages = Messages(self._context, session.topology)
        self.flags = FiniteFlags(self._context)
        # The thread that waits for it, if there is one.
        self._watch: Arrival | None = None
        # The mixing rate of all ranks of the group.
        self._rate = plan.mixing_rate
        self._headers: list[PendingMessage] = []
        # The buckets of parameters that are not mixed yet, with the buckets attached to each.
        self.unmixed: dict[Bucket, tuple[Bucket, ...]] = {}
        self._exchanges: dict[Bucket, Exchange] = {}
        # Whether any bucket moves a reference.
        self._uses_reference = False
        # The buckets whose flags are sent once all are posted.
        self._unflagged: list[Exchange] = []
        # The stamps of the buckets for which it is noticed if others change the parameters.
        self._stamps: dict[Bucket, tuple[int, ...]] = {}

    def open(self) -> Round:
        """Begin to exchange headers with the group."""
        # Before the buckets: larger groups sum, and would add up whatever comes first.
        self._headers = self.messages.send(self._header.encode(), tags.HEADER, 0)
        return self

    def end_backward(self) -> None:
        """Count the all-reduces that are done now, at the end of the backward pass."""
        if self.order is not GIVEN_ORDER:
            self.order.count(each.works for each in self._exchanges.values())

    def post(self, bucket: Bucket, snapshot: Mapping[Tensor, Tensor] | None = None) -> None:
        """Pack a bucket of parameters, and what extensions attach to it, and start the exchange.

        A group of one rank exchanges nothing.

        Args:
            bucket: the bucket.
            snapshot: values that are sent in place of the present ones, by member; None for none.
        """
        self.unmixed[bucket] = ()
        for extension in self._policy.extensions.all:
            self.unmixed[bucket] += (*extension.launch(bucket),)
        self._post(bucket, snapshot or {})
        for each in self.unmixed[bucket]:
            self._post(each, {})

    def _post(self, bucket: Bucket, snapshot: Mapping[Tensor, Tensor]) -> None:
        needs_snapshot = self._context.needs_snapshot
        is_empty = not bucket.numel or (self._context.group.size == 1 and not needs_snapshot)
        if is_empty or self.messages.failure:
            return
        meter = self._policy.meter
        with meter.launch:
            exchange = exchange_of(self._context, bucket, len(self._exchanges))
            exchange.pack(snapshot)
            self._exchanges[bucket] = exchange
            self._uses_reference |= exchange.uses_reference
            early = self._policy.pacing.mixes_early
            is_own = bucket in self.unmixed
            must_stay = bucket.is_sent_in_place or (early and is_own and not bucket.is_sharded)
            if not needs_snapshot and (must_stay or (is_own and exchange.allow_changes())):
                self._stamps[bucket] = bucket.stamps
            meter.count_bytes(exchange.bytes_sent)
            if exchange.turn is not None:
                # Before its turn: the wire is busy meanwhile. The first bucket is coded here: all
                # ranks wait for it, and the thread would share the core with this one.
                is_first = early and len(self._exchanges) == 1 and not exchange.via_cpu
                exchange.code() if is_first else self.messages.run(exchange.code, exchange)
            self.messages.run(exchange.start, exchange, exchange.turn)
            if early and not exchange.has_own_flag:
                flag = partial(self.flags.send, [exchange], self.messages)
                self.messages.run(flag, exchange)
            elif not exchange.has_own_flag:
                self._unflagged.append(exchange)

    def seal(self) -> None:
        """Send the group the flags of the buckets, once the last one is posted."""
        send = partial(self.flags.send, self._unflagged, self.messages)
        self.messages.seal(send if self._unflagged else None)

    def watch(self) -> None:
        """Begin to wait on a thread, once the round is sealed."""
        headers, thread = self._headers, self.messages.thread
        # Exchanges that a thread still posts are not known yet.
        posted = [] if thread else self._expected()

        def further() -> list[Expected]:
            if any(RoundHeader.decode(e.message).call != self._header.call for e in headers):
                # That rank sends no buckets, and `receive` raises.
                return []
            if thread is None:
                return posted
            thread.future.result()
            return self._expected()

        first = [Expected(each.works, 0, (each.rank,)) for each in headers]
        self._watch = Arrival(first, further if headers else None)

    def _expected(self) -> list[Expected]:
        """The messages that are to arrive after the headers."""
        peers = self._context.peers
        expected = [
            Expected(each.works, each.position, peers, each.on_gpu)
            for each in self._exchanges.values()
        ]
        for flags in self.flags.messages:
            last = flags.positions[-1]
            if flags.on_gpu is not None:
                expected.append(Expected(flags.on_gpu.works, last, peers, on_gpu=True))
            expected += [Expected(each.works, last, (each.rank,)) for each in flags.pending]
        return expected

    def has_arrived(self) -> bool:
        """Return whether everything has arrived, as far as a thread has watched."""
        return self._watch is not None and self._watch.future.done()

    def arrives_before(self, other: Arrival) -> bool:
        """Wait until the round or `other` has arrived; return whether the round has.

        Raises:
            PeerError: the data of a peer did not arrive.
        """
        if self._watch is not None:
            self.messages.wait_for(self._watch, other)
        return self._watch is None or self._watch.future.done()

    def receive(self, bucket: Bucket | None = None) -> None:
        """Wait until a bucket and the buckets attached to it have arrived; nothing is mixed.

        A second call returns at once. On a GPU, the stream waits and not the host.

        Args:
            bucket: the bucket; None waits for the whole round.

        Raises:
            PeerError: the data of a peer did not arrive.
            CallOrderError: a peer is in another method or round.
        """
        try:
            with self._policy.meter.wait:
                self._receive(bucket)
        except (PeerError, CallOrderError):
            self.abandon()
            raise

    def _receive(self, bucket: Bucket | None) -> None:
        messages = self.messages
        received = self._exchanges if bucket is None else self._with_attached(bucket)
        messages.wait_until_sent(() if bucket is None else received.values())
        if self._watch is not None:
            messages.wait_for(self._watch)
        if self._headers:
            self._receive_headers()
        for each, exchange in received.items():
            messages.wait(exchange.works, exchange.position, self._context.peers, exchange.on_gpu)
            if not exchange.may_change:
                self._stamps.pop(each, None)
        if self.state is RoundState.LAUNCHED:
            self.state, references = RoundState.RECEIVED, self._context.references
            if references and self._uses_reference:
                references.count_round()
        for exchange in received.values():
            if exchange.has_own_flag:
                if refused := exchange.refused():
                    self.flags.refuse(exchange, refused)
            elif flags := self.flags.of(exchange):
                for message in flags.pending:
                    messages.wait(message.works, flags.positions[-1], (message.rank,))
                self.flags.read(flags)

    def _with_attached(self, bucket: Bucket) -> dict[Bucket, Exchange]:
        """The exchanges of a bucket that is not mixed yet, and of the buckets attached to it."""
        buckets = (bucket, *self.unmixed[bucket])
        return {each: self._exchanges[each] for each in buckets if each in self._exchanges}

    def _receive_headers(self) -> None:
        for each in self._headers:
            self.messages.wait(each.works, 0, (each.rank,))
        transport = self._context.transport
        summed = self._header.summed
        for each in self._headers:
            other = RoundHeader.decode(each.message)
            if other == self._header:
                continue
            try:
                ranks = transport.members[each.rank], transport.initial_rank
                self._header.check(other, *ranks, self._policy.pacing.synchronous)
            except CallOrderError as error:
                # This rank leaves the round, and the others must notice, or they would wait for it.
                transport.report_and_close(error)
                raise
            self._rate = min(self._rate, other.mixing_rate)
            summed = min(summed, other.summed)
        if self.order is not GIVEN_ORDER:
            self.order.agree(int(summed))
        self._headers = []

    @property
    def is_outdated(self) -> bool:
        """True if parameters have changed since the launch, as far as that is noticed."""
        return [bucket.stamps for bucket in self._stamps] != [*self._stamps.values()]

    def changed_in_flight(self) -> Sequence[Tensor]:
        """Note what others have changed since the launch; return what must not have been."""
        changed: list[Tensor] = []
        for bucket, stamps in self._stamps.items():
            exchange = self._exchanges[bucket]
            is_first = exchange.may_change and bucket.changes_in_flight is None
            if is_first or bucket.stamps != stamps:
                changed += exchange.note_changes(stamps)
        return changed

    def watch_again(self) -> None:
        """Do not take for a change that an average was in place since the last check."""
        self._stamps = {bucket: bucket.stamps for bucket in self._stamps}

    def mix(self, bucket: Bucket) -> None:
        """Mix a bucket and the buckets attached to it, if they were posted and are not mixed."""
        if bucket not in self.unmixed:
            return
        extensions, kind = self._policy.extensions, self.plan.kind
        if not extensions.all:
            self.mix_tensors(bucket)
            return
        snapshot = partial(self.snapshot_of, bucket)
        with extensions.mixing(ReceivedBucket(kind=kind, bucket=bucket, snapshot=snapshot)):
            self.mix_tensors(bucket)
        if not self.unmixed:
            for extension in extensions.all:
                extension.end_round(kind)

    def mix_tensors(self, bucket: Bucket) -> None:
        """Mix as `mix` does, without telling the extensions."""
        self.state = RoundState.MIXING
        for each in (bucket, *self.unmixed.pop(bucket)):
            exchange = self._exchanges.get(each)
            if exchange is not None:
                with self._policy.meter.mix:
                    self._apply(exchange, self._rate * each.rate)

    def _apply(self, exchange: Exchange, rate: float) -> None:
        ranks: Sequence[int] = self._context.group.ranks
        mask = MixMask(ranks=ranks, present=len(ranks))
        if exchange.on_gpu:
            flags = self.flags.of(exchange)
            checked = None if flags is None else flags.on_gpu
            works = [*exchange.works, *(checked.works if checked else ())]
            # The stream that mixes may be another one than the stream that has received.
            self.messages.wait(works, exchange.position, self._context.peers)
            mask = checked.mask_of(exchange) if checked else mask
        elif left_out := self.flags.refused.get(exchange.position):
            ranks = [rank for rank in ranks if rank not in left_out]
            mask = MixMask(ranks=ranks, present=len(ranks))
        if ranks:
            exchange.apply(rate, mask)

    def snapshot_of(self, bucket: Bucket) -> Flat | None:
        """The bucket's parameters when the round was launched, if they may have changed since."""
        self.messages.wait_until_sent()
        exchange = self._exchanges.get(bucket)
        return None if exchange is None else exchange.snapshot

    def packed_of(self, bucket: Bucket) -> Flat | None:
        """The packed values of a bucket, if they are still in memory; otherwise None."""
        exchange = self._exchanges.get(bucket)
        return None if exchange is None else exchange.packed

    def refuses(self, bucket: Bucket) -> bool:
        """Return whether a bucket, or one attached to it, has values that must not be mixed."""
        return any(e.position in self.flags.refused for e in self._with_attached(bucket).values())

    def abandon(self) -> None:
        """Drop everything on the wire without waiting for the peers."""
        self.messages.abandon()
        self.unmixed.clear()
        self._exchanges.clear()
        self._unflagged.clear()
        self._stamps.clear()
        self._headers = []
        self.flags.abandon()
