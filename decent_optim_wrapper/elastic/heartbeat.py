"""Heartbeats through the store: every rank sends its own and watches the others'."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from typing import Any

from decent_optim_wrapper.comm.store import BoundedStore

# The longest interval between two heartbeats, and between two looks at the others' heartbeats.
_LONGEST_PAUSE = 0.25
# The least number of looks without a new heartbeat after which a rank counts as dead.
_LOOKS = 8
# For how many of its pauses a rank looks for heartbeats of another process before its own.
_LOOKS_FOR_OTHERS = 4


class Heartbeat:
    """Sends this rank's heartbeats and watches the others', on a thread of its own.

    Args:
        store: shared by all ranks.
        rank: this rank.
        world_size: number of ranks at the start.
        stale_after: seconds without a new heartbeat after which a rank counts as dead. Looks are
            counted, not seconds: time in which the store does not answer, or in which this process
            is stopped, does not count.
    """

    def __init__(self, store: BoundedStore, rank: int, world_size: int, stale_after: float) -> None:
        self._pause = min(_LONGEST_PAUSE, stale_after / _LOOKS)
        self._looks = round(stale_after / self._pause)
        self._store = store
        self._rank = rank
        self._last: dict[int, bytes] = {}
        # Looks since the last new heartbeat of each rank.
        self._silent = {other: 0 for other in range(world_size) if other != rank}
        self._awaited = ""
        # Whether the awaited key has been seen.
        self.came = False
        self._stop = threading.Event()

    def is_taken(self) -> bool:
        """Whether another process sends heartbeats of this rank; takes a second if none does.

        To be called before `start`.
        """
        key = _key(self._rank)
        first, deadline = self._store.find(key), time.monotonic() + _LOOKS_FOR_OTHERS * self._pause
        while time.monotonic() < deadline:
            time.sleep(self._pause / 5)
            if self._store.find(key) != first:
                return True
        return False

    def start(self, life: int) -> None:
        """Send heartbeats from now on, and watch the others' heartbeats.

        Args:
            life: distinguishes this process from earlier ones of this rank.
        """
        thread = threading.Thread(
            target=self._run, args=(life,), daemon=True, name="decent-heartbeat"
        )
        thread.start()

    def alive(self, rank: int) -> bool:
        """Whether the rank has sent a heartbeat lately."""
        return self._silent.get(rank, 0) < self._looks

    def expect(self, ranks: Iterable[int]) -> None:
        """Count the ranks as alive: they have just been noticed by other means."""
        self._silent |= {rank: 0 for rank in ranks if rank != self._rank}

    def await_key(self, key: str) -> None:
        """Look for this key in the store with every heartbeat from now on."""
        self.came = False
        self._awaited = key

    def stop(self) -> None:
        """Send no more heartbeats."""
        self._stop.set()

    def _run(self, life: int) -> None:
        try:
            # A connection of its own: no call of the main thread delays the heartbeat.
            store = self._store.clone()
            for count in itertools.count():
                self._store.check_server()
                self._beat(store, f"{life} {count}")
                self._store.note_answer()
                if self._stop.wait(self._pause):
                    return
        except RuntimeError:
            # The store is gone, and no agreement is possible without it.
            return

    def _beat(self, store: Any, beat: str) -> None:
        """Send one heartbeat and look once, in few calls: the link to the store may be slow."""
        store.set(_key(self._rank), beat)
        found = [r for r in self._silent if r in self._last or store.check([_key(r)])]
        beats = dict(zip(found, _get_all(store, [*map(_key, found)]), strict=True))
        for other in self._silent:
            old, new = self._last.get(other), beats.get(other)
            self._silent[other] = self._silent[other] + 1 if new == old else 0
        self._last |= beats
        awaited = self._awaited
        if awaited and store.check([awaited]) and awaited == self._awaited:
            self.came = True


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"


def _get_all(store: Any, keys: list[str]) -> list[bytes]:
    if keys and store.has_extended_api():
        return list(store.multi_get(keys))
    return [store.get(key) for key in keys]
