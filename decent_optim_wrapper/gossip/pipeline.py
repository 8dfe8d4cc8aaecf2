"""Rounds from their launch to their mixing; at most one is in flight."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial

from loguru import logger
from torch import Tensor

from decent_optim_wrapper.comm.background import in_background, is_background
from decent_optim_wrapper.errors import NonFiniteError
from decent_optim_wrapper.gossip.extension import Extensions, ReceivedBucket
from decent_optim_wrapper.gossip.header import CollectiveCall, RoundHeader
from decent_optim_wrapper.gossip.in_flight import InFlight
from decent_optim_wrapper.gossip.round import Round, RoundPolicy
from decent_optim_wrapper.gossip.schedule import RoundKind, RoundPlan
from decent_optim_wrapper.gossip.session import Session
from decent_optim_wrapper.wire.bucket import Bucket

# How long a dropped wrapper waits for peers that must still launch its last round.
_CLOSE_TIMEOUT = timedelta(seconds=5)


class _Connected:
    """The connections to close when the wrapper is dropped.

    Args:
        session: the ranks that take part.
        in_flight: the round in flight.
    """

    def __init__(self, session: Session, in_flight: InFlight) -> None:
        self.session = session
        self.in_flight = in_flight

    def enter(self, session: Session) -> None:
        """Go on with other ranks."""
        self.session = session


class Pipeline:
    """Launches, receives and mixes rounds, and counts them.

    Args:
        session: the ranks that take part; replaced as a whole when they change.
        policy: what all rounds have in common.
        extensions: the extensions that take part.
        mixing_rate: the rate of the first rounds.
    """

    def __init__(
        self, session: Session, policy: RoundPolicy, extensions: Extensions, mixing_rate: float
    ) -> None:
        self.in_flight = InFlight(mixing_rate)
        # The ranks that take part now.
        self.session = session
        self._connected = _Connected(session, self.in_flight)
        self.policy = policy
        self.extensions = extensions
        # In the order in which they are exchanged.
        self.buckets: tuple[Bucket, ...] = ()
        # The bucket of each member, by its id.
        self.bucket_of: dict[int, Bucket] = {}
        # The order in which the buckets of the last round were needed, if it is known.
        self._needed: dict[Bucket, int] = {}
        # Number of the next round.
        self.round = 0
        # The rate of the next rounds.
        self.mixing_rate = mixing_rate
        # The last mixed round, if the findings of a GPU in it were not read yet.
        self.mixed: Round | None = None
        # Runs when the wrapper is dropped or the interpreter exits, whichever comes first. A rank
        # that leaves with a round in flight would break it for a slower peer, and a gloo thread
        # that still runs while Python is finalised can abort the process.
        weakref.finalize(self, _close, self._connected)

    def enter(self, session: Session) -> None:
        """Go on with other ranks."""
        self.session = session
        self._connected.enter(session)
        for extension in self.extensions.all:
            extension.restart()

    def plan(self, buckets: Sequence[Bucket]) -> None:
        """Exchange these buckets from the next launch on; the round in flight keeps its own."""
        self.buckets = tuple(buckets)
        self.bucket_of = {id(member): each for each in buckets for member in each.members}
        for extension in self.extensions.all:
            extension.plan(self.buckets)
        self.session.references.replan(self.buckets)
        rank = self.session.transport.initial_rank
        for index, bucket in enumerate(buckets):
            logger.info("rank {} bucket {}: {!r}", rank, index, bucket)

    def resume_at(self, round: int) -> None:
        """Continue with this round; none is in flight."""
        self.round = round

    def mix_with(self, rate: float) -> None:
        """Launch rounds with this mixing rate from now on."""
        self.mixing_rate = rate

    def begin(self, number: int | None = None, rate: float | None = None) -> Round | None:
        """Begin a round, to which buckets are posted one by one.

        Args:
            number: the number of the round; None for the next one.
            rate: its mixing rate; None for the present one.

        Returns:
            None if this rank is idle, or while another round is in flight.
        """
        number = self.round if number is None else number
        plan = self.session.schedule.plan(number, self.mixing_rate if rate is None else rate)
        if plan.kind is RoundKind.IDLE or self.in_flight.round is not None:
            return None
        if plan.group.size == 1 and not (self.extensions.all or self.policy.pacing.needs_snapshot):
            # Nothing is exchanged, and no extension needs the round.
            return None
        transport = self.session.transport
        names = [*map(transport.members.__getitem__, plan.group.ranks)]
        logger.debug("rank {} round {}: group {}", transport.initial_rank, number, names)
        return self.announce(CollectiveCall.STEP, plan, number)

    def announce(self, call: CollectiveCall, plan: RoundPlan, number: int | None = None) -> Round:
        """Begin an exchange with the ranks that mix next: headers, and buckets if it has any."""
        self.session.transport.check_open()
        header = RoundHeader(call, self.round if number is None else number, plan.mixing_rate)
        return Round(header, plan, self.session, self.policy).open()

    def order_sends(self, launched: Round, ahead: bool) -> None:
        """Send the buckets of a round in the order in which they are needed.

        Args:
            launched: the round.
            ahead: whether receive buffers may be posted now.
        """
        ahead = ahead and not any(each.sends for each in self.extensions.all)
        launched.order_sends(self.buckets if ahead else ())

    def post_in_a_row(self, launched: Round) -> None:
        """Choose how to send a round whose buckets are posted one right after the other."""
        if self.session.transport.gpus and not self.policy.pacing.mixes_early:
            # One kernel for all. A forward pass would wait for all buckets before the first module.
            launched.sender.launch_together()

    def post(
        self, launched: Round, bucket: Bucket, snapshot: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        """Send a bucket of parameters and the buckets attached to it; see `Round.post`."""
        attached: list[Bucket] = []
        for extension in self.extensions.all:
            attached += extension.launch(bucket)
        # Buckets that were not needed come last.
        needed = self._needed.get(bucket, len(self._needed)) if self._needed else None
        launched.post(bucket, attached, snapshot, needed)

    def hand_over(self, launched: Round) -> None:
        """Leave a round in flight until a later step, once everything is posted."""
        launched.seal()
        self.in_flight.put(launched, self.mixing_rate)
        if not self.policy.pacing.synchronous:
            self.round += 1
            launched.watch()

    def launch(self) -> None:
        """Start the next round outside of a step, unless one is in flight."""
        if launched := self.begin():
            for bucket in launched.order.apply(self.buckets):
                self.post(launched, bucket)
            self.hand_over(launched)
            # As if the previous step had launched it.
            self.in_flight.count_step()

    def begin_extensions(self) -> None:
        """Let the extensions begin a step."""
        for extension in self.extensions.all:
            extension.begin_step(self.buckets)

    def end_step(self) -> None:
        """Count a step."""
        self.in_flight.count_step()
        if self.policy.pacing.synchronous:
            self.round += 1

    def receive(self) -> Round | None:
        """Return the round in flight if it is to be mixed now, and wait until it has arrived.

        Raises:
            NonFiniteError: the round must not be mixed, and is no longer in flight.
        """
        due = self.in_flight.is_due(self.policy.pacing)
        for extension in self.extensions.all:
            extension.received(in_flight=self.in_flight.round is not None and not due)
        if not due:
            return None
        self.policy.meter.note_round(self.in_flight.age)
        return self._receive()

    def _receive(self) -> Round | None:
        if self.mixed is not None:
            self.check_on_gpu()
        arrived = self.take()
        if arrived is not None:
            if arrived.flags.refused:
                arrived.flags.check()
            self.mixed = arrived if arrived.flags.on_gpu else None
            if self.extensions.all:
                self.begin_mixing(arrived)
        return arrived

    def begin_mixing(self, round: Round) -> None:
        """Tell the extensions that a round arrives, once."""
        if self.in_flight.announce():
            for extension in self.extensions.all:
                extension.arrived(round.plan.kind, self.buckets, self.session.transport)

    def note_need(self, wanted: Sequence[Bucket], first: bool) -> None:
        """Note the buckets that are needed next; the next round is sent in this order.

        Args:
            wanted: the buckets.
            first: whether they are the first of their round.
        """
        if first:
            self._needed = {}
        for bucket in wanted:
            self._needed[bucket] = len(self._needed)

    def take(self) -> Round | None:
        """Wait for the round in flight and return it; it is not mixed.

        A round that fails is no longer in flight, either, so no later call waits for it.
        """
        if (taken := self.in_flight.take()) is not None:
            taken.receive()
        return taken

    def forget(self) -> None:
        """Forget the findings of a GPU in the last round."""
        self.mixed = None

    def check_on_gpu(self) -> None:
        """Check the findings of a GPU in the last mixed round, unless they were checked.

        Raises:
            NonFiniteError: the round was not mixed. The one in flight is dropped.
        """
        mixed, self.mixed = self.mixed, None
        if mixed is None:
            return
        try:
            mixed.flags.check_on_gpu()
        except NonFiniteError:
            # As for a round that is refused on arrival: the round in flight follows from it.
            self.take()
            raise

    def mix(self, arrived: Round, bucket: Bucket) -> None:
        """Mix a bucket and the buckets attached to it, if they have arrived."""
        if bucket not in arrived.unmixed:
            return
        if not self.extensions.all:
            arrived.mix(bucket)
            return
        kind, snapshot = arrived.plan.kind, partial(arrived.snapshot_of, bucket)
        received = ReceivedBucket(kind=kind, bucket=bucket, snapshot=snapshot)
        with self.extensions.mixing(received):
            arrived.mix(bucket)
        if not arrived.unmixed:
            for extension in self.extensions.all:
                extension.end_round(kind)

    def finish(self) -> None:
        """Wait for the round in flight, if there is one, and mix it into the parameters."""
        if arrived := self._receive():
            for bucket in tuple(arrived.unmixed):
                self.mix(arrived, bucket)


def _close(connected: _Connected) -> None:
    """Wait for a round in flight without mixing it, and release the process group."""
    if is_background():
        # The garbage collector runs on any thread, even on one that this would wait for.
        in_background(partial(_end, connected))
    else:
        _end(connected)


def _end(connected: _Connected) -> None:
    """Do the work of `_close`.

    The peers launch the same round sooner or later, unless they are gone. A script that ends, or a
    wrapper that is replaced, does not wait for them as long as a step would.
    """
    transport = connected.session.transport
    transport.limit_waits(_CLOSE_TIMEOUT)
    try:
        if connected.in_flight.round and not transport.is_closed:
            connected.in_flight.round.receive()
    except RuntimeError as error:
        logger.warning(
            "rank {}: the wrapper was dropped with a round in flight, which did not arrive within "
            "{}: {}; call synchronize() at the end of the training",
            *(transport.initial_rank, _CLOSE_TIMEOUT, error),
        )
    transport.close()
