"""The launcher as a process that a test can signal and kill, and ranks that do without torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from ranks import print_to, start_process
from torch.distributed import run as torch_run

from decent_optim_wrapper.cli import main

# What a rank's script begins with. Ranks tell what they do by files in the folder of the test.
PROLOGUE = """
import os, signal, subprocess, sys, time
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


# A rank that trains until a file says up to which round, and tells where it is and with whom.
TRAINING = """
import torch
from decent_optim_wrapper import DecentOptimWrapper, Elastic

params = [torch.nn.Parameter(torch.full((50,), float(each))) for each in range(3)]
optimizer = DecentOptimWrapper(
    torch.optim.SGD(params, lr=0.1),
    topology="ring",
    timeout=20,
    bucket_cap_mb=1e-4,
    elastic=Elastic(stale_after=1.0),
)
tell(f"pid {rank} {life}", os.getpid())
last = Path("last round")
while not last.exists() or optimizer.round < int(last.read_text()):
    for param in params:
        param.grad = torch.full_like(param, (rank + 1.0) / (optimizer.round + 1))
    optimizer.step()
    tell(f"at {rank}", f"{optimizer.round} {optimizer.members}")
    time.sleep(0.02)
optimizer.global_avg(may_revert=False)
tell(f"end {rank}", [param.sum().item() for param in params])
"""


def ours(command: Sequence[str]) -> int:
    """Run our launcher."""
    return main(["run", *command])


def torchruns(command: Sequence[str]) -> int:
    """Run torchrun, whose ranks know of no earlier life."""
    torch_run.main(command)
    return 0


class Launched:
    """A launcher that runs a script.

    Args:
        folder: where it runs.
        script: what its ranks run after `PROLOGUE`.
        options: options of the launcher.
        launcher: runs a launcher with options.
    """

    def __init__(
        self,
        folder: Path,
        script: str,
        *options: str,
        launcher: Callable[[Sequence[str]], int] = ours,
    ) -> None:
        self._folder = folder
        number = len(list(folder.glob("script_*.py")))
        path = folder / f"script_{number}.py"
        path.write_text(PROLOGUE + script)
        self._printed = folder / f"printed_{number}"
        command = (*options, str(path))
        self.process = start_process(
            *(_launch, launcher, command, folder, self._printed), daemon=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()

    @property
    def printed(self) -> str:
        """What it has printed so far."""
        return self._printed.read_text() if self._printed.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> int:
        """Its exit code, once it has ended."""
        self.process.join(60)
        assert self.process.exitcode is not None, self.printed
        return self.process.exitcode

    def told(self, name: str) -> str:
        """What a rank has told under this name, once it has."""
        path = self._folder / name
        self.wait_until(path.exists)
        return path.read_text()

    def has_members(self, rank: int, members: tuple[int, ...]) -> bool:
        """Whether a rank of `TRAINING` makes its steps with these members now."""
        path = self._folder / f"at {rank}"
        return path.exists() and path.read_text().endswith(f" {members}")

    def round_of(self, rank: int) -> int:
        """The round of a rank of `TRAINING`."""
        return int(self.told(f"at {rank}").split()[0])

    def finish_training(self, rank: int, rounds: int = 100) -> None:
        """Let the ranks of `TRAINING` end, so many rounds after the one where this rank is."""
        part = self._folder / "last round.part"
        part.write_text(str(self.round_of(rank) + rounds))
        part.rename(self._folder / "last round")

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Wait for something to happen."""
        deadline = time.monotonic() + 60
        while not done():
            assert time.monotonic() < deadline, self.printed
            time.sleep(0.02)


def _launch(
    launcher: Callable[[Sequence[str]], int], command: Sequence[str], folder: Path, printed: Path
) -> None:
    print_to(printed)
    os.chdir(folder)
    sys.exit(launcher(command))


def children(pid: int) -> set[int]:
    """The processes that a process has started, and that have not ended."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # It has ended.
            continue
        if int(parent) == pid and state != "Z":
            found.add(int(folder.name))
    return found


def is_alive(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
