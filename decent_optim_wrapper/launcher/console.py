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

from decent_optim_wrapper.launcher.output import STDERR, Output, write

_PAUSE = 0.05


class Console:
    """Writes the lines of the launcher and of its ranks, and their logs, on its own threads."""

    def __init__(self) -> None:
        self._said: SimpleQueue[str] = SimpleQueue()
        self._shown, self._kept = list[Output](), list[Output]()
        # The same, each text once.
        self.say_once = cache(self.say)
        self._closing = Event()
        self._threads = [Thread(target=each, daemon=True) for each in (self._show, self._keep)]
        for thread in self._threads:
            thread.start()

    def say(self, text: str) -> None:
        """Print a line of the launcher, after what its ranks have written so far."""
        self._said.put(f"[launcher] {text}\n")

    def follow(self, outputs: Iterable[Output]) -> None:
        """Copy these until each is ended."""
        for output in outputs:
            self._shown.append(output)
            self._kept.append(output)

    def close(self, seconds: float | None) -> None:
        """Write the rest, for so many seconds at most."""
        self._closing.set()
        for thread in self._threads:
            thread.join(seconds)

    def _show(self) -> None:
        def show() -> None:
            said = "".join(self._said.get() for _ in range(self._said.qsize()))
            _call_each(self._shown, Output.show)
            write(STDERR, said.encode(errors="backslashreplace"))

        self._repeat(show)

    def _keep(self) -> None:
        self._repeat(lambda: _call_each(self._kept, Output.keep))

    def _repeat(self, action: Callable[[], None]) -> None:
        """Repeat this until the console is closed, and once more then."""
        while not self._closing.wait(_PAUSE):
            action()
        action()


def _call_each(outputs: list[Output], copy: Callable[[Output], bool]) -> None:
    """Copy of each output what is new, and remove those to which nothing comes any more."""
    for output in [*outputs]:
        if not copy(output):
            outputs.remove(output)
