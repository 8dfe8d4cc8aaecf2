"""Ranks in network namespaces: cut off from the store or each other, or behind bad links."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import netlab
import pytest
from restartable_processes import Failure, Report, RestartableProcesses, StoreProcess, train_or_tell

from decent_optim_wrapper.comm.process_groups import connect_gloo
from decent_optim_wrapper.elastic.membership import rendezvous

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(90),
    pytest.mark.skipif(not netlab.available(), reason="network namespaces need root and iproute2"),
]

RANKS = 3
STORE = RANKS
# What the promise adds to the timeout, and what two busy cores may.
SLACK = 2.0 + 8.0


def train_on_a_host(
    rank: int, world_size: int, store: Any, report: Report, where: netlab.Lab, **options: Any
) -> None:
    """Train on a host of its own until the test ends it, or until that fails."""
    netlab.enter(where.hosts[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = where.interface
    attempts = itertools.count(1)

    def connect_and_report(*args: Any) -> Any:
        report("attempts", next(attempts))
        return connect_gloo(*args)

    with mock.patch.object(rendezvous, "connect_gloo", connect_and_report):
        report("result", train_or_tell(rank, world_size, store, report, **options))
    # What hangs on a dead link must not hang this process, either.
    os._exit(0)


@contextmanager
def ranks_on(
    where: netlab.Lab, timeout: float, ranks: int = RANKS
) -> Iterator[RestartableProcesses]:
    """Ranks on hosts of their own, and a store on the next one."""
    with StoreProcess(netlab.address(ranks), netlab.enter, where.hosts[ranks]) as server:
        options: dict[str, Any] = {"make_store": server.connect, "timeout": timeout}
        with RestartableProcesses(ranks, train_on_a_host, where, **options) as processes:
            yield processes


@contextmanager
def training(timeout: float) -> Iterator[tuple[netlab.Lab, RestartableProcesses]]:
    with netlab.lab(RANKS + 1, "400mbit") as where, ranks_on(where, timeout) as processes:
        processes.all_reach("round 3")
        yield where, processes


def check_loss_of_the_store(processes: RestartableProcesses, rank: int, timeout: float) -> None:
    failure: Failure = processes.wait_for(rank, "result", 40)
    assert failure.seconds < timeout + SLACK
    assert "the store in which the ranks agree does not answer" in failure.text


def test_a_rank_that_is_cut_off_raises_and_others_go_on_over_a_slow_store() -> None:
    """It reaches nobody, or not the store. Two of three go on, then one of two: at least half."""
    with training(timeout=3.0) as (where, processes):
        netlab.slow_down(where, STORE, "50kbit")
        netlab.cut(where, 1)
        check_loss_of_the_store(processes, 1, timeout=3.0)
        processes.wait_for_members(2, (0, 2))
        # It is missed by the one that looks for it in the store.
        netlab.cut(where, 0, STORE)
        processes.wait_for_members(2, (2,))
        check_loss_of_the_store(processes, 0, timeout=3.0)
        (life,) = processes.end(2)
    assert life.members == (2,)


def cut_between(where: netlab.Lab, one: int, other: int) -> None:
    """Cut the link between two hosts."""
    netlab.cut(where, one, other)
    netlab.cut(where, other, one)


def test_a_dead_link_costs_one_rank_and_an_attempt_to_connect() -> None:
    timeout, dead_link = 3.0, "rank 2: this rank and ranks [1] are alive, but cannot connect"
    with training(timeout) as (where, processes):
        cut_between(where, 1, 2)
        for is_last in (False, True):
            failure: Failure = processes.wait_for(2, "result")
            assert dead_link in failure.text
            # A round and an attempt of all ranks; the attempt of each pair takes half as long.
            assert failure.seconds < 2.5 * timeout + SLACK
            processes.wait_for_members(0, (0, 1))
            # At the start; each time in vain with that rank, and then without it.
            assert processes.reports[0, "attempts"] == (5 if is_last else 3)
            if is_last:
                netlab.mend(where, 1)
                netlab.mend(where, 2)
            processes.start(2)
        # It joins.
        processes.wait_for_members(0, (0, 1, 2))
        lives = processes.end()
    assert [len(new) for _, new in lives[0].changes] == [2, 3]


LEFT, RIGHT = (0, 1), (2, 3)


def test_of_two_halves_of_a_torn_network_that_both_reach_the_store_one_goes_on() -> None:
    ranks = len(LEFT + RIGHT)
    with netlab.lab(ranks + 1, "400mbit") as where, ranks_on(where, 3.0, ranks) as processes:
        processes.all_reach("round 3")
        for one, other in itertools.product(LEFT, RIGHT):
            cut_between(where, one, other)
        while len(ended := processes.ended()) < 2:
            time.sleep(0.1)
        assert ended in ({*LEFT}, {*RIGHT})
        failures: list[Failure] = processes.results(*ended)
        assert [failure.kind for failure in failures] == 2 * ["PeerError"]
        kept = LEFT if ended == {*RIGHT} else RIGHT
        lives = processes.end(*kept)
    assert [life.members for life in lives] == 2 * [kept]


def test_ranks_that_cannot_reach_each_other_raise_at_the_start() -> None:
    with netlab.lab(RANKS + 1, "400mbit") as where:
        cut_between(where, 1, 2)
        # They try for four times as long.
        with ranks_on(where, timeout=1.0) as processes:
            for rank in range(RANKS):
                failure: Failure = processes.wait_for(rank, "result")
                assert f"rank {rank}: " in failure.text


ROUNDS = 20
# Lost packets are sent again after pauses that double.
TIMEOUT = 100.0


def retransmitted(where: netlab.Lab, host: int) -> int:
    """The packets that a host has sent again."""
    with ThreadPoolExecutor(1, initializer=netlab.enter, initargs=(where.hosts[host],)) as pool:
        return pool.submit(netlab.retransmitted).result(60)


@pytest.mark.timeout(240)
@pytest.mark.skipif(not os.access("/dev/net/tun", os.W_OK), reason="needs TUN devices")
def test_all_ranks_are_there_after_many_rounds_over_bad_links() -> None:
    with netlab.lab(RANKS + 1, "400mbit") as where, ranks_on(where, timeout=8.0) as processes:
        processes.all_reach("round 3")
        before = retransmitted(where, 0)
        relays = [netlab.lose(where, host, 0.1, 0.005, seed=5 + host) for host in range(RANKS + 1)]
        try:
            for rank in range(RANKS):
                processes.wait_for_round(rank, ROUNDS, TIMEOUT)
            assert retransmitted(where, 0) > before
        finally:
            for relay in relays:
                relay.kill()
        processes.wait_for_members(0, (0, 1, 2))
        lives = processes.end()
    assert lives[0].members == (0, 1, 2)
