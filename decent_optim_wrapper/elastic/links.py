"""Finds dead links between living ranks, and the ranks to leave out because of them."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.process_groups import connect_gloo
from decent_optim_wrapper.comm.store import BoundedStore
from decent_optim_wrapper.comm.waiting import wait_for_any, within
from decent_optim_wrapper.elastic.heartbeat import Heartbeat
from decent_optim_wrapper.errors import PeerError

# Every pair needs its own connection and threads.
MOST_TRIED = 32


class Links:
    """Finds the dead links of this rank, and leaves a rank out for each of them.

    Args:
        store: shared by all ranks.
        rank: this rank.
        timeout: bound of the attempts to connect. Ranks with working links wait in the next epoch
            meanwhile, up to a longer timeout.
    """

    def __init__(self, store: BoundedStore, rank: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._timeout = timeout
        # The last epoch whose members could not connect although they are alive.
        self._failed = -1

    def failed_in(self, epoch: int) -> bool:
        """Whether the members of the epoch could not connect although they are alive."""
        return self._failed == epoch

    def find_dead(self, epoch: int, members: Collection[int], heartbeat: Heartbeat) -> None:
        """Note the members that this rank cannot connect to; all of them try at the same time."""

        def is_dead() -> bool:
            # A request for the next epoch does not end this: that rank has tried its links.
            return heartbeat.is_replaced or not all(map(heartbeat.alive, members))

        if len(members) > MOST_TRIED or is_dead():
            return

        def connect() -> dict[int, Any]:
            # A call that waits for a peer's key delays all other calls over its connection.
            others = (rank for rank in members if rank != self._rank)
            return {rank: PrefixStore(f"{epoch}/links", self._store.clone()) for rank in others}

        try:
            stores = within(self._timeout.total_seconds(), connect, is_dead)
        except TimeoutError:
            return
        missing = unreachable(stores, self._rank, self._timeout, is_dead)
        self._store.set(_missing_key(epoch, self._rank), json.dumps(missing))
        self._failed = epoch

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


def unreachable(
    stores: Mapping[int, Any], rank: int, timeout: timedelta, should_stop: Callable[[], bool]
) -> list[int]:
    """The ranks that this one cannot connect to; all ranks try at about the same time.

    Args:
        stores: by rank, a connection to the store on which to meet it, all under one prefix that
            nobody has used.
        rank: this rank.
        timeout: bound of the attempts, which are made at the same time.
        should_stop: tells whether to give up earlier; then nothing is known.
    """
    pending = {
        in_background(partial(_connect, store, rank, other, timeout)): other
        for other, store in stores.items()
    }
    missing = set(pending.values())
    deadline = time.monotonic() + timeout.total_seconds()
    while pending and (left := deadline - time.monotonic()) > 0:
        with suppress(TimeoutError):
            wait_for_any(pending, left, should_stop)
        if should_stop():
            return []
        for attempt in [each for each in pending if each.done()]:
            other = pending.pop(attempt)
            if attempt.exception() is None:
                missing.discard(other)
    return sorted(missing)


def _connect(store: Any, rank: int, other: int, timeout: timedelta) -> None:
    pair = PrefixStore(f"{min(rank, other)}-{max(rank, other)}", store)
    connect_gloo(pair, int(rank > other), 2, timeout)


def left_out(missing: Mapping[int, Collection[int]], newcomers: Collection[int]) -> set[int]:
    """Choose greedily the fewest ranks without which all links work.

    Of two ranks with the same number of dead links, a newcomer is left out, or else the higher one.

    Args:
        missing: for each rank, the ranks that it could not connect to. A link is dead if both ends
            say so.
        newcomers: the ranks that have no state of their own.
    """
    dead = {
        (here, there)
        for here, others in missing.items()
        for there in others
        if here < there and here in missing.get(there, ())
    }
    out: set[int] = set()
    while dead:
        counts = Counter(rank for link in dead for rank in link)
        worst = max(counts, key=lambda rank: (counts[rank], rank in newcomers, rank))
        out.add(worst)
        dead = {link for link in dead if worst not in link}
    return out


def _missing_key(epoch: int, rank: int) -> str:
    """The key of the ranks that a rank could not connect to."""
    return f"{epoch}/missing/{rank}"
