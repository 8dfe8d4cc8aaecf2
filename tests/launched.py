"""The launcher as a process that a test can signal and kill, and ranks that do without torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self
from unittest import mock

from forked import start_process
from ranks import print_to

from decent_optim_wrapper.cli import main
from decent_optim_wrapper.elastic.launcher import nodes, program

# What a rank's script begins with. Ranks tell what they do by files in the folder of the test.
PROLOGUE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def tell(name, text=""):
    Path(f"{name}.part").write_text(str(text))
    Path(f"{name}.part").rename(name)
def wait_for(name):
    deadline = time.monotonic() + 60
    while not Path(name).exists():
        if time.monotonic() > deadline:
            sys.exit(f"nobody told {name}")
        time.sleep(0.01)
"""
# Runs a launcher with options.
Launcher = Callable[[Sequence[str]], int]


def ours(command: Sequence[str]) -> int:
    """Run our launcher as a user does."""
    return main(["run", *command])


def hurried(command: Sequence[str], seconds: float = 90.0, spare: float = 10.0) -> int:
    """Run our launcher so that it waits for a store and its spare process for so long."""
    beats = mock.patch.multiple(nodes, PAUSE=0.1, SILENT_SECONDS=seconds)
    with beats, mock.patch.object(program, "SPARE_SECONDS", spare):
        return ours(command)


class Launched:
    """A launcher that runs a script.

    Args:
        folder: where it runs.
        script: what its ranks run after `PROLOGUE`.
        options: options of the launcher.
        launcher: runs a launcher with options.
    """

    def __init__(self, folder: Path, script: str, *options: str, launcher: Launcher = ours) -> None:
        self._folder = folder
        path = folder / f"script_{len([*folder.glob('script_*.py')])}.py"
        path.write_text(PROLOGUE + script)
        self._printed = path.with_suffix(".printed")
        command = (*options, path.stem if "-m" in options else str(path))
        arguments = launch, launcher, command, folder, self._printed
        self.process = start_process(*arguments, daemon=False)
        assert self.process.pid is not None
        self.pid = self.process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def printed(self) -> str:
        """What it has printed so far."""
        return self._printed.read_text() if self._printed.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, and wait until it has ended: not for its ranks."""
        self.process.kill()
        self.process.join()

    def end(self, seconds: float = 60) -> int:
        """Its exit code, once it has ended."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, self.printed
        return self.process.exitcode

    def tell(self, name: str, text: str = "") -> None:
        """Tell ranks something under a name for which they wait."""
        part = self._folder / f"{name}.part"
        part.write_text(text)
        part.rename(self._folder / name)

    def told(self, name: str) -> str:
        """What a rank has told under this name, once it has."""
        path = self._folder / name
        self.wait_until(path.exists)
        return path.read_text()

    def wait_until_printed(self, text: str) -> None:
        self.wait_until(lambda: text in self.printed)

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Wait for something to happen."""
        deadline = time.monotonic() + 60
        while not done():
            assert time.monotonic() < deadline, self.printed
            time.sleep(0.02)

    def wait_until_ended(self, *pids: int) -> None:
        """Wait for the end of processes."""
        self.wait_until(lambda: not any(map(is_alive, pids)))


def launch(launcher: Launcher, command: Sequence[str], folder: Path, printed: Path) -> None:
    print_to(printed)
    os.chdir(folder)
    sys.exit(launcher(command))


def children(pid: int) -> set[int]:
    """The processes that the main thread of a process has started."""
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def is_alive(pid: int) -> bool:
    """Return whether a process has not ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
