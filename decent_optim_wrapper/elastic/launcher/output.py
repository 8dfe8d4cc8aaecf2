"""What ranks print: in memory, until it is in their logs and on the console.

A rank that printed into a file would end when the disk is full. One that printed into a pipe would
wait while the launcher is stopped, and what it has started would end with the launcher.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path

STDOUT, STDERR = 1, 2
# A progress bar writes "\r" and never ends a line.
_LINE_END = re.compile(rb"[\r\n]+")
# Also the longest part of a line that is shown at once.
_READ_BYTES = 64 * 1024
# What is kept of a process that fails, and of what a console that nobody empties has not taken.
_KEPT_BYTES, _WAITING_BYTES = 1 << 20, 16 << 20
# FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE: gives back the memory of a part.
_PUNCH = 0x01 | 0x02


class Output:
    """A stream of a process.

    Args:
        rank: its rank.
        stream: `STDOUT` or `STDERR`: the launcher's stream to which its lines are written.
        log: the file in which it is kept.
        keeps_all: whether all of it is kept; otherwise the end, of a process that fails.
        say: prints a line of the launcher, each text once.
    """

    def __init__(
        self, rank: int, stream: int, log: Path, keeps_all: bool, say: Callable[[str], None]
    ) -> None:
        self._rank, self._stream, self._log, self._say = rank, stream, log, say
        # Whether it goes to the log, in a folder of this mode.
        self._is_kept, self._mode = keeps_all, 0o777 if keeps_all else 0o700
        # The file to which the process writes.
        self.file = os.fdopen(os.memfd_create(f"output of rank {rank}"), "rb")
        # How much of it is in the log, on the console, and forgotten.
        self._logged = self._shown = self._forgotten = 0
        # A line on the console that has not ended yet.
        self._begun = b""
        self._is_complete = False
        if keeps_all:
            self._append(b"")

    def close(self, has_failed: bool) -> None:
        """Note that the process has ended, and whether it has failed."""
        if has_failed and not self._is_kept:
            self._is_kept, self._logged = True, max(0, self._size() - _KEPT_BYTES)
        self._is_complete = True

    def keep(self) -> bool:
        """Write what is new to the log, and forget what is old; return whether more may come."""
        is_complete, size = self._is_complete, self._size()
        while self._is_kept and self._logged < size:
            data = os.pread(self.file.fileno(), _KEPT_BYTES, self._logged)
            self._append(data)
            self._logged += len(data)
        old = min(size - _KEPT_BYTES, max(self._shown, size - _WAITING_BYTES))
        if old > self._forgotten:
            self._forgotten = old
            ends = ctypes.c_int64(0), ctypes.c_int64(old)
            ctypes.CDLL(None).fallocate(self.file.fileno(), _PUNCH, *ends)
        return not is_complete

    def show(self) -> bool:
        """Write the lines that are new to the console; return whether more may come."""
        is_complete, size = self._is_complete, self._size()
        while self._shown < size:
            data = os.pread(self.file.fileno(), _READ_BYTES, self._shown)
            if (late := self._forgotten - self._shown) > 0:
                lines, self._begun = [b"(%d bytes are not shown)" % late], b""
                self._shown += late
            else:
                *lines, self._begun = _LINE_END.split(self._begun + data)
                self._shown += len(data)
            if len(self._begun) > _READ_BYTES:
                lines, self._begun = [*lines, self._begun], b""
            self._write(lines)
        if is_complete:
            self._write([self._begun])
        return not is_complete

    def _size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def _append(self, data: bytes) -> None:
        """Write to the log. What it cannot take, such as on a full disk, is dropped."""
        try:
            self._log.parent.mkdir(self._mode, parents=True, exist_ok=True)
            with self._log.open("ab", buffering=0) as log:
                log.write(data)
        except OSError as error:
            self._say(f"the log of rank {self._rank} is not complete: {error}")

    def _write(self, lines: list[bytes]) -> None:
        prefix = b"[rank %d] " % self._rank
        write(self._stream, b"".join(b"%b%b\n" % (prefix, line) for line in lines if line))


def write(console: int, data: bytes) -> None:
    """Write to a stream of this process."""
    while data:
        try:
            data = data[os.write(console, data) :]
        except OSError:
            # Nobody reads it now.
            return
