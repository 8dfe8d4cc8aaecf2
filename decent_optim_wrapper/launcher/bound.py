"""Binds a process to the launcher: the kernel kills it when the launcher ends (on Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def bound(command: Sequence[str]) -> list[str]:
    """The command that becomes another one, bound to this process."""
    # Without the site's packages it starts in a few milliseconds.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(launcher: int, command: Sequence[str]) -> None:
    """Become `command`; the kernel kills it when the launcher, which has started it, ends."""
    if sys.platform == "linux":
        # At the end of the thread that has started this process, the launcher's main thread.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != launcher:
            sys.exit("the launcher has ended")
    # Otherwise they would kill a rank that has not come to its own handlers yet.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # Python ignores it, which would remain.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
