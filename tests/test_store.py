"""A store that is stopped, frozen for a while or cut off: every wait for it ends."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problem import backward, flatten, make_params, sgd
from ranks import PROCESSES, process_group, start_process
from restartable_processes import (
    STALE_AFTER,
    Failure,
    Life,
    RestartableProcesses,
    StoreProcess,
    TrainingProcesses,
    agree,
    connect,
    train,
    train_or_tell,
    wrap_elastic,
)
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import DistError

from decent_optim_wrapper import DecentOptimWrapper, Elastic, PeerError
from decent_optim_wrapper.comm.process_groups import new_communicator
from decent_optim_wrapper.comm.store import BoundedStore
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.comm.waiting import WireError, within
from decent_optim_wrapper.elastic.epoch import FIRST_NOTE, Epoch, Note
from decent_optim_wrapper.elastic.heartbeat import Heartbeat
from decent_optim_wrapper.elastic.rendezvous import Rendezvous, key_prefix

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

PATIENCE = 1.5
PATIENCE_AT_START = 2.5
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


def test_a_process_that_was_stopped_has_not_waited_meanwhile() -> None:
    ours, theirs = PROCESSES.Pipe()
    worker = start_process(wait_for_an_answer, theirs)
    assert ours.recv() == "asked"
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(worker.pid, signal.SIGCONT)
    time.sleep(0.5)
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


@contextmanager
def stopped(server: StoreProcess) -> Iterator[None]:
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


def test_a_stopped_store_is_not_waited_for_for_ever_and_answers_later_calls() -> None:
    patience = timedelta(seconds=PATIENCE)
    like = dist.ProcessGroupGloo(HashStore(), 0, 1, patience)
    with StoreProcess() as server:
        own, other, late = (server.connect() for _ in range(3))
        store = BoundedStore(own, patience)
        store.set("old", "old")
        store.set("new", "new")
        # It takes longest: it also waits for a name server that is slow.
        with stopped(server), ThreadPoolExecutor() as pool:
            built = pool.submit(wrap_elastic, make_params(), 0, 2, late, [], timeout=PATIENCE)
            for call in (lambda: store.get("old"), lambda: store.check(["old"])):
                start = time.monotonic()
                with pytest.raises(DistError, match="no answer for"):
                    call()
                assert time.monotonic() - start < PATIENCE + SLACK
            with pytest.raises(TimeoutError):
                new_communicator(like, other, 0, 2, patience)
            with pytest.raises(PeerError, match=r"store .* does not answer"):
                built.result()
        assert store.get("new") == "new"
        assert store.get("old") == "old"


def test_calls_to_a_store_whose_server_has_ended_end_at_once_and_write_no_stack(
    capfd: pytest.CaptureFixture[str],
) -> None:
    timeout = timedelta(seconds=30)
    with StoreProcess() as server:
        own = server.connect()
        bounded = [BoundedStore(own, timeout), BoundedStore(PrefixStore("part", own), timeout)]
        for store in bounded:
            store.set("key", "value")
            assert store.get("key") == "value"
        # One that connects only when the server has ended.
        bounded.append(BoundedStore(own, timeout))
        server.kill()
        for store in bounded:
            for call in (partial(store.check, ["key"]), partial(store.set, "key", ""), store.clone):
                start = time.monotonic()
                with pytest.raises(DistError, match="its server has ended"):
                    call()
                assert time.monotonic() - start < SLACK
    assert "frame #" not in capfd.readouterr().err


def train_over(
    rank: int,
    world_size: int,
    store: Any,
    report: Callable[[str, Any], None],
    port: int,
    elastic: bool,
    patience: float,
) -> Life | Failure:
    """Train over a store of its own until that fails, also as the store of a process group."""
    options: dict[str, Any] = {"topology": "complete", "timeout": PATIENCE, "port": port}
    if not elastic:
        own = connect(port)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size)
        options["elastic"] = None
    return train_or_tell(rank, world_size, store, report, patience, **options)


@pytest.mark.parametrize("fault", ["killed", "stopped", "killed with its store"])
@pytest.mark.parametrize("elastic", [True, False])
def test_every_survivor_raises_in_time_when_the_store_is_lost(elastic: bool, fault: str) -> None:
    ends = fault == "killed with its store"
    patience = SLACK if ends else 0.0
    with (
        StoreProcess() as server,
        RestartableProcesses(4, train_over, server.port, elastic, patience) as processes,
    ):
        processes.all_reach("round 3")
        if ends:
            server.kill()
        else:
            server.signal(signal.SIGSTOP)
        processes.signal(2, signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)
        for rank in (0, 1, 3):
            lost: Failure = processes.wait_for(rank, "result", 40)
            assert lost.seconds < PATIENCE + SLACK
            if elastic:
                answer = f"rank {rank}: the store in which the ranks agree does not answer"
                assert answer in lost.text
                assert "a process that outlives the ranks" in lost.text
            else:
                assert f"rank {rank}: lost" in lost.text
                assert "restart from a checkpoint" in lost.text
            assert "frame #" not in lost.stderr
            if ends:
                # Otherwise they would go on trying to reach the store.
                assert lost.threads_ended
                assert processes.join(rank, 30) == 0


def test_nobody_is_taken_for_dead_because_the_store_stood_still() -> None:
    options: dict[str, Any] = {"topology": "complete", "timeout": 8}
    with (
        StoreProcess() as server,
        TrainingProcesses(4, train, server.port, **options) as processes,
    ):
        processes.all_reach("round 3")
        with stopped(server):
            processes.kill(2)
            # Longer than a rank may be silent, and not as long as the timeout.
            time.sleep(2 * STALE_AFTER)
        for rank in (0, 1, 3):
            processes.wait_for_members(rank, (0, 1, 3))
        processes.finish()
        lives = processes.results(0, 1, 3)
    agree(lives)
    assert lives[0].members == (0, 1, 3)


def build_on_a_slow_store(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None], port: int
) -> tuple[int, ...]:
    own = connect(port)
    report("connected", None)
    store.wait(["build"])
    optimizer = DecentOptimWrapper(
        *(sgd(make_params()), rank, world_size),
        timeout=PATIENCE_AT_START,
        elastic=Elastic(store=own),
    )
    return optimizer.members


def test_a_connection_may_take_longer_than_the_timeout_at_the_start() -> None:
    """As where a name server does not answer torch, which asks for a name at each connection."""
    with (
        StoreProcess() as server,
        RestartableProcesses(2, build_on_a_slow_store, server.port) as processes,
    ):
        processes.all_reach("connected")
        with stopped(server):
            processes.put("build")
            time.sleep(PATIENCE_AT_START + 1)
        assert processes.results() == [(0, 1)] * 2


def rendezvous_of(store: Any, rank: int, size: int, timeout: float) -> Rendezvous:
    """As in a process of its own."""
    Rendezvous.built = 0
    return Rendezvous(store, rank, size, timedelta(seconds=timeout), stale_after=STALE_AFTER)


@contextmanager
def rendezvous(store: Any, size: int, timeout: float) -> Iterator[list[Rendezvous]]:
    """One for each rank, until they leave."""
    made = [rendezvous_of(store, rank, size, timeout) for rank in range(size)]
    try:
        yield made
    finally:
        for each in made:
            each.leave()


def gather(ranks: list[Rendezvous], note: Note) -> list[Epoch | PeerError]:
    """The epochs that the ranks enter at once, or their errors."""

    def enter(rank: Rendezvous) -> Epoch | PeerError:
        try:
            return rank.gather(note)
        except PeerError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(enter, ranks))


def members(epochs: list[Epoch | PeerError]) -> list[tuple[int, ...]]:
    assert all(isinstance(each, Epoch) for each in epochs), epochs
    return [each.members for each in epochs if isinstance(each, Epoch)]


HAS_STATE = Note(round=5, needs_state=False)


def test_half_of_the_last_members_go_on_one_loss_after_the_other() -> None:
    with rendezvous(HashStore(), 5, timeout=30.0) as ranks:
        assert members(gather(ranks, FIRST_NOTE)) == [tuple(range(5))] * 5
        for left in (3, 2, 1):
            for lost in ranks[left:]:
                lost.leave()
            assert members(gather(ranks[:left], HAS_STATE)) == [tuple(range(left))] * left


def test_fewer_than_half_of_the_last_members_raise_whatever_the_store_says() -> None:
    with rendezvous(HashStore(), 3, timeout=6.0) as ranks:
        assert members(gather(ranks, FIRST_NOTE)) == [(0, 1, 2)] * 3
        for lost in ranks[:2]:
            lost.leave()
        (error,) = gather(ranks[2:], HAS_STATE)
        assert isinstance(error, PeerError)
        text = (
            "rank 2: waited 0:00:06 for at least half of the last members [0, 1, 2], of which only"
        )
        assert f"{text} [2] came" in str(error)


def test_a_survivor_waits_for_restarted_ranks_to_make_up_half() -> None:
    store = HashStore()
    with rendezvous(store, 3, timeout=30.0) as ranks:
        assert members(gather(ranks, FIRST_NOTE)) == [(0, 1, 2)] * 3
        for lost in ranks[1:]:
            lost.leave()
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(gather, ranks[:1], HAS_STATE)
            time.sleep(2 * STALE_AFTER)
            assert not waiting.done()
            ranks[2] = rendezvous_of(store, 2, 3, timeout=30.0)
            assert members(gather(ranks[2:], FIRST_NOTE)) == [(0, 2)]
            assert members(waiting.result()) == [(0, 2)]


def test_nobody_goes_on_over_a_store_that_has_lost_the_last_members() -> None:
    """As one that was started again in the place of another, which the other side may still use."""
    store = HashStore()
    with rendezvous(store, 2, timeout=10.0) as ranks:
        assert members(gather(ranks, FIRST_NOTE)) == [(0, 1)] * 2
        store.delete_key(f"{key_prefix(0)}/1/members")
        for error in gather(ranks, HAS_STATE):
            assert "the store no longer knows that [0, 1] were the last members" in str(error)


def test_an_error_of_another_thread_does_not_come_to_hold_the_frames_that_wait() -> None:
    awaited: Future[None] = Future()
    error = RuntimeError("closed by peer")
    awaited.set_exception(error)
    with pytest.raises(WireError, match="closed by peer") as caught:
        Transport.over(None).finish(awaited)
    assert caught.value.__cause__ is error
    # Otherwise connections stay open until the garbage is collected.
    assert error.__traceback__ is None


class PythonStore(Store):
    """A store that is written in Python, over a dict that all ranks share."""

    def __init__(self, shared: HashStore) -> None:
        super().__init__()
        self._shared = shared

    def clone(self) -> PythonStore:
        return PythonStore(self._shared)

    def set(self, key: str, value: Any) -> None:
        self._shared.set(key, value)

    def get(self, key: str) -> bytes:
        return self._shared.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._shared.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._shared.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=30)) -> None:
        self._shared.wait(keys, timeout)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._shared.compare_set(key, expected, desired)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._shared.multi_get(keys)

    def has_extended_api(self) -> bool:
        return False

    def num_keys(self) -> int:
        return self._shared.num_keys()

    def delete_key(self, key: str) -> bool:
        return self._shared.delete_key(key)


def test_a_store_written_in_python_serves_as_any_other() -> None:
    def train_over(make: Callable[[HashStore], Store]) -> list[torch.Tensor]:
        shared = HashStore()

        def train_rank(rank: int) -> torch.Tensor:
            params = make_params(seed=rank)
            # Kept here: a PrefixStore does not keep the Python object behind it alive.
            own = make(shared)
            optimizer = DecentOptimWrapper(
                sgd(params),
                topology="ring",
                process_group=process_group(PrefixStore("run", own), rank, 4),
                bucket_cap_mb=5e-5,
                sync_at_start=False,
                timeout=20,
            )
            for step in range(4):
                backward(params, rank, step)
                optimizer.step()
            optimizer.synchronize()
            assert len(optimizer.buckets) > 1
            return flatten(params)

        with ThreadPoolExecutor(4) as pool:
            return [*pool.map(train_rank, range(4))]

    ours, expected = train_over(PythonStore), train_over(lambda shared: shared)
    assert all(map(torch.equal, ours, expected))
    assert not torch.equal(ours[0], ours[1])
    assert not torch.equal(ours[0], flatten(make_params(seed=0)))


def test_ranks_meet_in_a_store_written_in_python() -> None:
    own = PythonStore(HashStore())
    with (
        rendezvous(PrefixStore("run", own), 3, 20.0) as made,
        ThreadPoolExecutor(3) as pool,
    ):
        met = pool.map(lambda each: each.gather(FIRST_NOTE).members, made)
        assert [*met] == [(0, 1, 2)] * 3


@pytest.mark.parametrize("beats", [1, 40])
def test_the_last_heartbeat_of_a_process_that_has_ended_may_come_late(beats: int) -> None:
    """After a cut the kernel sends it once more: only two are those of a living process."""
    store = HashStore()
    store.set("heartbeat/0", "1 0 1 ")
    own = Heartbeat(BoundedStore(store, timedelta(seconds=20)), rank=0, stale_after=STALE_AFTER)

    def beat() -> None:
        for number in range(beats):
            time.sleep(0.1)
            store.set("heartbeat/0", f"1 {number + 1} 1 ")

    beating = threading.Thread(target=beat)
    beating.start()
    assert own.is_taken() == (beats > 1)
    beating.join()


class CountingStore(PythonStore):
    """Counts how often the notes of ranks are read."""

    def __init__(self, shared: HashStore) -> None:
        super().__init__(shared)
        self.reads = 0

    def has_extended_api(self) -> bool:
        return True

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.reads += any("/note/" in key for key in keys)
        return super().multi_get(keys)


def test_a_rank_reads_the_notes_of_all_others_in_a_few_calls() -> None:
    size = 12
    own = CountingStore(HashStore())
    with rendezvous(own, size, 30.0) as made, ThreadPoolExecutor(size) as pool:
        met = [*pool.map(lambda each: each.gather(FIRST_NOTE), made)]
    assert {each.members for each in met} == {tuple(range(size))}
    # Once to decide whether all of them start, and once to go on.
    assert size <= own.reads <= 3 * size
