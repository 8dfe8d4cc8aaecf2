"""The output of a rank: kept in files, copied to the console line by line, searched for errors.

With files, unlike pipes, a rank can print while the launcher is stopped. torch's TailLog does the
same with two threads per rank, and repeats its prefix inside a line that is written in pieces.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TextIO

# A progress bar writes "\r" and never ends a line.
_LINE_END = re.compile(rb"[\r\n]+")
# The end of a file that is searched for an error.
_SEARCHED_BYTES = 64 * 1024
_TRACEBACK = "Traceback (most recent call last):"


class CopiedFile:
    """Copies what is appended to a file, with a prefix before every line.

    Args:
        path: the file, which exists.
        prefix: the prefix.
        console: where the lines go.
    """

    def __init__(self, path: Path, prefix: str, console: TextIO) -> None:
        self._file = path.open("rb")
        self._prefix = prefix
        self._console = console
        # A line that has not ended yet.
        self._begun = b""

    def copy(self) -> None:
        """Copy the lines that have ended since the last call."""
        *lines, self._begun = _LINE_END.split(self._begun + self._file.read())
        self._write(lines)

    def end(self) -> None:
        """Copy the rest."""
        self.copy()
        self._write([self._begun])
        self._file.close()

    def _write(self, lines: list[bytes]) -> None:
        text = "".join(f"{self._prefix}{line.decode(errors='replace')}\n" for line in lines if line)
        if text:
            self._console.write(text)
            self._console.flush()


class Output:
    """The output of one process of a rank.

    Args:
        folder: where its files are.
        rank: the rank, for the prefix.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # The files of an earlier launch in the folder are kept.
        number = 1
        while (folder / f"start_{number}.stderr.log").exists():
            number += 1
        self.stdout, self.stderr = (
            folder / f"start_{number}.{name}.log" for name in ("stdout", "stderr")
        )
        for path in (self.stdout, self.stderr):
            path.touch()
        prefix = f"[rank {rank}] "
        self._copied = [
            CopiedFile(self.stdout, prefix, sys.stdout),
            CopiedFile(self.stderr, prefix, sys.stderr),
        ]

    def copy(self) -> None:
        """Copy to the console what has been written since the last call."""
        for each in self._copied:
            each.copy()

    def end(self) -> None:
        """Copy the rest, after the process has ended."""
        for each in self._copied:
            each.end()

    def error(self) -> str:
        """The line that tells best why the process has ended; empty if it wrote no errors."""
        with self.stderr.open("rb") as file:
            file.seek(max(0, self.stderr.stat().st_size - _SEARCHED_BYTES))
            return error_in(file.read().decode(errors="replace"))


def say(text: str, speaker: str = "launcher") -> None:
    """Print a line of the launcher."""
    print(f"[{speaker}] {text}", file=sys.stderr, flush=True)


def error_in(text: str) -> str:
    """The error of the last traceback in a text, or its last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    starts = [place for place, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    behind = lines[starts[-1] + 1 :] if starts else []
    own = (line for line in behind if not line.startswith(" "))
    return next(own, lines[-1] if lines else "")
