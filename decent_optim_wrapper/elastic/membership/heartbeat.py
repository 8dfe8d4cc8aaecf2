"""Heartbeats through the store: every rank sends its own and watches a few others."""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Collection, Iterable
from datetime import timedelta

from loguru import logger

from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.store import BoundedStore
from decent_optim_wrapper.elastic.membership.liveness import ENDED, Beat, EpochWatch
from decent_optim_wrapper.errors import text_of

# The longest interval between two heartbeats. A rank makes two calls to the store in each.
_LONGEST_PAUSE = 0.5
# The lowest number of looks without a new heartbeat after which a rank counts as dead.
_LOOKS = 4
# For how many pauses a rank looks for another process of its number before its first heartbeat.
_LOOKS_FOR_OTHERS = 3
# The longest wait for an answer, after which the store is asked over another connection.
_LONGEST_TIMEOUT = 60.0
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
        self._store, self._stale_after = store, stale_after
        self.rank = rank
        self._life = 0
        self._process = process_name(os.getpid())
        self._sent = ""
        # Before the first epoch, the watch of one without other members.
        self._watch = EpochWatch(0, rank, [rank], self._looks)
        # The text that is sent with each heartbeat.
        self._text = ""
        # Whether a later process of this rank sends heartbeats; whether this rank has failed.
        self.is_replaced = self._leaves = False
        self._stop = threading.Event()
        # The numbers of the heartbeats, and when the store has answered the last one.
        self._counts, self._answered = itertools.count(1), 0.0

    def is_taken(self) -> bool:
        """Return whether another process sends heartbeats of this rank.

        Call it before `start`. If there is none, it takes a second or two, unless the launcher has
        marked the last one as ended.
        """
        has_ended = (self._store.find(beat_key(self.rank)) or "").startswith(ENDED)
        return not has_ended and self._hears([self.rank], 0, _LOOKS_FOR_OTHERS)

    def hears_members(self, ranks: Iterable[int], since: int) -> bool:
        """Return whether one of these ranks is alive and in this epoch or a later one.

        It listens for `stale_after`, after which members call each other dead.
        """
        return self._hears(ranks, since, self._looks)

    def _hears(self, ranks: Iterable[int], since: int, looks: int) -> bool:
        """Return whether one of these ranks sends two new heartbeats of this epoch or a later one.

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
                if beat is None or beat == old or Beat.parse(beat).epoch < since:
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
        # What the last process of this rank has said; the others may not have read it yet.
        self._text = self.heard(self.rank)
        self._sent = str(Beat(life, process=self._process, text=self._text))
        # At once, since the ranks that watch this one expect a heartbeat.
        self._store.set(beat_key(self.rank), self._sent)
        in_background(self._run)

    def watch(self, members: Collection[int], epoch: int) -> None:
        """Watch the members of an epoch, all of which are known to be alive."""
        # Every key that is looked at must exist: a store waits for a missing key.
        self._store.compare_set(_dead_key(epoch), "", "[]")
        self._store.compare_set(request_key(epoch + 1), "", _NOBODY)
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

    def forget(self) -> None:
        """Say nothing, as before the first steps of a run."""
        self.say("")
        self._store.set(beat_key(self.rank), str(Beat(self._life, process=self._process)))

    def heard(self, rank: int) -> str:
        """The text of the last heartbeat of a rank; empty without one."""
        return Beat.parse(self._store.find(beat_key(rank)) or "").text

    def close(self) -> None:
        """Send no more heartbeats."""
        self._stop.set()

    def leave(self) -> None:
        """Send no more heartbeats, and mark this rank as dead for the members.

        Otherwise they would look for its heartbeat for `stale_after`. A rank that has made all its
        steps does not leave: they may still receive what it has sent.
        """
        self._leaves = True
        self.close()

    def _run(self) -> None:
        """Send heartbeats until told to stop, over another connection after each error."""
        timeout, self._answered, said = self._stale_after, time.monotonic(), 0.0
        is_over = False
        while not is_over:
            try:
                # Its own connection, so that no call of the main thread delays the heartbeat.
                self._send(self._store.another(timedelta(seconds=timeout)))
                return
            except RuntimeError as error:
                silent = time.monotonic() - self._answered
                if silent > self._store.timeout and said != self._answered:
                    said = self._answered
                    text = "rank {}: the store has not answered for {:.0f} s: {}"
                    logger.warning(text, self.rank, silent, text_of(error))
                # A call that hangs keeps its thread, so there should be few.
                timeout = min(2 * max(self._stale_after, silent), _LONGEST_TIMEOUT)
                is_over = self._stop.wait(self._pause)

    def _send(self, store: BoundedStore) -> None:
        store.connect()
        while not (self.is_replaced or self._stop.is_set()):
            watch = self._watch
            beat = Beat(self._life, next(self._counts), watch.epoch, self._process, self._text)
            self._beat(store, str(beat))
            if watch.epoch and not self.is_replaced:
                self._look(store, watch)
            self._store.note_answer()
            self._answered = time.monotonic()
            self._stop.wait(self._pause)
        if self._leaves and not self.is_replaced:
            # The heartbeat of a later process of this rank stays.
            store.compare_set(beat_key(self.rank), self._sent, ENDED + self._text)

    def _beat(self, store: BoundedStore, beat: str) -> None:
        """Send one heartbeat, and notice another process that sends them for this rank."""
        key = beat_key(self.rank)
        found = store.compare_set(key, self._sent, beat)
        if found != beat:
            # The launcher may have marked the end of the later process.
            self.is_replaced = Beat.parse(found).life > self._life or found.startswith(ENDED)
            if not self.is_replaced:
                store.set(key, beat)
        self._sent = beat

    def _look(self, store: BoundedStore, watch: EpochWatch) -> None:
        """Read everything that concerns this rank, in one call."""
        epoch, watched = watch.epoch, watch.watched
        keys = [_dead_key(epoch), request_key(epoch + 1), *map(beat_key, watched)]
        dead, requested, *beats = store.look(keys)
        # A stranger's value is empty, and asks for nothing.
        listed, asked = json.loads(dead or "[]"), requested not in ("", _NOBODY)
        if watch.look(dict(zip(watched, beats, strict=True)), listed, asked):
            # If another rank writes at the same time, the next look finds what is missing.
            store.set(keys[0], json.dumps(sorted(watch.dead)))


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
