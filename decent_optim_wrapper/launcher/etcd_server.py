"""The etcd server of a node, which the launcher starts, and starts again when it has ended.

Its data lives as long as the launcher. A launcher that is started again on its node begins without
data, and etcd refuses such a server: the others go on without it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from decent_optim_wrapper.launcher.bound import bound
from decent_optim_wrapper.launcher.guard import MARK, Guard
from decent_optim_wrapper.launcher.output import error_in, say
from decent_optim_wrapper.launcher.rank_process import End
from decent_optim_wrapper.launcher.supervisor import Restarts

# Fewer servers do not outlive the loss of one.
_ENOUGH = 3
_LOOPBACK = {"localhost", "127.0.0.1"}

Addresses = Sequence[tuple[str, int]]


class EtcdServer:
    """One server of a cluster, in a process of its own.

    Args:
        addresses: host and port of the server of each node. The servers reach each other at the
            next port.
        node: the number of this node.
        token: a name of the cluster.
        restarts: how often and when the server is started again.
        guard: ends the server, and removes its data, when the launcher ends.

    Raises:
        FileNotFoundError: etcd is not installed.
    """

    def __init__(
        self, addresses: Addresses, node: int, token: str, restarts: Restarts, guard: Guard
    ) -> None:
        if shutil.which("etcd") is None:
            raise FileNotFoundError(
                "--with-etcd needs the program etcd on the PATH: apt-get install etcd-server"
            )
        guard.folder.mkdir(mode=0o700)
        self._command = command(addresses, node, token, guard.folder / "etcd")
        self._log = guard.folder / "etcd.log"
        # Options in the environment contradict those of the command line.
        own = {name: text for name, text in os.environ.items() if not name.startswith("ETCD_")}
        self._environ = {**own, MARK: guard.mark}
        self._restarts = restarts
        self._is_needed = len(addresses) < _ENOUGH
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        # When it is started again.
        self._due = float("inf")
        self._start()
        if self._is_needed:
            say(
                f"a cluster of {len(addresses)} etcd servers does not outlive the loss of a node: "
                f"that takes {_ENOUGH} nodes"
            )

    def check(self) -> None:
        """Start it again if it has ended."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            self._note_end(code)
        if time.monotonic() >= self._due:
            self._start()

    def why_no_restart(self) -> str:
        """Why no rank can be started again; empty if the store may answer."""
        gone = self._process is None and self._due == float("inf")
        return "the etcd server has ended" if gone and self._is_needed else ""

    def _start(self) -> None:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                bound(self._command),
                env=self._environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._starts += 1
        self._due = float("inf")

    def _note_end(self, code: int) -> None:
        text = "" if code < 0 else error_in(self._log.read_text(errors="replace"))
        end = End(code=code, error=text, log=self._log)
        if self._starts > self._restarts.most:
            say(
                f"the etcd server of this node ended ({end}); it is not started again, because "
                f"--max-restarts is {self._restarts.most}"
            )
            return
        pause = self._restarts.pause(self._starts)
        self._due = time.monotonic() + pause
        say(f"the etcd server of this node ended ({end}); it is started again in {pause:g} s")


def command(addresses: Addresses, node: int, token: str, folder: Path) -> list[str]:
    """The command that starts the server of a node."""
    host, port = addresses[node]
    # On all addresses: the name of the host may stand for one that this machine does not know.
    everywhere = "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"
    here = "127.0.0.1" if host in _LOOPBACK else everywhere
    peers = [f"{number}=http://{host}:{port + 1}" for number, (host, port) in enumerate(addresses)]
    return [
        *("etcd", "--name", str(node), "--data-dir", str(folder)),
        *("--listen-client-urls", f"http://{here}:{port}"),
        *("--advertise-client-urls", f"http://{host}:{port}"),
        *("--listen-peer-urls", f"http://{here}:{port + 1}"),
        *("--initial-advertise-peer-urls", f"http://{host}:{port + 1}"),
        *("--initial-cluster", ",".join(peers), "--initial-cluster-token", token),
        # Each heartbeat is a new value.
        *("--auto-compaction-retention", "5m", "--logger", "zap"),
    ]


def free_port() -> int:
    """A free port of this machine, before another free one."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            with (
                suppress(OSError, OverflowError),
                socket.create_server(("127.0.0.1", port + 1)),
            ):
                return port
