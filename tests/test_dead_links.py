"""Dead links between living ranks are found, and no working link is taken for one."""

from __future__ import annotations

import json
import math
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
from decent_optim_wrapper.elastic.membership import links
from decent_optim_wrapper.elastic.membership.epoch import Note
from decent_optim_wrapper.elastic.membership.heartbeat import Heartbeat
from decent_optim_wrapper.elastic.membership.links import LinkTrial
from decent_optim_wrapper.errors import PeerError

TIMEOUT = timedelta(seconds=6)
# For the next link.
WAIT = TIMEOUT.total_seconds() / 2
# What a busy machine may need for what an idle one does at once.
LIMIT = 30.0
DEAD = math.inf


def try_links(
    store: Any,
    ranks: Collection[int],
    takes: Callable[..., float],
    late: float = 0.0,
    newcomers: Collection[int] = (),
    is_over: bool = False,
    limit: timedelta = TIMEOUT,
) -> list[str]:
    """Try the links of these ranks; return the errors of those that leave, else "".

    Args:
        store: shared by all ranks.
        ranks: the ranks that try, up to the last one of all.
        takes: seconds that an attempt takes longer, or DEAD, by its number and two ranks. They are
            the same where a rank connects to itself.
        late: seconds by which rank 1 comes later.
        newcomers: the ranks that come back.
        is_over: whether the members must meet again.
        limit: bound of the waits for the others.
    """
    notes = {rank: Note(round=3, needs_state=rank in newcomers) for rank in range(max(ranks) + 1)}

    def connect(pair: tuple[str, Any], *args: Any) -> None:
        number, (one, other) = map(json.loads, pair[0].split("/")[-2:])
        if (seconds := takes(number, one, other)) == DEAD:
            raise RuntimeError("no route to host")
        time.sleep(seconds)
        connect_gloo(PrefixStore(*pair), *args)

    def try_links_of(rank: int) -> str:
        heartbeat = mock.Mock(spec=Heartbeat, rank=rank, is_over=lambda: is_over)
        time.sleep(late if rank == 1 else 0)
        try:
            LinkTrial(BoundedStore(store, TIMEOUT), 3, notes, heartbeat, limit).run()
        except PeerError as error:
            assert heartbeat.leave.called
            return str(error)
        assert not heartbeat.leave.called
        return ""

    patched = mock.patch.multiple(links, connect_gloo=connect, PrefixStore=lambda *pair: pair)
    with patched, ThreadPoolExecutor() as pool:
        return [*pool.map(try_links_of, ranks, timeout=LIMIT)]


def one_attempt(number: int, one: int, other: int) -> float:
    return DEAD if number == 0 and one != other else 0


def one_link(_: int, *ends: int) -> float:
    return DEAD if ends == (0, 1) else 0


def any_link(_: int, one: int, other: int) -> float:
    return DEAD if one != other else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("takes", "late", "newcomers", "leave"),
    [
        (lambda *_: 0, 0, [], {}),
        (one_attempt, 0, [], {}),
        # The one with two dead links, even if the others are newcomers.
        (lambda _, *ends: DEAD if ends in ((0, 1), (1, 2)) else 0, 0, [0, 2], {1: [0, 2]}),
        (one_link, 0, [], {1: [0]}),
        (one_link, 0, [0], {0: [1]}),
        (any_link, 0, [], {1: [0, 2], 2: [0, 1]}),
        # A busy machine: a rank comes late, has no time to try, or the links connect one by one.
        (lambda *_: 0, 1.5 * WAIT, [], {}),
        (lambda _, *ends: 1.5 * WAIT * (1 in ends), 0, [], {}),
        (lambda _, *ends: 0.75 * WAIT * len({0, 2}.intersection(ends)), 0, [], {}),
    ],
)
def test_a_link_is_dead_if_all_attempts_fail_and_one_end_leaves(
    takes: Callable[..., float], late: float, newcomers: list[int], leave: dict[int, list[int]]
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    texts = try_links(store, range(3), takes, late, newcomers)
    assert store.check([f"3/missing/{rank}" for rank in range(3)])
    known = {rank: f"rank {rank}: this rank and ranks {leave[rank]} are alive" for rank in leave}
    assert [text.partition(", but")[0] for text in texts] == [known.get(r, "") for r in range(3)]


def test_a_rank_stays_unless_the_other_end_says_so_too() -> None:
    """It stays if the other end does not come, or if the members must meet again, too."""
    store, own = HashStore(), ["3/missing/1"]
    assert try_links(store, [1], any_link, limit=timedelta(seconds=0.2)) == [""]
    assert try_links(store, [1], any_link, is_over=True) == [""]
    assert not store.check(own)
    bounded = BoundedStore(store, TIMEOUT)
    bounded.set("3/begun/0", "[]")
    bounded.set("3/missing/0", "[]")
    assert try_links(store, [1], any_link) == [""]
    assert bounded.get(own[0]) == "[0]"
