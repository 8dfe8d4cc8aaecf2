"""Finds dead links between living ranks that cannot connect; one end of each leaves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import product

from torch.distributed.distributed_c10d import PrefixStore

from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.process_groups import connect_gloo
from decent_optim_wrapper.comm.store import BoundedStore
from decent_optim_wrapper.elastic.epoch import Note
from decent_optim_wrapper.elastic.heartbeat import Heartbeat
from decent_optim_wrapper.errors import PeerError

_POLL_SECONDS = 0.05
# Every attempt on a pair needs its own connection and threads.
_MOST_TRIED = 32
# The longest attempt to connect a pair: TCP sends its first packet after 0, 1, 3 and 7 s.
_LONGEST_ATTEMPT = timedelta(seconds=8)
# A link of up to so many ranks is dead if two attempts at once have failed: lost packets may use up
# the time of one. Among more ranks, the store's process might run out of open files.
_MOST_TRIED_TWICE = 16


def check_links(
    store: BoundedStore, epoch: int, notes: dict[int, Note], heartbeat: Heartbeat, limit: timedelta
) -> None:
    """Try the links of this rank to the others; all members that cannot connect do so at once.

    Of two ranks that cannot reach each other, the one with more dead links leaves; of two with the
    same number a newcomer, or else the higher one.

    Args:
        store: shared by all ranks.
        epoch: whose members could not connect.
        notes: the notes of the members.
        heartbeat: of this rank.
        limit: how long the others wait for this rank. Attempts take at most half of it: ranks with
            working links wait in the next epoch meanwhile.

    Raises:
        PeerError: this rank leaves.
    """

    def is_over() -> bool:
        # A request for the next epoch does not end this: that rank has tried its links.
        return heartbeat.is_replaced or not all(map(heartbeat.alive, notes))

    if len(notes) > _MOST_TRIED or is_over():
        return
    rank, seconds = heartbeat.rank, min(limit / 2, _LONGEST_ATTEMPT)
    others = notes.keys() - {rank}
    # The ranks to which it has begun to connect: where the store is slow, nothing is known.
    begun = set[int]()

    def connect(number: int, other: int) -> None:
        # A call that waits for a peer's key delays all other calls over its connection.
        ends = sorted((rank, other))
        part = PrefixStore(f"{epoch}/links/{number}/{ends}", store.clone())
        begun.add(other)
        connect_gloo(part, ends.index(rank), 2, seconds)

    tries = product(range(2 if len(others) < _MOST_TRIED_TWICE else 1), others)
    attempts = {in_background(partial(connect, *each)): each[1] for each in tries}

    def missing() -> list[int]:
        connected = {attempts[each] for each in attempts if each.done() and not each.exception()}
        return sorted(begun - connected)

    def is_known() -> bool:
        return (begun == others and not missing()) or all(each.done() for each in attempts)

    _wait_until(is_known, seconds, is_over)
    if is_over():
        return
    own = [len(dead := missing()), notes[rank].needs_state, rank, dead]
    store.set(_key(epoch, rank), json.dumps(own))
    for other in dead:
        _wait_until(partial(store.check, [_key(epoch, other)]), seconds, is_over)
        theirs = json.loads(store.find(_key(epoch, other)) or "[0, false, 0, []]")
        if rank in theirs[3] and theirs < own:
            heartbeat.leave()
            raise PeerError(
                f"rank {rank}: this rank and ranks {dead} are alive, but cannot connect to each "
                f"other, and the others go on without this one; repair the link, and restart this "
                f"rank"
            )


def _wait_until(
    done: Callable[[], bool], limit: timedelta, should_stop: Callable[[], bool]
) -> None:
    deadline = time.monotonic() + limit.total_seconds()
    while not done() and not should_stop() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _key(epoch: int, rank: int) -> str:
    """The key of the ranks that a rank could not connect to."""
    return f"{epoch}/missing/{rank}"
