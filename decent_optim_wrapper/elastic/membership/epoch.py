"""An epoch: the ranks that take part, their rounds, and which of them need a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from decent_optim_wrapper.comm.transport import Transport


class Note(NamedTuple):
    """What a rank writes about itself when it enters an epoch.

    Args:
        round: the number of its next round.
        needs_state: whether it needs the state of another rank, if any rank has one.
        calls_made: number of collective calls that it has made in addition to its steps.
        summary: what its `Follower` sends to the other ranks; JSON values.
    """

    round: int
    needs_state: bool
    calls_made: int = 0
    summary: Any = None


# The note of every rank at the start. If no rank has a state yet, none needs one.
FIRST_NOTE = Note(round=0, needs_state=True)


@dataclass(frozen=True)
class Epoch:
    """Members that have agreed on each other and are connected.

    Args:
        notes: the notes of the members by rank, in ascending order. At least one of them needs no
            state.
        transport: connects the members. It has the only reference to their communicator, so that
            `abort` can close it.
    """

    notes: dict[int, Note]
    transport: Transport

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks, as numbered at the start."""
        return self.transport.members

    @property
    def note(self) -> Note:
        """The note of this rank."""
        return self.notes[self.transport.initial_rank]

    @property
    def round(self) -> int:
        """The round with which the members continue: the latest round of a member."""
        return max(note.round for note in self._donors.values())

    @property
    def calls_made(self) -> int:
        """Number of collective calls that all members with a state have made."""
        return min(note.calls_made for note in self._donors.values())

    @property
    def has_newcomers(self) -> bool:
        """True if a member needs the state of another one."""
        return len(self._donors) < len(self.notes)

    @property
    def donor(self) -> int:
        """The position of a member at `round`; other members may be a step behind."""
        return next(place for place, note in self._donors.items() if note.round == self.round)

    @property
    def _donors(self) -> dict[int, Note]:
        """The notes of the members that have a state, by their position."""
        notes = enumerate(self.notes.values())
        return {place: note for place, note in notes if not note.needs_state}


def with_donor(notes: dict[int, Note]) -> dict[int, Note]:
    """If all ranks need a state, those at the latest round become donors of their state."""
    if not all(note.needs_state for note in notes.values()):
        return notes
    latest = max(note.round for note in notes.values())
    return {rank: note._replace(needs_state=note.round < latest) for rank, note in notes.items()}
