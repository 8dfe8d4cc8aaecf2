"""Ends all processes of the launcher when the launcher has ended, however it ended.

A killed process cannot clean up, and the kernel's signal to the children of a dead process does not
reach their children. So a small separate process waits for the end of the launcher. All processes
of the launcher inherit a mark in their environment, by which the guard finds them in /proc (on
Linux), even if they have left the session.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK = "DECENT_LAUNCHER"
# Some processes start others while they are being ended.
_SWEEPS = 5
# They may come for all processes of a job.
_IGNORED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


class Guard:
    """A process that outlives this one for a moment.

    Args:
        folder: a folder that it removes; it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        # Below the mark of the launcher that has started this one, if there is one: its guard ends
        # all of these, too.
        self.mark = f"{os.environ.get(MARK, '')}/{uuid.uuid4().hex}"
        self.folder = folder
        self._process = self._start()

    def check(self) -> None:
        """Start the guard again if it was killed."""
        if self._process.poll() is not None:
            self._process = self._start()

    def end(self) -> None:
        """End all that is left, and remove the folder."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        # Without the site's packages it starts in a few milliseconds. In a session of its own, it
        # is not interrupted with the launcher. It sees the end of the launcher as the end of its
        # input.
        command = [sys.executable, "-I", "-S", __file__, self.mark, str(self.folder)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def marked(mark: str) -> Iterator[int]:
    """The processes that have inherited the mark."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        # It has ended, or belongs to somebody else.
        with suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if any(variable.startswith(wanted) for variable in variables):
                yield int(folder.name)


def main(mark: str, folder: Path) -> None:
    """Wait for the end of the launcher, end all that has the mark, and remove the folder."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    _end_all(mark)
    if folder.exists():
        # Only here: it takes longer to import than all the rest.
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def _end_all(mark: str) -> None:
    for _ in range(_SWEEPS):
        found = list(marked(mark))
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
