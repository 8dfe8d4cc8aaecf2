"""Finds dead links between living ranks that cannot connect; one end of each leaves."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import product

from torch.distributed.distributed_c10d import PrefixStore

from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.process_groups import connect_gloo
from decent_optim_wrapper.comm.store import BoundedStore
from decent_optim_wrapper.comm.waiting import wait_for_any
from decent_optim_wrapper.elastic.membership.epoch import Note
from decent_optim_wrapper.elastic.membership.heartbeat import Heartbeat
from decent_optim_wrapper.errors import PeerError

_POLL_SECONDS = 0.05
# Every attempt on a pair needs its own connection and threads.
_MOST_TRIED = 32
# The longest wait for the next link: TCP sends its first packet after 0, 1, 3 and 7 s.
_LONGEST_WAIT = timedelta(seconds=8)
# A link of up to so many ranks is dead if two attempts at once have failed: lost packets may use up
# the time of one. Among more ranks, the store's process might run out of open files.
_MOST_TRIED_TWICE = 16


@dataclass(frozen=True)
class LinkTrial:
    """A trial of the links between members that could not connect.

    Args:
        store: shared by all ranks.
        epoch: whose members could not connect.
        notes: the notes of the members.
        heartbeat: of this rank.
        limit: bound of each wait for the others.
    """

    store: BoundedStore
    epoch: int
    notes: dict[int, Note]
    heartbeat: Heartbeat
    limit: timedelta

    @property
    def _wait(self) -> timedelta:
        """How long to wait for the next link after one has been tried."""
        return min(self.limit / 2, _LONGEST_WAIT)

    def run(self) -> None:
        """Try the links of this rank to the others; all members do so at once.

        A link is dead if both of its ends say so. Of two ranks that cannot reach each other, the
        one with more dead links leaves; of two with the same number a newcomer, or else the higher
        one. Nothing is known if a member does not come, or if the members must meet again
        meanwhile.

        Raises:
            PeerError: this rank leaves.
        """
        rank = self.heartbeat.rank
        # All begin together: an attempt fails while the other end does not make it.
        if len(self.notes) > _MOST_TRIED or not self._share("begun", []):
            return
        said = self._share("missing", self._find_missing())
        dead = {one: [other for other in said[one] if one in said[other]] for one in said}
        order = {one: (len(dead[one]), self.notes[one].needs_state, one) for one in said}
        if any(order[other] < order[rank] for other in dead.get(rank, [])):
            self.heartbeat.leave()
            raise PeerError(
                f"rank {rank}: this rank and ranks {dead[rank]} are alive, but cannot connect, "
                f"and the others go on without this one; repair the link, and restart this rank"
            )

    def _share(self, name: str, own: list[int]) -> dict[int, list[int]]:
        """The lists that the ranks have written under this name; none if one does not come."""
        keys = [f"{self.epoch}/{name}/{rank}" for rank in self.notes]
        self.store.set(f"{self.epoch}/{name}/{self.heartbeat.rank}", json.dumps(own))
        deadline = time.monotonic() + 2 * self._wait.total_seconds()
        while True:
            # Before the look: a rank that has seen all lists asks for the next epoch.
            is_over = self.heartbeat.is_over() or time.monotonic() > deadline
            if self.store.exist(keys) and "" not in (texts := self.store.look(keys)):
                return dict(zip(self.notes, map(json.loads, texts), strict=True))
            if is_over:
                return {}
            time.sleep(_POLL_SECONDS)

    def _find_missing(self) -> list[int]:
        """Try the links to all ranks; return those without a connection, as far as it is known.

        This rank also connects to itself: before it has, it has had no time to try its links. Each
        attempt that ends gives the others more time, since on a busy machine links connect one
        after the other.
        """
        rank, numbers = self.heartbeat.rank, range(2 if len(self.notes) <= _MOST_TRIED_TWICE else 1)
        others = [other for other in self.notes if other != rank]
        tries = [(number, other, int(other < rank)) for number, other in product(numbers, others)]
        tries += [(0, rank, place) for place in range(2)]
        pending = {in_background(partial(self._connect, *each)): each[1] for each in tries}
        connected = set[int]()
        with suppress(TimeoutError):
            while pending and len(connected) < len(self.notes):
                wait_for_any(pending, self._wait.total_seconds(), self.heartbeat.is_over)
                for attempt in [each for each in pending if each.done()]:
                    other = pending.pop(attempt)
                    if attempt.exception() is None:
                        connected.add(other)
        is_known = rank in connected and not self.heartbeat.is_over()
        return [other for other in others if is_known and other not in connected]

    def _connect(self, number: int, other: int, place: int) -> None:
        """Connect to another rank; each attempt on a link has a number, each end a place."""
        # A call that waits for a peer's key delays all other calls over its connection.
        ends = sorted((self.heartbeat.rank, other))
        part = PrefixStore(f"{self.epoch}/links/{number}/{ends}", self.store.clone())
        connect_gloo(part, place, 2, 2 * self._wait)
