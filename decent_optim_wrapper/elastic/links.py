"""Finds dead links between living ranks, and the ranks to leave out because of them.

A rank that comes back tries its links to the members before it asks to join, and one that waits
long for others tries its links to them. They answer on a thread and train on meanwhile, so that
nobody stops for a rank that cannot connect, or for one that is only slow.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, NoReturn

from loguru import logger
from torch.distributed.distributed_c10d import PrefixStore

from decent_optim_wrapper.comm.background import THREAD_PREFIX, in_background
from decent_optim_wrapper.comm.process_groups import connect_gloo
from decent_optim_wrapper.comm.store import BoundedStore
from decent_optim_wrapper.comm.waiting import wait_for_any, within
from decent_optim_wrapper.elastic.heartbeat import PROBES_KEY, Heartbeat
from decent_optim_wrapper.errors import PeerError

# Every attempt on a pair needs its own connection and threads.
MOST_TRIED = 32
# The longest attempt to connect a pair: TCP sends its first packet after 0, 1, 3 and 7 s.
_LONGEST_ATTEMPT = timedelta(seconds=8)
# A link of up to so many ranks is dead if two attempts at once have failed: lost packets may use up
# the time of one. Among more ranks, the store's process might run out of open files.
_MOST_TRIED_TWICE = 16
# For how long a rank waits at most for those that it asks, who look twice a second.
_ANSWER_SECONDS = 3.0
# For how long these wait: a newcomer looks for another process of its number before it begins.
_BEGIN_SECONDS = 6.0
_POLL_SECONDS = 0.1
# The key of the rank that asks and the number of its attempts, written when it begins to try its
# links.
_BEGUN = "begun"


class Probe(NamedTuple):
    """The ranks that a rank has asked to try their links to it.

    Args:
        number: the number of the probe, from 1.
        members: the ranks that are asked; none where there are more than can be tried.
    """

    number: int
    members: tuple[int, ...]


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
        # If members have died with this rank, the others wait for it meanwhile, for `timeout`.
        self._answer_seconds = min(timeout.total_seconds() / 4, _ANSWER_SECONDS)
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
        others = [rank for rank in members if rank != self._rank]
        try:
            stores = self._connections(f"{epoch}/links", others, is_dead)
        except TimeoutError:
            return
        missing = self._try_all(stores, is_dead)
        self._store.set(_missing_key(epoch, self._rank), json.dumps(missing))
        self._failed = epoch

    def _connections(
        self, prefix: str, others: Collection[int], stop: Callable[[], bool]
    ) -> dict[int, list[Any]]:
        """Connections to the store, one for each attempt to connect to one of these ranks.

        A call that waits for a peer's key delays all other calls over its connection.

        Raises:
            TimeoutError: the store does not answer, or `stop` has ended it.
        """

        def connect() -> dict[int, list[Any]]:
            attempts = range(_attempts(others))
            begun = {
                rank: [in_background(partial(self._connection, prefix, each)) for each in attempts]
                for rank in others
            }
            return {rank: [each.result() for each in found] for rank, found in begun.items()}

        return within(self._timeout.total_seconds(), connect, stop)

    def _connection(self, prefix: str, attempt: int) -> Any:
        return PrefixStore(f"{prefix}/{attempt}", self._store.clone())

    def _try_all(self, stores: Mapping[int, list[Any]], stop: Callable[[], bool]) -> list[int]:
        """The ranks that this one cannot connect to; none if `stop` has ended the attempts."""
        attempts = {
            in_background(partial(_connect, store, self._rank, other, self._timeout)): other
            for other, each in stores.items()
            for store in each
        }
        missing = {*stores}
        deadline = time.monotonic() + self._timeout.total_seconds()
        while attempts and missing and (left := deadline - time.monotonic()) > 0:
            with suppress(TimeoutError):
                wait_for_any(attempts, left, stop)
            if stop():
                return []
            for attempt in [each for each in attempts if each.done()]:
                other = attempts.pop(attempt)
                if attempt.exception() is None:
                    missing.discard(other)
        return sorted(missing)

    def announce(self, members: Collection[int]) -> Probe:
        """Ask members to try their links to this rank, once it begins."""
        others = tuple(rank for rank in members if rank != self._rank)
        if not 0 < len(others) < MOST_TRIED:
            return Probe(number=0, members=())
        return Probe(number=self._store.add(PROBES_KEY, 1), members=others)

    def answer(self, number: int) -> None:
        """Try the link to the rank that has announced the probe, on a thread."""
        _on_a_thread(self._answer, number)

    def _answer(self, number: int) -> None:
        prefix = _probe_prefix(number)
        store = PrefixStore(prefix, self._store.clone())
        # A rank that has given up never begins.
        if not _appear(store, [_BEGUN], _BEGIN_SECONDS):
            return
        asking, attempts = json.loads(store.get(_BEGUN))
        if asking == self._rank:
            return
        store.set(_tries_key(self._rank), "1")
        others = [self._connection(prefix, attempt) for attempt in range(1, attempts)]
        # It may wait for others before it tries this link.
        seconds = self._timeout + timedelta(seconds=self._answer_seconds)
        for each in (PrefixStore("0", store), *others):
            _on_a_thread(_connect, each, self._rank, asking, seconds)

    def check_probe(self, probe: Probe, heartbeat: Heartbeat) -> None:
        """Check the links of this newcomer to the members that answer.

        Raises:
            PeerError: one of them is alive, but cannot be reached.
        """
        if dead := self._dead(probe, heartbeat, lambda: False):
            self._refuse(dead)

    def find_dead_by_probe(self, members: Collection[int], heartbeat: Heartbeat) -> list[int]:
        """The members that are alive, but cannot be reached; none once the epoch is over."""
        logger.info("rank {}: waits for others, and tries its links to them", self._rank)
        return self._dead(self.announce(members), heartbeat, lambda: heartbeat.is_over)

    def _dead(self, probe: Probe, heartbeat: Heartbeat, stop: Callable[[], bool]) -> list[int]:
        """The ranks that try the link to this one, too, and are alive, but cannot be reached."""
        if not probe.members:
            return []
        prefix = _probe_prefix(probe.number)
        try:
            stores = self._connections(prefix, probe.members, stop)
        except TimeoutError:
            return []
        keys = {rank: f"{prefix}/{_tries_key(rank)}" for rank in probe.members}
        begun = json.dumps([self._rank, _attempts(stores)])
        self._store.set(f"{prefix}/{_BEGUN}", begun)
        _appear(self._store, [*keys.values()], self._answer_seconds)
        # One that is dead does not try; nor does one that is too busy.
        trying = [rank for rank, key in keys.items() if self._store.check([key])]
        missing = self._try_all({rank: stores[rank] for rank in trying}, stop)
        # One that has ended meanwhile tells nothing about its link.
        return [rank for rank in missing if heartbeat.hears_members([rank])]

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
            self._refuse(missing)

    def _refuse(self, missing: list[int]) -> NoReturn:
        raise PeerError(
            f"rank {self._rank}: this rank and ranks {missing} are alive, but cannot connect "
            f"to each other, and the others go on without this one; repair the link, and "
            f"restart this rank"
        )


def _attempts(others: Collection[int]) -> int:
    """How many attempts are made at once on the link to each of these ranks."""
    return 2 if len(others) < _MOST_TRIED_TWICE else 1


def _on_a_thread(action: Callable[..., None], *args: Any) -> None:
    """Run a part of an answer to a probe; the rank that asks draws the conclusions.

    It does not run in the background: from the thread of the heartbeat, that would be on the first
    GPU.
    """

    def run() -> None:
        with suppress(RuntimeError):
            action(*args)

    threading.Thread(target=run, daemon=True, name=f"{THREAD_PREFIX}probe").start()


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


def _appear(store: Any, keys: list[str], seconds: float) -> bool:
    """Wait for keys, for a limited time; return whether all of them exist."""
    deadline = time.monotonic() + seconds
    while not (there := store.check(keys)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return bool(there)


def _probe_prefix(number: int) -> str:
    return f"probe {number}"


def _tries_key(rank: int) -> str:
    """The key under which a rank that is asked tells that it tries the link."""
    return f"{rank} tries"


def _missing_key(epoch: int, rank: int) -> str:
    """The key of the ranks that a rank could not connect to."""
    return f"{epoch}/missing/{rank}"
