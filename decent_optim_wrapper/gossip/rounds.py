"""Rounds from their launch to their mixing; at most one is in flight."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from typing import Literal, NamedTuple, Self, TypedDict

from loguru import logger
from torch import Tensor

from decent_optim_wrapper.comm.background import in_background, is_background
from decent_optim_wrapper.errors import NonFiniteError
from decent_optim_wrapper.gossip.header import CollectiveCall, RoundHeader
from decent_optim_wrapper.gossip.round import Round, RoundPolicy, RoundState
from decent_optim_wrapper.gossip.schedule import RoundKind, RoundPlan
from decent_optim_wrapper.gossip.session import Session
from decent_optim_wrapper.wire.bucket import Bucket

# How long a dropped wrapper waits for peers that must still launch its last round.
_CLOSE_TIMEOUT = timedelta(seconds=5)


class PendingResume(NamedTuple):
    """The actions with which the next step begins after a state was loaded; by default none.

    Loading cannot do it: it does not communicate, and may come before the parameters are loaded.

    Args:
        keeps_average: accept the parameters, which are an average, as this rank's own.
        source: the rank that has saved the loaded states of extensions that belong to a rank: this
            one or another one. The ranks then agree on how to continue. None if they need not.
        in_flight: launch the round again that was in flight.
        rate: its mixing rate.
        age: number of steps since its launch.
        snapshot: the parameters at its launch, if they may have changed since.
    """

    keeps_average: bool = False
    source: Literal["own", "other"] | None = None
    in_flight: bool = False
    rate: float = 1.0
    age: int = 1
    snapshot: Mapping[Tensor, Tensor] = {}

    def without_round(self) -> Self:
        """The other actions, once the round is launched or dropped."""
        return self._replace(in_flight=False, snapshot={})


class _Open(TypedDict):
    """The resources that end with the wrapper: its connections, and the round in flight."""

    session: Session
    round: Round | None


class Rounds:
    """Launches, receives and mixes rounds, and counts them.

    Args:
        session: the ranks that take part; replaced as a whole when they change.
        policy: what all rounds have in common.
        mixing_rate: the rate of the first rounds.
    """

    def __init__(self, session: Session, policy: RoundPolicy, mixing_rate: float) -> None:
        # The ranks that take part now.
        self.session = session
        self._open: _Open = {"session": session, "round": None}
        self.policy = policy
        self.extensions = policy.extensions
        # In the order in which they are exchanged.
        self.buckets: tuple[Bucket, ...] = ()
        # The bucket of each member, by its id.
        self.bucket_of: dict[int, Bucket] = {}
        # Number of rounds so far, which is the number of the next one.
        self.count = 0
        # Number of steps since the launch of the round in flight.
        self.age = 0
        # What a loaded state leaves to the next step. This and `unchecked` are no `RoundState`,
        # since they say nothing of the round in flight: one is of a round that is launched later,
        # the other of a round that was mixed before.
        self.pending = PendingResume()
        # The rate of the next rounds.
        self.mixing_rate = mixing_rate
        # The last mixed round, as long as the host has not read what a GPU has found in it.
        self.unchecked: Round | None = None
        # Runs when the wrapper is dropped or the interpreter exits, whichever comes first. A rank
        # that leaves with a round in flight would break it for a slower peer, and a gloo thread
        # that still runs while Python is finalised can abort the process.
        close = weakref.finalize(self, _close, self._open)
        # A process of multiprocessing, unless it was spawned, ends without `atexit`.
        Finalize(self, close, exitpriority=0)

    @property
    def in_flight(self) -> Round | None:
        """The round that is launched and not mixed yet."""
        return self._open["round"]

    def enter(self, session: Session) -> None:
        """Continue with the members of a new session; the extensions restart."""
        self.session = self._open["session"] = session
        # Groups are noted by positions, which are others now.
        self.policy.meter.history.clear()
        for extension in self.extensions.all:
            extension.restart()

    def set_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Exchange these buckets from the next launch on; the round in flight keeps its own."""
        self.buckets = tuple(buckets)
        self.bucket_of = {id(member): each for each in buckets for member in each.members}
        for extension in self.extensions.all:
            extension.plan(self.buckets)
        self.session.references.replan(self.buckets)
        rank = self.session.transport.initial_rank
        for index, bucket in enumerate(buckets):
            logger.info("rank {} bucket {}: {!r}", rank, index, bucket)

    def resume_at(self, round: int, pending: PendingResume | None = None) -> None:
        """Continue with this round, as all other ranks do; none is in flight.

        Args:
            round: number of the next round.
            pending: what a loaded state leaves to the next step. None keeps what is left, without
                `source`, on which the ranks have agreed.
        """
        self.count = round
        self.pending = pending or self.pending._replace(source=None)

    def set_mixing_rate(self, rate: float) -> None:
        """Launch rounds with this mixing rate from now on."""
        self.mixing_rate = rate

    def begin(self, age: int = 0, rate: float | None = None) -> Round | None:
        """Begin a round, to which buckets are posted one by one.

        Args:
            age: number of steps since the one that launches it; if ranks make the same steps, it is
                so many rounds before the next one.
            rate: its mixing rate; None for the rate of the next rounds.

        Returns:
            None if this rank is idle, or alone in its group and nothing needs the round; and while
            another round is in flight.
        """
        number = self.count - age * self.policy.pacing.synchronous
        plan = self.session.schedule.plan(number, rate or self.mixing_rate)
        # Alone in its group it exchanges nothing.
        needs = plan.group.size > 1 or self.extensions.all or self.policy.pacing.needs_snapshot
        if plan.kind is RoundKind.IDLE or self._open["round"] is not None or not needs:
            return None
        transport = self.session.transport
        names = [*map(transport.members.__getitem__, plan.group.ranks)]
        logger.debug("rank {} round {}: group {}", transport.initial_rank, number, names)
        header = RoundHeader(CollectiveCall.STEP, number, plan.mixing_rate)
        return Round(header, plan, self.session, self.policy).open()

    def announce(self, call: CollectiveCall, plan: RoundPlan) -> Round:
        """Send the header of a collective call, as of a round without buckets."""
        header = RoundHeader(call, self.count, plan.mixing_rate)
        return Round(header, plan, self.session, self.policy).open()

    def hand_over(self, launched: Round, age: int = 0) -> None:
        """Leave a round in flight until a later step, once everything is posted."""
        launched.seal()
        self._open["round"], self.age = launched, age
        if not self.policy.pacing.synchronous:
            self.count += 1
            launched.watch()

    def launch(self, again: PendingResume | None = None) -> None:
        """Launch a whole round outside of a step, unless one is in flight.

        Args:
            again: the round that was in flight when a state was saved; None for the next one.
        """
        age, rate, snapshot = (again.age, again.rate, again.snapshot) if again else (1, None, None)
        if launched := self.begin(age, rate):
            for bucket in launched.order.apply(self.buckets):
                launched.post(bucket, snapshot)
            self.hand_over(launched, age)

    def relaunch(self) -> None:
        """Begin the extensions, and launch the round that was in flight when a state was saved.

        synchronize() may come before the first step, and the state from a run without an outer
        optimizer: without the beginning of a step, it would have no anchors to mix the round with.
        """
        self.begin_extensions()
        pending, self.pending = self.pending, self.pending.without_round()
        if pending.in_flight:
            self.launch(pending)

    def begin_extensions(self) -> None:
        """Call the extensions at the start of a step."""
        for extension in self.extensions.all:
            extension.begin_step(self.buckets)

    def end_step(self) -> None:
        """Count a step."""
        self.age += 1
        if self.policy.pacing.synchronous:
            self.count += 1

    def receive(self) -> Round | None:
        """Return the round in flight if it is to be mixed now, and wait until it has arrived.

        Raises:
            NonFiniteError: the round must not be mixed, and is no longer in flight.
        """
        round, pacing = self._open["round"], self.policy.pacing
        due = round is not None and pacing.is_due(self.age, round.has_arrived)
        for extension in self.extensions.all:
            extension.received(in_flight=round is not None and not due)
        if round is None or not due:
            return None
        self.policy.meter.note_round(self.age, round.plan.group.ranks)
        return self._arrive()

    def _arrive(self) -> Round | None:
        if self.unchecked is not None:
            self.check_on_gpu()
        arrived = self.take()
        if arrived is not None:
            if arrived.flags.refused:
                arrived.flags.check()
            self.unchecked = arrived if arrived.flags.on_gpu else None
            if self.extensions.all:
                self.notify_arrived(arrived)
        return arrived

    def notify_arrived(self, round: Round) -> None:
        """Call `arrived` of the extensions, before the first bucket of a round is mixed."""
        if round.state is not RoundState.MIXING:
            for extension in self.extensions.all:
                extension.arrived(round.plan.kind, self.buckets, self.session.transport)

    def take(self) -> Round | None:
        """Receive the round in flight, and return it without mixing.

        It is no longer in flight, even if it has failed, so no later call waits for it.
        """
        taken, self._open["round"] = self._open["round"], None
        if taken is not None:
            taken.receive()
        return taken

    def abandon(self) -> None:
        """Drop the round in flight, or the one to be launched again, without waiting for it."""
        self.pending = self.pending.without_round()
        if round := self._open["round"]:
            round.abandon()
        self._open["round"] = None

    def receive_and_abandon(self) -> None:
        """Wait for the round in flight, and drop it without mixing."""
        self.unchecked = None
        self.pending = PendingResume(source=self.pending.source)
        self.take()

    def check_on_gpu(self) -> None:
        """Check what a GPU has found in the last mixed round, unless that was checked.

        Raises:
            NonFiniteError: the round was not mixed. The one in flight is dropped.
        """
        mixed, self.unchecked = self.unchecked, None
        if mixed is None:
            return
        try:
            mixed.flags.check_on_gpu()
        except NonFiniteError:
            # The round in flight was launched with values that follow from it.
            self.take()
            raise

    def finish(self) -> None:
        """Wait for the round in flight, if there is one, and mix it into the parameters."""
        if arrived := self._arrive():
            self.policy.meter.note_round(0, arrived.plan.group.ranks)
            for bucket in tuple(arrived.unmixed):
                arrived.mix(bucket)


def _close(opened: _Open) -> None:
    """Wait for a round in flight without mixing it, and release the process group."""
    if is_background():
        # The garbage collector runs on any thread, even on one that this would wait for.
        in_background(partial(_close_now, opened))
    else:
        _close_now(opened)


def _close_now(opened: _Open) -> None:
    """Wait for the round in flight, and release the process group, on this thread.

    The peers launch the same round sooner or later, unless they are gone. A script that ends, or a
    wrapper that is replaced, does not wait for them as long as a step would.
    """
    transport = opened["session"].transport
    transport.limit_waits(_CLOSE_TIMEOUT)
    # First, because a wait that times out closes the connections.
    transport.note_end()
    try:
        if opened["round"] and not transport.is_closed:
            opened["round"].receive()
    except RuntimeError as error:
        logger.warning(
            "rank {}: the wrapper was dropped with a round in flight, which did not arrive within "
            "{}: {}; call synchronize() at the end of the training",
            *(transport.initial_rank, _CLOSE_TIMEOUT, error),
        )
    transport.release()
