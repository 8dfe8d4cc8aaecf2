"""A store that is stopped, frozen for a while or cut off: every wait for it ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from loguru import logger
from problem import make_params
from restartable_processes import (
    STALE_AFTER,
    Failure,
    Life,
    Report,
    RestartableProcesses,
    StoreProcess,
    train,
    train_or_tell,
    wrap_elastic,
)
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistError

from decent_optim_wrapper import PeerError
from decent_optim_wrapper.comm import secret
from decent_optim_wrapper.comm.process_groups import new_communicator
from decent_optim_wrapper.comm.store import BoundedStore, part_of_run
from decent_optim_wrapper.elastic.membership.ended import key_prefix
from decent_optim_wrapper.elastic.membership.epoch import FIRST_NOTE, Note
from decent_optim_wrapper.elastic.membership.heartbeat import Heartbeat
from decent_optim_wrapper.elastic.membership.rendezvous import Rendezvous

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

TIMEOUT = 1.5
# What the promise adds to the timeout, and what two busy cores may.
SLACK = 2.0 + 8.0


@contextmanager
def stopped(server: StoreProcess) -> Iterator[None]:
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


# Else it waits for 12 s, which a slow name server may take.
@mock.patch("decent_optim_wrapper.comm.store._LEAST_SECONDS_TO_CONNECT", 2.0)
def test_a_stopped_store_is_not_waited_for_for_ever_and_answers_later_calls() -> None:
    timeout = timedelta(seconds=TIMEOUT)
    like = dist.ProcessGroupGloo(HashStore(), 0, 1, timeout)
    with StoreProcess() as server:
        own, other, late = map(server.connect, range(3))
        store = BoundedStore(own, timeout)
        store.set("old", "old")
        store.set("new", "new")
        with stopped(server), ThreadPoolExecutor() as pool:
            built = pool.submit(wrap_elastic, make_params(), 0, 2, late, [], timeout=TIMEOUT)
            for call in (lambda: store.get("old"), lambda: store.check(["old"])):
                start = time.monotonic()
                with pytest.raises(DistError, match="no answer for"):
                    call()
                assert time.monotonic() - start < TIMEOUT + SLACK
            with pytest.raises(TimeoutError):
                new_communicator(like, other, 0, 2, timeout)
            with pytest.raises(PeerError, match=r"store .* does not answer"):
                built.result()
        assert store.get("new") == "new"
        assert store.get("old") == "old"


def test_only_waits_for_an_answer_count_as_silence_of_the_store() -> None:
    now = time.monotonic

    def later() -> float:
        return now() + 100

    with StoreProcess() as server:
        store = BoundedStore(server.connect(0), timedelta(seconds=8.0))
        store.set("key", "value")
        assert store.get("key") == "value"
        # This process seems to have been stopped between the calls, for longer than the timeout.
        with mock.patch("time.monotonic", later), ThreadPoolExecutor() as pool:
            server.signal(signal.SIGSTOP)
            answer, start = pool.submit(store.get, "key"), now()
            # More than the least wait.
            time.sleep(2.5)
            server.signal(signal.SIGCONT)
            assert answer.result() == "value"
            assert now() - start >= 2.5


def train_over(
    rank: int,
    world_size: int,
    store: Any,
    report: Report,
    make_store: Callable[[int], Store],
    elastic: bool,
) -> Life | Failure:
    """Train over a store of its own until that fails, also as the store of a process group."""
    options: dict[str, Any] = {"topology": "complete", "timeout": TIMEOUT}
    if not elastic:
        own = make_store(rank)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size)
        options["elastic"] = None
    return train_or_tell(rank, world_size, store, report, make_store=make_store, **options)


@pytest.mark.parametrize(("elastic", "fault"), [(True, signal.SIGSTOP), (False, signal.SIGKILL)])
def test_every_survivor_raises_in_time_when_the_store_stands_still(
    elastic: bool, fault: signal.Signals
) -> None:
    with (
        StoreProcess() as server,
        RestartableProcesses(4, train_over, server.connect, elastic) as processes,
    ):
        processes.all_reach("round 3")
        server.signal(signal.SIGSTOP)
        processes.signal(2, fault)
        for rank in (0, 1, 3):
            lost: Failure = processes.wait_for(rank, "result", 40)
            assert lost.seconds < TIMEOUT + SLACK
            texts = ("lost", "restart from a checkpoint")
            if elastic:
                texts = ("the store in which the ranks agree does not answer", "a process that")
            assert f"rank {rank}: {texts[0]}" in lost.text
            assert texts[1] in lost.text


def test_nobody_is_taken_for_dead_because_the_store_stood_still() -> None:
    options: dict[str, Any] = {"topology": "complete", "timeout": 8}
    with (
        StoreProcess() as server,
        RestartableProcesses(4, train, make_store=server.connect, **options) as processes,
    ):
        processes.all_reach("round 3")
        with stopped(server):
            processes.kill(2)
            # Longer than a rank may be silent, and not as long as the timeout.
            time.sleep(2 * STALE_AFTER)
        for rank in (0, 1, 3):
            processes.wait_for_members(rank, (0, 1, 3))
        lives = processes.end(0, 1, 3)
    assert lives[0].members == (0, 1, 3)


def test_a_connection_may_take_longer_than_the_timeout_at_the_start() -> None:
    """As where a name server does not answer torch, which asks for a name at each connection."""
    with StoreProcess() as server, ThreadPoolExecutor() as pool:
        own = server.connect(0)
        with stopped(server):
            built = pool.submit(wrap_elastic, make_params(), 0, 1, own, [], timeout=TIMEOUT)
            time.sleep(TIMEOUT + 1)
            assert not built.done()
        assert built.result(30).members == (0,)


# As `STALE_AFTER`, but shorter: the threads of one process wait for each other at most.
SILENT = 0.6


def rendezvous_of(store: Any, rank: int, size: int, timeout: float) -> Rendezvous:
    """As in a process of its own."""
    Rendezvous.built = 0
    return Rendezvous(store, rank, size, timedelta(seconds=timeout), stale_after=SILENT)


def rendezvous(store: Any, size: int, timeout: float) -> list[Rendezvous]:
    """One for each rank; its heartbeat ends with it."""
    return [rendezvous_of(store, rank, size, timeout) for rank in range(size)]


def enter(rank: Rendezvous, note: Note) -> tuple[int, ...] | str:
    """The members of the epoch that a rank enters, or the text of its `PeerError`."""
    try:
        return rank.gather(note).members
    except PeerError as error:
        return str(error)


def gather(ranks: Sequence[Rendezvous], note: Note) -> list[tuple[int, ...] | str]:
    """What the ranks find that enter at once."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [*pool.map(partial(enter, note=note), ranks)]


HAS_STATE = Note(round=5, needs_state=False)


def test_half_of_the_last_members_go_on_and_fewer_wait_for_restarted_ranks() -> None:
    store = HashStore()
    ranks = rendezvous(store, 5, timeout=30.0)
    assert gather(ranks, FIRST_NOTE) == [tuple(range(5))] * 5
    for lost in ranks[3:]:
        lost.leave()
    assert gather(ranks[:3], HAS_STATE) == [(0, 1, 2)] * 3
    for lost in ranks[1:]:
        lost.leave()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(enter, ranks[0], HAS_STATE)
        time.sleep(2 * SILENT)
        assert not waiting.done()
        ranks[2] = rendezvous_of(store, 2, 5, timeout=30.0)
        assert enter(ranks[2], FIRST_NOTE) == (0, 2)
        assert waiting.result() == (0, 2)
    ranks[2].leave()
    assert enter(ranks[0], HAS_STATE) == (0,)


def test_fewer_than_half_of_the_last_members_raise_whatever_the_store_says() -> None:
    ranks = rendezvous(HashStore(), 3, timeout=2.0)
    assert gather(ranks, FIRST_NOTE) == [(0, 1, 2)] * 3
    for lost in ranks[:2]:
        lost.leave()
    text = "waited 0:00:02 for at least half of the last members [0, 1, 2], of which only [2]"
    assert f"rank 2: {text} came" in str(enter(ranks[2], HAS_STATE))


def test_nobody_goes_on_over_a_store_that_has_lost_the_last_members() -> None:
    """As one that was started again in the place of another, which the other side may still use."""
    store = HashStore()
    ranks = rendezvous(store, 2, timeout=10.0)
    assert gather(ranks, FIRST_NOTE) == [(0, 1)] * 2
    store.delete_key(f"{key_prefix(0)}/1/members")
    for text in gather(ranks, HAS_STATE):
        assert "the store no longer knows that [0, 1] were the last members" in str(text)


@pytest.mark.parametrize("others", ["ended", "came", "left out"])
def test_a_rank_that_comes_back_when_nobody_trains_waits_for_one_timeout(others: str) -> None:
    """They may be started again, too, but need no time to notice this one."""
    store = HashStore()
    ranks = rendezvous(store, 3, timeout=2.0)
    assert gather(ranks, FIRST_NOTE) == [(0, 1, 2)] * 3
    own = part_of_run(store, key_prefix(0), timedelta(seconds=20))
    if others == "left out":
        # Rank 1 is alive, but rank 0 has gone on alone, and has ended.
        own.set("2/members", "[0]")
        own.set("epoch", "2")
    # Their heartbeats end with them.
    ranks[:] = ranks[1:2] if others == "left out" else []
    # Or they die when they have just come to meet without this rank.
    for rank in (0, 1) if others == "came" else ():
        own.set(f"{int(own.get('epoch')) + 1}/note/{rank}", json.dumps(HAS_STATE))
    came_back = rendezvous_of(store, 2, 3, timeout=2.0)
    text = r"rank 2: waited 0:00:02 for .* of which \[0, 1\] did not come .*; .* have finished"
    assert re.match(text, str(enter(came_back, FIRST_NOTE)))


def test_the_last_heartbeat_of_a_process_that_has_ended_may_come_late() -> None:
    """After a cut the kernel sends it once more: only two come from a living process."""
    store = HashStore()
    bounded = BoundedStore(store, timedelta(seconds=20))
    bounded.set("heartbeat/0", "1 0 1 host:1 ")
    own = Heartbeat(bounded.another(timedelta(seconds=20)), rank=0, stale_after=STALE_AFTER)
    late = threading.Timer(0.1, bounded.set, ("heartbeat/0", "1 1 1 host:1 "))
    late.start()
    assert not own.is_taken()
    late.join()
    assert bounded.get("heartbeat/0") == "1 1 1 host:1 "


class Relay:
    """Listens in the place of a store, and can close its connections, or block them for good.

    Args:
        port: of the store, on this machine.
    """

    def __init__(self, port: int) -> None:
        self._store = "127.0.0.1", port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._passing = set[socket.socket]()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Close all connections, as a firewall or a restart of the network does."""
        for each in [*self._passing]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Close all connections, and take no more."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self.close()

    def block(self) -> None:
        """Pass nothing more on over the connections that are there, which stay open."""
        self._passing.clear()

    def _accept(self) -> None:
        # Until the store has ended.
        with suppress(OSError), self._listening:
            while True:
                ends = self._listening.accept()[0], socket.create_connection(self._store)
                self._passing.update(ends)
                for pair in (ends, ends[::-1]):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError), source:
            while data := source.recv(65536):
                if source in self._passing:
                    sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


def beat_counts(server: Store, ranks: Sequence[int]) -> list[int]:
    """The numbers of the last heartbeats."""
    own = part_of_run(server, key_prefix(0), timedelta(seconds=20))
    return [int(own.get(f"heartbeat/{rank}").split()[1]) for rank in ranks]


def wait_for_heartbeats(server: Store, ranks: Sequence[int]) -> None:
    """Return once every rank has sent more heartbeats than before which it could be missed."""
    before, deadline = beat_counts(server, ranks), time.monotonic() + 30
    while min(now - was for now, was in zip(beat_counts(server, ranks), before, strict=True)) < 12:
        assert time.monotonic() < deadline, "the heartbeats have ended"
        time.sleep(0.05)


@pytest.mark.parametrize("fault", ["close", "block"])
def test_heartbeats_and_agreements_go_on_over_a_new_connection(fault: str) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    relay = Relay(server.port)
    stores = [TCPStore("127.0.0.1", relay.port, is_master=False) for _ in range(2)]
    ranks = [rendezvous_of(store, rank, 2, timeout=30.0) for rank, store in enumerate(stores)]
    assert gather(ranks, FIRST_NOTE) == [(0, 1)] * 2
    for _ in range(2):
        getattr(relay, fault)()
        wait_for_heartbeats(server, range(2))
    if fault == "close":
        # Nobody was missed, and the connections of the main threads were closed, too.
        assert not any(rank.is_due() for rank in ranks)
        assert gather(ranks, HAS_STATE) == [(0, 1)] * 2


def test_a_store_that_does_not_answer_for_the_timeout_is_logged_once() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    relay, lines = Relay(server.port), list[str]()
    relayed = TCPStore("127.0.0.1", relay.port, is_master=False)
    own = part_of_run(relayed, key_prefix(0), timedelta(seconds=1))
    # Heartbeats that other tests have left may find that their stores are gone, too.
    said = "rank 7: the store has not answered for"
    heartbeat = Heartbeat(own, rank=7, stale_after=SILENT)
    logger.enable("decent_optim_wrapper")
    sink = logger.add(lines.append, format="{message}", filter=lambda log: said in log["message"])
    try:
        heartbeat.start(life=1)
        # A connection that is being made when the relay ends would be tried again for a while.
        wait_for_heartbeats(server, [7])
        relay.end()
        deadline = time.monotonic() + 30
        while not lines and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)
    finally:
        heartbeat.close()
        logger.remove(sink)
        logger.disable("decent_optim_wrapper")
    (line,) = lines
    assert re.match(rf"{said} [1-9]\d* s: .*refused", line)


# No number, no JSON, no UTF-8, another type, and too deep for Python.
ODD = (b"x 1", b"{", b"\xff\xfe", b'{"rank": 0}', b"[" * 100_000)


@pytest.mark.parametrize("value", ODD)
def test_values_that_no_rank_writes_are_passed_over(value: bytes) -> None:
    store = HashStore()
    ranks = rendezvous(store, 2, timeout=30.0)
    assert gather(ranks, FIRST_NOTE) == [(0, 1)] * 2
    own: Any = PrefixStore(key_prefix(0), store)
    for key in ("heartbeat/0", "heartbeat/1", "1/dead", "epoch", "2/members"):
        own.set(key, value)
    time.sleep(2 * SILENT)
    wait_for_heartbeats(store, range(2))
    assert not any(rank.is_due() for rank in ranks)
    # A list of members that is there already is replaced.
    assert gather(ranks, HAS_STATE) == [(0, 1)] * 2
    assert secret.verified(key_prefix(0), "epoch", own.get("epoch").decode()) == "2"
