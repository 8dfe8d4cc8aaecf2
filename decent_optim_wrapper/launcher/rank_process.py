"""A rank: its process, its output, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

from decent_optim_wrapper.launcher.bound import bound
from decent_optim_wrapper.launcher.console import STDERR, STDOUT, Console, CopiedFile, last_error


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

    def __str__(self) -> str:
        """What happened, in a few words."""
        code = self.code
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        return f"{how}: {self.error}" if self.error else how


@dataclass(eq=False)
class RankProcess:
    """A rank, which can be started again after it has ended.

    Args:
        rank: its number among all ranks.
        command: what it runs, without the interpreter.
        environ: its variables, in addition to the variables of this process.
        folder: where its output is kept.
        console: where its output is copied to.
    """

    rank: int
    command: tuple[str, ...]
    environ: Mapping[str, str]
    folder: Path
    console: Console

    def __post_init__(self) -> None:
        self.starts = self.pid = 0
        self._process: subprocess.Popen[bytes] | None = None
        # Its files that are copied to the console; the last one has its errors.
        self._copied: tuple[CopiedFile, ...] = ()

    @property
    def is_running(self) -> bool:
        """True until `poll` has returned how it ended."""
        return self._process is not None

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
            self._copied = CopiedFile(out, prefix, STDOUT), CopiedFile(log, prefix, STDERR)
            self._process = subprocess.Popen(
                bound((sys.executable, "-u", *self.command)),
                env={**os.environ, **self.environ, "TORCHELASTIC_RESTART_COUNT": restarts},
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.console.follow(self._copied)

    def poll(self) -> End | None:
        """Return how it ended, once, if it has."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        if code != 0:
            # What it has started, such as workers of a DataLoader, would disturb its next process.
            self.signal(signal.SIGKILL)
        self._process = None
        for file in self._copied:
            file.end()
        log = self._copied[-1].path
        # A killed process has no time to write an error.
        silent = code in (0, -signal.SIGKILL, -signal.SIGTERM)
        return End(code=code, error="" if silent else last_error(log), log=log)

    def request(self, number: signal.Signals) -> None:
        """Send a signal to the process only: what it has started may not expect it."""
        if self._process is not None:
            self._process.send_signal(number)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, and to all that it has started."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
