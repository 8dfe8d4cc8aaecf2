"""Lost ranks are named, local errors stay local, and closed connections raise."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problem import TINY_CAP_MB, backward, flatten, make_params, sgd
from ranks import captured_stderr, run_processes, run_threads, threads_end
from restartable_processes import RestartableProcesses
from torch._C._distributed_c10d import HashStore, TCPStore

from decent_optim_wrapper import DecentOptimWrapper, Elastic, PeerError, Schedule
from decent_optim_wrapper.comm.failure_reports import FailureReports, PeerLoss
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.elastic.epoch import FIRST_NOTE, Epoch, Note, with_donor
from decent_optim_wrapper.elastic.recovery import Recovery
from decent_optim_wrapper.elastic.rendezvous import Rendezvous
from decent_optim_wrapper.errors import text_of
from decent_optim_wrapper.topo import Complete

# Far beyond what a busy machine, or the end of an earlier test in this process, may take.
PATIENCE = 60.0


def wrap(params: Any, group: Any = None, **options: Any) -> DecentOptimWrapper:
    options = {"topology": "ring", "timeout": PATIENCE, "bucket_cap_mb": TINY_CAP_MB, **options}
    return DecentOptimWrapper(sgd(params), process_group=group, **options)


class OutOfMemoryError(RuntimeError):
    """What an allocator raises, which is a RuntimeError like those of gloo."""


def break_at(optimizer: DecentOptimWrapper, bucket: int) -> None:
    """Let the packing of one bucket fail from now on."""
    buckets = optimizer.buckets
    assert len(buckets) > bucket

    def pack(flat: object, *others: object, **options: object) -> object:
        raise OutOfMemoryError("expected 25 MiB, but they are not there")

    buckets[bucket].pack = pack  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("call", ["step", "global_avg"])
@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_a_local_error_is_raised_as_it_is_and_named_by_the_others(topology: str, call: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[str, int | None, str, float]:
        params = make_params()
        optimizer = wrap(params, group, topology=topology)
        for step in range(2):
            backward(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        if rank == 2:
            break_at(optimizer, 1)

        def go_on() -> None:
            for step in range(2, 9):
                if call == "global_avg":
                    optimizer.global_avg()
                backward(params, rank, step)
                optimizer.step()

        start = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            go_on()
        seconds = time.monotonic() - start
        kind = type(caught.value).__name__
        with pytest.raises(RuntimeError, match="restart from the last checkpoint") as again:
            optimizer.step()
        assert isinstance(again.value, PeerError) == (rank != 2)
        return kind, getattr(caught.value, "rank", None), str(caught.value), seconds

    results = run_threads(4, main)
    assert results[2][:2] == ("OutOfMemoryError", None)
    for rank in (0, 1, 3):
        kind, lost, text, seconds = results[rank]
        assert (kind, lost) == ("PeerError", 2), text
        assert "rank 2, which failed with OutOfMemoryError: expected 25 MiB" in text
        assert seconds < PATIENCE / 2


@pytest.mark.parametrize("call", ["synchronize", "keep"])
def test_a_local_error_outside_of_steps_is_named_by_the_others_too(call: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[str, str, float]:
        params = make_params()
        optimizer = wrap(params, group, schedule=Schedule(average_state="average"))
        for step in range(2):
            backward(params, rank, step)
            optimizer.step()
        # The round in flight is launched again by the next synchronize().
        optimizer.load_state_dict(optimizer.state_dict())
        if rank == 2 and call == "synchronize":
            break_at(optimizer, 1)
        if rank == 2 and call == "keep":
            # Of another type than all other keys.
            optimizer.state[params[0]][0] = torch.zeros_like(params[0])

        def go_on() -> None:
            if call == "synchronize":
                optimizer.synchronize()
            optimizer.global_avg(may_revert=False)

        start = time.monotonic()
        with pytest.raises((RuntimeError, TypeError)) as caught:
            go_on()
        return type(caught.value).__name__, str(caught.value), time.monotonic() - start

    results = run_threads(4, main)
    own = results[2][0]
    assert own == ("OutOfMemoryError" if call == "synchronize" else "TypeError")
    for rank in (0, 1, 3):
        kind, text, seconds = results[rank]
        assert kind == "PeerError", text
        assert f"rank 2, which failed with {own}" in text
        assert seconds < PATIENCE / 2


def break_in_the_middle(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> tuple[str, Any]:
    params = make_params()
    optimizer = wrap(
        params,
        rank=rank,
        world_size=world_size,
        elastic=Elastic(store=store),
    )
    while optimizer.round < 60 or len(optimizer.members) == world_size:
        if rank == 2 and optimizer.round == 20:
            break_at(optimizer, 1)
        backward(params, rank, optimizer.round)
        try:
            optimizer.step()
        except OutOfMemoryError as error:
            with pytest.raises(RuntimeError, match="this rank failed with OutOfMemoryError"):
                optimizer.step()
            report("result", (str(error), optimizer.round))
            # The process lives on, and the others do not wait for it.
            time.sleep(60)
    optimizer.global_avg(may_revert=False)
    return "went on", (optimizer.members, flatten(params).tolist())


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_the_others_go_on_without_a_rank_that_failed_by_itself() -> None:
    with RestartableProcesses(4, break_in_the_middle) as processes:
        assert processes.wait_for(2, "result") == ("expected 25 MiB, but they are not there", 20)
        results = [processes.wait_for(rank, "result") for rank in (0, 1, 3)]
    for word, (members, params) in results:
        assert (word, members) == ("went on", (0, 1, 3))
        assert params == pytest.approx(results[0][1][1], abs=1e-12)
    assert results[0][1][1] != flatten(make_params()).tolist()


def die_in_a_ring(rank: int) -> tuple[int | None, str, float]:
    dist.init_process_group("gloo")
    params = make_params()
    optimizer = wrap(params)
    for step in range(100):
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        backward(params, rank, step)
        start = time.monotonic()
        try:
            optimizer.step()
        except PeerError as error:
            return error.rank, str(error), time.monotonic() - start
    raise AssertionError("nothing failed")


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_every_survivor_of_a_ring_names_the_rank_that_died() -> None:
    for rank, text, seconds in run_processes(6, die_in_a_ring, lost={1}):
        assert rank == 1, text
        assert "lost rank 1 in round" in text
        assert seconds < PATIENCE / 2


def die_with_the_store(rank: int, port: int) -> tuple[str, str, bool]:
    """Rank 0 holds the store and dies while its bytes are on the wire."""
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    params = [torch.zeros(2_500_000).requires_grad_() for _ in range(4)]
    optimizer = DecentOptimWrapper(torch.optim.SGD(params, lr=0.1), timeout=PATIENCE)
    with captured_stderr() as stderr:
        for step in range(100):
            for param in params:
                param.grad = torch.ones_like(param)
            try:
                optimizer.step()
            except PeerError as error:
                return str(error), stderr(), threads_end(PATIENCE / 4)
            if rank == 0 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nothing failed")


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_the_death_of_the_rank_that_holds_the_store_is_a_peer_error_and_nothing_else() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outcomes = run_processes(4, die_with_the_store, port, lost={0})
    assert len(outcomes) == 3
    for text, stderr, threads_ended in outcomes:
        assert "lost" in text
        assert "restart from a checkpoint" in text
        assert "frame #" not in stderr
        # Otherwise they would go on trying to reach the store.
        assert threads_ended


def test_an_error_of_torch_is_quoted_without_its_stack() -> None:
    stack = (
        "\nException raised from doWait at TCPStore.cpp:1 (most recent call first):\nframe #0: x"
    )
    notes = HashStore()
    FailureReports(notes, 3).note_error(RuntimeError(f"get('0') got error: reset{stack}"))
    loss = PeerLoss([3], "RuntimeError: get('0') got error: reset")
    assert FailureReports(notes, 1).error() == loss
    assert text_of(RuntimeError("nothing\nbut text")) == "nothing\nbut text"


def test_nothing_is_sent_and_no_thread_is_started_before_the_ranks_meet() -> None:
    store, threads = HashStore(), {*threading.enumerate()}
    rendezvous = Rendezvous(store, 0, 1, timedelta(seconds=10), stale_after=1000.0)
    epoch = Epoch(notes={0: FIRST_NOTE}, transport=Transport.over(None))
    recovery = Recovery(rendezvous, epoch, Complete(1), Schedule(), None)
    assert store.num_keys() == 0
    assert {*threading.enumerate()} <= threads
    met = rendezvous.gather(FIRST_NOTE)
    try:
        assert store.num_keys() > 0
        assert {each.name for each in {*threading.enumerate()} - threads} >= {"decent-heartbeat"}
        # Nobody has any state: this rank needs no other's.
        assert (met.members, met.note.needs_state, recovery.joins) == ((0,), False, True)
    finally:
        rendezvous.leave()


def test_a_heartbeat_ends_with_its_rendezvous() -> None:
    rendezvous = Rendezvous(HashStore(), 0, 1, timedelta(seconds=10), stale_after=0.1)
    before = {*threading.enumerate()}
    rendezvous.gather(FIRST_NOTE)
    (beating,) = (t for t in {*threading.enumerate()} - before if t.name == "decent-heartbeat")
    del rendezvous
    gc.collect()
    beating.join(PATIENCE)
    assert not beating.is_alive()


def test_an_epoch_goes_on_at_the_latest_round_with_the_state_of_a_rank_that_is_there() -> None:
    notes = {
        0: Note(round=4, needs_state=False, calls_made=2),
        2: Note(round=5, needs_state=False, calls_made=3),
        # Its round is that of an earlier life.
        3: Note(round=9, needs_state=True, calls_made=1),
    }
    epoch = Epoch(notes=notes, transport=Transport(None, 2, (0, 2, 3), timedelta(seconds=1)))
    assert (epoch.members, epoch.note) == ((0, 2, 3), notes[3])
    assert (epoch.round, epoch.donor, epoch.calls_made) == (5, 1, 2)
    assert epoch.has_newcomers
    assert with_donor(notes) == notes


def test_ranks_that_all_need_a_state_take_the_latest_one() -> None:
    notes = {rank: Note(round=rank // 2, needs_state=True) for rank in range(4)}
    donors = [rank for rank, note in with_donor(notes).items() if not note.needs_state]
    assert donors == [2, 3]


def slow_rank(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None], topology: str
) -> tuple[list[int], list[Any], float]:
    params = make_params(seed=rank)
    changes: list[Any] = []
    gatherings: list[int] = []
    gather = Rendezvous.gather

    def count(self: Rendezvous, note: Note) -> Epoch:
        gatherings.append(note.round)
        return gather(self, note)

    Rendezvous.gather = count  # type: ignore[method-assign]
    optimizer = wrap(
        params,
        rank=rank,
        world_size=world_size,
        topology=topology,
        sync_at_start=False,
        elastic=Elastic(
            store=store, on_membership_change=lambda old, new: changes.append((old, new))
        ),
    )
    for step in range(12):
        backward(params, rank, step)
        time.sleep(0.2 * (rank == 1))
        optimizer.step()
    distance = optimizer.consensus_distance()
    return gatherings, changes, distance


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_a_slow_rank_is_waited_for_and_not_given_up(topology: str) -> None:
    with RestartableProcesses(4, slow_rank, topology) as processes:
        results = [processes.wait_for(rank, "result") for rank in range(4)]
    for gatherings, changes, distance in results:
        # The one of the start.
        assert (gatherings, changes) == ([0], [])
        # Ranks that never mix drift apart: they start from other parameters.
        assert 0 < distance < 2.0


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_a_dropped_wrapper_waits_a_few_seconds_and_leaves_the_users_connections_alone(
    topology: str,
) -> None:
    dropped = threading.Event()

    def main(rank: int, group: dist.ProcessGroup) -> tuple[float, float]:
        params = make_params()
        optimizer = wrap(params, group, topology=topology, timeout=60.0)
        # The last round of rank 0 is one that the others never launch.
        for step in range(2 + (rank == 0)):
            backward(params, rank, step)
            optimizer.step()
        start = time.monotonic()
        if rank:
            optimizer.synchronize()
            dropped.wait(PATIENCE)
        del optimizer
        gc.collect()
        dropped.set()
        seconds = time.monotonic() - start
        total = torch.ones(3)
        group.allreduce([total]).wait(timedelta(seconds=PATIENCE))
        return seconds, total.sum().item()

    results = run_threads(4, main)
    assert [total for _, total in results] == [12.0] * 4
    assert 4 < results[0][0] < 15


@pytest.mark.slow
def test_after_a_loss_nothing_takes_this_rank_for_a_world_of_one() -> None:
    stopped = threading.Event()

    def main(rank: int, group: dist.ProcessGroup) -> list[str]:
        params = make_params()
        optimizer = wrap(params, group, topology="complete", timeout=1.5)
        for step in range(2 - rank):
            backward(params, rank, step)
            optimizer.step()
        if rank == 1:
            stopped.wait(PATIENCE)
            return []
        before = flatten(params)
        with pytest.raises(PeerError):
            optimizer.step()
        assert torch.equal(flatten(params), before)
        texts = []
        for call in (
            optimizer.step,
            optimizer.global_avg,
            optimizer.consensus_distance,
            optimizer.rebuild_buckets,
            lambda: optimizer.all_gather(torch.ones(1)),
        ):
            with pytest.raises(PeerError) as caught:
                call()
            texts.append(str(caught.value))
        stopped.set()
        return texts

    texts = run_threads(2, main)[0]
    assert len(texts) == 5
    for text in texts:
        assert "expected connections to the other ranks, but this rank has closed them" in text
        assert "rank 1 was lost" in text


def go_on_after_a_loss(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> tuple[float, tuple[int, ...]]:
    params = make_params()
    optimizer = wrap(
        params,
        rank=rank,
        world_size=world_size,
        elastic=Elastic(store=store),
    )
    longest = 0.0
    while optimizer.round < 40:
        if (rank, optimizer.round) == (1, 5):
            report("result", (0.0, ()))
            os.kill(os.getpid(), signal.SIGKILL)
        backward(params, rank, optimizer.round)
        start = time.monotonic()
        optimizer.step()
        longest = max(longest, time.monotonic() - start)
    optimizer.synchronize()
    return longest, optimizer.members


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_ranks_whose_neighbours_close_for_anothers_sake_do_not_wait_for_their_timeout() -> None:
    with RestartableProcesses(6, go_on_after_a_loss) as processes:
        results = [processes.wait_for(rank, "result") for rank in (0, 2, 3, 4, 5)]
    for longest, members in results:
        assert members == (0, 2, 3, 4, 5)
        assert 0 < longest < PATIENCE / 2


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_a_closure_that_fails_in_the_middle_of_a_step_ends_it_on_all_ranks(topology: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params()
        base = torch.optim.LBFGS(params, lr=0.1, max_iter=3)
        optimizer = DecentOptimWrapper(
            base,
            topology=topology,
            process_group=group,
            bucket_cap_mb=TINY_CAP_MB,
            overlap=False,
            timeout=PATIENCE,
        )
        evaluated = 0

        def closure() -> float:
            nonlocal evaluated
            evaluated += 1
            if (rank, evaluated) == (1, 5):
                raise OutOfMemoryError("in the closure")
            return float(backward(params, rank, optimizer.round))

        def train() -> None:
            for _ in range(6):
                optimizer.step(closure)

        with pytest.raises(RuntimeError) as caught:
            train()
        assert not torch.equal(flatten(params), flatten(make_params()))
        return f"{type(caught.value).__name__}: {caught.value}"

    texts = run_threads(4, main)
    assert texts[1] == "OutOfMemoryError: in the closure"
    for rank in (0, 2, 3):
        assert "lost rank 1, which failed with OutOfMemoryError: in the closure" in texts[rank]


class RefusedError(Exception):
    """What a user's closure raises."""


@pytest.mark.parametrize("error", [RefusedError, PeerError])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_closure_that_fails_is_named_by_the_others(overlap: bool, error: type[Exception]) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params()
        # It evaluates the closure in the middle of a step that does not overlap.
        base = torch.optim.LBFGS(params) if not overlap else sgd(params)
        optimizer = DecentOptimWrapper(
            base, process_group=group, topology="ring", timeout=PATIENCE, overlap=overlap
        )

        def closure(step: int) -> float:
            if rank == 1 and step == 2:
                raise error("the batch is empty")
            return backward(params, rank, step).item()

        def go_on() -> None:
            for step in range(6):
                optimizer.step(partial(closure, step))

        with pytest.raises((RefusedError, PeerError)) as caught:
            go_on()
        return f"{type(caught.value).__name__}: {caught.value}"

    start = time.monotonic()
    texts = run_threads(4, main)
    assert texts[1] == f"{error.__name__}: the batch is empty"
    assert all(f"failed with {error.__name__}: the batch" in texts[rank] for rank in (0, 2, 3))
    assert time.monotonic() - start < PATIENCE / 2
