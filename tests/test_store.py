"""A store that is stopped, frozen for a while or cut off: every wait for it ends."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch.distributed as dist
from problem import TINY_CAP_MB, backward, make_params, sgd
from ranks import PROCESSES, start_process
from restartable_processes import STEP, RestartableProcesses, StoreProcess
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed import DistError

from decent_optim_wrapper import DecentOptimWrapper, Elastic, PeerError
from decent_optim_wrapper.comm.process_groups import new_communicator
from decent_optim_wrapper.comm.store import BoundedStore
from decent_optim_wrapper.comm.waiting import within

pytestmark = pytest.mark.slow

PATIENCE = 1.5
PATIENCE_AT_START = 4.0
# What the promise adds to the timeout, and what two busy cores may.
SLACK = 2.0 + 8.0


def test_waiting_ends_with_the_action_the_deadline_or_when_it_should_stop() -> None:
    never = threading.Event()
    assert within(30, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(30, lambda: 1 // 0)
    with pytest.raises(TimeoutError):
        within(0.2, never.wait)
    with pytest.raises(TimeoutError):
        within(30, never.wait, should_stop=lambda: True)
    never.set()


def test_an_error_keeps_nothing_alive_that_the_action_used() -> None:
    class Connection:
        def fail(self) -> None:
            raise RuntimeError("lost")

    connection = Connection()
    watched = weakref.ref(connection)
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="lost"):
            within(30, connection.fail)
        del connection
        deadline = time.monotonic() + 20
        while watched() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert watched() is None
    finally:
        gc.enable()


def wait_for_an_answer(pipe: Connection) -> None:
    def ask() -> Any:
        pipe.send("asked")
        return pipe.recv()

    within(1.0, ask)


@pytest.mark.timeout(60)
def test_a_process_that_was_stopped_has_not_waited_meanwhile() -> None:
    ours, theirs = PROCESSES.Pipe()
    worker = start_process(wait_for_an_answer, theirs)
    assert ours.recv() == "asked"
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(2)
    os.kill(worker.pid, signal.SIGCONT)
    time.sleep(0.2)
    ours.send("answer")
    worker.join(20)
    assert worker.exitcode == 0


def test_calls_of_a_bounded_store_are_those_of_the_store() -> None:
    plain = HashStore()
    store = BoundedStore(PrefixStore("part", plain), timedelta(seconds=30))
    assert not store.check(["a"])
    store.set("a", "1")
    store.claim("a", "2")
    store.claim("b", "3")
    assert (store.get("a"), store.get("b"), store.add("n", 2), store.add("n", 3)) == (*"13", 2, 5)
    assert store.check(["a", "b"])
    assert plain.get("part/a") == b"1"


@pytest.mark.timeout(60)
def test_a_call_to_a_stopped_store_ends_and_the_next_one_gets_its_own_answer() -> None:
    with StoreProcess() as server:
        store = BoundedStore(server.connect(), timedelta(seconds=PATIENCE))
        store.set("old", "old")
        store.set("new", "new")
        server.signal(signal.SIGSTOP)
        for call in (lambda: store.get("old"), lambda: store.check(["old"])):
            start = time.monotonic()
            with pytest.raises(DistError, match="no answer for"):
                call()
            assert time.monotonic() - start < PATIENCE + SLACK
        server.signal(signal.SIGCONT)
        assert store.get("new") == "new"
        assert store.get("old") == "old"


@pytest.mark.timeout(60)
def test_calls_to_a_store_whose_server_has_ended_end_at_once_and_write_no_stack(
    capfd: pytest.CaptureFixture[str],
) -> None:
    timeout = timedelta(seconds=30)
    with StoreProcess() as server:
        own = server.connect()
        stores = [BoundedStore(own, timeout), BoundedStore(PrefixStore("part", own), timeout)]
        for store in stores:
            store.set("key", "value")
            assert store.get("key") == "value"
        # One that connects only when the server has ended.
        stores.append(BoundedStore(own, timeout))
        server.kill()
        for store in stores:
            for call in (partial(store.check, ["key"]), partial(store.set, "key", ""), store.clone):
                start = time.monotonic()
                with pytest.raises(DistError, match="its server has ended"):
                    call()
                assert time.monotonic() - start < SLACK
    assert "frame #" not in capfd.readouterr().err


def train(
    rank: int,
    world_size: int,
    store: Any,
    report: Callable[[str, Any], None],
    port: int,
    end: str,
) -> tuple[float, str]:
    """Train over a store of its own until that fails."""
    own = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    params = make_params(seed=rank)
    arguments: dict[str, Any] = {"elastic": Elastic(store=own)}
    if end == "raise":
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size)
        arguments = {}
    optimizer = DecentOptimWrapper(
        *(sgd(params), rank, world_size, None, "complete", TINY_CAP_MB),
        timeout=PATIENCE,
        **arguments,
    )
    while True:
        backward(params, rank, optimizer.round)
        start = time.monotonic()
        try:
            optimizer.step()
        except PeerError as error:
            report("result", (time.monotonic() - start, str(error)))
            # What hangs on the store must not hang this process, either.
            os._exit(0)
        if optimizer.round % 10 == 0:
            report(f"round {optimizer.round}", optimizer.members)
        time.sleep(STEP)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("end", ["continue", "raise"])
def test_every_survivor_raises_in_time_when_the_store_is_stopped(
    end: str, fault: signal.Signals
) -> None:
    with StoreProcess() as server, RestartableProcesses(4, train, server.port, end) as processes:
        for rank in range(4):
            processes.wait_for(rank, "round 10")
        server.signal(signal.SIGSTOP)
        processes.signal(2, fault)
        for rank in (0, 1, 3):
            seconds, text = processes.wait_for(rank, "result", 40)
            assert seconds < PATIENCE + SLACK
            expected = "the store in which the ranks agree does not answer"
            assert (expected if end == "continue" else f"rank {rank}: lost") in text


def freeze_and_go_on(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None], port: int
) -> tuple[int, ...]:
    own = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    params = make_params(seed=rank)
    optimizer = DecentOptimWrapper(
        *(sgd(params), rank, world_size, None, "complete", TINY_CAP_MB),
        timeout=8,
        elastic=Elastic(store=own),
    )
    while not store.check(["finish"]) or optimizer.round < int(store.get("finish")):
        backward(params, rank, optimizer.round)
        optimizer.step()
        if optimizer.round % 10 == 0:
            report(f"round {optimizer.round}", optimizer.members)
        time.sleep(STEP)
    optimizer.synchronize()
    return optimizer.members


@pytest.mark.timeout(60)
def test_nobody_is_taken_for_dead_because_the_store_stood_still() -> None:
    with (
        StoreProcess() as server,
        RestartableProcesses(4, freeze_and_go_on, server.port) as processes,
    ):
        for rank in range(4):
            processes.wait_for(rank, "round 10")
        server.signal(signal.SIGSTOP)
        processes.kill(2)
        # Longer than a rank may be silent, and not as long as the timeout.
        time.sleep(4)
        server.signal(signal.SIGCONT)
        for rank in (0, 1, 3):
            processes.wait_for_members(rank, (0, 1, 3))
        processes.finish()
        assert [processes.wait_for(rank, "result") for rank in (0, 1, 3)] == [(0, 1, 3)] * 3


@contextmanager
def stopped(server: StoreProcess) -> Iterator[None]:
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


@pytest.mark.timeout(60)
def test_the_constructor_does_not_wait_for_ever_for_a_stopped_store() -> None:
    with StoreProcess() as server:
        own = server.connect()
        with stopped(server), pytest.raises(PeerError, match=r"store .* does not answer"):
            DecentOptimWrapper(
                *(sgd(make_params()), 0, 2),
                timeout=PATIENCE,
                elastic=Elastic(store=own),
            )


def build_on_a_slow_store(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None], port: int
) -> tuple[int, ...]:
    own = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    report("connected", None)
    store.wait(["build"])
    optimizer = DecentOptimWrapper(
        *(sgd(make_params()), rank, world_size, None, "complete", TINY_CAP_MB),
        timeout=PATIENCE_AT_START,
        elastic=Elastic(store=own),
    )
    return optimizer.members


@pytest.mark.timeout(60)
def test_a_connection_may_take_longer_than_the_timeout_at_the_start() -> None:
    """As where a name server does not answer torch, which asks for a name at each connection."""
    with (
        StoreProcess() as server,
        RestartableProcesses(2, build_on_a_slow_store, server.port) as processes,
    ):
        for rank in range(2):
            processes.wait_for(rank, "connected")
        with stopped(server):
            processes.put("build")
            time.sleep(PATIENCE_AT_START + 2)
        assert [processes.wait_for(rank, "result") for rank in range(2)] == [(0, 1)] * 2


@pytest.mark.timeout(60)
def test_communicators_are_not_waited_for_for_ever_when_the_store_is_stopped() -> None:
    like = dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=PATIENCE))
    with StoreProcess() as server:
        own = server.connect()
        with stopped(server), pytest.raises(TimeoutError):
            new_communicator(like, own, 0, 2, timedelta(seconds=PATIENCE))
