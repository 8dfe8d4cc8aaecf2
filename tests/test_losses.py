"""Lost ranks are named, local errors stay local, and closed connections raise."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import problem
import pytest
import torch
import torch.distributed as dist
from problem import backward, flatten, make_params, sgd, take_steps
from ranks import run_threads
from restartable_processes import (
    Life,
    RestartableProcesses,
    TrainingProcesses,
    agree,
    train,
    wrap_elastic,
)
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from decent_optim_wrapper import DecentOptimWrapper, PeerError, Schedule
from decent_optim_wrapper.comm.failure_reports import FailureReports, PeerLoss
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.elastic.epoch import FIRST_NOTE, Epoch, Note, with_donor
from decent_optim_wrapper.elastic.recovery import Recovery
from decent_optim_wrapper.elastic.rendezvous import Rendezvous
from decent_optim_wrapper.errors import text_of
from decent_optim_wrapper.topo import Complete

# Far beyond what a busy machine, or the end of an earlier test in this process, may take.
PATIENCE = 60.0


wrap = partial(problem.wrap, topology="ring", timeout=PATIENCE)


class OutOfMemoryError(RuntimeError):
    """What an allocator raises, which is a RuntimeError like those of gloo."""


def break_at(optimizer: DecentOptimWrapper, bucket: int) -> None:
    """Let the packing of one bucket fail from now on."""
    buckets = optimizer.buckets
    assert len(buckets) > bucket

    def pack(flat: object, *others: object, **options: object) -> object:
        raise MEMORY

    buckets[bucket].pack = pack  # type: ignore[method-assign, assignment]


class RefusedError(Exception):
    """What a user's closure raises."""


def step_with_a_bucket_that_fails(optimizer: Any, params: list[Tensor], rank: int) -> None:
    if rank == 2:
        break_at(optimizer, 1)
    take_steps(optimizer, params, rank, range(2, 9))


def average_with_a_bucket_that_fails(optimizer: Any, params: list[Tensor], rank: int) -> None:
    if rank == 2:
        break_at(optimizer, 1)
    optimizer.global_avg()
    step_with_a_bucket_that_fails(optimizer, params, rank)


def launch_again_with_a_bucket_that_fails(optimizer: Any, params: list[Tensor], rank: int) -> None:
    # The round in flight is launched again by the next synchronize().
    optimizer.load_state_dict(optimizer.state_dict())
    if rank == 2:
        break_at(optimizer, 1)
    optimizer.synchronize()
    optimizer.global_avg(may_revert=False)


def keep_a_state_that_fails(optimizer: Any, params: list[Tensor], rank: int) -> None:
    if rank == 2:
        # Of another type than all other keys.
        optimizer.state[params[0]][0] = torch.zeros_like(params[0])
    optimizer.global_avg(may_revert=False)


def step_with_a_closure_that_fails(
    error: Exception, optimizer: Any, params: list[Tensor], rank: int
) -> None:
    evaluated = 0

    def closure() -> float:
        nonlocal evaluated
        evaluated += 1
        # In the middle of a step, if the base evaluates it several times.
        if (rank, evaluated) == (2, 5):
            raise error
        return float(backward(params, rank, optimizer.round))

    for _ in range(9):
        optimizer.step(closure)


def lbfgs(params: list[Tensor]) -> Any:
    return torch.optim.LBFGS(params, lr=0.1, max_iter=3)


MEMORY = OutOfMemoryError("expected 25 MiB, but they are not there")
# What rank 2 fails in, its base, and what it raises.
LOCAL_ERRORS: dict[str, tuple[Any, Any, str]] = {
    "step": (step_with_a_bucket_that_fails, sgd, f"OutOfMemoryError: {MEMORY}"),
    "global_avg": (average_with_a_bucket_that_fails, sgd, f"OutOfMemoryError: {MEMORY}"),
    "synchronize": (launch_again_with_a_bucket_that_fails, sgd, f"OutOfMemoryError: {MEMORY}"),
    "keep": (keep_a_state_that_fails, sgd, "TypeError: "),
    **{
        f"{type(error).__name__} in a closure of {make_base.__name__}": (
            partial(step_with_a_closure_that_fails, error),
            make_base,
            f"{type(error).__name__}: {error}",
        )
        for error, make_base in (
            (RefusedError("the batch is empty"), lbfgs),
            (PeerError("no batch"), sgd),
            (MEMORY, sgd),
        )
    },
}


@pytest.mark.parametrize("call", LOCAL_ERRORS)
@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_a_local_error_is_raised_as_it_is_and_named_by_the_others(topology: str, call: str) -> None:
    fail, make_base, own = LOCAL_ERRORS[call]

    def main(rank: int, group: dist.ProcessGroup) -> tuple[str, int | None, float]:
        params = make_params()
        optimizer = wrap(
            params,
            group,
            make_base(params),
            topology=topology,
            overlap=make_base is sgd,
            schedule=Schedule(average_state="average" if make_base is sgd else "keep"),
        )

        def step(step: int) -> float:
            return float(backward(params, rank, step))

        for each in range(2):
            optimizer.step(partial(step, each))
        assert not torch.equal(flatten(params), flatten(make_params()))
        start = time.monotonic()
        with pytest.raises((RuntimeError, TypeError, RefusedError)) as caught:
            fail(optimizer, params, rank)
        seconds = time.monotonic() - start
        with pytest.raises(RuntimeError, match="restart from the last checkpoint") as again:
            optimizer.step(partial(step, 9))
        own_is_peer_error = own.startswith("PeerError")
        assert isinstance(again.value, PeerError) == (rank != 2 or own_is_peer_error)
        text = f"{type(caught.value).__name__}: {caught.value}"
        return text, getattr(caught.value, "rank", None), seconds

    results = run_threads(4, main)
    assert results[2][0].startswith(own)
    assert results[2][1] is None
    for rank in (0, 1, 3):
        text, lost, seconds = results[rank]
        assert (text.partition(":")[0], lost) == ("PeerError", 2), text
        assert f"rank 2, which failed with {own}" in text
        assert seconds < PATIENCE / 2


def break_in_the_middle(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> Life:
    held = []

    def break_it(rank: int, optimizer: DecentOptimWrapper) -> None:
        if (rank, optimizer.round) == (2, 5):
            break_at(optimizer, 1)
            held.append(optimizer)

    try:
        options: dict[str, Any] = {"topology": "ring", "timeout": PATIENCE}
        return train(rank, world_size, store, report, before=break_it, **options)
    except OutOfMemoryError as error:
        with pytest.raises(RuntimeError, match="this rank failed with OutOfMemoryError"):
            held[0].step()
        report("result", str(error))
        # The process lives on, and the others do not wait for it.
        time.sleep(PATIENCE)
        raise


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_the_others_go_on_without_a_rank_that_failed_by_itself() -> None:
    with TrainingProcesses(4, break_in_the_middle) as processes:
        assert processes.wait_for(2, "result") == str(MEMORY)
        processes.wait_for_members(0, (0, 1, 3))
        processes.finish()
        lives = processes.results(0, 1, 3)
    agree(lives)
    assert lives[0].members == (0, 1, 3)


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


class TornRendezvous(Rendezvous):
    """A rank that can be cut off from the other half, and held up before it writes its members."""

    half: tuple[int, ...] = ()

    def tear(self, half: tuple[int, ...], wait: Callable[[], object]) -> None:
        """Let the rank see its half alone, and `wait` when it has decided who goes on."""
        self.half, self._wait = half, wait
        self._heartbeat.alive = half.__contains__  # type: ignore[assignment, method-assign]

    def _present(self, epoch: int, ranks: tuple[int, ...] | None = None) -> tuple[int, ...]:
        found = super()._present(epoch, ranks)
        return tuple(rank for rank in found if not self.half or rank in self.half)

    def _survivors(self, epoch: int, late: bool) -> tuple[int, ...]:
        found = super()._survivors(epoch, late)
        if found:
            self._wait()
            # Nobody answers those that ask to join: they need not wait for long.
            self._timeout = timedelta(seconds=1)
        return found


def gathered(rank: Rendezvous, note: Note) -> tuple[int, ...] | PeerError:
    """The members of the epoch that a rank enters, or its error."""
    try:
        return rank.gather(note).members
    except PeerError as error:
        return error


@pytest.mark.slow
@pytest.mark.parametrize("quick", [(0, 1), (2, 3)], ids=["lower half", "upper half"])
def test_of_two_halves_that_both_decide_to_go_on_only_one_does(quick: tuple[int, ...]) -> None:
    """Each sees itself alone, is half, and decides before it can see the list of the other."""
    store, everyone = HashStore(), (0, 1, 2, 3)
    slow = tuple(rank for rank in everyone if rank not in quick)
    all_decided, written = threading.Barrier(len(everyone)), threading.Event()
    ranks = []
    try:
        for rank in everyone:
            # As in a process of its own.
            TornRendezvous.built = 0
            patience = timedelta(seconds=PATIENCE)
            ranks.append(TornRendezvous(store, rank, 4, patience, stale_after=1000.0))
        with ThreadPoolExecutor(len(everyone)) as pool:
            assert [*pool.map(lambda rank: gathered(rank, FIRST_NOTE), ranks)] == [everyone] * 4

            def hold_up() -> None:
                all_decided.wait(PATIENCE)
                written.wait(PATIENCE)

            for rank in quick:
                ranks[rank].tear(quick, partial(all_decided.wait, PATIENCE))
            for rank in slow:
                ranks[rank].tear(slow, hold_up)
            note = Note(round=5, needs_state=False)
            ends = [pool.submit(gathered, rank, note) for rank in ranks]
            assert [ends[rank].result(PATIENCE) for rank in quick] == [quick] * 2
            written.set()
            for rank in slow:
                error = ends[rank].result(PATIENCE)
                assert isinstance(error, PeerError), f"{error} train beside {quick}"
                assert f"waited 0:00:04 for the other ranks, of which {[*quick]}" in str(error)
    finally:
        for each in ranks:
            each.leave()


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


def train_with_a_slow_rank(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> list[float]:
    """How far the ranks are apart in the end, without that any of them has gathered again."""
    gather, distances = Rendezvous.gather, []
    for topology in ("ring", "complete"):
        gatherings: list[int] = []

        def count(self: Rendezvous, note: Note, to: list[int] = gatherings) -> Epoch:
            to.append(note.round)
            return gather(self, note)

        Rendezvous.gather = count  # type: ignore[method-assign]
        params, changes = make_params(seed=rank), []  # type: tuple[list[Tensor], list[Any]]
        options: dict[str, Any] = {"topology": topology, "timeout": PATIENCE}
        optimizer = wrap_elastic(
            params, rank, world_size, store, changes, sync_at_start=False, **options
        )
        for step in range(6):
            backward(params, rank, step)
            time.sleep(0.2 * (rank == 1))
            optimizer.step()
        distances.append(optimizer.consensus_distance())
        # The one of the start.
        assert (gatherings, changes) == ([0], [])
    return distances


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_slow_rank_is_waited_for_and_not_given_up() -> None:
    with RestartableProcesses(4, train_with_a_slow_rank) as processes:
        for distances in processes.results():
            # Ranks that never mix drift apart: they start from other parameters.
            assert len(distances) == 2
            assert all(0 < distance < 2.0 for distance in distances)


def drop_on_rank_0(topology: str) -> list[tuple[float, float]]:
    """How long each rank takes to drop its wrapper, and the sum of a collective of the user."""
    dropped = threading.Event()

    def main(rank: int, group: dist.ProcessGroup) -> tuple[float, float]:
        params = make_params()
        optimizer = wrap(params, group, topology=topology, timeout=PATIENCE)
        # The last round of rank 0 is one that the others never launch.
        take_steps(optimizer, params, rank, range(2 + (rank == 0)))
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

    return run_threads(4, main)


@pytest.mark.slow
def test_a_dropped_wrapper_waits_a_few_seconds_and_leaves_the_users_connections_alone() -> None:
    with ThreadPoolExecutor() as pool:
        for results in pool.map(drop_on_rank_0, ("ring", "complete")):
            assert [total for _, total in results] == [12.0] * 4
            assert 4 < results[0][0] < PATIENCE / 2


@pytest.mark.slow
def test_after_a_loss_nothing_takes_this_rank_for_a_world_of_one() -> None:
    stopped = threading.Event()

    def main(rank: int, group: dist.ProcessGroup) -> list[str]:
        params = make_params()
        optimizer = wrap(params, group, topology="complete", timeout=1.5)
        take_steps(optimizer, params, rank, range(2 - rank))
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
