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
        waiting: the number of samples in batches that it has fetched and not used.
        repeated: the upper bound of the samples used twice that it knows of.
        heard: the latest counts of all ranks that it has seen.
    """

    rules: Rules
    first: tuple[int, ...]
    changes: list[Any]
    done: int
    fetched: int
    waiting: int
    repeated: int
    heard: dict[int, Count]

    def pack(self) -> list[Any]:
        """As lists, for JSON."""
        heard = [[rank, *count] for rank, count in self.heard.items()]
        return [[*self.rules], [*self.first], *self[2:-1], heard]

    @classmethod
    def unpack(cls, packed: Any) -> Self:
        """From what `pack` has returned."""
        rules, first, changes, *numbers, heard = packed
        counts = {rank: Count(*count) for rank, *count in heard}
        done, fetched, waiting, repeated = numbers
        return cls(Rules(*rules), tuple(first), changes, done, fetched, waiting, repeated, counts)


class Agreement(NamedTuple):
    """What all members have agreed on.

    Args:
        dealing: all deals so far.
        arrival: the number of steps at which a new member begins.
        starts: the first step of each member that is dealt again.
        came: the members that were not members before.
        again: upper bound of the number of samples that are used twice by this change, because
            ranks had used or fetched them of which the others did not know.
        repeated: the same, by all changes so far.
    """

    dealing: Dealing
    arrival: int
    starts: dict[int, int]
    came: frozenset[int]
    again: int
    repeated: int


def agree(
    told: Mapping[int, Told | None], newcomers: Collection[int], lead: int = 1
) -> Agreement | None:
    """Deal again to the ranks that have met; the result is the same on all of them.

    Args:
        told: what each rank has said; None if it has no sampler yet.
        newcomers: ranks that take the state of another rank, for example after a restart.
        lead: the number of steps by which a rank may be ahead of the others.

    Returns:
        None if no rank has a sampler.
    """
    known = {rank: each for rank, each in told.items() if each is not None}
    if not known:
        return None
    # Some may not have finished the last agreement, but all took part in it. A rank that was
    # dropped may have finished one that the others have not.
    last = max(known, key=lambda rank: (len(known[rank].changes), rank not in newcomers))
    latest = known[last]
    dealing = Dealing(latest.rules, latest.first, [*map(Change.unpack, latest.changes)])
    stay = {
        rank: each
        for rank, each in known.items()
        if rank in dealing.members and rank not in newcomers
    }
    arrival = max((each.done for each in stay.values()), default=latest.done)
    starts = {rank: _start(each, rank in stay, arrival) for rank, each in told.items()}
    came = told.keys() - stay.keys()
    gone = [rank for rank in dealing.members if rank not in stay]
    repeated = max(each.repeated for each in known.values())
    if not gone and not came:
        return Agreement(dealing, arrival, starts, frozenset(), 0, repeated)
    counts = {
        rank: max(each.heard.get(rank, Count(0, 0)) for each in known.values()) for rank in gone
    }
    done = {rank: dealing.finished(rank, count) for rank, count in counts.items()}
    again = 0
    for rank in {*gone, *known} - stay.keys():
        if rank not in known:
            # At most up to the step in which it would have waited for the others.
            again += dealing.at_most(range(done[rank], arrival + lead), rank)
        elif rank in dealing.members:
            again += dealing.at_most(range(done[rank], known[rank].fetched), rank)
        else:
            # It was dropped, so what it has fetched was dealt again, and its loader cannot take
            # back what workers have read. The steps that it has made count since its loss.
            again += known[rank].waiting
    dealing.apply(Change(starts=starts, done=done))
    return Agreement(dealing, arrival, starts, frozenset(came), again, repeated + again)


def _start(told: Told | None, stays: bool, arrival: int) -> int:
    """The first step of a rank that is dealt again."""
    if told is None:
        return arrival
    # A rank that comes back in the same process first uses what it has fetched.
    return told.fetched if stays else arrival + told.fetched - told.done
