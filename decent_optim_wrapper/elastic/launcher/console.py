"""The console of the launcher, to which the output of the ranks is copied line by line.

Separate threads copy it, so that a console that nobody empties delays neither logs nor restarts nor
signals. torch's TailLog waits for such a console when it is stopped, ends at a character that the
console cannot encode, and repeats its prefix inside a line that is written in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from queue import SimpleQueue
from threading import Event, Thread

from decent_optim_wrapper.elastic.launcher.output import STDERR, Output, write

_PAUSE = 0.05
# Copies what is new; returns whether more may come.
_Copy = Callable[[Output], bool]


class Console:
    """Writes the lines of the launcher and of its ranks, and their logs, on its own threads."""

    def __init__(self) -> None:
        self._said: SimpleQueue[str] = SimpleQueue()
        # The same, each text once.
        self.say_once = cache(self.say)
        self._closing = Event()
        # For each thread what it does with an output, and the outputs that have not ended.
        self._pending: dict[_Copy, list[Output]] = {Output.show: [], Output.keep: []}
        self._threads = [
            Thread(target=self._run, args=(copy,), daemon=True) for copy in self._pending
        ]
        for thread in self._threads:
            thread.start()

    def say(self, text: str) -> None:
        """Print a line of the launcher, after what its ranks have written so far."""
        self._said.put(f"[launcher] {text}\n")

    def follow(self, outputs: Iterable[Output]) -> None:
        """Copy these until each is ended."""
        for output in outputs:
            for pending in self._pending.values():
                pending.append(output)

    def close(self, seconds: float | None) -> None:
        """Write the rest, for so many seconds at most."""
        self._closing.set()
        for thread in self._threads:
            thread.join(seconds)

    def _run(self, copy: _Copy) -> None:
        """Copy what is new until the console is closed, and once more then."""
        pending, is_last = self._pending[copy], False
        while not is_last:
            is_last = self._closing.wait(_PAUSE)
            said = self._said.qsize() if copy is Output.show else 0
            for output in [*pending]:
                if not copy(output):
                    pending.remove(output)
            lines = "".join(self._said.get() for _ in range(said))
            write(STDERR, lines.encode(errors="backslashreplace"))
