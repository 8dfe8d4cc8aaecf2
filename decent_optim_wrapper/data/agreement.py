"""How the members agree on the samples to deal again when they change."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from decent_optim_wrapper.data.dealing import Change, Dealing


class Told(NamedTuple):
    """What a rank says when the members change, in values that JSON keeps.

    Args:
        dealing: its `Dealing.packed`.
        done: the number of steps that it has finished.
        fetched: the number of steps whose batches have left its sampler.
        waiting: the number of samples in batches that it has fetched and not used.
        repeated: the upper bound of the samples used twice that it knows of.
        heard: each rank of which it has heard, with the number of changes and of finished steps
            that came with that rank's last heartbeat.
    """

    dealing: list[Any]
    done: int
    fetched: int
    waiting: int
    repeated: int
    heard: list[list[int]]


class Agreement(NamedTuple):
    """What all members have agreed on.

    Args:
        dealing: all deals so far.
        arrival: the number of steps at which a new member begins.
        came: for each rank that was not a member before, the first step that is dealt to it.
        again: upper bound of the number of samples that are used twice by this change, because
            ranks had used or fetched them of which the others did not know.
        repeated: the same, by all changes so far.
    """

    dealing: Dealing
    arrival: int
    came: dict[int, int]
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
    latest = max(known, key=lambda rank: (len(known[rank].dealing[2]), rank not in newcomers))
    dealing = Dealing(*known[latest].dealing)
    stay = {r: known[r] for r in dealing.members if r in known and r not in newcomers}
    gone = [rank for rank in dealing.members if rank not in stay]
    arrival = max((each.done for each in stay.values()), default=known[latest].done)
    # A rank that comes back in the same process first uses what it has fetched.
    came = {
        rank: arrival if each is None else arrival + each.fetched - each.done
        for rank, each in sorted(told.items())
        if rank not in stay
    }
    repeated = max(each.repeated for each in known.values())
    if not gone and not came:
        return Agreement(dealing, arrival, came, 0, repeated)
    heard = sorted(tuple(count) for each in known.values() for count in each.heard)
    counts = {rank: count for rank, *count in heard}
    done = {rank: dealing.finished(rank, *counts.get(rank, (0, 0))) for rank in gone}
    again = 0
    for rank in {*gone, *known} - stay.keys():
        if rank not in dealing.members:
            # It was dropped, so what it has fetched was dealt again, and its loader cannot take
            # back what workers have read. The steps that it has made count since its loss.
            again += known[rank].waiting
        else:
            # At most up to the step in which it would have waited for the others.
            end = known[rank].fetched if rank in known else arrival + lead
            again += dealing.at_most(range(done[rank], end), rank)
    start = max(dealing.start, *(each.fetched for each in stay.values()), *done.values())
    dealing.apply(Change(start, [*came.items()], [*done.items()]))
    return Agreement(dealing, arrival, came, again, repeated + again)
