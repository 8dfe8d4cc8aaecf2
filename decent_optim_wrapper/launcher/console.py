"""The output of the ranks, copied from their files to the console line by line.

With files, unlike pipes, a rank can print while the launcher is stopped. A separate thread copies
them, so that a console that nobody empties delays neither restarts nor signals. torch's TailLog
waits for such a console when it is stopped, ends at a character that the console cannot encode, and
repeats its prefix inside a line that is written in pieces.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

STDOUT, STDERR = 1, 2
_PAUSE = 0.05
# A progress bar writes "\r" and never ends a line.
_LINE_END = re.compile(rb"[\r\n]+")
_READ_BYTES = 64 * 1024


class CopiedFile:
    """Copies what is appended to a file, with a prefix before every line.

    Args:
        path: the file, which exists.
        rank: its rank, for the prefix.
        console: the file descriptor to which the lines are written.
    """

    def __init__(self, path: Path, rank: int, console: int) -> None:
        self._file = path.open("rb")
        self._prefix = f"[rank {rank}] ".encode()
        self._console = console
        # A line that has not ended yet.
        self._begun = b""
        self._is_complete = False

    def end(self) -> None:
        """Note that nothing more will be appended."""
        self._is_complete = True

    def copy(self) -> bool:
        """Copy the lines that have ended since the last call; return whether more may come."""
        is_complete = self._is_complete
        while chunk := self._file.read(_READ_BYTES):
            *lines, self._begun = _LINE_END.split(self._begun + chunk)
            self._write(lines)
        if is_complete:
            self._write([self._begun])
            self._file.close()
        return not is_complete

    def _write(self, lines: list[bytes]) -> None:
        _write(self._console, b"".join(b"%b%b\n" % (self._prefix, line) for line in lines if line))


class Console:
    """Writes the lines of the launcher and of its ranks, on its own thread."""

    def __init__(self) -> None:
        self._said: SimpleQueue[str] = SimpleQueue()
        self._files: list[CopiedFile] = []
        self._closing = Event()
        self._thread = Thread(target=self._run, daemon=True, name="console")
        self._thread.start()

    def say(self, text: str) -> None:
        """Print a line of the launcher, after what its ranks have written so far."""
        self._said.put(f"[launcher] {text}\n")

    def follow(self, files: Iterable[CopiedFile]) -> None:
        """Copy these files to the console until each is ended."""
        self._files += files

    def close(self, seconds: float | None) -> bool:
        """Write the rest, for so many seconds at most; return True if all is written."""
        self._closing.set()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.is_set()
            said = "".join(self._said.get() for _ in range(self._said.qsize()))
            for file in list(self._files):
                if not file.copy():
                    self._files.remove(file)
            _write(STDERR, said.encode(errors="backslashreplace"))
            self._closing.wait(_PAUSE)


def _write(console: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(console, data) :]
        except OSError:
            # Nobody reads it any more. The files keep what the ranks have written.
            return
