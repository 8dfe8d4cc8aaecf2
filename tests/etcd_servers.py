"""Clusters of etcd servers on this machine, whose servers can be killed."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import pytest

SECONDS_TO_START = 30.0


def require_etcd() -> None:
    """Skip the test where etcd is not installed, unless CI has installed it."""
    if shutil.which("etcd") and shutil.which("etcdctl"):
        return
    text = "needs the etcd and etcdctl programs: apt-get install etcd-server etcd-client"
    if os.environ.get("ETCD_INSTALLED"):
        pytest.fail(f"{text}; CI has installed them, but they are not on the PATH")
    pytest.skip(text)


class EtcdServers:
    """A cluster of servers.

    Args:
        size: number of servers.
        tls: whether they take TLS only, with a certificate that is made for this test.
    """

    def __init__(self, size: int, tls: bool = False) -> None:
        self._ports = free_ports(2 * size)
        self._tls = tls
        # In memory: a busy disk delays every answer.
        memory = Path("/dev/shm")
        self._folder = TemporaryDirectory(dir=memory if memory.is_dir() else None)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        if self._tls:
            make_certificate(self.certificate, self._key)
        for server in range(self.size):
            self.start(server)
        deadline = time.monotonic() + SECONDS_TO_START
        while True:
            try:
                self.control("get", "any")
                return self
            except subprocess.SubprocessError as error:
                if time.monotonic() > deadline:
                    self.__exit__()
                    raise TimeoutError(f"etcd has not started: {error}") from error
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._folder.cleanup()

    @property
    def size(self) -> int:
        return len(self._ports) // 2

    @property
    def endpoints(self) -> str:
        return ",".join(map(self.endpoint, range(self.size)))

    def endpoint(self, server: int) -> str:
        return f"127.0.0.1:{self._ports[server]}"

    @property
    def certificate(self) -> str:
        """The servers' certificate, which is its own authority."""
        return f"{self._folder.name}/cert.pem"

    @property
    def _key(self) -> str:
        return f"{self._folder.name}/key.pem"

    def start(self, server: int) -> None:
        """Start a server, for the first time or again."""
        scheme = "https" if self._tls else "http"
        client = f"{scheme}://{self.endpoint(server)}"
        peers = [f"http://127.0.0.1:{port}" for port in self._ports[self.size :]]
        cluster = ",".join(f"{number}={peer}" for number, peer in enumerate(peers))
        command = [
            *("etcd", "--name", str(server)),
            *("--data-dir", f"{self._folder.name}/{server}"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peers[server]),
            *("--initial-advertise-peer-urls", peers[server], "--initial-cluster", cluster),
            *("--auto-compaction-retention", "5m", "--logger", "zap"),
        ]
        if self._tls:
            command += ["--cert-file", self.certificate, "--key-file", self._key]
        log = Path(self._folder.name) / f"{server}.log"
        with log.open("ab") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
        self._processes[server] = process

    def kill(self, server: int) -> None:
        """End a server without a word."""
        self._processes[server].kill()
        self._processes[server].wait()

    def stop(self, server: int) -> None:
        """Let a server hang: it keeps its connections, and answers nobody."""
        self._processes[server].send_signal(signal.SIGSTOP)

    def alive(self) -> list[int]:
        return [number for number, each in self._processes.items() if each.poll() is None]

    def leader(self) -> int:
        """The server that leads the others."""
        rows = [line.split(", ") for line in self.control("endpoint", "status").splitlines()]
        leading = {endpoint for endpoint, _, _, _, leads, *_ in rows if leads == "true"}
        return next(number for number in self.alive() if self.endpoint(number) in leading)

    def control(self, *command: str) -> str:
        """Run etcdctl, and return what it prints."""
        options = ["--endpoints", self.endpoints]
        if self._tls:
            options += ["--cacert", self.certificate]
        done = subprocess.run(
            ["etcdctl", *options, *command],
            env={**os.environ, "ETCDCTL_API": "3"},
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        return done.stdout


def make_certificate(certificate: str, key: str) -> None:
    """A certificate for this machine, signed with its own key."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", key, "-out", certificate, "-subj", "/CN=etcd"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, nor on the next ones, where servers reach each other.

    Below those that the system gives to connections, which come and go until a server starts.
    """
    drawn = random.SystemRandom().sample(range(11_000, 31_000, 2), 500)
    ports = list(itertools.islice(filter(_are_free, drawn), count))
    assert len(ports) == count
    return ports


def _are_free(port: int) -> bool:
    try:
        with (
            socket.create_server(("127.0.0.1", port)),
            socket.create_server(("127.0.0.1", port + 1)),
        ):
            return True
    except OSError:
        return False
