"""How the members agree on the samples to deal again when they change."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from decent_optim_wrapper.data.dealing import Change, Dealing


class Summary(NamedTuple):
    """What a rank says when the members change, in values that JSON keeps.

    Args:
        dealing: its `Dealing.packed`.
        done: the number of steps that it has finished.
        fetched: the number of steps whose batches have left its sampler.
        waiting: the number of samples in batches that it has fetched and not used.
        heard: each rank of which it has heard, with the number of changes and of finished steps
            that came with that rank's last heartbeat.
    """

    dealing: list[Any]
    done: int
    fetched: int
    waiting: int
    heard: list[list[int]]


def agree(
    known: Mapping[int, Summary], members: Collection[int], newcomers: Collection[int], lead: int
) -> tuple[Dealing, Change | None]:
    """Deal again to the ranks that have met; the result is the same on all of them.

    Args:
        known: what each rank has said that has a sampler; at least one has.
        members: the ranks that have met.
        newcomers: ranks that take the state of another rank, for example after a restart.
        lead: the number of steps by which a rank may be ahead of the others.

    Returns:
        All deals so far, and the change that was made now; None if the members are the same.
    """
    # Some may not have finished the last agreement, but all took part in it. A rank that was
    # dropped may have finished one that the others have not.
    latest = max(known, key=lambda rank: (len(known[rank].dealing[2]), rank not in newcomers))
    # To look at the batches of later steps deals out their epochs, which the change must not find.
    dealing, before = Dealing(*known[latest].dealing), Dealing(*known[latest].dealing)
    stay = {r: known[r] for r in dealing.members if r in known and r not in newcomers}
    gone = [rank for rank in dealing.members if rank not in stay]
    arrival = max((each.done for each in stay.values()), default=known[latest].done)
    # A rank that comes back in the same process first uses what it has fetched.
    came = {
        rank: arrival + (known[rank].fetched - known[rank].done if rank in known else 0)
        for rank in sorted(members)
        if rank not in stay
    }
    if not gone and not came:
        return dealing, None
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
            again += sum(len(before.samples(step, rank)) for step in range(done[rank], end))
    start = max(dealing.start, *(each.fetched for each in stay.values()), *done.values())
    change = Change(start, arrival, [*came.items()], [*done.items()], again)
    dealing.apply(change)
    return dealing, change
