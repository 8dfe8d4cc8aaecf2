"""Dead links between living ranks are found, and no working link is taken for one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from decent_optim_wrapper.comm.process_groups import connect_gloo
from decent_optim_wrapper.comm.store import BoundedStore
from decent_optim_wrapper.elastic.heartbeat import Heartbeat
from decent_optim_wrapper.elastic.links import Links, left_out
from decent_optim_wrapper.errors import PeerError

CONNECT, PREFIX = (
    f"decent_optim_wrapper.elastic.links.{n}" for n in ("connect_gloo", "PrefixStore")
)
TIMEOUT = timedelta(seconds=20)
# What a busy machine may need for what an idle one does at once.
PATIENCE = 30.0


def no_route(*_: Any) -> None:
    raise RuntimeError("no route to host")


def all_work(pair: tuple[str, Any], end: int, size: int, timeout: timedelta) -> None:
    connect_gloo(PrefixStore(*pair), end, size, timeout)


def lose_first(pair: tuple[str, Any], *args: Any) -> None:
    """The first attempt on a link fails at both of its ends."""
    (no_route if "/links/0/" in pair[0] else all_work)(pair, *args)


def lose_rank_1(pair: tuple[str, Any], *args: Any) -> None:
    """The links to rank 1 are dead."""
    (no_route if "1" in pair[0].rpartition("/")[2] else all_work)(pair, *args)


def alive(ranks: Collection[int]) -> Any:
    """The heartbeat of a rank that hears these."""
    heartbeat = mock.Mock(spec=Heartbeat, is_replaced=False)
    heartbeat.alive = lambda rank: rank in ranks
    return heartbeat


@pytest.mark.slow
@pytest.mark.parametrize(
    ("connect", "missing"),
    [
        (all_work, [[], [], []]),
        (lose_first, [[], [], []]),
        (lose_rank_1, [[1], [0, 2], [1]]),
        (no_route, [[1, 2], [0, 2], [0, 1]]),
    ],
)
def test_a_link_is_dead_if_all_attempts_fail(
    connect: Callable[..., None], missing: list[list[int]]
) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def find(rank: int) -> Links:
        store = BoundedStore(TCPStore("127.0.0.1", server.port, is_master=False), TIMEOUT)
        links = Links(store, rank, TIMEOUT)
        links.find_dead(3, (0, 1, 2), alive((0, 1, 2)))
        return links

    pairs = mock.patch(PREFIX, lambda prefix, store: (prefix, store))
    with mock.patch(CONNECT, connect), pairs, ThreadPoolExecutor() as pool:
        found = [*pool.map(find, range(3), timeout=PATIENCE)]
    assert [json.loads(server.get(f"3/missing/{rank}")) for rank in range(3)] == missing
    for links, dead in zip(found, missing, strict=True):
        assert links.failed_in(3)
        links.check(4)
        if dead:
            with pytest.raises(PeerError, match=f"this rank and ranks .{dead[0]}.* are alive"):
                links.check(3)
        else:
            links.check(3)
    out = left_out(dict(enumerate(missing)), ())
    assert found[0].choose(3, (0, 1, 2), ()) == tuple(rank for rank in range(3) if rank not in out)


def test_of_a_link_that_was_not_tried_nothing_is_known() -> None:
    """The store is slow, a member dies meanwhile, or there are too many to try."""
    store = mock.Mock(spec=BoundedStore)
    for members, heard in (((0, 1), (0,)), (range(33), range(33))):
        links = Links(store, 0, TIMEOUT)
        links.find_dead(1, members, alive(heard))
        assert not store.mock_calls
        assert not links.failed_in(1)
    store.clone.side_effect = lambda: time.sleep(1.0)
    Links(store, 0, timedelta(seconds=0.2)).find_dead(1, (0, 1), alive((0, 1)))
    store.set.assert_called_with("1/missing/0", "[]")


def test_links_of_many_ranks_are_tried_once() -> None:
    """Else the process that holds the store might run out of open files."""
    store = mock.Mock(spec=BoundedStore)
    store.clone.side_effect = HashStore
    for size, attempts in ((16, 2), (17, 1)):
        store.clone.reset_mock()
        with mock.patch(CONNECT, no_route):
            Links(store, 0, TIMEOUT).find_dead(1, range(size), alive(range(size)))
        assert store.clone.call_count == attempts * (size - 1)


@pytest.mark.parametrize(
    ("missing", "newcomers", "out"),
    [
        ({}, [], set()),
        # Both ends must say so.
        ({0: [1]}, [], set()),
        ({0: [1], 1: [0]}, [], {1}),
        ({0: [1], 1: [0]}, [0], {0}),
        # One rank with two dead links, even if the others are newcomers.
        ({0: [1, 2], 1: [0], 2: [0]}, [1, 2], {0}),
        ({0: [1], 1: [0], 2: [3], 3: [2]}, [2], {1, 2}),
    ],
)
def test_the_fewest_ranks_are_left_out(
    missing: dict[int, list[int]], newcomers: list[int], out: set[int]
) -> None:
    assert left_out(missing, newcomers) == out
