"""One process that has imported torch, from which the workers of pytest and all ranks are forked.

``python forked.py ADDRESS ... -c CODE`` runs code as ``python -c CODE`` does, in a process that is
forked from the one that listens there.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any
from unittest import mock


class _Process(ForkServerProcess):
    """A process that prints where its parent prints, and not where the server does."""

    _output: tuple[Connection, ...]

    def start(self) -> None:
        self._output = tuple(Connection(os.dup(stream)) for stream in (1, 2))
        super().start()
        for connection in self._output:
            connection.close()

    def run(self) -> None:
        start_server()
        for stream, connection in enumerate(self._output, 1):
            os.dup2(connection.fileno(), stream)
            connection.close()
        super().run()


class _Context(ForkServerContext):
    Process = _Process


PROCESSES = _Context()
# The attributes of what connects this process to the server.
_CLIENT = vars(vars(forkserver)["_forkserver"])


@cache
def start_server() -> None:
    """Start the process from which others are forked, unless this one is forked from it itself."""
    if _CLIENT["_forkserver_address"] is not None:
        _CLIENT["ensure_running"] = lambda: None
        return
    PROCESSES.set_forkserver_preload(["preloaded"])
    # Where it finds them; Python 3.11 does not tell it.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()


def start_process(target: Any, *args: Any, daemon: bool = True) -> ForkServerProcess:
    """Start a process that calls `target(*args)`; a daemon cannot start processes itself."""
    start_server()
    process = PROCESSES.Process(target=target, args=args, daemon=daemon)
    process.start()
    return process


def forked_python() -> str:
    """The command that runs code in a process which is forked from the server."""
    start_server()
    return f"{sys.executable} {__file__} {_CLIENT['_forkserver_address']}"


def _run(stdin: Connection, stdout: Connection, code: str) -> None:
    """Run the code as `python` does."""
    for stream, connection in enumerate((stdin, stdout)):
        os.dup2(connection.fileno(), stream)
        connection.close()
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(code, vars(main))


def main(address: str, code: str) -> None:
    """Run the code in a process that is forked from the server, and wait for its end."""
    # The server ends with the process that has started it, whoever else is there.
    alive = os.open(os.devnull, os.O_RDONLY)
    # Ranks that are killed unlink none of their semaphores.
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"
    _CLIENT.update(_forkserver_address=address, _forkserver_alive_fd=alive)
    process = start_process(_run, Connection(0), Connection(1), code, daemon=False)
    process.join()
    sys.exit(process.exitcode)


if __name__ == "__main__":
    # So that the server finds what it is to call.
    import forked

    forked.main(sys.argv[1], sys.argv[-1])
