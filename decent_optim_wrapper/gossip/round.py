"""One round on the wire: posted by bucket, received as a whole, mixed by bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from decent_optim_wrapper.comm.waiting import Arrival, Expected, PendingMessage
from decent_optim_wrapper.errors import CallOrderError, PeerError
from decent_optim_wrapper.gossip.header import RoundHeader
from decent_optim_wrapper.gossip.schedule import Pacing, RoundKind, RoundPlan
from decent_optim_wrapper.gossip.session import Session
from decent_optim_wrapper.gossip.timing import Meter
from decent_optim_wrapper.wire.bucket import Bucket, changed_since
from decent_optim_wrapper.wire.exchange import HEADER_TAG, Exchange, PlainExchange, Wire
from decent_optim_wrapper.wire.messages import FiniteFlags, Messages, exchange_of
from decent_optim_wrapper.wire.nonfinite import NonFinitePolicy
from decent_optim_wrapper.wire.storage import Flat
from decent_optim_wrapper.wire.sum_order import GIVEN_ORDER


class RoundPolicy(NamedTuple):
    """The settings that all rounds of a wrapper share.

    Args:
        pacing: when a round is mixed.
        nonfinite: what happens to values that are not finite.
        meter: counts every wait, every copy and all bytes.
        in_backward_order: whether buckets are listed in the order in which a backward pass
            completes them, and a forward pass waits for them in reverse.
    """

    pacing: Pacing
    nonfinite: NonFinitePolicy
    meter: Meter
    in_backward_order: bool = False


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
        self.plan = plan
        # Number of steps since its launch.
        self.age = 0
        # The order in which buckets are posted.
        reorders = policy.in_backward_order and group.size > 2
        self.order = session.sum_order.of(group.ranks) if reorders else GIVEN_ORDER
        self._header = header._replace(
            coded_rounds=0 if references is None else references.coded_rounds,
            sums_first=self.order.first,
            summed=self.order.summed,
        )
        self._transport = transport
        self._policy = policy
        self._wire = Wire(
            transport=transport,
            group=group,
            peers=tuple(filter(transport.rank.__ne__, group.ranks)),
            round=header.round,
            is_average=plan.kind is RoundKind.AVERAGE,
            references=references,
            needs_snapshot=policy.pacing.needs_snapshot,
            nonfinite=policy.nonfinite,
        )
        self.messages = Messages(self._wire, session.topology)
        self.flags = FiniteFlags(self._wire)
        # The thread that waits for it, if there is one.
        self._watch: Arrival | None = None
        # The mixing rate of all ranks of the group.
        self._rate = plan.mixing_rate
        self._headers: list[PendingMessage] = []
        # The buckets of parameters that are not mixed yet, with the buckets attached to each.
        self.unmixed: dict[Bucket, tuple[Bucket, ...]] = {}
        # Whether any bucket is mixed.
        self.mixing_has_begun = False
        self._exchanges: dict[Bucket, Exchange] = {}
        self._moves_references = False
        # The stamps of the buckets whose parameters must not be changed by hand meanwhile, and of
        # those whose parameters may be.
        self._stamps: dict[Bucket, tuple[int, ...]] = {}
        self._watched: dict[Bucket, tuple[PlainExchange, tuple[int, ...]]] = {}
        mixes_now = policy.pacing.mixes_early or policy.pacing.mixes_in_step(header.round)
        self._watches = not (mixes_now or policy.pacing.needs_snapshot)

    def open(self, age: int) -> Round:
        """Begin to exchange headers with the group.

        Args:
            age: number of steps since the launch, if it was launched by an earlier step.
        """
        self.age = age
        # Before the buckets: larger groups sum, and would add up whatever comes first.
        self._headers = self.messages.send(self._header, HEADER_TAG, 0)
        return self

    def count_step(self) -> None:
        """Count a step since the launch."""
        self.age += 1

    def end_backward(self) -> None:
        """Count the all-reduces that are done now, at the end of the backward pass."""
        self.order.note(each.works for each in self._exchanges.values())

    def post(
        self,
        bucket: Bucket,
        attached: Sequence[Bucket] = (),
        snapshot: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        """Pack a bucket and start its exchange; a group of one rank exchanges nothing.

        Args:
            bucket: the bucket.
            attached: buckets that are exchanged and mixed together with it.
            snapshot: values that are sent in place of the present ones, by member; None for none.
        """
        self.unmixed[bucket] = others = tuple(attached)
        self._post(bucket, snapshot or {})
        for each in others:
            self._post(each, {})

    def _post(self, bucket: Bucket, snapshot: Mapping[Tensor, Tensor]) -> None:
        keeps = self._wire.needs_snapshot
        if not bucket.numel or self.messages.failure or (self._wire.group.size == 1 and not keeps):
            return
        meter = self._policy.meter
        with meter.launch:
            exchange = exchange_of(self._wire, bucket, len(self._exchanges))
            exchange.pack(snapshot)
            self._exchanges[bucket] = exchange
            self._moves_references |= exchange.uses_reference
            is_own = bucket in self.unmixed
            early = self._policy.pacing.mixes_early and is_own and not bucket.is_sharded
            if not keeps and (early or bucket.is_sent_in_place):
                self._stamps[bucket] = bucket.stamps
            elif self._watches and is_own and isinstance(exchange, PlainExchange):
                if bucket.changes_in_flight is not False:
                    exchange.keep_sent()
                self._watched[bucket] = exchange, bucket.stamps
            meter.count_bytes(exchange.bytes_sent)
            self.messages.run(exchange.start, exchange)
            if self._policy.pacing.mixes_early and not exchange.has_own_flag:
                flag = partial(self.flags.send, [exchange], self.messages)
                self.messages.run(flag, exchange)

    def seal(self) -> None:
        """Send the group the flags of all buckets, once the last one is posted."""
        others = [each for each in self._exchanges.values() if not each.has_own_flag]
        # If the pacing mixes early, each of them has sent its flag already.
        sends = bool(others) and not self._policy.pacing.mixes_early
        self.messages.seal(partial(self.flags.send, others, self.messages) if sends else None)

    def watch(self) -> None:
        """Begin to wait on a thread, once the round is sealed."""
        headers, thread = self._headers, self.messages.thread
        # Exchanges that a thread still posts are not known yet.
        posted = [] if thread else self._expected()

        def further() -> list[Expected]:
            if any(each.message[0].item() != self._header.call for each in headers):
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
        peers = self._wire.peers
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
        if self._watch is None:
            return True
        self.messages.wait_for(self._watch, other)
        return self._watch.future.done()

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
        messages.wait_until_sent()
        if self._watch is not None:
            messages.wait_for(self._watch)
        self._receive_headers()
        exchanges = self._exchanges.values() if bucket is None else self._with_attached(bucket)
        for exchange in exchanges:
            messages.wait(exchange.works, exchange.position, self._wire.peers, exchange.on_gpu)
        if bucket is None:
            self._stamps.clear()
        else:
            self._stamps.pop(bucket, None)
        if self._moves_references and self._wire.references is not None:
            # Once, as soon as a part of the round has arrived.
            self._wire.references.count_round()
            self._moves_references = False
        for exchange in exchanges:
            if exchange.has_own_flag:
                self.flags.read_pair(exchange)
            elif flags := self.flags.of(exchange):
                for message in flags.pending:
                    messages.wait(message.works, flags.positions[-1], (message.rank,))
                self.flags.read(flags)

    def _with_attached(self, bucket: Bucket) -> list[Exchange]:
        """The exchanges of a bucket that is not mixed yet, and of the buckets attached to it."""
        found = (self._exchanges.get(each) for each in (bucket, *self.unmixed[bucket]))
        return [each for each in found if each is not None]

    def _receive_headers(self) -> None:
        for each in self._headers:
            self.messages.wait(each.works, 0, (each.rank,))
        for each in self._headers:
            message = each.message.tolist()
            if message == [*self._header]:
                continue
            try:
                ranks = self._transport.members[each.rank], self._transport.initial_rank
                self._header.check(message, *ranks, self._policy.pacing.synchronous)
            except CallOrderError as error:
                # This rank leaves the round, and the others must notice, or they would wait for it.
                self._transport.fail(error)
                raise
            self._rate = min(self._rate, RoundHeader(*message).mixing_rate)
        if self.order is not GIVEN_ORDER and self._headers:
            self.order.agree(each.message[-1].item() for each in self._headers)
        self._headers = []

    @property
    def is_outdated(self) -> bool:
        """True if parameters have changed since the launch, as far as that is noticed."""
        watched = {bucket: stamps for bucket, (_, stamps) in self._watched.items()}
        return any(b.stamps != stamps for b, stamps in (self._stamps | watched).items())

    def changed_in_flight(self) -> Sequence[Tensor]:
        """Note what others have changed since the launch; return what must not have been."""
        changed: list[Tensor] = []
        for bucket, stamps in self._stamps.items():
            changed += changed_since(stamps, bucket)
        for bucket, (exchange, stamps) in self._watched.items():
            if bucket.stamps != stamps or bucket.changes_in_flight is None:
                changed += exchange.note_changes(stamps)
        return changed

    def watch_again(self) -> None:
        """Do not take for a change that an average was in place since the last check."""
        self._watched = {b: (exchange, b.stamps) for b, (exchange, _) in self._watched.items()}

    def mix(self, bucket: Bucket) -> None:
        """Mix a posted bucket and the buckets attached to it, once."""
        self.mixing_has_begun = True
        for each in (bucket, *self.unmixed.pop(bucket)):
            exchange = self._exchanges.get(each)
            if exchange is not None:
                with self._policy.meter.mix:
                    self._mix(exchange, self._rate * each.rate)

    def _mix(self, exchange: Exchange, rate: float) -> None:
        if exchange.on_gpu:
            flags = self.flags.of(exchange)
            checked = None if flags is None else flags.on_gpu
            works = [*exchange.works, *(checked.works if checked else ())]
            # The stream that mixes may be another one than the stream that has received.
            self.messages.wait(works, exchange.position, self._wire.peers)
            if checked:
                exchange.apply_usable(rate, checked.usable(exchange))
                return
        present: tuple[int, ...] | list[int] = self._wire.group.ranks
        if self.flags.refused:
            left_out = self.flags.refused.get(exchange.position, ())
            present = [rank for rank in present if rank not in left_out]
        if present:
            exchange.apply(rate, present)

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
        refused = self.flags.refused
        return any(each.position in refused for each in self._with_attached(bucket))

    def abandon(self) -> None:
        """Drop everything on the wire without waiting for the peers."""
        self.messages.drop()
        self.unmixed.clear()
        self._exchanges.clear()
        self._stamps.clear()
        self._watched.clear()
        self._headers = []
        self.flags.drop()
