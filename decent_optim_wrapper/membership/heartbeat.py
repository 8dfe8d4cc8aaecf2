"""Signs of life through the store: every rank beats, and watches the others' beats change."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Iterable
from typing import Any

from decent_optim_wrapper.comm.store import BoundedStore

# Between two beats, and between two looks at those of the others.
_LONGEST_PAUSE = 0.25
# The least number of looks without a new beat after which a rank counts as dead.
_LOOKS = 8


class Heartbeat:
    """Beats for this rank and watches the others, on a thread of its own.

    Args:
        store: shared by all ranks.
        rank: this one.
        world_size: how many there may be.
        stale_after: seconds without a new beat after which a rank counts as dead. Looks are
            counted, not seconds: while the store does not answer, or this process stands still,
            nothing is known of anybody, and nobody grows older.
    """

    def __init__(self, store: BoundedStore, rank: int, world_size: int, stale_after: float) -> None:
        self._pause = min(_LONGEST_PAUSE, stale_after / _LOOKS)
        self._looks = round(stale_after / self._pause)
        self._store = store
        self._rank = rank
        self._life = uuid.uuid4().hex
        self._last: dict[int, bytes] = {}
        # Looks since the last new beat.
        self._silent = {other: 0 for other in range(world_size) if other != rank}
        self._awaited = ""
        self._came = False
        self._stop = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="decent-heartbeat").start()

    def alive(self, rank: int) -> bool:
        """Whether a beat of the rank has come lately."""
        return self._silent.get(rank, 0) < self._looks

    def expect(self, ranks: Iterable[int]) -> None:
        """Take the ranks for alive, as they have just been heard of by other means."""
        self._silent |= {rank: 0 for rank in ranks if rank != self._rank}

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
        try:
            # A connection of its own: no call of the main thread holds up the beat.
            store = self._store.clone()
            for count in itertools.count():
                self._beat(store, count)
                self._store.note_answer()
                if self._stop.wait(self._pause):
                    return
        except RuntimeError:
            # The store has gone, and with it everything that could be agreed on.
            return

    def _beat(self, store: Any, count: int) -> None:
        """Beat once and look once, in few calls: the store's link may be a slow one."""
        store.set(f"heartbeat/{self._rank}", f"{self._life} {count}")
        keys = {
            other: f"heartbeat/{other}"
            for other in self._silent
            if other in self._last or store.check([f"heartbeat/{other}"])
        }
        beats = dict(zip(keys, _get_all(store, list(keys.values())), strict=True))
        for other in self._silent:
            beat = beats.get(other)
            self._silent[other] = self._silent[other] + 1 if beat == self._last.get(other) else 0
        self._last |= beats
        awaited = self._awaited
        if awaited and store.check([awaited]) and awaited == self._awaited:
            self._came = True


def _get_all(store: Any, keys: list[str]) -> list[bytes]:
    if keys and store.has_extended_api():
        return list(store.multi_get(keys))
    return [store.get(key) for key in keys]
