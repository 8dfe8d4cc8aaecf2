"""What the process of a rank runs before its script; a spare process imports torch first.

It runs as a script, so that nothing of the package is imported before the rank's paths are
set.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path


def main(launcher: int, descriptor: int, pause: float, *command: str) -> None:
    """Become the rank that comes through a socket; the kernel kills it when the launcher ends.

    Args:
        launcher: the process that has started this one.
        descriptor: the socket, which brings the variables of the rank and the files for its output.
        pause: seconds without a rank after which this process is a spare one, and imports torch.
        command: the script, or "-m" and the module, and its arguments.
    """
    # PR_SET_PDEATHSIG: at the end of the thread that has started this process, the main thread.
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
    # Otherwise they would kill a rank that has not come to its own handlers yet.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    script, is_module = command[0], command[0] == "-m"
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd() if is_module else Path(script).resolve().parent)
    with socket.socket(fileno=descriptor) as connection:
        if is_spare := not wait([connection], pause):
            # The script will say why not, if it needs it.
            with suppress(Exception):
                import_module("decent_optim_wrapper.elastic.membership.elastic")
        message, files, *_ = socket.recv_fds(connection, 65536, 2)
    if not message or os.getppid() != launcher:
        # The launcher has ended.
        return
    for stream, file in enumerate(files, start=1):
        os.dup2(file, stream)
        os.close(file)
    os.environ.update(json.loads(message))
    # From here on as the interpreter starts a script.
    sys.orig_argv[:] = sys.executable, "-u", *command
    if not is_spare:
        os.execv(sys.executable, sys.orig_argv)
    if is_module:
        sys.argv[:] = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = command
        runpy.run_path(str(Path(script).absolute()), run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:])
