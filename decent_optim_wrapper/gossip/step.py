"""The algorithm: what every rank does in a step, whoever calls it.

With x the parameters of this rank, W the mixing of the round that has been in flight since the last
step, and u the local update from the gradient at x, a step is

    x <- W x - u(x),    and the next round leaves with the new x.

Without overlap the next round is finished within the same step: x <- W (x - u(x)).

A round may also travel under several steps. With s the parameters of the step that launched it, the
step that mixes it does

    x <- x + (W s - s) - u(x),

and a step in between is x <- x - u(x). There is one round in flight at a time, so this is stable
however long it takes, and the mean over the ranks does not move.

`Step` is the algorithm; `Rounds` owns what lasts from one step to the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from loguru import logger
from torch import Tensor

from decent_optim_wrapper.comm.background import in_background, is_background
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.errors import CallOrderError, NonFiniteError, PeerError
from decent_optim_wrapper.gossip.average import WorldAverage
from decent_optim_wrapper.gossip.extension import Extension, Extensions, ReceivedBucket
from decent_optim_wrapper.gossip.header import Call, Header
from decent_optim_wrapper.gossip.launch_values import starts_of
from decent_optim_wrapper.gossip.local_update import LocalUpdate
from decent_optim_wrapper.gossip.members import Members
from decent_optim_wrapper.gossip.round import Round
from decent_optim_wrapper.gossip.schedule import Kind, Pacing, RoundPlan, Session
from decent_optim_wrapper.gossip.timing import Meter, SpareTime
from decent_optim_wrapper.mesh.replica import Replica
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.nonfinite import NonFinitePolicy
from decent_optim_wrapper.wire.references import Meetings

Result = TypeVar("Result")

# How long a wrapper that is dropped waits for peers that still have to launch its last round.
_CLOSE_TIMEOUT = timedelta(seconds=5)


class Step:
    """One step, as a context: enter, advance part by part, exit.

    On entry it receives the round in flight, if it is to be mixed now, and begins the next one.
    Nothing is mixed before everything has arrived: a round that fails leaves all parameters as they
    were. No bucket is sent before that either: two rounds on the wire would slow down the older
    one, for which all ranks are waiting.

    Args:
        gossip: the rounds, one of which may be in flight.
        in_backward: whether the parts come in the course of a backward pass, and not one right
            after the other.
    """

    def __init__(self, gossip: Rounds, in_backward: bool = False) -> None:
        self._gossip = gossip
        self._in_backward = in_backward
        self._arrived: Round | None = None
        self._launched: Round | None = None
        self._entered = False
        self._ready: set[Bucket] = set()
        self._waiting: list[Bucket] = []

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets to advance, each once and in any order."""
        return self._gossip.buckets

    def __enter__(self) -> Step:
        self._gossip.begin_step()
        with self._gossip.failing_together():
            self._gossip.surviving(self._receive)
        self._waiting = list(self.buckets)
        self._entered = True
        return self

    def _receive(self) -> None:
        self._arrived = self._gossip.receive()
        if self._arrived:
            # Members of a replaced bucket are in a new one, which is not sent before the mixing.
            for bucket in self._arrived.unmixed:
                if bucket not in self.buckets:
                    self._gossip.mix(self._arrived, bucket)
        self._launched = self._gossip.begin_round()
        if self._launched and not self._in_backward and self._gossip.has_time():
            self._launched.hold_back()

    def advance(self, buckets: Sequence[Bucket], update: Callable[[], Result]) -> Result:
        """Mix some buckets, update their parameters, and send them.

        Args:
            buckets: one bucket, or several that are updated by one call.
            update: the local update of their parameters.

        Returns:
            The result of the update.
        """
        if not self._entered:
            raise RuntimeError("advance() expects a step that has been entered")
        for bucket in buckets:
            if self._arrived:
                self._gossip.mix(self._arrived, bucket)
        with self._gossip.meter.update:
            result = update()
        if self._launched:
            self._ready.update(buckets)
            self._post(self._launched)
        return result

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            # A round may have begun. This rank closes its connections, so that the others notice,
            # whatever the error is: another wrapper's, raised by a closure, tells them nothing.
            if self._launched:
                self._launched.abandon()
            self._gossip.close(error)
            return
        with self._gossip.failing_together():
            if self._launched:
                self._gossip.hand_over(self._launched)
            self._gossip.end_step()

    def _post(self, launched: Round) -> None:
        """Send the buckets that are ready, in the plan's order.

        The order on the wire must be the same on every rank, whatever the order of the updates, or
        the sums of larger groups would add up different buckets.
        """
        while self._waiting and self._waiting[0] in self._ready:
            self._gossip.post(launched, self._waiting.pop(0))


class GossipState(NamedTuple):
    """The state of the rounds that a checkpoint needs.

    Args:
        round: number of the next round.
        in_flight: whether the last round is still to be mixed.
        mixing_rate: that of the next round.
        last_rate: that of the last round.
        age: steps since the last round was launched.
    """

    round: int
    in_flight: bool
    mixing_rate: float = 1.0
    last_rate: float = 1.0
    age: int = 1


@dataclass
class _Connected:
    """What must be closed when the wrapper is dropped."""

    session: Session
    in_flight: Round | None = None


class Rounds:
    """The rounds of one rank, one of which may be in flight.

    Args:
        session: the ranks that take part; replaced as a whole when they change.
        local_update: steps the base optimizer and checks its parameters.
        average: puts the world average in place.
        nonfinite: what happens to values that are not finite.
        meter: counts every wait, every copy and all bytes.
        replica: the ranks that hold one copy of the model together.
        mixing_rate: that of the first rounds.
        pacing: when a round is mixed.
        extensions: what else takes part.
        members: continues without lost ranks; None if their loss is an error.
    """

    def __init__(
        self,
        session: Session,
        local_update: LocalUpdate,
        average: WorldAverage,
        nonfinite: NonFinitePolicy,
        meter: Meter,
        replica: Replica,
        *,
        mixing_rate: float,
        pacing: Pacing,
        extensions: Extensions,
        members: Members | None = None,
    ) -> None:
        self._connected = _Connected(session)
        self._local_update = local_update
        self.average = average
        self._nonfinite = nonfinite
        self.meter = meter
        self.replica = replica
        # Of the rounds that are launched from now on.
        self.mixing_rate = self._last_rate = mixing_rate
        self.pacing = pacing
        self.extensions = extensions
        self._spare_time = SpareTime()
        self.members = members
        self._buckets: tuple[Bucket, ...] = ()
        self._round = 0
        # Steps since the round in flight was launched.
        self._age = 0
        # The last round that was mixed, if nobody has asked yet what a GPU has found in it.
        self._mixed: Round | None = None
        # A resumed run has a round in flight that this process still has to launch. Loading cannot
        # do it: it must not communicate, and may come before the parameters are loaded.
        self._pending = False
        # The parameters with which it was launched, if they have changed since.
        self._starts: dict[Tensor, Tensor] = {}
        # Whether all ranks have launched the same round, and made no step since.
        self._assembled = False
        # Whether the states of extensions that were loaded are of this rank. None once the ranks
        # have agreed on how to go on with what they have loaded.
        self._loaded: Literal["own", "other"] | None = None
        # Whether the loaded state was saved while an average was in place.
        self._kept = False
        # Runs when the wrapper is dropped or the interpreter exits, whichever comes first. A rank
        # that leaves with a round in flight would break it for a slower peer, and a gloo thread
        # that still runs while Python is finalised can abort the process.
        weakref.finalize(self, _close, self._connected)

    @property
    def session(self) -> Session:
        """The ranks that take part now."""
        return self._connected.session

    @session.setter
    def session(self, session: Session) -> None:
        self._connected.session = session
        for extension in self.extensions.all:
            extension.restart()

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets, in the order in which they are exchanged."""
        return self._buckets

    @buckets.setter
    def buckets(self, buckets: Sequence[Bucket]) -> None:
        # From the next launch on; the round in flight keeps its own.
        self._buckets = tuple(buckets)
        for extension in self.extensions.all:
            extension.plan(self._buckets)
        self.session.references.replan(self._buckets)
        for index, bucket in enumerate(buckets):
            logger.info(
                "rank {} bucket {}: {!r}", self.session.transport.initial_rank, index, bucket
            )

    @property
    def round(self) -> int:
        """Number of the next round."""
        return self._round

    @property
    def in_flight(self) -> Round | None:
        """The round in flight, if there is one."""
        return self._connected.in_flight

    @property
    def state(self) -> GossipState:
        """The state of the rounds, to save now."""
        return GossipState(
            round=self._round,
            in_flight=self._pending or self._connected.in_flight is not None,
            mixing_rate=self.mixing_rate,
            last_rate=self._last_rate,
            age=self._age,
        )

    @property
    def differs(self) -> bool:
        """Whether a round is in flight while the values in place differ between ranks."""
        if self.session.transport.world_size == 1 or self.average.snapshot is not None:
            return False
        return self.state.in_flight

    @property
    def params(self) -> list[Tensor]:
        """All parameters of the base, in the order of its groups."""
        return self._local_update.params

    def has_time(self) -> bool:
        """Whether the round of this step may leave later; ask once in a step."""
        # With what extensions send the wire soon has no time to spare.
        sends = any(each.sends for each in self.extensions.all)
        if sends or self.pacing.mixes_in_step(self._round):
            return False
        return self._spare_time.begin_round()

    def check_idle(self) -> None:
        """Check that a state may be loaded.

        Raises:
            RuntimeError: a round is in flight that other ranks may not have launched yet.
        """
        transport = self.session.transport
        flying = self.in_flight is not None and not transport.is_closed
        flying = flying and transport.world_size > 1
        if not self.pacing.synchronous and flying and not self._assembled:
            raise RuntimeError(
                f"rank {self.session.transport.initial_rank}: load_state_dict() expects no "
                f'round in flight with gossip_every="auto", since other ranks may be at '
                f"another one; call synchronize() on all ranks before"
            )

    def starts(self) -> list[Tensor]:
        """Copies of the parameters as the round in flight has them, or as they are without one."""
        if self._starts:
            return [self._starts.get(param, param).detach().clone() for param in self.params]
        return starts_of(self._connected.in_flight, self.params)

    def restore(
        self,
        state: GossipState,
        kept: bool = False,
        starts: dict[Tensor, Tensor] | None = None,
        references: dict[str, Meetings] | None = None,
    ) -> None:
        """Continue from `state`. The round in flight is dropped, even if it has failed.

        Args:
            state: the state of the rounds.
            kept: whether an average was in place.
            starts: the parameters with which the round in flight was launched.
            references: to which differences are coded, by group.
        """
        self._kept = kept
        try:
            self.discard()
        finally:
            self._round, self._pending, self.mixing_rate, self._last_rate, _ = state
            # Where nothing may change in flight, what is sent is what is mixed into.
            self._starts = dict(starts or {}) if self.pacing.needs_snapshot else {}
            self._age = state.age if self.pacing.needs_snapshot else 1
            if not self.pacing.synchronous:
                # Each rank may have saved its own round.
                self._loaded = "other"
            session = self.session
            session.references.load(references or {}, self._buckets, session.transport.members)

    def prepare_load(
        self, extension: Extension, state: dict[str, Any] | None, is_own: bool
    ) -> Callable[[], None]:
        """Check a state of an extension, and return the function that continues with it.

        Args:
            extension: one of this wrapper's.
            state: None to start again.
            is_own: whether the state is one of this rank, with the same members.

        Raises:
            ValueError: the state is that of something else.
        """
        if not extension.belongs_to_rank:
            return extension.prepare_load(state)
        # A rank that comes back, or one that is at another step, loads alone.
        loads = self.members is None and self.pacing.synchronous
        load = extension.prepare_load(state)
        if not (is_own and loads):
            load = extension.prepare_load(None)

        def run() -> None:
            load()
            if loads:
                self._loaded = "own" if is_own and state is not None else "other"

        return run

    def agree_on_loaded(self) -> None:
        """Go on together if states were loaded since the last call; collective then.

        All continue with the highest round. The states of extensions that belong to a rank start
        again unless all ranks have loaded their own: corrections of gradients would not sum to
        zero, and pull the training away for good.

        Raises:
            CallOrderError: a rank has loaded nothing, or the state of another step.
        """
        if self._loaded is None:
            return
        # A rank that has loaded nothing is found by those that mix with it, in its next round. All
        # leave before any arrives: that rank may wait for one of these before it comes to another.
        plans = self.session.schedule.plan_each_group(self.mixing_rate)
        # The last may be a collective of all ranks, in which more of them notice that one raises.
        for announced in reversed([self.round_of(Call.LOADED, plan) for plan in plans]):
            announced.receive()
        own = torch.tensor([self._round, self._loaded == "own"], device="cpu")
        rounds, owns = self.session.transport.all_gather(own).unbind(1)
        self.resume_at(int(rounds.max()))
        if not owns.all():
            for extension in self.extensions.all:
                if extension.belongs_to_rank:
                    extension.restart()

    def begin_step(self) -> None:
        """Check parameters, averages and members for changes since the last step."""
        self.meter.reset()
        self.session.transport.check_open()
        self.check_parameters()
        if self._kept or self.average.snapshot is not None:
            self.keep_average()
        if self.members:
            self.members.begin_step()
        self._assembled = False
        if self._loaded:
            with self.failing_together():
                self.surviving(self.agree_on_loaded)
        self._begin_extensions()

    def _begin_extensions(self) -> None:
        for extension in self.extensions.all:
            extension.begin_step(self._buckets)

    def end_step(self) -> None:
        """End the step; without overlap, finish its round, too."""
        if self.members:
            self.members.end_step()
        self._age += 1
        mixes_now = self.pacing.mixes_in_step(self._round)
        if self.pacing.synchronous:
            self._round += 1
        if mixes_now:
            self.surviving(self.finish)
        self.meter.close(len(self._buckets), self._round)

    def receive(self) -> Round | None:
        """Return the round in flight if it is to be mixed now, and wait until it has arrived.

        Raises:
            NonFiniteError: the round must not be mixed, and is dropped.
        """
        try:
            self.check_on_gpu()
        except NonFiniteError:
            # As a round that is refused when it arrives: what is in flight follows from it.
            self.discard()
            raise
        self._relaunch()
        due = self._is_due()
        for extension in self.extensions.all:
            extension.received(in_flight=self._connected.in_flight is not None and not due)
        if not due:
            return None
        self.meter.staleness = self._age
        return self._receive()

    def check_on_gpu(self) -> None:
        """Check what a GPU has found in the round that was mixed last, if nobody has yet.

        Raises:
            NonFiniteError: it has mixed nothing of that round.
        """
        mixed, self._mixed = self._mixed, None
        if mixed is not None:
            mixed.check_on_gpu()

    def post(
        self, launched: Round, bucket: Bucket, starts: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        """Send a bucket of parameters, and what travels behind it; see `Round.post`."""
        behind = [each for extension in self.extensions.all for each in extension.launch(bucket)]
        launched.post(bucket, starts, behind)

    def _is_due(self) -> bool:
        flying = self._connected.in_flight
        if flying is None:
            return False
        return self.pacing.is_due(self._age, flying.has_arrived)

    def _receive(self) -> Round | None:
        self.check_on_gpu()
        arrived = self._take()
        if arrived is not None:
            arrived.check_finite()
            self._mixed = arrived if arrived.is_checked_on_gpu else None
            for extension in self.extensions.all:
                extension.arrived(arrived.plan.kind, self._buckets, self.session.transport)
        return arrived

    def mix(self, arrived: Round, bucket: Bucket) -> None:
        """Mix what has arrived for a bucket and what travels behind it, if anything has."""
        if bucket in arrived.unmixed:
            if self.extensions.all:
                self._mix_with_extensions(arrived, bucket)
            else:
                arrived.mix(bucket)

    def _mix_with_extensions(self, arrived: Round, bucket: Bucket) -> None:
        kind = arrived.plan.kind
        received = ReceivedBucket(
            kind=kind,
            bucket=bucket,
            snapshot=partial(arrived.start_of, bucket),
            compare=partial(arrived.compare, bucket),
        )
        with self.extensions.mixing(received):
            arrived.mix(bucket)
        if not arrived.unmixed:
            for extension in self.extensions.all:
                extension.end_round(kind)

    def begin_round(self) -> Round | None:
        """Begin the next round, to which the buckets are posted one by one.

        Returns:
            None if this rank is idle, or while another round is in flight.
        """
        plan = self.session.schedule.plan(self._round, self.mixing_rate)
        if plan.kind is Kind.IDLE or self._connected.in_flight is not None:
            return None
        transport = self.session.transport
        names = [transport.members[rank] for rank in plan.group.ranks]
        logger.debug("rank {} round {}: group {}", transport.initial_rank, self._round, names)
        return self.round_of(Call.STEP, plan)

    def hand_over(self, launched: Round) -> None:
        """Leave a round in flight until a later step, once everything is posted."""
        launched.seal()
        self._connected.in_flight = launched
        self._last_rate = self.mixing_rate
        self._age = 0
        if not self.pacing.synchronous:
            self._round += 1
            launched.watch()

    def launch(self) -> None:
        """Start the next round outside of a step, unless one is in flight."""
        if launched := self.begin_round():
            for bucket in self._buckets:
                self.post(launched, bucket, self._starts)
            self.hand_over(launched)
            # As if the step before had launched it.
            self._age = 1

    def reshard(self) -> None:
        """Let what is written into shards be seen; see `Replica.reshard`."""
        if self.replica.fsdp_modules:
            self.replica.reshard()

    def keep_average(self) -> None:
        """Accept the average in place as the ranks' own parameters; collective."""
        self._kept = False
        self.average.keep()
        with self.failing_together():
            self.discard()
            if self.members and any(each.collective for each in self.extensions.all):
                self.members.meet(Call.KEEP_AVERAGE, self.keep_state)
            else:
                self.keep_state()

    def keep_state(self) -> None:
        """Let the extensions follow an average that is kept; collective."""
        for extension in self.extensions.all:
            extension.kept(self._buckets, self.session.transport)

    def resume_at(self, round: int) -> None:
        """Continue with this round, as all other ranks do; none is in flight."""
        self._round = round
        self._loaded = None

    def surviving(self, action: Callable[[], Result]) -> Result:
        """Run an action that waits for peers; if one is lost, run it again in a new session."""
        while True:
            try:
                return action()
            except PeerError as error:
                if self.members is None:
                    raise
                self.members.recover(error)

    @contextmanager
    def failing_together(self, *shared: type[Exception]) -> Iterator[None]:
        """Notify the other ranks if the body fails here, since they would wait for this rank.

        Args:
            shared: further errors, which all ranks raise together and which change nothing.
        """
        try:
            yield
        except BaseException as error:
            self.fail(error, *shared)
            raise

    def fail(self, error: BaseException, *shared: type[Exception]) -> None:
        """Close the connections, unless all ranks raise the error; see `failing_together`."""
        if isinstance(error, (PeerError, CallOrderError)):
            # The ranks along the other dimensions of a mesh wait for this one, too.
            for transport in self.transports if self.replica.dimensions else ():
                transport.pass_on(error)
        elif not isinstance(error, (NonFiniteError, *shared)):
            self.close(error)

    def close(self, error: BaseException) -> None:
        """Close the connections for good, and tell the others why."""
        self.abandon()
        for transport in self.transports:
            transport.fail(error)
        if self.members:
            self.members.leave()

    @property
    def transports(self) -> Sequence[Transport]:
        """What connects this rank, along every dimension of a mesh."""
        inside = (dimension.transport for dimension in self.replica.dimensions)
        return [self.session.transport, *inside]

    def abandon(self) -> None:
        """Drop the round in flight without waiting for it."""
        self._pending = False
        if self._connected.in_flight:
            self._connected.in_flight.abandon()
        self._connected.in_flight = None

    def discard(self) -> None:
        """Wait for the round in flight, if there is one, and drop it without mixing."""
        self._pending = False
        self._mixed = None
        self.surviving(self._take)

    def check_parameters(self) -> None:
        """Check the parameters for changes since the wrapper was built."""
        flying = self._connected.in_flight
        changed = flying.changed_in_flight() if flying else []
        self._local_update.check(self._buckets, changed, self.session.transport.initial_rank)

    def finish(self) -> None:
        """Wait for the round in flight, if there is one, and mix it into the parameters."""
        # A closure may have gathered the parameters again.
        self.reshard()
        self._relaunch()
        if arrived := self._receive():
            for bucket in arrived.unmixed:
                self.mix(arrived, bucket)

    def _relaunch(self) -> None:
        """Launch the round that was in flight when the state was saved."""
        if self._pending:
            # synchronize() may come before any step(), and the state may come from a run without an
            # outer optimizer, which would then have no anchors when the round is mixed.
            self._begin_extensions()
            self._pending = False
            rate, self.mixing_rate = self.mixing_rate, self._last_rate
            round, age = self._round, self._age
            self._round -= age
            self.launch()
            self._starts = {}
            self._round, self._age, self.mixing_rate = round, age, rate

    def _take(self) -> Round | None:
        """Wait for the round in flight and return it.

        A round that fails is no longer in flight either: it is not waited for again.
        """
        flying, self._connected.in_flight = self._connected.in_flight, None
        if flying is not None:
            before = self.meter.wait.seconds
            flying.receive()
            if flying.was_held_back:
                self._spare_time.note(self.meter.wait.seconds - before)
        return flying

    def round_of(self, call: Call, plan: RoundPlan) -> Round:
        """Begin an exchange with the ranks that mix next: headers, and buckets if it has any."""
        self.session.transport.check_open()
        header = Header(call, self._round, plan.mixing_rate)
        return Round(header, plan, self.session, self.pacing, self._nonfinite, self.meter)


def _close(connected: _Connected) -> None:
    """Wait for a round in flight, which nobody will mix, and release the process group."""
    if is_background():
        # The garbage collector runs on any thread, also on one that this would wait for.
        in_background(partial(_end, connected))
    else:
        _end(connected)


def _end(connected: _Connected) -> None:
    """As `_close`.

    The peers launch the same round sooner or later, unless they are gone. A script that ends, or a
    wrapper that is replaced, does not wait for them as long as a step would.
    """
    transport = connected.session.transport
    transport.limit_waits(_CLOSE_TIMEOUT)
    try:
        if connected.in_flight:
            connected.in_flight.receive()
    except RuntimeError as error:
        logger.warning(
            "rank {}: the wrapper was dropped with a round in flight, which did not arrive within "
            "{}: {}; call synchronize() at the end of the training",
            *(transport.initial_rank, _CLOSE_TIMEOUT, error),
        )
    transport.close()
