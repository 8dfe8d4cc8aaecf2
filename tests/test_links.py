"""Dead links between living ranks are found, and no working link is taken for one."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from decent_optim_wrapper.comm.process_groups import connect_gloo
from decent_optim_wrapper.comm.store import BoundedStore
from decent_optim_wrapper.elastic.epoch import Note
from decent_optim_wrapper.elastic.heartbeat import Heartbeat
from decent_optim_wrapper.elastic.links import check_links
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


def lose_0_to_1(pair: tuple[str, Any], *args: Any) -> None:
    (no_route if pair[0].endswith("[0, 1]") else all_work)(pair, *args)


def alive(ranks: Collection[int], own: int = 0) -> Any:
    """The heartbeat of a rank that hears these."""
    heartbeat = mock.Mock(spec=Heartbeat, is_replaced=False, rank=own)
    heartbeat.alive = lambda rank: rank in ranks
    return heartbeat


def notes_of(ranks: Collection[int], newcomers: Collection[int] = ()) -> dict[int, Note]:
    return {rank: Note(round=3, needs_state=rank in newcomers) for rank in ranks}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("connect", "newcomers", "missing", "leave"),
    [
        (all_work, [], [[], [], []], {}),
        (lose_first, [], [[], [], []], {}),
        # The one with two dead links, even if the others are newcomers.
        (lose_rank_1, [0, 2], [[1], [0, 2], [1]], {1: [0, 2]}),
        (lose_0_to_1, [], [[1], [0], []], {1: [0]}),
        (lose_0_to_1, [0], [[1], [0], []], {0: [1]}),
        (no_route, [], [[1, 2], [0, 2], [0, 1]], {1: [0, 2], 2: [0, 1]}),
    ],
)
def test_a_link_is_dead_if_all_attempts_fail_and_one_end_leaves(
    connect: Callable[..., None],
    newcomers: list[int],
    missing: list[list[int]],
    leave: dict[int, list[int]],
) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def try_links(rank: int) -> str:
        store = BoundedStore(TCPStore("127.0.0.1", server.port, is_master=False), TIMEOUT)
        heartbeat = alive((0, 1, 2), rank)
        try:
            check_links(store, 3, notes_of((0, 1, 2), newcomers), heartbeat, TIMEOUT)
        except PeerError as error:
            assert heartbeat.leave.called
            return str(error)
        assert not heartbeat.leave.called
        return ""

    pairs = mock.patch(PREFIX, lambda prefix, store: (prefix, store))
    with mock.patch(CONNECT, connect), pairs, ThreadPoolExecutor() as pool:
        texts = [*pool.map(try_links, range(3), timeout=PATIENCE)]
    assert [json.loads(server.get(f"3/missing/{rank}"))[3] for rank in range(3)] == missing
    for rank, text in enumerate(texts):
        dead = leave.get(rank)
        assert (f"rank {rank}: this rank and ranks {dead} are alive" in text) == (dead is not None)


@pytest.mark.parametrize("theirs", [None, "[0, false, 0, []]"])
def test_a_rank_stays_unless_the_other_end_says_so_too(theirs: str | None) -> None:
    store = mock.Mock(spec=BoundedStore)
    store.clone.side_effect = HashStore
    store.find.return_value = theirs
    store.check.return_value = theirs is not None
    with mock.patch(CONNECT, no_route):
        check_links(store, 1, notes_of((0, 1)), alive((0, 1), 1), timedelta(seconds=0.2))
    store.set.assert_called_with("1/missing/1", "[1, false, 1, [0]]")
