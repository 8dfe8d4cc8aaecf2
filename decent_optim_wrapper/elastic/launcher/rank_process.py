"""A rank: its process, and its output."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from decent_optim_wrapper.elastic.launcher.console import Console
from decent_optim_wrapper.elastic.launcher.output import STDERR, STDOUT, Output
from decent_optim_wrapper.elastic.launcher.program import Process, Program


@dataclass(eq=False)
class RankProcess:
    """A rank, which can be started again after it has ended.

    Args:
        rank: its number among all ranks.
        local_rank: its number on this node.
        program: what it runs.
        folder: where its output is kept.
        keeps_all: whether all of it is kept; otherwise only the end, of a process that fails.
        console: where its output is copied to.
    """

    rank: int
    local_rank: int
    program: Program
    folder: Path
    keeps_all: bool
    console: Console

    def __post_init__(self) -> None:
        self.starts = self.pid = 0
        self._process: Process | None = None
        # What its process prints, and its errors.
        self._outputs: list[Output] = []

    @property
    def is_running(self) -> bool:
        """True until `poll` has returned how it ended."""
        return self._process is not None

    def start(self) -> None:
        """Start the process, for the first time or again.

        Raises:
            OSError: the system starts no more processes.
        """
        environ = {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "TORCHELASTIC_RESTART_COUNT": str(self.starts),
        }
        self.starts += 1
        # The files of an earlier launch in the folder are kept.
        number = len(list(self.folder.glob("*.stderr.log"))) + 1
        logs = [self.folder / f"start_{number}.{name}.log" for name in ("stdout", "stderr")]
        self._outputs = [
            Output(self.rank, stream, log, self.keeps_all, self.console.say_once)
            for stream, log in zip((STDOUT, STDERR), logs, strict=True)
        ]
        self._process = self.program.start(environ, *(each.file for each in self._outputs))
        self.pid = self._process.pid
        self.console.follow(self._outputs)

    def poll(self) -> int | None:
        """Return its exit code, or the negative number of the signal that killed it; only once."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        if code != 0:
            # What it has started, such as workers of a DataLoader, would disturb its next process.
            self.signal(signal.SIGKILL)
        self._process = None
        for output in self._outputs:
            output.close(has_failed=code != 0)
        return code

    def signal(self, number: signal.Signals, send: Callable[[int, int], None] = os.killpg) -> None:
        """Send a signal to the process and what it has started, or with `os.kill` to it alone."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                send(self._process.pid, number)
