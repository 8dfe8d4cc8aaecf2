"""An epoch: which ranks take part, at which rounds they are, and who needs the state of another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from decent_optim_wrapper.comm.transport import Transport


class Note(NamedTuple):
    """What a rank writes about itself when it enters an epoch.

    Args:
        round: the number of its next round.
        needs_state: whether it needs the state of another rank, if there is one that has any.
        calls_made: number of collective calls that it has made in addition to its steps.
    """

    round: int
    needs_state: bool
    calls_made: int = 0


# Every rank starts so; if no rank has any state yet, none of them needs another's.
FIRST_NOTE = Note(round=0, needs_state=True)


@dataclass(frozen=True)
class Epoch:
    """Members that have agreed on each other and are connected.

    Args:
        notes: the notes of the members by rank, in ascending order; at least one of them needs no
            state.
        transport: connects the members. It holds the only reference to their communicator, so that
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
        """The round with which the members go on: the latest at which a member is."""
        return max(note.round for note in self._donors.values())

    @property
    def calls_made(self) -> int:
        """Number of collective calls that all members with a state have made."""
        return min(note.calls_made for note in self._donors.values())

    @property
    def has_newcomers(self) -> bool:
        """Whether a member needs the state of another."""
        return len(self._donors) < len(self.notes)

    @property
    def donor(self) -> int:
        """The position of a member at `round`; others that have a state may be a step behind."""
        donors = self._donors.items()
        return next(place for place, note in donors if note.round == self.round)

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
