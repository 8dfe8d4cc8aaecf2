"""Ranks in network namespaces: cut off from the store, from each other, or behind a slow link."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import netlab
import pytest
from restartable_processes import (
    STALE_AFTER,
    Failure,
    StoreProcess,
    TrainingProcesses,
    agree,
    train_or_tell,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(90),
    pytest.mark.skipif(not netlab.available(), reason="network namespaces need root and iproute2"),
]

RANKS = 3
STORE = RANKS
TIMEOUT = 3.0
# What the promise adds to the timeout, and what two busy cores may.
SLACK = 2.0 + 8.0


def train_on_a_host(
    rank: int,
    world_size: int,
    store: Any,
    report: Callable[[str, Any], None],
    where: netlab.Lab,
    port: int,
    timeout: float,
) -> None:
    """Train on a host of its own until the test ends it, or until that fails."""
    netlab.enter(where.hosts[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = where.interface
    options: dict[str, Any] = {"host": netlab.address(STORE), "port": port, "timeout": timeout}
    report("result", train_or_tell(rank, world_size, store, report, **options))
    # What hangs on a dead link must not hang this process, either.
    os._exit(0)


@contextmanager
def ranks_on(where: netlab.Lab, timeout: float = TIMEOUT) -> Iterator[TrainingProcesses]:
    """Ranks on hosts of their own, and a store on another one."""
    host = netlab.address(STORE)
    with (
        StoreProcess(host, netlab.enter, where.hosts[STORE]) as server,
        TrainingProcesses(RANKS, train_on_a_host, where, server.port, timeout) as processes,
    ):
        yield processes


class Trouble(NamedTuple):
    """What happens to the links, and what the ranks make of it.

    Args:
        act: changes the links.
        kills: whether rank 0 is killed, too.
        raising: the ranks that raise.
        staying: those that go on.
        first: the members before rank 0 is killed, if they are fewer than all.
    """

    act: Callable[[netlab.Lab], object]
    kills: bool
    raising: tuple[int, ...]
    staying: tuple[int, ...]
    first: tuple[int, ...] = ()


def cut_between(where: netlab.Lab, one: int, other: int) -> None:
    """Cut the link between two hosts."""
    netlab.cut(where, one, other)
    netlab.cut(where, other, one)


def mend_between(where: netlab.Lab, one: int, other: int) -> None:
    """Undo `cut_between`: the hosts ask for each other's hardware address again."""
    for host, peer in ((one, other), (other, one)):
        command = f"ip -n {where.hosts[host]} neigh del {netlab.address(peer)} dev eth0"
        subprocess.run(command.split(), check=True)


TROUBLES = {
    "a rank is cut off": Trouble(lambda where: netlab.cut(where, 1), False, (1,), (0, 2)),
    # Two of three go on, and then one of these two; of three at once it would not be half.
    "a rank without the store": Trouble(
        lambda where: netlab.cut(where, 1, STORE), True, (1,), (2,), first=(0, 2)
    ),
    "no store": Trouble(lambda where: netlab.cut(where, STORE), True, (1, 2), ()),
    "a slow store": Trouble(partial(netlab.slow_down, host=STORE, rate="50kbit"), True, (), (1, 2)),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_who_cannot_reach_the_store_raises_in_time_and_the_others_go_on(trouble: str) -> None:
    act, kills, raising, staying, first = TROUBLES[trouble]
    with netlab.lab(RANKS + 1, "400mbit") as where, ranks_on(where) as processes:
        processes.all_reach("round 3")
        act(where)
        if kills:
            # A rank that is only cut off from the store is missed by those that look for it there.
            time.sleep(1.5 * STALE_AFTER)
            if first:
                processes.wait_for_members(2, first)
            processes.kill(0)
        for rank in raising:
            failure: Failure = processes.wait_for(rank, "result", 40)
            assert failure.seconds < TIMEOUT + SLACK
            assert "the store in which the ranks agree does not answer" in failure.text
        processes.finish()
        lives = [processes.wait_for(rank, "result") for rank in staying]
    assert all(life.members == staying for life in lives)
    if staying:
        agree(lives)


DEAD_LINK = "rank 2: this rank and ranks [1] are alive, but cannot connect"
# So long that two attempts to connect would exceed the slack.
LONG_TIMEOUT = 10.0


def test_a_link_that_dies_costs_the_timeout_of_a_round_and_one_attempt_to_connect() -> None:
    with (
        netlab.lab(RANKS + 1, "400mbit") as where,
        ranks_on(where, timeout=LONG_TIMEOUT) as processes,
    ):
        processes.all_reach("round 3")
        cut_between(where, 1, 2)
        failure: Failure = processes.wait_for(2, "result")
        processes.finish()
        lives = processes.results(0, 1)
    assert DEAD_LINK in failure.text
    # The attempt ends after half the timeout; one of all ranks before it took another timeout.
    longest = 1.5 * LONG_TIMEOUT + 6.0
    assert failure.seconds < longest
    assert max(life.longest for life in lives) < longest
    assert all(life.members == (0, 1) for life in lives)
    agree(lives)


def test_nobody_stops_for_a_rank_that_comes_back_behind_a_dead_link() -> None:
    with (
        netlab.lab(RANKS + 1, "400mbit") as where,
        ranks_on(where, timeout=LONG_TIMEOUT) as processes,
    ):
        processes.all_reach("round 3")
        processes.kill(2)
        processes.wait_for_members(0, (0, 1))
        cut_between(where, 1, 2)
        processes.start(2)
        failure: Failure = processes.wait_for(2, "result")
        assert DEAD_LINK in failure.text
        mend_between(where, 1, 2)
        processes.start(2)
        # Its links are tried again, and it joins.
        processes.wait_for_members(0, (0, 1, 2))
        processes.finish()
        lives = processes.results()
    # An attempt to connect with the dead link took the members the timeout.
    assert max(life.longest for life in lives[:2]) < LONG_TIMEOUT
    assert [len(new) for _, new in lives[0].changes] == [2, 3]
    agree(lives)


def test_ranks_that_cannot_reach_each_other_raise_at_the_start() -> None:
    with netlab.lab(RANKS + 1, "400mbit") as where:
        cut_between(where, 1, 2)
        # They try for four times as long.
        with ranks_on(where, timeout=1.5) as processes:
            for rank in range(RANKS):
                failure: Failure = processes.wait_for(rank, "result")
                assert f"rank {rank}: " in failure.text
