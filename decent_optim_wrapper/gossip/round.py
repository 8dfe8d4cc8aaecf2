"""One round on the wire: posted bucket by bucket, received as a whole, mixed bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

from torch import Tensor

from decent_optim_wrapper.comm.waiting import (
    Arrival,
    Expected,
    PendingMessage,
    Waitable,
    WireError,
)
from decent_optim_wrapper.errors import CallOrderError, PeerError
from decent_optim_wrapper.gossip.finite_flags import FiniteFlags
from decent_optim_wrapper.gossip.header import RoundHeader
from decent_optim_wrapper.gossip.pacing import Pacing
from decent_optim_wrapper.gossip.schedule import RoundKind, RoundPlan
from decent_optim_wrapper.gossip.sender import Sender
from decent_optim_wrapper.gossip.session import Session
from decent_optim_wrapper.gossip.timing import Meter
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.exchange import Exchange, Wire
from decent_optim_wrapper.wire.nonfinite import NonFinitePolicy
from decent_optim_wrapper.wire.pack import pack
from decent_optim_wrapper.wire.storage import Flat

_HEADER_TAG = 0


class RoundPolicy(NamedTuple):
    """What the rounds of a wrapper have in common.

    Args:
        pacing: when a round is mixed.
        nonfinite: what happens to values that are not finite.
        meter: counts every wait, every copy and all bytes.
    """

    pacing: Pacing
    nonfinite: NonFinitePolicy
    meter: Meter


class Round:
    """One round of one rank, from its launch to its mixing.

    Args:
        header: the method that launches it, and its number; the same on all ranks.
        plan: the ranks that mix, and the mixing rate.
        session: connects them.
        policy: what all rounds have in common.
    """

    def __init__(
        self, header: RoundHeader, plan: RoundPlan, session: Session, policy: RoundPolicy
    ) -> None:
        group, transport = plan.group, session.transport
        references = session.references.groups.get(group.ranks)
        self.plan = plan
        self._header = header
        if references is not None:
            self._header = header._replace(coded_rounds=references.coded_rounds)
        self._topology = session.topology
        self._transport = transport
        self._policy = policy
        self._wire = Wire(
            transport=transport,
            group=group,
            peers=tuple([rank for rank in group.ranks if rank != transport.rank]),
            round=header.round,
            is_average=plan.kind is RoundKind.AVERAGE,
            references=references,
            needs_snapshot=policy.pacing.needs_snapshot,
            on_nonfinite=policy.nonfinite.on_nonfinite,
            checks=policy.nonfinite.checks,
        )
        self.sender = Sender(self._wire)
        self.flags = FiniteFlags(self._wire)
        # If a thread waits for it.
        self._watch: Arrival | None = None
        # That of all ranks of the group.
        self._rate = plan.mixing_rate
        self._headers: list[PendingMessage] = []
        # The buckets of parameters that are not mixed yet, and what travels behind each.
        self.unmixed: dict[Bucket, tuple[Bucket, ...]] = {}
        self._exchanges: dict[Bucket, Exchange] = {}
        self._moves_references = False
        # Parameters whose own memory is being sent, with their version counters.
        self._sent_in_place: list[tuple[Tensor, int]] = []

    def open(self) -> Round:
        """Tell the group what this rank is about to do."""
        # Before the buckets: a group that sums would add up whatever comes first.
        self._headers = self.sender.send(self._header, _HEADER_TAG, 0)
        return self

    def post(
        self,
        bucket: Bucket,
        attached: Iterable[Bucket] = (),
        snapshot: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        """Pack a bucket and start its exchange; a group of one rank exchanges nothing.

        Args:
            bucket: the bucket.
            attached: buckets that are exchanged and mixed together with it.
            snapshot: what is sent in place of its members' values, by member; None for nothing.
        """
        self.unmixed[bucket] = others = tuple(attached)
        self._post(bucket, snapshot or {})
        for each in others:
            self._post(each, {})

    def _post(self, bucket: Bucket, snapshot: Mapping[Tensor, Tensor]) -> None:
        keeps = self._wire.needs_snapshot
        if not bucket.numel or self.sender.failure or (self._wire.group.size == 1 and not keeps):
            return
        meter = self._policy.meter
        with meter.launch:
            exchange = pack(self._wire, bucket, snapshot, len(self._exchanges))
            self._exchanges[bucket] = exchange
            self._moves_references |= exchange.uses_reference
            if not keeps:
                self._sent_in_place += bucket.versions()
            meter.count_bytes(exchange.bytes_sent)
            self.sender.post(exchange)

    def seal(self) -> None:
        """Post what was deferred, and then tell the group which buckets had finite values."""
        self.sender.seal(partial(self.flags.send, self._exchanges.values(), self.sender))

    def watch(self) -> None:
        """Begin to wait on a thread, once the round is sealed."""
        headers, thread = self._headers, self.sender.thread
        # Those of a thread that still posts are not known yet.
        posted = [] if thread else self._expected()

        def further() -> list[Expected]:
            if any(int(each.message[0]) != self._header.call for each in headers):
                # `receive` raises: that rank sends no buckets.
                return []
            if thread is None:
                return posted
            thread.future.result()
            return self._expected()

        first = [Expected(each.works, 0, each.suspects) for each in headers]
        self._watch = Arrival(first, further if headers else None)

    def _expected(self) -> list[Expected]:
        """What is to arrive behind the headers."""
        peers = self._wire.peers
        expected: list[Expected] = []
        expected += [
            Expected(each.works, each.position, peers, each.on_gpu)
            for each in self._exchanges.values()
        ]
        last = max(0, len(self._exchanges) - 1)
        if self.flags.on_gpu is not None:
            expected.append(Expected(self.flags.on_gpu.works, last, peers, on_gpu=True))
        expected += [Expected(each.works, last, each.suspects) for each in self.flags.pending]
        return expected

    def has_arrived(self) -> bool:
        """Whether nothing is left to wait for, as far as a thread has watched."""
        return self._watch is not None and self._watch.future.done()

    def receive(self) -> None:
        """Wait until everything has arrived; nothing is mixed. A second call returns at once.

        What arrives on a GPU is waited for by its stream.

        Raises:
            PeerError: the data of a peer did not arrive.
            CallOrderError: a peer is in another method or round.
        """
        with self._policy.meter.wait:
            if self.sender.thread:
                self._wait_for_sender()
            if failure := self.sender.failure:
                peers = self._wire.peers
                raise self._lost(self.sender.failed_bucket, peers, failure.silent) from failure
            if self._watch is not None:
                self._wait_for(self._watch)
            self._receive_headers()
            for exchange in self._exchanges.values():
                self._wait(exchange.works, exchange.position, self._wire.peers, exchange.on_gpu)
            self._sent_in_place.clear()
            if self._moves_references and self._wire.references is not None:
                self._wire.references.count_round()
                self._moves_references = False
            if self.flags.pending:
                for message in self.flags.pending:
                    self._wait(message.works, len(self._exchanges) - 1, message.suspects)
                self.flags.read()

    def _receive_headers(self) -> None:
        for each in self._headers:
            self._wait(each.works, 0, each.suspects)
        for each in self._headers:
            message = each.message.tolist()
            if message != [*self._header]:
                self._compare(message, each.rank)
                _, _, rate, _ = message
                self._rate = min(self._rate, rate)
        self._headers = []

    def changed_in_flight(self) -> list[Tensor]:
        """Parameters that are being sent from their own memory and have changed since."""
        return [param for param, version in self._sent_in_place if param._version != version]

    def mix(self, bucket: Bucket) -> None:
        """Mix what has arrived for a posted bucket and for those attached to it, once."""
        attached = self.unmixed.pop(bucket)
        for each in (bucket, *attached):
            exchange = self._exchanges.get(each)
            if exchange is not None:
                with self._policy.meter.mix:
                    self._mix(exchange, self._rate * each.rate)

    def _mix(self, exchange: Exchange, rate: float) -> None:
        on_gpu = self.flags.on_gpu if exchange.on_gpu else None
        if exchange.on_gpu:
            # The stream that mixes need not be the one that has received.
            for work in exchange.works:
                work.wait()
        if on_gpu is not None:
            exchange.mix_usable(rate, on_gpu.usable(exchange))
            return
        present: tuple[int, ...] | list[int] = self._wire.group.ranks
        if self.flags.nonfinite:
            left_out = self.flags.left_out(exchange)
            present = [rank for rank in present if rank not in left_out]
        if present:
            exchange.mix(rate, present)

    def compare(self, bucket: Bucket) -> tuple[Tensor, Tensor] | None:
        """Whether this rank has what has arrived for a bucket, of shape (), and what it has sent.

        Returns:
            None if that cannot be told, as where a rank is left out.
        """
        exchange = self._exchanges.get(bucket)
        if exchange is None or self._wire.group.size == 1 or self.flags.left_out(exchange):
            return None
        return exchange.compare()

    def snapshot_of(self, bucket: Bucket) -> Flat | None:
        """The bucket's parameters when the round was launched, if they may have changed since."""
        if self.sender.thread:
            self._wait_for_sender()
        exchange = self._exchanges.get(bucket)
        return None if exchange is None else exchange.snapshot

    def arrives(self, other: Arrival) -> bool:
        """Wait until the round has arrived or the other arrival is over; whether it has arrived.

        Raises:
            PeerError: the data of a peer did not arrive.
        """
        if self._watch is None:
            return True
        self._wait_for(self._watch, other)
        return self._watch.future.done()

    def abandon(self) -> None:
        """Drop everything on the wire without waiting for the peers."""
        self.sender.drop()
        self.unmixed.clear()
        self._exchanges.clear()
        self._sent_in_place.clear()
        self._headers = []
        self.flags.pending.clear()

    def _compare(self, message: list[float], rank: int) -> None:
        transport = self._transport
        try:
            same_rate = self._policy.pacing.synchronous
            self._header.check(message, transport.members[rank], transport.initial_rank, same_rate)
        except CallOrderError as error:
            # This rank takes no further part: the others must notice, or they would wait for it.
            self.abandon()
            transport.fail(error)
            raise

    def _wait_for_sender(self) -> None:
        try:
            self.sender.wait()
        except WireError as error:
            raise self._lost(0, self._wire.peers, error.silent) from error

    def _wait_for(self, watch: Arrival, *others: Arrival) -> None:
        try:
            self._transport.finish(watch.future, *(each.future for each in others))
        except WireError as error:
            lost = watch.lost() or Expected([], 0, self._wire.peers)
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
        transport, number = self._transport, self._header.round
        loss = transport.lose(suspects, silent)
        group = tuple(transport.members[rank] for rank in self._wire.group.ranks)
        return loss.as_error(
            transport.initial_rank,
            f"lost {loss} in round {number}, bucket {bucket}, group {group} of "
            f"{self._topology!r}; {loss.advice}. The parameters are as they were before this round "
            f"was mixed: restart from a checkpoint, or let the others go on with "
            f"elastic=Elastic()",
            round=number,
            bucket=bucket,
        )
