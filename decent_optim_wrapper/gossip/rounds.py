"""Rounds of gossip: begin, hand over, receive, mix, discard.

This module owns the mutable state of the gossip: the counter and the round in flight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from loguru import logger
from torch import Tensor

from decent_optim_wrapper.comm.call_order import Call, Header
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.errors import PeerError
from decent_optim_wrapper.gossip.bucket import Bucket
from decent_optim_wrapper.gossip.post_mix import PostMixHooks
from decent_optim_wrapper.gossip.round import Round, Rules
from decent_optim_wrapper.gossip.schedule import RoundPlan, RoundSchedule
from decent_optim_wrapper.gossip.timing import Meter
from decent_optim_wrapper.topo import Topology

# How long a wrapper that is dropped waits for peers that still have to launch its last round.
_CLOSE_TIMEOUT = timedelta(seconds=5)


class GossipState(NamedTuple):
    """What a checkpoint needs to know of the gossip.

    Args:
        round: the counter.
        in_flight: whether the last round is still to be mixed.
        mixing_rate: of the next round.
        last_rate: what it was when the last round was launched.
    """

    round: int
    in_flight: bool
    mixing_rate: float = 1.0
    last_rate: float = 1.0


class Gossip:
    """Rounds over a growing set of buckets.

    Args:
        transport: the ranks and how to reach them.
        schedule: whom this rank meets, round by round.
        rules: what every round needs to know.
        meter: told of every wait, every copy and all bytes.
        post_mix: see there.
        mixing_rate: of the first rounds.
    """

    def __init__(
        self,
        transport: Transport,
        schedule: RoundSchedule,
        rules: Rules,
        meter: Meter,
        post_mix: PostMixHooks,
        mixing_rate: float,
    ) -> None:
        transport.connect(schedule.groups)
        self._transport = transport
        self._schedule = schedule
        self._post_mix = post_mix
        # Of the rounds that are launched from now on.
        self.mixing_rate = self._last_rate = mixing_rate
        self._rules = rules
        self._meter = meter
        self._buckets: list[Bucket] = []
        self._round = 0
        # Rounds before it are idle: they belong to ranks that were ahead when a peer was lost.
        self._resume = 0
        # What to do about a lost peer, other than to raise; it drops the round.
        self.on_loss: Callable[[PeerError], None] | None = None
        # None or one; a list, so that the finalizer below sees what is in it then.
        self._in_flight: list[Round] = []
        # A resumed run has a round in flight that this process has yet to launch: not at loading,
        # which must not communicate and may come before the parameters are loaded.
        self._pending = False
        # Runs when the wrapper is dropped or the interpreter exits, whichever comes first. A rank
        # that left with a round in flight would break it for a slower peer, and a gloo thread that
        # works on while Python is finalised can abort the process.
        weakref.finalize(self, _close, self._in_flight, transport)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets, in the order in which they are exchanged."""
        return self._buckets

    @property
    def state(self) -> GossipState:
        """What to save now."""
        in_flight = self._pending or bool(self._in_flight)
        return GossipState(self._round, in_flight, self.mixing_rate, self._last_rate)

    def changed_in_flight(self) -> list[Tensor]:
        """Parameters whose values were changed while they are on the wire themselves."""
        return [param for flying in self._in_flight for param in flying.changed_in_flight()]

    @property
    def widest_group(self) -> int:
        """Size of the largest group of this rank."""
        return max(group.size for group in self._schedule.groups)

    def abandon(self) -> None:
        """Let go of the round in flight, whatever becomes of its bytes."""
        self._pending = False
        for flying in self._in_flight:
            flying.abandon()
        self._in_flight.clear()

    def rewire(self, topology: Topology, resume: int) -> None:
        """Go on with another topology, and the transport that belongs to it.

        Args:
            topology: of the ranks that are there.
            resume: the round in which all of them meet again.
        """
        rank, world_size = self._transport.rank, self._transport.world_size
        phases = topology.schedule(rank)
        self._schedule = self._schedule._replace(phases=phases, rank=rank, world_size=world_size)
        self._rules = self._rules._replace(topology=repr(topology))
        self._resume = resume
        self._transport.connect(self._schedule.groups)

    def restore(self, state: GossipState) -> None:
        """Continue from `state`, also where the round in flight, which is dropped, has failed."""
        try:
            self.discard()
        finally:
            self._round, self._pending, self.mixing_rate, self._last_rate = state

    def replan(self, buckets: Iterable[Bucket]) -> None:
        """Gossip these buckets from the next launch on; the round in flight keeps its own."""
        self._buckets = list(buckets)
        for index, bucket in enumerate(self._buckets):
            logger.info("rank {} bucket {}: {!r}", self._transport.name, index, bucket)

    def launch(self) -> None:
        """Start the next round with the parameters as they are now."""
        launched = self.begin_round()
        for bucket in self._buckets:
            launched.post(bucket)
        self.hand_over(launched)

    def begin_round(self) -> Round:
        """The next round, to which the buckets are posted one by one."""
        plan = self._schedule.plan(self._round, self.mixing_rate)
        names = [self._transport.members[rank] for rank in plan.group.ranks]
        logger.debug("rank {} round {}: group {}", self._transport.name, self._round, names)
        return self._round_of(Call.STEP, plan)

    def hand_over(self, launched: Round) -> None:
        """Leave a round to which everything is posted to the wire, until the next step."""
        launched.seal()
        self._in_flight.append(launched)
        self._last_rate = self.mixing_rate
        self._round += 1

    def finish(self) -> None:
        """Wait for the round in flight, if there is one, and mix it into the parameters."""
        if arrived := self.receive():
            for bucket in arrived.unmixed:
                self.mix(arrived, bucket)

    def receive(self) -> Round | None:
        """Wait for the round in flight as a whole, if there is one, in order to mix it.

        Raises:
            NonFiniteError: it must not be mixed, and is dropped.
        """
        self._relaunch()
        arrived = self._take()
        if arrived is None:
            return None
        arrived.check_finite()
        # A rank that is lost only now may have cost this one its parameters: they are the others'.
        arrive = partial(self._post_mix.arrive, arrived.plan.kind, self._buckets)
        return arrived if self.survive(arrive) else None

    def mix(self, arrived: Round, bucket: Bucket) -> None:
        """Mix in what has arrived for a bucket, if anything has."""
        if bucket in arrived.unmixed:
            arrived.mix(bucket)
            self._post_mix.mix(arrived.plan.kind, bucket)

    def mix_replaced(self, arrived: Round) -> None:
        """Mix the buckets that are not of the current plan any more."""
        for bucket in arrived.unmixed:
            if bucket not in self._buckets:
                self.mix(arrived, bucket)

    def arrive(self) -> None:
        """Wait for the round in flight, if there is one; nothing is mixed yet.

        Raises:
            NonFiniteError: it must not be mixed; it stays in flight, and whoever mixes it raises.
        """
        for flying in self._in_flight:
            if self.survive(flying.receive):
                flying.check_finite()

    def survive(self, action: Callable[[], None]) -> bool:
        """Do something that waits for peers; whether it was done.

        It was not where a peer was lost and `on_loss` has dealt with that, dropping the round.
        """
        try:
            action()
        except PeerError as error:
            if self.on_loss is None:
                raise
            self.on_loss(error)
            return False
        return True

    def announce(self, call: Call) -> None:
        """Make sure that the ranks of the next round's group are in the same method as this one.

        Raises:
            CallOrderError: one is elsewhere.
            PeerError: one does not say.
        """
        # Whom this rank meets next: an announcement during a rest is heard by them.
        plan = self._schedule.next_plan(self._round, self.mixing_rate)
        self._round_of(call, plan).receive()

    def discard(self) -> None:
        """Drop the round in flight, if there is one, whatever it holds: it is not mixed."""
        self._pending = False
        self._take()

    def _relaunch(self) -> None:
        """Launch the round that was in flight when the state was saved."""
        if self._pending:
            # synchronize() may come before any step(), and the state may be of a run without an
            # outer optimizer: it would miss its start when the round is mixed.
            self._post_mix.begin(self._buckets)
            self._pending = False
            self._round -= 1
            rate, self.mixing_rate = self.mixing_rate, self._last_rate
            self.launch()
            self.mixing_rate = rate

    def _take(self) -> Round | None:
        """Take the round out of flight once it has arrived.

        One that fails is out of flight, too: what fails on the wire is not waited for again.
        """
        if not self._in_flight:
            return None
        flying = self._in_flight.pop()
        return flying if self.survive(flying.receive) else None

    def _round_of(self, call: Call, plan: RoundPlan) -> Round:
        self._transport.check_open()
        if self._round < self._resume:
            plan = self._schedule.idle()
        header = Header(call, self._round, plan.mixing_rate)
        return Round(header, plan, self._transport, self._rules, self._meter)


def _close(in_flight: list[Round], transport: Transport) -> None:
    """See a round that nobody will mix off the wire, and let go of the process group.

    The peers launch the same round sooner or later, unless they are gone; a script that ends, or a
    wrapper that is replaced, does not wait for them for as long as a step would.
    """
    transport.limit_waits(_CLOSE_TIMEOUT)
    try:
        for flying in in_flight:
            flying.receive()
    except RuntimeError as error:
        logger.warning(
            "rank {}: the wrapper was dropped with a round in flight, which did not arrive within "
            "{}: {}; call synchronize() at the end of the training",
            *(transport.name, _CLOSE_TIMEOUT, error),
        )
    in_flight.clear()
    transport.close()
