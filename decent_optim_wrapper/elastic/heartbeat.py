"""Heartbeats through the store: every rank sends its own and watches a few others."""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Set
from typing import Any

from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.store import BoundedStore, values_of
from decent_optim_wrapper.elastic.liveness import ENDED, EpochWatch

# The longest interval between two heartbeats. A rank makes two calls to the store in each.
_LONGEST_PAUSE = 0.5
# The lowest number of looks without a new heartbeat after which a rank counts as dead.
_LOOKS = 4
# For how many pauses a rank looks for another process of its number before its first heartbeat.
_LOOKS_FOR_OTHERS = 3
_NOBODY = "nobody"


class Heartbeat:
    """Sends this rank's heartbeats and watches others', on a thread of its own.

    Args:
        store: shared by all ranks.
        rank: this rank.
        stale_after: seconds without a new heartbeat after which a rank counts as dead. Looks are
            counted, not seconds, so time in which the store does not answer or this process is
            stopped does not count.
    """

    def __init__(self, store: BoundedStore, rank: int, stale_after: float) -> None:
        # Seconds between two heartbeats, and the looks without one after which a rank is dead.
        self._pause = min(_LONGEST_PAUSE, stale_after / _LOOKS)
        self._looks = round(stale_after / self._pause)
        self._store = store
        self.rank = rank
        self._life = 0
        self._process = process_name(os.getpid())
        self._sent = ""
        # Of an epoch without others, before the first one.
        self._watch = EpochWatch(0, rank, [rank], self._looks)
        # The text that is sent with each heartbeat.
        self._text = ""
        # Whether a later process of this rank sends heartbeats.
        self.is_replaced = False
        self._stop = threading.Event()
        # Whether it stops because this rank has failed.
        self._leaves = False

    def is_taken(self) -> bool:
        """Return whether another process sends heartbeats of this rank.

        Call it before `start`. If there is none, it takes a second or two, unless the launcher has
        marked the last one as ended.
        """
        has_ended = self._store.find(beat_key(self.rank)) == ENDED.decode()
        return not has_ended and self._hears([self.rank], lambda beat: True, _LOOKS_FOR_OTHERS)

    def hears_members(self, ranks: Iterable[int], since: int) -> bool:
        """Return whether one of these ranks is alive and in this epoch or a later one.

        It listens for `stale_after`, after which members call each other dead.
        """
        return self._hears(ranks, lambda beat: int(beat.split(" ")[2]) >= since, self._looks)

    def _hears(self, ranks: Iterable[int], counts: Callable[[str], bool], looks: int) -> bool:
        """Return whether one of these ranks sends two new matching heartbeats.

        One may be the last one of a process that has ended: once a link is back, the kernel sends
        again what it could not send before.
        """
        last = {key: self._store.find(key) for key in map(beat_key, ranks)}
        heard = set[str]()
        deadline = time.monotonic() + looks * self._pause
        while last and time.monotonic() < deadline:
            time.sleep(self._pause / 5)
            for key, old in last.items():
                beat = self._store.find(key)
                if beat is None or beat == old or not counts(beat):
                    continue
                if key in heard:
                    return True
                heard.add(key)
                last[key] = beat
                deadline = time.monotonic() + looks * self._pause
        return False

    def start(self, life: int) -> None:
        """Send heartbeats from now on.

        Args:
            life: number of this process among those that have had this rank; later ones are higher.
        """
        self._life = life
        self._sent = f"{life} 0 0 {self._process} "
        # At once, since the ranks that watch this one expect a heartbeat.
        self._store.set(beat_key(self.rank), self._sent)
        in_background(self._run)

    def watch(self, members: Collection[int], epoch: int) -> None:
        """Watch the members of an epoch, all of which are known to be alive."""
        # Every key that is looked at must exist: a store waits for a missing key.
        self._store.claim(_dead_key(epoch), "[]")
        self._store.claim(request_key(epoch + 1), _NOBODY)
        self._watch = EpochWatch(epoch, self.rank, members, self._looks)

    def alive(self, rank: int) -> bool:
        """Return whether no rank has found this one dead in the present epoch."""
        return rank not in self._watch.dead

    def is_over(self) -> bool:
        """Return whether the members must meet again, because one is dead or a rank asks for it."""
        return self.is_replaced or self._watch.requested or bool(self._watch.dead)

    def say(self, text: str) -> None:
        """Send this text with every heartbeat from now on."""
        self._text = text

    def heard(self, rank: int) -> str:
        """The text of the last heartbeat of a rank; empty without one."""
        beat = self._store.find(beat_key(rank)) or ""
        # Behind the life, the number of the heartbeat, the epoch and the process.
        return beat.split(" ", 4)[-1]

    def stop(self) -> None:
        """Send no more heartbeats."""
        self._stop.set()

    def leave(self) -> None:
        """Send no more heartbeats, and mark this rank as dead for the members.

        Otherwise they would look for its heartbeat for `stale_after`. A rank that has made all its
        steps does not leave: they may still receive what it has sent.
        """
        self._leaves = True
        self.stop()

    def _run(self) -> None:
        try:
            # Its own connection, so that no call of the main thread delays the heartbeat.
            store = self._store.clone()
            for count in itertools.count(1):
                watch = self._watch
                beat = f"{self._life} {count} {watch.epoch} {self._process} {self._text}"
                self._beat(store, beat)
                if self.is_replaced:
                    return
                if watch.epoch:
                    self._look(store, watch)
                self._store.note_answer()
                if self._stop.wait(self._pause):
                    if self._leaves:
                        # The heartbeat of a later process of this rank stays.
                        store.compare_set(beat_key(self.rank), self._sent, ENDED.decode())
                    return
        except RuntimeError:
            # The store is gone, and no agreement is possible without it.
            return

    def _beat(self, store: Any, beat: str) -> None:
        """Send one heartbeat, and notice another process that sends them for this rank."""
        key = beat_key(self.rank)
        found = store.compare_set(key, self._sent, beat).decode()
        if found != beat:
            life, *_ = found.split()
            # The launcher may have marked the end of the later process.
            self.is_replaced = int(life) > self._life or found == ENDED.decode()
            if not self.is_replaced:
                store.set(key, beat)
        self._sent = beat

    def _look(self, store: Any, watch: EpochWatch) -> None:
        """Read everything that concerns this rank, in one call."""
        epoch, watched = watch.epoch, watch.watched
        keys = [_dead_key(epoch), request_key(epoch + 1), *map(beat_key, watched)]
        dead, requested, *beats = values_of(store, keys)
        newest, asked = dict(zip(watched, beats, strict=True)), requested.decode() != _NOBODY
        if watch.look(newest, json.loads(dead), asked):
            self._tell(store, epoch, watch.dead, dead.decode())

    def _tell(self, store: Any, epoch: int, dead: Set[int], known: str) -> None:
        """Add dead ranks to the common list; other ranks may do so at the same time."""
        while True:
            text = json.dumps(sorted(dead | {*json.loads(known)}))
            found = store.compare_set(_dead_key(epoch), known, text).decode()
            if found == text:
                return
            known = found


def process_name(pid: int) -> str:
    """A process of this host, as heartbeats name it: processes of two hosts may have one number."""
    return f"{socket.gethostname()}:{pid}"


def request_key(epoch: int) -> str:
    """The key under which a rank asks all others to enter the epoch."""
    return f"{epoch}/join_request"


def _dead_key(epoch: int) -> str:
    """The key of the list of dead ranks."""
    return f"{epoch}/dead"


def beat_key(rank: int) -> str:
    """The key of the last heartbeat of a rank."""
    return f"heartbeat/{rank}"
