"""Continues without lost ranks, and with those that come back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
from loguru import logger

from decent_optim_wrapper.comm.state_transfer import difference
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.config import OnChange, Schedule
from decent_optim_wrapper.elastic.rendezvous import Note, Rendezvous
from decent_optim_wrapper.errors import CallOrderError, NonFiniteError, PeerError
from decent_optim_wrapper.gossip.gossip import Gossip
from decent_optim_wrapper.gossip.header import Call
from decent_optim_wrapper.gossip.schedule import Session
from decent_optim_wrapper.topo import Complete, Greedy, RandomMatching, Topology

# Sends the state of the rank at that position; the flag says whether to take it. Collective.
HandOver = Callable[[int, bool], None]
Result = TypeVar("Result")


class Recovery:
    """Opens a new session whenever the members change.

    A rank that comes back starts with a step. Until all members are in a step, it takes part in
    their other calls and drops the results.

    Args:
        rendezvous: agrees on the members.
        topology: that of all ranks.
        schedule: when the ranks mix.
        timeout: bound of every wait.
        on_change: called with the old and the new members.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        topology: Topology,
        schedule: Schedule,
        timeout: timedelta,
        on_change: OnChange | None,
    ) -> None:
        self._rendezvous = rendezvous
        self._full = topology
        self._schedule = schedule
        self._timeout = timeout
        self._on_change = on_change
        # Every rank starts so; if no rank has any state yet, none of them needs another's.
        self._note = Note(round=0, needs_state=True)
        # Whether ranks have come back and wait until the others are in a step.
        self._newcomers = False
        # The call that this rank is in, as long as others may wait for it there.
        self._call: Call | None = None
        # How many calls this rank has made in addition to its steps, and how many all ranks have.
        self._calls_made = self._calls_of_all = 0
        weakref.finalize(self, rendezvous.leave)
        self._meet()
        # The members of which the user was last notified.
        self._notified = self.members

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part, as numbered at the start."""
        return self._rendezvous.members

    @property
    def joins(self) -> bool:
        """Whether this rank joins others that are training already."""
        return self._note.needs_state

    def leave(self) -> None:
        """Leave for good: the others continue at once instead of after a timeout."""
        self._rendezvous.leave()

    def agree(self, text: str) -> None:
        """Compare a description with that of the members, or publish it for ranks that come later.

        Raises:
            ValueError: this rank comes back with another description.
        """
        if not self.joins:
            self._rendezvous.publish(text)
        elif (theirs := self._rendezvous.published()) != text:
            raise ValueError(
                f"rank {self._rendezvous.rank}: this rank comes back with "
                f"{difference(text, theirs, 'everyone else')}; build the same model, optimizer and "
                f"wrapper as before"
            )

    def open_session(self, first_round: int = 0) -> Session:
        """Connect the groups of the members; collective."""
        topology = fitting(self._full, self.members)
        return Session.connect(self.transport, topology, self._schedule.intervals, first_round)

    def begin(self, gossip: Gossip, hand_over: HandOver) -> None:
        """Manage the members of the gossip from now on; a rank that joins receives its state."""
        self._gossip = gossip
        self._hand_over = hand_over
        gossip.members = self
        if self.joins:
            self._call = Call.STEP
            self._settle_all()
            self._assemble()
            self._notified = self.members
        self.end_step()

    def begin_step(self) -> None:
        """Admit ranks that come back, and join the recovery of ranks that have lost a peer."""
        self._call = Call.STEP
        if self._rendezvous.wanted:
            self._gather_again("another rank has lost a peer, or comes back")
        elif self.transport.is_closed:
            # In a call that does not continue without the lost rank, such as Checkpoints.save().
            self._gather_again("lost a peer since the last step")
        self._assemble()

    def end_step(self) -> None:
        """Note that the next round is launched: no rank waits any more for this one's step."""
        self._call = None

    def meet(self, call: Call, action: Callable[[], Result]) -> Result:
        """Make a call with all ranks; if one is lost, again with the remaining ones.

        Args:
            call: the method that this rank is in.
            action: the action; it may run several times.
        """
        results: list[Result] = []
        self._call = call
        try:
            done = False
            while not done:
                self._assemble()
                done = self._make(call, lambda: results.append(action()))
        finally:
            self._call = None
        return results[-1]

    def recover(self, reason: object) -> None:
        """Agree on the remaining ranks, drop the round in flight and continue with them.

        Raises:
            PeerError: the ranks could not agree.
        """
        self._gather_again(reason)
        if self._call is Call.STEP:
            self._assemble()

    def _make(self, call: Call, action: Callable[[], None]) -> bool:
        """Make a call with all ranks; return whether all of them have completed it.

        No rank leaves before all have come to the end of the action. A rank that loses a peer there
        asks the others: if one of them has not come to the end, all make the call again.
        """
        acted = False
        try:
            self._gossip.announce(call)
            action()
            acted = True
            self.transport.all_gather(torch.zeros(1, device="cpu"))
        except PeerError as error:
            self._gather_again(error, acted)
            acted = acted and self._calls_of_all > self._calls_made
        self._calls_made += acted
        return acted

    def _assemble(self) -> None:
        """If ranks have come back, make the calls that others are in, until all are in a step.

        Raises:
            CallOrderError: the others are in different calls.
        """
        while self._newcomers and self._gossip.state.round >= self._resume:
            calls = self._calls() - {Call.STEP}
            if len(calls) > 1:
                raise CallOrderError(
                    f"rank {self._rendezvous.rank}: expected all ranks in the same method when a "
                    f"rank comes back, but they are in {' and '.join(map(str, sorted(calls)))}; "
                    f"call the same methods in the same order on every rank"
                )
            if self._call in calls:
                return
            for call in calls:
                with suppress(NonFiniteError):
                    self._make(call, partial(_mirror, call, self._gossip, self._rendezvous.rank))

    def _calls(self) -> set[Call]:
        """The calls that the ranks are in; once all are in a step, none is a newcomer."""
        try:
            numbers = self.transport.all_gather(torch.tensor([self._call or 0], device="cpu"))
        except PeerError as error:
            self._gather_again(error)
            return set()
        calls = {Call(number) for number in numbers.flatten().tolist()}
        if calls == {Call.STEP}:
            self._newcomers = False
            self._note = self._note._replace(needs_state=False)
        return calls

    def notify_change(self) -> None:
        """Call the user's callback if the members have changed; its errors are not caught."""
        before, self._notified = self._notified, self.members
        if self._on_change is not None and before != self._notified:
            self._on_change(before, self._notified)

    def _gather_again(self, reason: object, acted: bool = False) -> None:
        """Agree on the remaining ranks, and bring them to the same round."""
        logger.warning("rank {}: {}", self._rendezvous.rank, reason)
        self._note = self._note._replace(
            round=self._gossip.state.round, calls_made=self._calls_made + acted
        )
        self._leave_round()
        self._meet()
        self._settle_all()

    def _leave_round(self) -> None:
        self._gossip.abandon()
        self.transport.abort("the members gather again")

    def _meet(self) -> None:
        """Agree on the members, and connect them."""
        rank, rendezvous = self._rendezvous.rank, self._rendezvous
        gathering = rendezvous.gather(self._note)
        self._notes = list(gathering.notes.values())
        self._note = self._note._replace(needs_state=gathering.notes[rank].needs_state)
        # No other reference to the communicator is kept: `abort` must be able to close it.
        self.transport = Transport(
            gathering.world,
            gathering.members.index(rank),
            gathering.members,
            self._timeout,
            gathering.store,
            should_stop=lambda: rendezvous.wanted,
        )

    def _settle_all(self) -> None:
        """Settle; if a rank is lost meanwhile, again with the remaining ones."""
        while True:
            try:
                self._settle()
                return
            except PeerError as error:
                logger.warning(
                    "rank {}: lost a peer while rebuilding: {}", self._rendezvous.rank, error
                )
                self._leave_round()
                self._meet()

    def _settle(self) -> None:
        """Bring the members to the same round, and send the state to those that come back."""
        donors = [place for place, note in enumerate(self._notes) if not note.needs_state]
        self._resume = max(self._notes[place].round for place in donors)
        self._calls_of_all = min(self._notes[place].calls_made for place in donors)
        newcomers = len(donors) < len(self._notes)
        session = self.open_session(self._resume)
        self._gossip.session = session
        if newcomers:
            # From a rank that is at this round already: others still have steps to make until then.
            donor = next(p for p in donors if self._notes[p].round == self._resume)
            self._hand_over(donor, self.joins)
        synchronous = self._gossip.pacing.synchronous
        if self.joins or not synchronous:
            self._gossip.resume_at(self._resume)
        if self.joins:
            self._calls_made = self._calls_of_all
        # Where ranks may be at different steps, the others' calls wait for those of a newcomer.
        self._newcomers = newcomers and synchronous
        if not synchronous:
            self._note = self._note._replace(needs_state=False)
        logger.warning(
            "rank {}: {} of {} ranks go on with round {}: {}, {!r}",
            *(self._rendezvous.rank, len(self.members), self._full.world_size, self._resume),
            *(self.members, session.topology),
        )


def _mirror(call: Call, gossip: Gossip, rank: int) -> None:
    """Make a call with ranks that are in it, and drop the result; collective.

    Raises:
        CallOrderError: the call changes what the ranks train.
    """
    match call:
        case Call.GLOBAL_AVG:
            gossip.apply_average(may_revert=True)
            gossip.revert_average()
        case Call.CONSENSUS_DISTANCE:
            gossip.consensus_distance()
        case Call.KEEP_AVERAGE:
            gossip.keep_state()
        case _:
            raise CallOrderError(
                f"rank {rank}: a rank comes back while others are in {call}, and cannot make that "
                f"call with them; restart it"
            )


def fitting(full: Topology, members: tuple[int, ...]) -> Topology:
    """The topology for these members: of the same kind if it fits, else one that fits any size.

    Args:
        full: the topology of all ranks.
        members: the remaining ranks; they are renumbered in this order.
    """
    size, local = len(members), full.local_world_size
    if size == full.world_size:
        return full
    nodes = [rank // local for rank in members]
    if any(nodes.count(node) != local for node in nodes):
        local = 1
    kind = type(full)
    try:
        if kind.accepts(size, local):
            return kind(size, local)
    except Exception as error:
        # A user's topology may fail in any way, and must not end the remaining ranks.
        logger.warning("{} cannot be rebuilt for {} ranks: {!r}", kind.__name__, size, error)
    general = Greedy if Greedy.accepts(size) else RandomMatching
    other = Complete(size) if size < 3 else general(size)
    logger.warning("{!r} does not fit {} ranks: {!r} takes its place", full, size, other)
    return other
