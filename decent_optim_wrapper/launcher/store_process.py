"""Holds the store of the ranks in a separate process, which survives ranks.

The launcher opens the port and passes it on, so that the ranks can be started at once: they connect
as soon as the process serves.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys


def start(listening: socket.socket) -> subprocess.Popen[bytes]:
    """Start a process that holds a `TCPStore`, which never ends by itself.

    Args:
        listening: the socket on which it serves; it is closed here.
    """
    # Not in the process of the store, which would import the whole package first.
    from decent_optim_wrapper.launcher.bound import bound

    port, descriptor = listening.getsockname()[1], listening.fileno()
    # -P: the modules beside this file are not to be found by their short names.
    command = bound([sys.executable, "-P", __file__, str(descriptor), str(port)])
    # Closed here: otherwise ranks could connect after it has ended, without an answer.
    with listening:
        return subprocess.Popen(command, pass_fds=[descriptor], start_new_session=True)


def serve(descriptor: int, port: int) -> None:
    """Serve on an open socket until this process is ended."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(
        "localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )
    while store is not None:
        signal.pause()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
