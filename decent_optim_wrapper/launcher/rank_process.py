"""A rank: its process, its output, and how it ended.

The process is started by torch's `SubprocessHandler`, as in torchrun. Its `PContext` is not used:
it ends all its processes when one fails, and even with a single process it installs signal handlers
that raise an exception wherever they interrupt, such as in the start of another rank.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    SubprocessHandler,
    get_subprocess_handler,
)

from decent_optim_wrapper.launcher.bound import bound
from decent_optim_wrapper.launcher.output import Output, say

# Seconds that what a rank has started may go on after the rank has ended without an error.
_REST_SECONDS = 30.0


class End(NamedTuple):
    """How a process ended.

    Args:
        code: its exit code, or the number of the signal that killed it, negative.
        error: the error that it wrote last; empty if there is none.
        log: the file with its errors.
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
        if self.code < 0:
            how = f"killed by {signal.Signals(-self.code).name}"
        else:
            how = f"exit code {self.code}"
        return f"{how}: {self.error}" if self.error else how


class RankProcess:
    """A rank, which can be started again after it has ended.

    Args:
        rank: its number among all ranks.
        command: what it runs, without the interpreter.
        environ: its variables, in addition to those of this process.
        folder: where its output is kept.
    """

    def __init__(
        self, rank: int, command: tuple[str, ...], environ: Mapping[str, str], folder: Path
    ) -> None:
        self.rank = rank
        self.starts = 0
        self._command = command
        self._environ = dict(environ)
        self._folder = folder
        self._running: tuple[SubprocessHandler, Output] | None = None
        # When what it has started is killed, once it has ended without an error.
        self._rest_ends = float("inf")

    @property
    def has_finished(self) -> bool:
        """Whether it has ended without an error, while what it has started still goes on."""
        return self._running is not None and self._running[0].proc.returncode == 0

    def start(self) -> None:
        """Start the process, for the first time or again."""
        output = Output(self._folder, self.rank)
        entrypoint, *args = bound((sys.executable, "-u", *self._command))
        handler = get_subprocess_handler(
            entrypoint=entrypoint,
            args=tuple(args),
            env={**self._environ, "TORCHELASTIC_RESTART_COUNT": str(self.starts)},
            stdout=str(output.stdout),
            stderr=str(output.stderr),
            local_rank_id=int(self._environ["LOCAL_RANK"]),
        )
        self.starts += 1
        self._running = handler, output

    def poll(self) -> End | None:
        """Copy its output, and return how it ended, once, if it has.

        If it has ended without an error, what it has started may first come to an end, too.
        """
        if self._running is None:
            return None
        handler, output = self._running
        # Before the last copy, so that no output is written after it.
        code = handler.proc.poll()
        if code is None or (code == 0 and self._rest_goes_on(handler.proc.pid)):
            output.copy()
            return None
        # What it has started, such as the workers of a DataLoader, would disturb its next process.
        # After an end without an error nothing is left, or its time is up.
        self.signal(signal.SIGKILL)
        self._running = None
        output.end()
        # A killed process has no time to write an error.
        silent = code in (0, -signal.SIGKILL, -signal.SIGTERM)
        return End(code=code, error="" if silent else output.error(), log=output.stderr)

    def request(self, number: signal.Signals) -> None:
        """Send a signal to the process only: what it has started may not expect it."""
        if self._running is not None:
            self._running[0].proc.send_signal(number)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, and to all that it has started."""
        if self._running is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._running[0].proc.pid, number)

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
        say(
            f"rank {self.rank} ended {_REST_SECONDS:g} s ago; what it has started and left is "
            f"killed: let the script wait for it"
        )
        return False
