"""What the ranks run, and their processes, of which one more may wait to replace any that dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

_RANK_MAIN = str(Path(__file__).with_name("rank_main.py"))
# First the ranks should have the processor: they start, or one comes back.
SPARE_SECONDS = 10.0
Process = subprocess.Popen[bytes]


@dataclass(eq=False)
class Program:
    """Starts the processes of ranks, and a spare one, which ends with this process.

    Args:
        command: what they run, without the interpreter.
        environ: the variables of all ranks, in addition to the variables of this process.
    """

    command: tuple[str, ...]
    # With the URL of a store, which may contain a password.
    environ: Mapping[str, str] = field(repr=False)

    def __post_init__(self) -> None:
        self._spare: tuple[Process, socket.socket] | None = None

    def start(self, environ: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes]) -> Process:
        """Start a process with the variables of a rank, or turn the spare one into it.

        Raises:
            OSError: the system starts no more processes.
        """
        spare, self._spare = self._spare, None
        # A spare process that has died is replaced only now: it would die again and again.
        if spare is None or spare[0].poll() is not None:
            spare = self._popen(stdout=stdout, stderr=stderr)
        process, connection = spare
        # Somebody may have stopped it, who did not know that it would be needed.
        process.send_signal(signal.SIGCONT)
        with connection, suppress(OSError):
            files = [stdout.fileno(), stderr.fileno()]
            socket.send_fds(connection, [json.dumps(environ).encode()], files)
        return process

    def prepare(self) -> None:
        """Start the spare process if there is none, and if the system starts one more."""
        if self._spare is None:
            with suppress(OSError):
                self._spare = self._popen(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _popen(self, **streams: Any) -> tuple[Process, socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            options = os.getpid(), theirs.fileno(), SPARE_SECONDS
            process = subprocess.Popen(
                [sys.executable, "-u", _RANK_MAIN, *map(str, options), *self.command],
                env={**os.environ, **self.environ},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                **streams,
            )
        return process, ours
