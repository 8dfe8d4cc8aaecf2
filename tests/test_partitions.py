"""Ranks in network namespaces: cut off from the store, from each other, or behind a slow link."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import netlab
import pytest
from problem import TINY_CAP_MB, backward, make_params, sgd
from restartable_processes import STEP, RestartableProcesses, StoreProcess
from torch._C._distributed_c10d import TCPStore

from decent_optim_wrapper import DecentOptimWrapper, Elastic, PeerError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not netlab.available(), reason="network namespaces need root and iproute2"),
]

RANKS = 3
STORE = RANKS
TIMEOUT = 3.0
# What the promise adds to the timeout, and what two busy cores may.
SLACK = 2.0 + 8.0


def train(
    rank: int,
    world_size: int,
    store: Any,
    report: Callable[[str, Any], None],
    where: netlab.Lab,
    port: int,
) -> Any:
    """Train on a host of its own until the test ends it, or until that fails."""
    netlab.enter(where.hosts[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = where.interface
    own = TCPStore(netlab.address(STORE), port, is_master=False, timeout=timedelta(seconds=60))
    params = make_params(seed=rank)
    start = time.monotonic()
    try:
        optimizer = DecentOptimWrapper(
            *(sgd(params), rank, world_size, None, "ring" if world_size == 2 else "complete"),
            bucket_cap_mb=TINY_CAP_MB,
            timeout=TIMEOUT,
            elastic=Elastic(store=own),
        )
        while not store.check(["finish"]) or optimizer.round < int(store.get("finish")):
            start = time.monotonic()
            backward(params, rank, optimizer.round)
            optimizer.step()
            if optimizer.round % 10 == 0:
                report(f"round {optimizer.round}", optimizer.members)
            if rank == 0 and store.check(["exit"]):
                os._exit(1)
            time.sleep(STEP)
        optimizer.synchronize()
        report("result", optimizer.members)
    except PeerError as error:
        report("result", (time.monotonic() - start, str(error)))
    # What hangs on a dead link must not hang this process, either.
    os._exit(0)


class Net:
    """Ranks on hosts of their own, and a store on another one."""

    def __init__(self, where: netlab.Lab, processes: RestartableProcesses) -> None:
        self.where, self.processes = where, processes

    def train_a_little(self) -> None:
        for rank in range(RANKS):
            self.processes.wait_for(rank, "round 10")


@contextmanager
def net() -> Iterator[Net]:
    with netlab.lab(RANKS + 1, "400mbit") as where:
        host = netlab.address(STORE)
        with (
            StoreProcess(host, netlab.enter, where.hosts[STORE]) as server,
            RestartableProcesses(RANKS, train, where, server.port) as processes,
        ):
            yield Net(where, processes)


@pytest.mark.timeout(90)
def test_a_rank_that_is_cut_off_raises_in_time_and_the_others_go_on() -> None:
    with net() as lab:
        lab.train_a_little()
        netlab.cut(lab.where, 1)
        seconds, text = lab.processes.wait_for(1, "result", 40)
        assert seconds < TIMEOUT + SLACK
        assert "the store in which the ranks agree does not answer" in text
        lab.processes.finish()
        assert [lab.processes.wait_for(rank, "result") for rank in (0, 2)] == [(0, 2)] * 2


@pytest.mark.timeout(90)
def test_a_rank_without_its_link_to_the_store_raises_when_a_peer_is_lost() -> None:
    with net() as lab:
        lab.train_a_little()
        netlab.cut(lab.where, 1, STORE)
        time.sleep(2)
        lab.processes.put("exit")
        seconds, text = lab.processes.wait_for(1, "result", 40)
        assert seconds < TIMEOUT + SLACK
        assert "the store in which the ranks agree does not answer" in text
        lab.processes.finish()
        assert lab.processes.wait_for(2, "result") == (2,)


@pytest.mark.timeout(90)
def test_everyone_raises_in_time_when_the_store_is_cut_off() -> None:
    with net() as lab:
        lab.train_a_little()
        netlab.cut(lab.where, STORE)
        lab.processes.kill(0)
        for rank in (1, 2):
            seconds, text = lab.processes.wait_for(rank, "result", 40)
            assert seconds < TIMEOUT + SLACK
            assert "the store in which the ranks agree does not answer" in text


@pytest.mark.timeout(90)
def test_a_store_behind_a_slow_link_is_slow_and_no_more() -> None:
    with net() as lab:
        lab.train_a_little()
        netlab.slow_down(lab.where, STORE, "50kbit")
        time.sleep(3)
        lab.processes.kill(0)
        lab.processes.finish()
        assert [lab.processes.wait_for(rank, "result") for rank in (1, 2)] == [(1, 2)] * 2


@pytest.mark.timeout(90)
def test_ranks_that_cannot_reach_each_other_raise_at_the_start() -> None:
    with netlab.lab(RANKS + 1, "400mbit") as where:
        netlab.cut(where, 1, 2)
        netlab.cut(where, 2, 1)
        host = netlab.address(STORE)
        with (
            StoreProcess(host, netlab.enter, where.hosts[STORE]) as server,
            RestartableProcesses(RANKS, train, where, server.port) as processes,
        ):
            for rank in range(RANKS):
                _, text = processes.wait_for(rank, "result", 60)
                assert f"rank {rank}: " in text
