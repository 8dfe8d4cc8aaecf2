"""How the members agree on the samples to deal again when they change."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Self

from decent_optim_wrapper.data.dealing import Change, Dealing, Rules


class Count(NamedTuple):
    """How far a rank is, as sent with its heartbeats.

    Args:
        version: the number of changes of the dealing in which it counts.
        done: the number of steps that it has finished.
    """

    version: int
    done: int

    def __str__(self) -> str:
        return f"{self.version} {self.done}"

    @classmethod
    def read(cls, text: str) -> Self:
        """Read the text of a count."""
        version, done = map(int, text.split())
        return cls(version, done)


class Told(NamedTuple):
    """What a rank says when the members change.

    Args:
        rules: how its samples are dealt.
        first: the members of the first deal.
        changes: all changes that it knows of, packed.
        done: the number of steps that it has finished.
        fetched: the number of steps whose batches have left its sampler.
        heard: the latest counts of all ranks that it has seen.
    """

    rules: Rules
    first: tuple[int, ...]
    changes: list[Any]
    done: int
    fetched: int
    heard: dict[int, Count]

    def pack(self) -> list[Any]:
        """As lists, for JSON."""
        heard = [[rank, *count] for rank, count in self.heard.items()]
        return [[*self.rules], [*self.first], self.changes, self.done, self.fetched, heard]

    @classmethod
    def unpack(cls, packed: Any) -> Self:
        """From what `pack` has returned."""
        rules, first, changes, done, fetched, heard = packed
        counts = {rank: Count(*count) for rank, *count in heard}
        return cls(Rules(*rules), tuple(first), changes, done, fetched, counts)


class Agreement(NamedTuple):
    """What all members have agreed on.

    Args:
        dealing: all deals so far.
        arrival: the number of steps at which a new member begins.
        starts: the first step of each member that is dealt again.
        came: the members that were not members before.
        repeated: upper bound of the number of samples that are used twice, because lost ranks had
            made steps after their last heartbeats.
    """

    dealing: Dealing
    arrival: int
    starts: dict[int, int]
    came: frozenset[int]
    repeated: int


def agree(told: Mapping[int, Told | None], newcomers: Collection[int]) -> Agreement | None:
    """Deal again to the ranks that have met; the result is the same on all of them.

    Args:
        told: what each rank has said; None if it has no sampler yet.
        newcomers: ranks that take the state of another rank, for example after a restart.

    Returns:
        None if no rank has a sampler.
    """
    known = [each for each in told.values() if each is not None]
    if not known:
        return None
    # Some may not have finished the last agreement, but all took part in it.
    latest = max(known, key=lambda each: len(each.changes))
    dealing = Dealing(latest.rules, latest.first, [*map(Change.unpack, latest.changes)])
    stay = {
        rank: each
        for rank, each in told.items()
        if each is not None and rank in dealing.members and rank not in newcomers
    }
    arrival = max((each.done for each in stay.values()), default=latest.done)
    starts = {rank: _start(each, rank in stay, arrival) for rank, each in told.items()}
    came = told.keys() - stay.keys()
    gone = [rank for rank in dealing.members if rank not in stay]
    if not gone and not came:
        return Agreement(dealing, arrival, starts, frozenset(), 0)
    counts = {rank: max(each.heard.get(rank, Count(0, 0)) for each in known) for rank in gone}
    done = {rank: dealing.finished(rank, count) for rank, count in counts.items()}
    repeated = 0
    for rank, first in done.items():
        again = told.get(rank)
        # At most the step that the others are in, or all batches that it has fetched and will use.
        last = arrival + 1 if again is None else again.fetched
        repeated += dealing.at_most(range(first, last), rank)
    dealing.apply(Change(starts=starts, done=done))
    return Agreement(dealing, arrival, starts, frozenset(came), repeated)


def _start(told: Told | None, stays: bool, arrival: int) -> int:
    """The first step of a rank that is dealt again."""
    if told is None:
        return arrival
    # A rank that comes back in the same process first uses what it has fetched.
    return told.fetched if stays else arrival + told.fetched - told.done
