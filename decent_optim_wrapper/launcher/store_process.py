"""Holds the store of the ranks in a separate process, which survives ranks and the launcher.

The launcher opens the port and passes it on, so that the ranks can be started at once: they connect
as soon as the process serves.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from typing import NamedTuple


class StoreProcess:
    """A `TCPStore` in a process of its own.

    Args:
        listening: the socket on which it serves; it is closed here.
        environ: the environment of the process.
    """

    def __init__(self, listening: socket.socket, environ: dict[str, str]) -> None:
        # Not in the process of the store, which would import the whole package first.
        from decent_optim_wrapper.launcher.bound import bound

        port, descriptor = listening.getsockname()[1], listening.fileno()
        self._process = subprocess.Popen(
            # -P: the modules beside this file are not to be found by their short names.
            bound([sys.executable, "-P", __file__, str(descriptor), str(port)]),
            env=environ,
            pass_fds=[descriptor],
            start_new_session=True,
        )
        # Otherwise ranks could connect after the process has ended, without an answer.
        listening.close()

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, which it never does by itself."""
        return self._process.poll() is not None


class Address(NamedTuple):
    """Where the ranks find the store."""

    host: str
    port: int


def listen(endpoint: tuple[str, int] | None) -> tuple[socket.socket, Address]:
    """Open the port of the store.

    Args:
        endpoint: its host and port; None takes a free port that only this machine can reach.

    Raises:
        OSError: the port cannot be opened.
    """
    if endpoint is None:
        local = socket.create_server(("127.0.0.1", 0))
        return local, Address("127.0.0.1", local.getsockname()[1])
    # On all addresses: the name of the host may stand for one that this machine does not know.
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", endpoint[1]), family=family, dualstack_ipv6=dual), Address(
        *endpoint
    )


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
