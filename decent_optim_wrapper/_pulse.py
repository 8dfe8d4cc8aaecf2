"""Signs of life through the store: every rank beats, and watches the others' beats change."""

from __future__ import annotations

import threading
import time
import uuid
from typing import Any

BEAT_SECONDS = 0.25
# Without a new beat for so long, a rank counts as dead: eight beats lost.
STALE_SECONDS = 2.0


class Pulse:
    """Beats for this rank and watches the others, on a thread of its own.

    Args:
        store: shared by all ranks.
        rank: this one.
        world_size: how many there may be.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        # A connection of its own: a call that waits in the main thread would hold up the beat.
        self._store = store.clone() if hasattr(store, "clone") else store
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._life = uuid.uuid4().hex
        self._last: dict[int, bytes] = {}
        # Who has not been heard of yet may have had no time to beat.
        self._changed = dict.fromkeys(self._others, time.monotonic())
        self._awaited = ""
        self._came = False
        self._stop = threading.Event()
        self._beat(0)
        threading.Thread(target=self._run, daemon=True, name="decent-pulse").start()

    def alive(self, rank: int) -> bool:
        """Whether a beat of the rank has come lately."""
        return time.monotonic() - self._changed[rank] < STALE_SECONDS

    def await_key(self, key: str) -> None:
        """Look for a key of the store with every beat from now on."""
        self._came = False
        self._awaited = key

    @property
    def came(self) -> bool:
        """Whether the awaited key has been seen."""
        return self._came

    def stop(self) -> None:
        """Beat no more."""
        self._stop.set()

    def _run(self) -> None:
        count, last = 0, time.monotonic()
        while not self._stop.wait(BEAT_SECONDS):
            count += 1
            now = time.monotonic()
            if now - last > STALE_SECONDS / 2:
                # This process was stopped or starved itself: it knows nothing of the others.
                self._changed = dict.fromkeys(self._changed, now)
            last = now
            try:
                self._beat(count)
            except RuntimeError:
                # The store has gone, and with it everything that could be agreed on.
                return

    def _beat(self, count: int) -> None:
        self._store.set(f"pulse/{self._rank}", f"{self._life} {count}")
        for other in self._others:
            key = f"pulse/{other}"
            if other not in self._last and not self._store.check([key]):
                continue
            beat = self._store.get(key)
            if beat != self._last.get(other):
                self._last[other] = beat
                self._changed[other] = time.monotonic()
        awaited = self._awaited
        if awaited and self._store.check([awaited]) and awaited == self._awaited:
            self._came = True
