"""Continues without lost ranks, and sends the state to ranks that come back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from loguru import logger

from decent_optim_wrapper.comm.background import Result
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.elastic.membership.epoch import Epoch, Note
from decent_optim_wrapper.elastic.membership.hand_over import hand_over
from decent_optim_wrapper.elastic.membership.rendezvous import Rendezvous
from decent_optim_wrapper.errors import CallOrderError, NonFiniteError, PeerError
from decent_optim_wrapper.gossip.coordinator import Coordinator
from decent_optim_wrapper.gossip.header import CollectiveCall
from decent_optim_wrapper.gossip.schedule import Intervals
from decent_optim_wrapper.gossip.session import Session
from decent_optim_wrapper.start.membership import Follower, Trained
from decent_optim_wrapper.topo import Greedy, Topology, TopologyFactory, default_name

# Of more, `greedy` takes long to compute, and has a triple in each of up to 200 rounds if they are
# odd: a communicator for each, with threads and files, before the ranks go on.
_MOST_GREEDY = 8
# Called with the old and the new members.
OnChange = Callable[[tuple[int, ...], tuple[int, ...]], object]


@dataclass(eq=False)
class Recovery:
    """Opens a new session whenever the members change.

    A rank that comes back starts with a step. Until all members are in a step, it takes part in
    their other calls and drops the results.

    Args:
        rendezvous: agrees on the members.
        epoch: the members that have met there.
        topology: the topology of all ranks.
        intervals: how often rounds are launched.
        on_change: called with the old and the new members.
    """

    rendezvous: Rendezvous
    epoch: Epoch
    topology: Topology
    intervals: Intervals
    on_change: OnChange | None
    # How often this rank has received its state from others.
    takeovers: int = field(default=0, init=False)
    # Managed, and what newcomers receive, from `begin` on.
    _coordinator: Coordinator = field(init=False)
    _trained: Trained = field(init=False)

    def __post_init__(self) -> None:
        # For good, so that the others continue at once and not after a timeout; and to send a text
        # with every heartbeat from now on, for the followers of other ranks.
        self.leave, self.say = self.rendezvous.leave, self.rendezvous.say
        # The note of this rank, which says whether it still needs the state of another one.
        self._note = self.epoch.note
        # Whether ranks have come back and wait until the others are in a step.
        self._newcomers = False
        # The call that this rank is in, while others may wait for it there.
        self._call: CollectiveCall | None = None
        # Number of calls of this rank in addition to its steps.
        self._calls_made = 0
        self._follower: Callable[[], Follower | None] = lambda: None

    @property
    def transport(self) -> Transport:
        """Connects the members."""
        return self.epoch.transport

    @property
    def joins(self) -> bool:
        """True if this rank joins others that are training already."""
        return self._note.needs_state

    def attach(self, follower: Follower) -> None:
        """Notify a follower whenever the members change, as long as it exists."""
        self._follower = weakref.ref(follower)
        if any(note.summary is not None for note in self.epoch.notes.values()):
            self._notify(follower)

    def _notify(self, follower: Follower) -> None:
        notes = self.epoch.notes
        newcomers = {rank for rank, note in notes.items() if note.needs_state}
        follower.follow({rank: note.summary for rank, note in notes.items()}, newcomers)

    def open_session(self, first_round: int = 0) -> Session:
        """Connect the groups of the members; collective."""
        topology = fitting(self.topology, self.epoch.members)
        return Session.connect(self.transport, topology, self.intervals, first_round)

    def agree(self, text: str) -> None:
        """Publish a description, or compare it with the one that the members have published.

        Raises:
            ValueError: this rank joins them with another description.
        """
        self.rendezvous.agree(text, self.joins)

    def begin(self, coordinator: Coordinator, trained: Trained) -> None:
        """Manage the members of the gossip from now on; a rank that joins receives its state."""
        # The coordinator knows this object, and the caller keeps both.
        self._coordinator, self._trained = weakref.proxy(coordinator), weakref.proxy(trained)
        if self.joins:
            self._call = CollectiveCall.STEP
            self._catch_up()
            self._assemble()
        # The members in the last notification of the user.
        self._notified = self.epoch.members
        self.end_step()

    def begin_step(self) -> None:
        """Admit ranks that come back, and join the recovery of ranks that have lost a peer."""
        self._call = CollectiveCall.STEP
        # Closed by a call that does not continue without a lost rank, such as Checkpoints.save().
        if self.rendezvous.is_due() or self.transport.is_closed:
            self._gather_again("a rank is dead, has lost a peer, or comes back")
        self._assemble()

    def end_step(self) -> None:
        """Mark the step of this rank as complete: no rank waits for it now."""
        self._call = None

    def meet(self, call: CollectiveCall, action: Callable[[], Result]) -> Result:
        """Make a call with all ranks; if one is lost, repeat it with the remaining ones.

        Args:
            call: the method that this rank is in.
            action: the action; it may run several times.
        """
        results: list[Result] = []
        self._call = call
        try:
            while True:
                self._assemble()
                if self._make(call, lambda: results.append(action())):
                    return results[-1]
        finally:
            self._call = None

    def recover(self, reason: object) -> None:
        """Agree on the remaining ranks, drop the round in flight and continue with them.

        Raises:
            PeerError: the ranks could not agree.
        """
        self._gather_again(reason)
        if self._call is CollectiveCall.STEP:
            self._assemble()

    def _make(self, call: CollectiveCall, action: Callable[[], None]) -> bool:
        """Make a call with all ranks; return whether all of them have completed it.

        No rank leaves before all have reached the end of the action. A rank that loses a peer asks
        the others: if one of them has not reached the end, all make the call again.
        """
        acted = False
        try:
            self._coordinator.announce(call)
            action()
            acted = True
            self.transport.all_gather(torch.zeros(1, device="cpu"))
        except PeerError as error:
            self._gather_again(error, acted)
            acted = acted and self.epoch.calls_made > self._calls_made
            if call is CollectiveCall.GLOBAL_AVG and not acted:
                # Even if it is complete on this rank: all start again from their own values.
                self._coordinator.average.undo()
        self._calls_made += acted
        return acted

    def _assemble(self) -> None:
        """If ranks have come back, make the calls that others are in, until all are in a step.

        Raises:
            CallOrderError: the others are in different calls.
        """
        while self._newcomers and self._coordinator.rounds.count >= self.epoch.round:
            calls = self._calls() - {CollectiveCall.STEP}
            if len(calls) > 1:
                raise CallOrderError(
                    f"rank {self.rendezvous.rank}: expected all ranks in the same method when a "
                    f"rank comes back, but they are in {' and '.join(map(str, sorted(calls)))}; "
                    f"call the same methods in the same order on every rank"
                )
            if self._call in calls:
                return
            for call in calls:
                with suppress(NonFiniteError):
                    mirror = partial(_mirror, call, self._coordinator, self.rendezvous.rank)
                    self._make(call, mirror)

    def _calls(self) -> set[CollectiveCall]:
        """The calls that the ranks are in; when all are in a step, there are no newcomers."""
        try:
            numbers = self.transport.all_gather(torch.tensor([self._call or 0], device="cpu"))
        except PeerError as error:
            self._gather_again(error)
            return set()
        calls = {CollectiveCall(number) for number in numbers.flatten().tolist()}
        if calls == {CollectiveCall.STEP}:
            self._newcomers = False
            self._note = self._note._replace(needs_state=False)
        return calls

    def notify_change(self) -> None:
        """Call the user's callback if the members have changed; its errors are not caught."""
        before, self._notified = self._notified, self.epoch.members
        if self.on_change is not None and before != self._notified:
            self.on_change(before, self._notified)

    def _gather_again(self, reason: object, acted: bool = False) -> None:
        """Agree on the remaining ranks, and bring them to the same round."""
        own = f"rank {self.rendezvous.rank}: "
        # Leave out the advice: the ranks follow it now.
        what = str(reason).removeprefix(own).partition("; ")[0]
        logger.warning("{}{}; the ranks that are left gather", own, what)
        follower = self._follower()
        self._note = Note(
            round=self._coordinator.rounds.count,
            needs_state=self.joins,
            calls_made=self._calls_made + acted,
            summary=None if follower is None else follower.summary(self.rendezvous.heard()),
        )
        self._gather()
        self._catch_up()

    def _gather(self) -> None:
        """Close the connections, and connect the remaining ranks."""
        self._coordinator.rounds.abandon()
        self.transport.close("the members gather again")
        self.epoch = self.rendezvous.gather(self._note)
        self._note = self.epoch.note

    def _catch_up(self) -> None:
        """Bring the members to the same round, without ranks that are lost meanwhile."""
        while True:
            try:
                self._begin_epoch()
                return
            except PeerError as error:
                logger.warning("rank {}: lost a peer meanwhile: {}", self.rendezvous.rank, error)
                self._gather()

    def _begin_epoch(self) -> None:
        """Open a session at the epoch's round, and send the state to ranks that need it."""
        epoch, coordinator = self.epoch, self._coordinator
        session = self.open_session(epoch.round)
        coordinator.rounds.enter(session)
        coordinator.local_update.set_members(len(epoch.members))
        if epoch.has_newcomers:
            if self.joins:
                # If it fails, this rank has parts of two states, which belong to no round.
                self._note = self._note._replace(round=0)
            hand_over(self._trained, coordinator, epoch.donor, takes=self.joins)
            self.takeovers += self.joins
        synchronous = coordinator.rounds.policy.pacing.synchronous
        if self.joins or not synchronous:
            coordinator.rounds.resume_at(epoch.round)
        if self.joins:
            self._calls_made = epoch.calls_made
        # If ranks may be at different steps, the others wait in their calls for a newcomer.
        self._newcomers = epoch.has_newcomers and synchronous
        if not synchronous:
            self._note = self._note._replace(needs_state=False)
        logger.warning(
            "rank {}: {} of {} ranks go on with round {}: {}, {!r}",
            *(self.rendezvous.rank, len(self.epoch.members), self.topology.world_size, epoch.round),
            *(self.epoch.members, session.topology),
        )
        if (follower := self._follower()) is not None:
            self._notify(follower)


def _mirror(call: CollectiveCall, coordinator: Coordinator, rank: int) -> None:
    """Make a call together with ranks that are in it, and ignore the result; collective.

    Raises:
        CallOrderError: the call changes what the ranks train.
    """
    match call:
        case CollectiveCall.GLOBAL_AVG:
            coordinator.average.apply(may_revert=True)
            coordinator.average.revert()
        case CollectiveCall.CONSENSUS_DISTANCE:
            coordinator.average.consensus_distance()
        case CollectiveCall.KEEP_AVERAGE:
            coordinator.keep_state()
        case _:
            raise CallOrderError(
                f"rank {rank}: a rank comes back while others are in {call}; restart it afterwards"
            )


def fitting(full: Topology, members: tuple[int, ...]) -> Topology:
    """The topology for these members, of the same kind if it fits; otherwise one for any size.

    Args:
        full: the topology of all ranks.
        members: the remaining ranks; they are renumbered in this order.
    """
    size, local, kind = len(members), full.local_world_size, type(full)
    if size == full.world_size:
        return full
    nodes = [rank // local for rank in members]
    if any(nodes.count(node) != local for node in nodes):
        local = 1
    try:
        if kind.accepts(size, local) and (kind is not Greedy or size <= _MOST_GREEDY):
            return full.resized(size, local)
    except Exception as error:
        # A user's topology may fail in any way, and must not end the remaining ranks.
        logger.warning("{} cannot be rebuilt for {} ranks: {!r}", kind.__name__, size, error)
    other = TopologyFactory.create("base-2" if size > _MOST_GREEDY else default_name(size), size)
    logger.warning("{!r} is not kept for {} ranks: {!r} takes its place", full, size, other)
    return other
