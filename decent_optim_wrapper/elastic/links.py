"""Finds dead links between living ranks that cannot connect, and the ranks to leave out."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial

from torch.distributed.distributed_c10d import PrefixStore

from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.process_groups import connect_gloo
from decent_optim_wrapper.comm.store import BoundedStore
from decent_optim_wrapper.comm.waiting import wait_for_any
from decent_optim_wrapper.elastic.heartbeat import Heartbeat
from decent_optim_wrapper.errors import PeerError

# Every attempt on a pair needs its own connection and threads.
_MOST_TRIED = 32
# The longest attempt to connect a pair: TCP sends its first packet after 0, 1, 3 and 7 s.
_LONGEST_ATTEMPT = timedelta(seconds=8)
# A link of up to so many ranks is dead if two attempts at once have failed: lost packets may use up
# the time of one. Among more ranks, the store's process might run out of open files.
_MOST_TRIED_TWICE = 16


class Links:
    """Finds the dead links of this rank, and leaves a rank out for each of them.

    Args:
        store: shared by all ranks.
        rank: this rank.
        timeout: of the waits for other ranks. Attempts to connect take at most half of it: ranks
            with working links wait for the others in the next epoch meanwhile.
    """

    def __init__(self, store: BoundedStore, rank: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._timeout = min(timeout / 2, _LONGEST_ATTEMPT)
        # The last epoch whose members could not connect although they are alive.
        self._failed = -1

    def failed_in(self, epoch: int) -> bool:
        """Return whether the members of the epoch could not connect although they are alive."""
        return self._failed == epoch

    def find_dead(self, epoch: int, members: Collection[int], heartbeat: Heartbeat) -> None:
        """Note the members that this rank cannot connect to; all of them try at the same time."""

        def is_dead() -> bool:
            # A request for the next epoch does not end this: that rank has tried its links.
            return heartbeat.is_replaced or not all(map(heartbeat.alive, members))

        if len(members) > _MOST_TRIED or is_dead():
            return
        others = [rank for rank in members if rank != self._rank]
        # The ranks to which it has begun to connect: where the store is slow, nothing is known.
        begun = set[int]()
        attempts = {
            in_background(partial(self._connect, epoch, number, other, begun)): other
            for number in range(2 if len(others) < _MOST_TRIED_TWICE else 1)
            for other in others
        }
        connected = set[int]()
        deadline = time.monotonic() + self._timeout.total_seconds()
        while attempts and connected != {*others} and (left := deadline - time.monotonic()) > 0:
            with suppress(TimeoutError):
                wait_for_any(attempts, left, is_dead)
            if is_dead():
                return
            for attempt in [each for each in attempts if each.done()]:
                other = attempts.pop(attempt)
                if attempt.exception() is None:
                    connected.add(other)
        missing = sorted(begun - connected)
        self._store.set(_missing_key(epoch, self._rank), json.dumps(missing))
        self._failed = epoch

    def _connect(self, epoch: int, number: int, other: int, begun: set[int]) -> None:
        # A call that waits for a peer's key delays all other calls over its connection.
        ends = sorted((self._rank, other))
        store = PrefixStore(f"{epoch}/links/{number}/{ends}", self._store.clone())
        begun.add(other)
        connect_gloo(store, ends.index(self._rank), 2, self._timeout)

    def choose(
        self, epoch: int, present: Collection[int], newcomers: Collection[int]
    ) -> tuple[int, ...]:
        """The ranks that remain without one end of each link that is dead in the epoch."""
        found = {rank: self._store.find(_missing_key(epoch, rank)) for rank in present}
        missing = {rank: json.loads(text) for rank, text in found.items() if text is not None}
        out = left_out(missing, newcomers)
        return tuple(rank for rank in present if rank not in out)

    def check(self, epoch: int) -> None:
        """Check that this rank was not left out because of a dead link.

        Raises:
            PeerError: it was left out.
        """
        if not self.failed_in(epoch):
            return
        if missing := json.loads(self._store.get(_missing_key(epoch, self._rank))):
            raise PeerError(
                f"rank {self._rank}: this rank and ranks {missing} are alive, but cannot connect "
                f"to each other, and the others go on without this one; repair the link, and "
                f"restart this rank"
            )


def left_out(missing: Mapping[int, Collection[int]], newcomers: Collection[int]) -> set[int]:
    """Choose greedily the fewest ranks without which all links work.

    Of two ranks with the same number of dead links, a newcomer is left out, or else the higher one.

    Args:
        missing: for each rank, the ranks that it could not connect to. A link is dead if both ends
            say so.
        newcomers: the ranks that have no state of their own.
    """
    pairs = {(here, there) for here, others in missing.items() for there in others}
    dead = {(here, there) for here, there in pairs if (there, here) in pairs}
    out: set[int] = set()
    while dead:
        counts = Counter(rank for link in dead for rank in link)
        out.add(max(counts, key=lambda rank: (counts[rank], rank in newcomers, rank)))
        dead = {link for link in dead if out.isdisjoint(link)}
    return out


def _missing_key(epoch: int, rank: int) -> str:
    """The key of the ranks that a rank could not connect to."""
    return f"{epoch}/missing/{rank}"
