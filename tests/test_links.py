"""Dead links between living ranks are found, and no working link is taken for one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.process_groups import connect_gloo
from decent_optim_wrapper.comm.store import BoundedStore
from decent_optim_wrapper.comm.waiting import WireError
from decent_optim_wrapper.elastic import long_wait
from decent_optim_wrapper.elastic.heartbeat import PROBES_KEY, Heartbeat
from decent_optim_wrapper.elastic.links import Links, left_out
from decent_optim_wrapper.elastic.long_wait import LongWaits
from decent_optim_wrapper.errors import PeerError

CONNECT = "decent_optim_wrapper.elastic.links.connect_gloo"
RANKS = (0, 1, 2)
TIMEOUT = timedelta(seconds=20)
# What a busy machine may need for what an idle one does at once.
PATIENCE = 30.0


class Member:
    """What a rank has for its links: a store, and heartbeats.

    The last rank sends heartbeats, but answers no probe.
    """

    def __init__(self, rank: int, port: int) -> None:
        self.store = BoundedStore(TCPStore("127.0.0.1", port, is_master=False), TIMEOUT)
        self.links = Links(self.store, rank, TIMEOUT)
        # The numbers of the probes that it answers.
        self.answered: list[int] = []
        answer = None if rank == RANKS[-1] else self._answer
        self.heartbeat = Heartbeat(self.store, rank, stale_after=1.0, answer=answer)
        self.heartbeat.start(life=1)

    def _answer(self, number: int) -> None:
        self.links.answer(number)
        self.answered.append(number)

    def dead(self) -> list[int]:
        return self.links.find_dead_by_probe(RANKS, self.heartbeat)


@pytest.fixture
def members() -> Iterator[list[Member]]:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = [Member(rank, server.port) for rank in RANKS]
    for member in members:
        member.heartbeat.watch(RANKS, epoch=1)
    yield members
    for member in members:
        member.heartbeat.stop()


def no_route(*_: Any) -> None:
    raise RuntimeError("no route to host")


def lose_first(store: BoundedStore, prefix: str, ends: list[int]) -> Callable[..., None]:
    """In place of `connect_gloo`: the first attempt on a link fails at both of its ends.

    Args:
        store: the store.
        prefix: of the keys of the trial.
        ends: the end of each attempt, 0 or 1, is added.
    """

    def connect(pair: Any, end: int, size: int, timeout: timedelta) -> None:
        ends.append(end)
        pair.set(f"end {end}", str(id(pair)))
        if store.find(f"{prefix}/0/0-1/end {end}") == str(id(pair)):
            no_route()
        connect_gloo(pair, end, size, timeout)

    return connect


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def nobody_waits_to_answer() -> bool:
    return not any(each.name.endswith("probe") for each in threading.enumerate())


@pytest.mark.slow
def test_only_a_living_member_that_tries_its_link_counts_as_unreachable(
    members: list[Member],
) -> None:
    assert members[0].dead() == []
    assert members[0].store.get(PROBES_KEY) == "1"
    with mock.patch(CONNECT, no_route):
        assert members[0].dead() == [1]
        members[1].heartbeat.stop()
        # They meet again in any case.
        assert members[0].dead() == []


@pytest.mark.slow
def test_a_rank_that_asks_late_blames_nobody_and_one_that_gives_up_is_not_met(
    members: list[Member],
) -> None:
    with mock.patch(CONNECT, side_effect=no_route) as connect:
        late, given_up = (members[0].links.announce(RANKS) for _ in range(2))
        wait_until(lambda: all(member.answered == [1, 2] for member in members[:2]))
        wait_until(nobody_waits_to_answer)
        members[0].links.check_probe(late, members[0].heartbeat)
        assert not connect.called
        assert (late.number, given_up.number) == (1, 2)
        in_time = members[0].links.announce(RANKS)
        with pytest.raises(PeerError, match=r"this rank and ranks \[1\] are alive"):
            members[0].links.check_probe(in_time, members[0].heartbeat)


@pytest.mark.slow
def test_a_link_over_which_only_one_attempt_fails_works(members: list[Member]) -> None:
    store, ends = members[0].store, list[int]()
    with mock.patch(CONNECT, lose_first(store, "probe 1", ends)):
        assert members[0].dead() == []
        wait_until(lambda: sorted(ends) == [0, 0, 1, 1])
    for lost, missing in ((lose_first(store, "1/links", ends), "[]"), (no_route, "[1]")):
        with mock.patch(CONNECT, lost), ThreadPoolExecutor() as pool:
            trials = [
                pool.submit(member.links.find_dead, 1, RANKS[:2], member.heartbeat)
                for member in members[:2]
            ]
            assert [trial.result(PATIENCE) for trial in trials] == [None] * 2
        assert store.get("1/missing/0") == missing
    assert store.get("1/missing/1") == "[0]"


def test_links_of_many_ranks_are_tried_once() -> None:
    """Else the process that holds the store might run out of open files."""
    store, heartbeat = mock.Mock(spec=BoundedStore), mock.Mock(spec=Heartbeat)
    heartbeat.hears_members.return_value = False
    store.clone.side_effect = HashStore
    for size, attempts in ((16, 2), (17, 1)):
        store.clone.reset_mock()
        with mock.patch("decent_optim_wrapper.elastic.links._ANSWER_SECONDS", 0.0):
            links = Links(store, 0, TIMEOUT)
        store.check.return_value = False
        store.add.return_value = 5
        assert links.find_dead_by_probe(range(size), heartbeat) == []
        assert store.clone.call_count == attempts * (size - 1)


def test_a_rank_alone_or_among_more_than_can_be_tried_asks_nobody() -> None:
    store, heartbeat = mock.Mock(spec=BoundedStore), mock.Mock(spec=Heartbeat)
    links = Links(store, 0, TIMEOUT)
    for ranks in (range(1), range(33)):
        assert links.find_dead_by_probe(ranks, heartbeat) == []
    assert not store.mock_calls


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


class Clock:
    """The time that long waits see, and how often they have tried the links."""

    def __init__(self, dead: Callable[[int], list[int]]) -> None:
        self.now, self.trials, self._dead = 100.0, 0, dead
        self._begun: list[Future[Any]] = []

    def monotonic(self) -> float:
        return self.now

    def in_background(self, trial: Callable[[], list[int]]) -> Future[list[int]]:
        self._begun.append(in_background(trial))
        return self._begun[-1]

    def find_dead_by_probe(self, *_: Any) -> list[int]:
        self.trials += 1
        return self._dead(self.trials)

    def wait(self, waits: LongWaits, seconds: float) -> int:
        """Wait for so long; the number of trials after that."""
        stop = waits.begin()
        self.now += seconds
        # The first call begins a trial, and the second one reads it.
        for _ in range(2):
            assert not stop()
            assert not wait(self._begun, PATIENCE).not_done
        return self.trials


@pytest.fixture
def start_waiting() -> Iterator[
    Callable[[Callable[[int], list[int]]], tuple[Clock, LongWaits, Any]]
]:
    with pytest.MonkeyPatch.context() as patch:

        def start(dead: Callable[[int], list[int]]) -> tuple[Clock, LongWaits, Any]:
            clock, heartbeat = Clock(dead), SimpleNamespace(is_over=False)
            patch.setattr(long_wait, "time", clock)
            patch.setattr(long_wait, "in_background", clock.in_background)
            links: Any = clock
            return clock, LongWaits(links, RANKS, heartbeat, patience=4.0), heartbeat  # type: ignore[arg-type]

        yield start


def test_each_trial_of_the_links_waits_for_twice_as_long_a_wait(start_waiting: Any) -> None:
    clock, waits, heartbeat = start_waiting(lambda trials: [])
    # A rank that takes five seconds for each step makes nobody try more than once.
    assert [clock.wait(waits, seconds) for seconds in (3.9, 4.1, 5, 5, 7.9, 8.1, 9)] == [
        *(0, 1, 1, 1, 1, 2, 2)
    ]
    heartbeat.is_over = True
    assert waits.begin()()


def test_a_dead_link_ends_the_wait_and_a_silent_store_does_not(start_waiting: Any) -> None:
    def dead(trials: int) -> list[int]:
        if trials == 1:
            raise RuntimeError("no answer")
        return [2]

    clock, waits, _ = start_waiting(dead)
    assert clock.wait(waits, 5) == 1
    with pytest.raises(WireError, match=r"the link to ranks \[2\] is dead"):
        clock.wait(waits, 9)


def test_what_a_trial_has_found_says_nothing_once_its_wait_has_ended(start_waiting: Any) -> None:
    clock, waits, _ = start_waiting(lambda trials: [2])
    first = waits.begin()
    clock.now += 5
    assert not first()
    assert clock.wait(waits, 1) == 1
    with pytest.raises(WireError, match="is dead"):
        clock.wait(waits, 9)
    assert clock.trials == 2
