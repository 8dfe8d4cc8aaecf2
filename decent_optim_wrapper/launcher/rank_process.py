"""A rank: its process, its output, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

from decent_optim_wrapper.launcher.bound import bound
from decent_optim_wrapper.launcher.console import STDERR, STDOUT, Console, CopiedFile, last_error

# Seconds that what a rank has started may go on after the rank has ended without an error.
_REST_SECONDS = 30.0


class End(NamedTuple):
    """How a process ended.

    Args:
        code: its exit code, or the number of the signal that killed it, negative.
        error: the error that it wrote last; empty if there is none.
        log: the file with its errors, or the folder if there is none.
    """

    code: int
    error: str
    log: Path

    @property
    def exit_code(self) -> int:
        """The code as a shell reports it: 128 and the number of a signal."""
        return 128 - self.code if self.code < 0 else self.code

    def __str__(self) -> str:
        """What happened, in a few words."""
        name = signal.Signals(-self.code).name if self.code < 0 else ""
        how = f"killed by {name}" if name else f"exit code {self.code}"
        return f"{how}: {self.error}" if self.error else how


class _Running(NamedTuple):
    """A process, its files that are copied to the console, and the one with its errors."""

    process: subprocess.Popen[bytes]
    copied: tuple[CopiedFile, ...]
    log: Path


@dataclass(eq=False)
class RankProcess:
    """A rank, which can be started again after it has ended.

    Args:
        rank: its number among all ranks.
        command: what it runs, without the interpreter.
        environ: its variables, in addition to those of this process.
        folder: where its output is kept.
        console: where its output is copied to.
    """

    rank: int
    command: tuple[str, ...]
    environ: Mapping[str, str]
    folder: Path
    console: Console

    def __post_init__(self) -> None:
        self.starts = 0
        self._running: _Running | None = None
        # When what it has started is killed, once it has ended without an error.
        self._rest_ends = float("inf")

    @property
    def has_finished(self) -> bool:
        """Whether it has ended without an error, while what it has started still goes on."""
        return self._running is not None and self._running.process.returncode == 0

    def start(self) -> None:
        """Start the process, for the first time or again.

        Raises:
            OSError: its log cannot be opened, or the system starts no more processes.
        """
        restarts, self.starts = str(self.starts), self.starts + 1
        self.folder.mkdir(parents=True, exist_ok=True)
        # The files of an earlier launch in the folder are kept.
        names = (self.folder / f"start_{number}" for number in count(1))
        name = next(each for each in names if not Path(f"{each}.stderr.log").exists())
        out, log = (Path(f"{name}.{stream}.log") for stream in ("stdout", "stderr"))
        with out.open("wb") as stdout, log.open("wb") as stderr:
            # Before the process: if one cannot be opened, there is none that nobody watches.
            prefix = f"[rank {self.rank}] "
            copied = (CopiedFile(out, prefix, STDOUT), CopiedFile(log, prefix, STDERR))
            process = subprocess.Popen(
                bound((sys.executable, "-u", *self.command)),
                env={**os.environ, **self.environ, "TORCHELASTIC_RESTART_COUNT": restarts},
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        self.console.follow(copied)
        self._running = _Running(process=process, copied=copied, log=log)

    def poll(self) -> End | None:
        """Return how it ended, once, if it has.

        If it has ended without an error, what it has started may first come to an end, too.
        """
        if self._running is None:
            return None
        process, copied, log = self._running
        code = process.poll()
        if code is None or (code == 0 and self._rest_goes_on(process.pid)):
            return None
        # What it has started, such as the workers of a DataLoader, would disturb its next process.
        # After an end without an error nothing is left, or its time is up.
        self.signal(signal.SIGKILL)
        self._running = None
        for file in copied:
            file.end()
        # A killed process has no time to write an error.
        silent = code in (0, -signal.SIGKILL, -signal.SIGTERM)
        return End(code=code, error="" if silent else last_error(log), log=log)

    def request(self, number: signal.Signals) -> None:
        """Send a signal to the process only: what it has started may not expect it."""
        if self._running is not None:
            self._running.process.send_signal(number)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, and to all that it has started."""
        if self._running is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._running.process.pid, number)

    def _rest_goes_on(self, group: int) -> bool:
        """Whether the process has left others in its group, which have some time left."""
        # Only the launcher can bury those that it has adopted as the first process of a container.
        with suppress(ChildProcessError):
            while os.waitpid(-group, os.WNOHANG)[0]:
                pass
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return False
        self._rest_ends = min(self._rest_ends, time.monotonic() + _REST_SECONDS)
        if time.monotonic() < self._rest_ends:
            return True
        self.console.say(
            f"rank {self.rank} ended {_REST_SECONDS:g} s ago; what it has started and left is "
            f"killed: let the script wait for it"
        )
        return False
