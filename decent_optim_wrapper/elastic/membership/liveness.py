"""Which ranks are alive: each rank watches a few others, and lists the dead ones for all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

# Of a process that is known to have ended, before the text of its last heartbeat.
ENDED = "0 0 0 0 "


class Beat(NamedTuple):
    """A heartbeat.

    Args:
        life: number of the process among those that have had its rank; 0 for a value that is none.
        number: of the heartbeat; no two of a process are the same.
        epoch: the epoch of the process; 0 before the first one.
        process: its name.
        text: what it says.
    """

    life: int = 0
    number: int = 0
    epoch: int = 0
    process: str = ""
    text: str = ""

    def __str__(self) -> str:
        return " ".join(map(str, self))

    @classmethod
    def parse(cls, value: str) -> Beat:
        """Read a value of the store."""
        try:
            life, number, epoch, process, text = value.split(" ", 4)
            return cls(int(life), int(number), int(epoch), process, text)
        except ValueError:
            return cls()


class EpochWatch:
    """What one member of an epoch knows about the others.

    The living members form a ring. A rank watches those 1, 2, 4, ... places behind it, which are
    log2(n) ranks. Ranks of one node, which may die together, are also watched from other nodes. A
    member that was found dead stays dead until the next epoch.

    Args:
        epoch: its number.
        rank: this rank.
        members: the ranks of the epoch, this one included.
        looks: number of looks without a new heartbeat after which a rank is dead.
    """

    def __init__(self, epoch: int, rank: int, members: Collection[int], looks: int) -> None:
        self.epoch = epoch
        self._rank = rank
        self._members = sorted(members)
        self._looks = looks
        # The last heartbeat of each watched rank, and the number of looks since then.
        self._beats: dict[int, str] = {}
        self._silent: dict[int, int] = {}
        self.dead: frozenset[int] = frozenset()
        # Whether a rank asks for the next epoch.
        self.requested = False
        self.watched = self._choose()

    def look(self, beats: Mapping[int, str], listed: Collection[int], requested: bool) -> bool:
        """Update from one poll of the other ranks.

        Args:
            beats: the newest heartbeats of the watched ranks.
            listed: the common list of dead ranks.
            requested: whether a rank asks for the next epoch.

        Returns:
            True if this rank knows of dead ranks that are not in the common list.
        """
        self.requested = requested
        self._silent = {
            rank: self._silent.get(rank, 0) + 1 if beat == self._beats.get(rank) else 0
            for rank, beat in beats.items()
        }
        self._beats = dict(beats)
        silent = {rank for rank, looks in self._silent.items() if looks >= self._looks}
        ended = {rank for rank, beat in beats.items() if beat.startswith(ENDED)}
        self.dead = self.dead.union(silent, ended, listed)
        self.watched = self._choose()
        return not self.dead.issubset(listed)

    def _choose(self) -> tuple[int, ...]:
        """Choose the ranks to watch among the living ones."""
        ring = [rank for rank in self._members if rank == self._rank or rank not in self.dead]
        place, size = ring.index(self._rank), len(ring)
        distances = (1 << power for power in range((size - 1).bit_length()))
        return tuple(ring[(place + distance) % size] for distance in distances)
