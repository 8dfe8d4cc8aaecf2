"""Packets that are lost or late: no rank is lost for good, and nothing hangs."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import netlab
import pytest
from restartable_processes import agree
from test_partitions import RANKS, STORE, ranks_on

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        not netlab.available() or not os.access("/dev/net/tun", os.W_OK),
        reason="network namespaces and TUN devices need root and iproute2",
    ),
]

Result = TypeVar("Result")
HOSTS = (*range(RANKS), STORE)
ROUNDS = 20
# Lost packets are sent again after pauses that double.
PATIENCE = 100.0


def on_host(where: netlab.Lab, host: int, action: Callable[[], Result]) -> Result:
    """Call an action in the network of a host."""

    def call() -> Result:
        netlab.enter(where.hosts[host])
        return action()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(60)


def round_trip() -> float:
    """Seconds until another host has refused a connection."""
    began = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((netlab.address(1), 1), timeout=50)
    return time.monotonic() - began


@pytest.mark.parametrize(("loss", "delay"), [(0.1, 0.0), (0.0, 0.05)])
def test_all_ranks_are_there_after_many_rounds_over_bad_links(loss: float, delay: float) -> None:
    with netlab.lab(RANKS + 1, "400mbit") as where, ranks_on(where, timeout=8.0) as processes:
        processes.all_reach("round 3")
        before = on_host(where, 0, netlab.retransmitted)
        relays = [netlab.lose(where, host, loss, delay, seed=5 + host) for host in HOSTS]
        try:
            for rank in range(RANKS):
                processes.wait_for_round(rank, ROUNDS, PATIENCE)
            assert on_host(where, 0, round_trip) >= 2 * delay
            assert not loss or on_host(where, 0, netlab.retransmitted) > before
        finally:
            for relay in relays:
                relay.kill()
        processes.wait_for_members(0, (0, 1, 2))
        lives = processes.end()
    agree(lives)
    assert lives[0].members == (0, 1, 2)
