"""Going on without lost ranks, and together with those that come back."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from loguru import logger

from decent_optim_wrapper._agreement import difference
from decent_optim_wrapper._crew import Crew, Note
from decent_optim_wrapper._gossip import Gossip
from decent_optim_wrapper._transport import Transport
from decent_optim_wrapper.errors import PeerError
from decent_optim_wrapper.topo import Complete, Greedy, RandomMatching, Topology

OnChange = Callable[[tuple[int, ...], tuple[int, ...]], object]
# Gives the state of the rank at that place to those that have none, and takes it there; collective.
HandOver = Callable[[int, bool], None]


class Survival:
    """Rebuilds topology and connections whenever the members change.

    Args:
        crew: who is there.
        transport: what to rebuild.
        topology: that of all ranks.
        on_change: told of the old and the new members.
    """

    def __init__(
        self, crew: Crew, transport: Transport, topology: Topology, on_change: OnChange | None
    ) -> None:
        self._crew = crew
        self._transport = transport
        self._full = topology
        self._on_change = on_change
        self._note = Note(0, crew.reborn)
        weakref.finalize(self, crew.leave)
        transport.alarm = lambda: crew.wanted
        self._notes = self._meet()

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part, as numbered at the start."""
        return self._crew.members

    @property
    def joins(self) -> bool:
        """Whether this rank comes to others who are training already."""
        return self._note.fresh

    @property
    def wanted(self) -> bool:
        """Whether a rank asks to gather again."""
        return self._crew.wanted

    def leave(self) -> None:
        """Stay away from now on: the others go on at once, and not after a timeout."""
        self._crew.leave()

    def agree(self, text: str) -> None:
        """Compare a description with that of the members, or leave it for those that come later.

        Raises:
            ValueError: this rank comes back as another one than it was.
        """
        if not self.joins:
            self._crew.publish(text)
        elif (theirs := self._crew.published()) != text:
            raise ValueError(
                f"rank {self._crew.rank}: this rank comes back with "
                f"{difference(text, theirs, 'everyone else')}; build the same model, optimizer and "
                f"wrapper as before"
            )

    def begin(self, gossip: Gossip, hand_over: HandOver) -> None:
        """Take charge of the gossip, from the first epoch on."""
        self._gossip = gossip
        self._hand_over = hand_over
        gossip.on_loss = self.recover
        if self.joins:
            self._settle_all()

    def recover(self, reason: object) -> None:
        """Agree on who is left, drop the round in flight and go on with them.

        Raises:
            PeerError: there is no agreement.
        """
        logger.warning("rank {}: {}", self._crew.rank, reason)
        before = self.members
        self._note = Note(self._gossip.state.round, False)
        self._leave_round()
        self._notes = self._meet()
        self._settle_all()
        if self._on_change is not None and self.members != before:
            self._on_change(before, self.members)

    def _leave_round(self) -> None:
        self._gossip.abandon()
        self._transport.abort("the members gather again")

    def _meet(self) -> list[Note]:
        """Gather, and build what depends on who came; what they say of themselves, in their order.

        Nothing here keeps the group itself: hanging up must be able to close it.
        """
        gathering = self._crew.gather(self._note)
        mine = gathering.notes[self._crew.rank]
        self._note = self._note._replace(fresh=mine.fresh)
        self._transport.reform(gathering.world, gathering.members, self._crew.rank, gathering.store)
        self.topology = fitting(self._full, gathering.members)
        return list(gathering.notes.values())

    def _settle_all(self) -> None:
        """Settle, with those that are left if one is lost meanwhile."""
        while True:
            try:
                self._settle()
                return
            except PeerError as error:
                logger.warning("rank {}: lost a peer while rebuilding: {}", self._crew.rank, error)
                self._leave_round()
                self._notes = self._meet()

    def _settle(self) -> None:
        """Bring the members to the same round, and those that come back to the same state."""
        resume = max(note.round for note in self._notes if not note.fresh)
        self._gossip.rewire(self.topology, resume)
        if any(note.fresh for note in self._notes):
            # From a rank that is there already: another one still has a step to make until then.
            self._hand_over(self._notes.index(Note(resume, False)), self.joins)
        if self.joins:
            self._gossip.restore(self._gossip.state._replace(round=resume, in_flight=False))
            self._note = Note(resume, False)
        logger.warning(
            "rank {}: {} of {} ranks go on with round {}: {}, {!r}",
            *(self._crew.rank, len(self.members), self._full.world_size, resume),
            *(self.members, self.topology),
        )


def fitting(full: Topology, members: tuple[int, ...]) -> Topology:
    """The topology for those members: of the same kind where it fits, else one that fits any size.

    Args:
        full: the topology of all ranks.
        members: the ranks that are left; they are renumbered in this order.
    """
    size, local = len(members), full.local_world_size
    if size == full.world_size:
        return full
    nodes = [rank // local for rank in members]
    if any(nodes.count(node) != local for node in nodes):
        local = 1
    kind = type(full)
    if kind.accepts(size, local):
        try:
            return kind(size, local)
        except (TypeError, ValueError) as error:
            logger.warning("{} cannot be rebuilt for {} ranks: {}", kind.__name__, size, error)
    general = Greedy if Greedy.accepts(size) else RandomMatching
    other = Complete(size) if size < 3 else general(size)
    logger.warning("{!r} does not fit {} ranks: {!r} takes its place", full, size, other)
    return other
