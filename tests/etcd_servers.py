"""Clusters of etcd servers on this machine, whose servers can be killed."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from tempfile import TemporaryDirectory

import pytest


@contextmanager
def etcd_servers(size: int, tls: bool = False) -> Iterator[EtcdServers]:
    """A cluster of servers; skips the test where etcd is missing, unless CI has installed it."""
    if not (shutil.which("etcd") and shutil.which("etcdctl")):
        text = "needs the etcd and etcdctl programs: apt-get install etcd-server etcd-client"
        (pytest.fail if os.environ.get("ETCD_INSTALLED") else pytest.skip)(text)
    # In memory: a busy disk delays every answer.
    with TemporaryDirectory(dir="/dev/shm") as folder:
        cluster = EtcdServers(folder, size, make_certificate(folder) if tls else None)
        try:
            for server in range(size):
                cluster.start(server)
            # Answered once they have a leader.
            cluster.control("get", "any")
            yield cluster
        finally:
            for server in [*cluster.processes]:
                cluster.kill(server)


class EtcdServers:
    """A cluster of servers.

    Args:
        folder: where they keep their data.
        size: number of servers.
        certificate: file with a certificate, its own authority, beside its key: for TLS only.
    """

    def __init__(self, folder: str, size: int, certificate: str | None = None) -> None:
        self._folder, self.certificate = folder, certificate
        addresses = [f"127.0.0.1:{port}" for port in free_ports(2 * size)]
        self._clients, self._peers = addresses[:size], addresses[size:]
        # Those that have not been killed.
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def endpoints(self) -> str:
        return ",".join(self._clients)

    def start(self, server: int) -> None:
        """Start a server, for the first time or again."""
        scheme = "https" if self.certificate else "http"
        client, peer = f"{scheme}://{self._clients[server]}", f"http://{self._peers[server]}"
        cluster = ",".join(f"{number}=http://{each}" for number, each in enumerate(self._peers))
        command = [
            *("etcd", "--name", str(server), "--data-dir", f"{self._folder}/{server}"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", cluster, "--auto-compaction-retention", "5m"),
        ]
        if self.certificate:
            command += ["--cert-file", self.certificate, "--key-file", f"{self._folder}/key.pem"]
        nowhere = subprocess.DEVNULL
        self.processes[server] = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)

    def kill(self, server: int) -> None:
        """End a server without a word."""
        process = self.processes.pop(server)
        process.kill()
        process.wait()

    def leader(self) -> int:
        """The server that leads the others."""
        rows = [line.split(", ") for line in self.control("endpoint", "status").splitlines()]
        return next(self._clients.index(row[0]) for row in rows if row[4] == "true")

    def control(self, *command: str) -> str:
        """Run etcdctl, and return what it prints."""
        waits = ("--dial-timeout", "30s", "--command-timeout", "30s")
        full = ["etcdctl", "--endpoints", self.endpoints, *waits, *command]
        if self.certificate:
            full += ["--cacert", self.certificate]
        done = subprocess.run(full, capture_output=True, text=True, check=True, timeout=40)
        return done.stdout


def make_certificate(folder: str) -> str:
    """A certificate for this machine, signed with its own key, which is beside it."""
    command = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=etcd -keyout key.pem"
    command += " -out cert.pem -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True, timeout=60)
    return f"{folder}/cert.pem"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on.

    Below those that the system gives to connections, which come and go until a server starts.
    """
    drawn = random.SystemRandom().sample(range(11_000, 31_000), 500)
    return list(islice(filter(_is_free, drawn), count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
