"""Lost ranks are named, local errors stay local, and closed connections raise."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import problem
import pytest
import torch
import torch.distributed as dist
from problem import MakeOptimizer, backward, flatten, make_params, sgd, take_steps
from ranks import run_threads
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store

from decent_optim_wrapper import DecentOptimWrapper, PeerError, StateAverage
from decent_optim_wrapper.comm.failure_reports import FailureReports
from decent_optim_wrapper.comm.process_groups import abort, connect_gloo
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.comm.waiting import LONGEST_WAIT, Collective
from decent_optim_wrapper.topo import Group

# Far beyond what a busy machine, or the end of an earlier test in this process, may take.
TIMEOUT = 60.0


wrap = partial(problem.wrap, topology="ring", timeout=TIMEOUT)


class OutOfMemoryError(RuntimeError):
    """What an allocator raises, which is a RuntimeError like gloo's errors."""


MEMORY = OutOfMemoryError("expected 25 MiB, but they are not there")
FAULTY = 2


def break_a_bucket(optimizer: DecentOptimWrapper, rank: int, error: Any = MEMORY) -> None:
    """Make the packing of the second bucket fail on one rank, always or as a list says."""
    assert len(optimizer.buckets) > 1
    if rank == FAULTY:
        pack = mock.Mock(wraps=optimizer.buckets[1].pack, side_effect=error)
        optimizer.buckets[1].pack = pack  # type: ignore[method-assign]


def fail_in_a_step(
    error: BaseException, optimizer: DecentOptimWrapper, params: list[Tensor], rank: int
) -> None:
    break_a_bucket(optimizer, rank, error)
    take_steps(optimizer, params, rank, range(2, 9))


def fail_in_an_average(optimizer: DecentOptimWrapper, params: list[Tensor], rank: int) -> None:
    optimizer.synchronize()
    own = flatten(params)
    # First the values before the average are packed, and then those that are averaged.
    break_a_bucket(optimizer, rank, [mock.DEFAULT, MEMORY])
    try:
        optimizer.global_avg()
    finally:
        assert torch.equal(flatten(params), own), "half an average has remained"


def fail_in_synchronize(optimizer: DecentOptimWrapper, params: list[Tensor], rank: int) -> None:
    # The round in flight is launched again by the next synchronize().
    optimizer.load_state_dict(optimizer.state_dict())
    break_a_bucket(optimizer, rank)
    optimizer.synchronize()
    optimizer.global_avg(may_revert=False)


def fail_in_a_state(optimizer: DecentOptimWrapper, params: list[Tensor], rank: int) -> None:
    if rank == FAULTY:
        # Of another type than all other keys.
        optimizer.state[params[0]][0] = torch.zeros_like(params[0])
    optimizer.global_avg(may_revert=False)


def fail_in_a_closure(
    error: Exception, optimizer: DecentOptimWrapper, params: list[Tensor], rank: int
) -> None:
    evaluated = itertools.count(1)

    def closure() -> float:
        # In the middle of a step, if the base evaluates it several times.
        if (rank, next(evaluated)) == (FAULTY, 5):
            raise error
        return float(backward(params, rank, optimizer.round))

    for _ in range(9):
        optimizer.step(closure)


lbfgs = partial(torch.optim.LBFGS, lr=0.1, max_iter=3)

OF_MEMORY = f"OutOfMemoryError: {MEMORY}"


@pytest.mark.parametrize(
    ("topology", "make_base", "fail", "own"),
    [
        ("ring", sgd, partial(fail_in_a_step, MEMORY), OF_MEMORY),
        ("ring", sgd, fail_in_an_average, OF_MEMORY),
        ("complete", sgd, partial(fail_in_a_step, KeyboardInterrupt()), "KeyboardInterrupt"),
        ("complete", sgd, fail_in_synchronize, OF_MEMORY),
        ("ring", sgd, fail_in_a_state, "TypeError: "),
        ("complete", lbfgs, partial(fail_in_a_closure, ValueError("empty")), "ValueError: empty"),
        ("ring", sgd, partial(fail_in_a_closure, PeerError("no batch")), "PeerError: no batch"),
        ("complete", sgd, partial(fail_in_a_closure, MEMORY), OF_MEMORY),
    ],
)
def test_a_local_error_is_raised_as_it_is_and_named_by_the_others(
    topology: str, make_base: MakeOptimizer, fail: Callable[..., object], own: str
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[str, int | None, float]:
        params = make_params()
        extensions = [StateAverage()] if make_base is sgd else []
        options: dict[str, Any] = {"overlap": make_base is sgd, "extensions": extensions}
        optimizer = wrap(params, group, make_base(params), topology=topology, **options)
        for step in range(2):
            optimizer.step(partial(backward, params, rank, step))
        assert not torch.equal(flatten(params), flatten(make_params()))
        start = time.monotonic()
        with pytest.raises((RuntimeError, TypeError, ValueError, KeyboardInterrupt)) as caught:
            fail(optimizer, params, rank)
        seconds = time.monotonic() - start
        is_peer_error = rank != FAULTY or own.startswith("PeerError")
        before = flatten(params)
        # Nothing takes this rank for a world of one.
        for call in (
            *(optimizer.step, optimizer.global_avg, optimizer.consensus_distance),
            *(optimizer.rebuild_buckets, lambda: optimizer.all_gather(torch.ones(1))),
        ):
            with pytest.raises(RuntimeError, match="restart from the last checkpoint") as again:
                call()
            assert isinstance(again.value, PeerError) == is_peer_error
        assert torch.equal(flatten(params), before)
        text = f"{type(caught.value).__name__}: {caught.value}"
        return text, getattr(caught.value, "rank", None), seconds

    results = run_threads(4, main)
    assert results[FAULTY][0].startswith(own)
    assert results[FAULTY][1] is None
    for rank in (0, 1, 3):
        text, lost, seconds = results[rank]
        assert (text.partition(":")[0], lost) == ("PeerError", FAULTY), text
        assert f"rank {FAULTY}, which failed with {own}" in text
        assert seconds < TIMEOUT / 2


def test_the_error_that_ends_the_process_of_a_rank_is_named_by_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever raised it, and although its process ends after those that it has stopped."""
    # Where the interpreter keeps it until the process has ended.
    monkeypatch.setattr(sys, "last_value", ValueError("no more data"), raising=False)

    def main(rank: int, group: dist.ProcessGroup) -> str:
        optimizer = wrap(params := make_params(), group)
        take_steps(optimizer, params, rank, range(2))
        if rank == FAULTY:
            optimizer.synchronize()
            del optimizer
            gc.collect()
            return ""
        with pytest.raises(PeerError) as caught:
            take_steps(optimizer, params, rank, range(2, 9))
        return str(caught.value)

    texts = run_threads(4, main)
    named = f"lost rank {FAULTY}, which failed with ValueError: no more data"
    assert [named in text for text in texts] == [rank != FAULTY for rank in range(4)], texts


@pytest.mark.slow
def test_an_abort_closes_the_connections_of_all_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are spread over them by their tags."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo,lo")
    store = HashStore()

    def connect(rank: int) -> Any:
        return connect_gloo(store, rank, 3, timedelta(seconds=TIMEOUT))

    with ThreadPoolExecutor() as pool:
        aborted, waiting, _ = (groups := [*pool.map(connect, range(3))])
    works = [waiting.recv([torch.empty(1)], 0, (1 << 20) + tag) for tag in range(6)]
    # Its destructor, which would close them, too, waits for this until its timeout.
    aborted.allreduce([torch.ones(1)])
    del aborted
    abort(groups[:1])
    del groups[0]
    for work in works:
        with pytest.raises(RuntimeError) as caught:
            work.wait(timedelta(seconds=TIMEOUT / 4))
        assert "Timed out" not in str(caught.value)


class Forgotten:
    """A collective of gloo that waits for a send which gloo has forgotten, or that has failed."""

    def __init__(self, error: str = "") -> None:
        self.error, self.seconds = error, 0.0

    def wait(self, timeout: timedelta = LONGEST_WAIT) -> None:
        if self.error:
            raise RuntimeError(self.error)
        self.seconds += timeout.total_seconds()
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return bool(self.error)


def test_a_collective_ends_soon_after_a_loss_and_not_before() -> None:
    minute = timedelta(seconds=60)
    looks = iter([False] * 30 + [True] * 9)
    for work, is_lost, seconds in (
        (Forgotten(), lambda: True, 5.0),
        (Forgotten(), lambda: next(looks), 35.0),
        (Forgotten(), lambda: False, 60.0),
    ):
        with pytest.raises(RuntimeError, match="timed out"):
            Collective(work, is_lost).wait(minute)
        assert work.seconds == pytest.approx(seconds)
    with pytest.raises(RuntimeError, match="Connection reset"):
        Collective(Forgotten("Connection reset by peer"), lambda: False).wait(minute)


@pytest.mark.slow
def test_a_collective_that_hangs_ends_soon_after_a_rank_has_said_that_it_failed() -> None:
    """The connections stay open, as for a rank that waits for a send that gloo has forgotten."""
    ended = threading.Barrier(3)

    def main(rank: int, group: dist.ProcessGroup) -> tuple[str, int | None, float]:
        transport = Transport.over(group, timedelta(seconds=TIMEOUT))
        transport.connect([Group(range(3))])
        total = torch.full((5,), float(rank))
        # Longer than the interval of the looks, and nobody is lost.
        time.sleep(2.5 * (rank == FAULTY))
        transport.sum_(total)
        assert torch.equal(total, torch.full((5,), 3.0))
        start = time.monotonic()
        if rank == FAULTY:
            FailureReports(transport.store, rank).note_error(MEMORY)
            ended.wait(TIMEOUT)
            return "", None, 0.0
        with pytest.raises(PeerError) as caught:
            transport.sum_(total)
        seconds = time.monotonic() - start
        ended.wait(TIMEOUT)
        return str(caught.value), caught.value.rank, seconds

    for text, lost, seconds in run_threads(3, main)[:FAULTY]:
        assert f"rank {FAULTY}, which failed with {OF_MEMORY}" in text
        assert lost == FAULTY
        assert seconds < TIMEOUT / 2


def test_a_loss_is_known_to_all_ranks_and_the_end_of_a_rank_is_none() -> None:
    store = HashStore()
    reports = [FailureReports(store, rank) for rank in range(3)]
    reports[0].note(())
    assert not any(each.is_lost() for each in reports)
    reports[1].note((2,))
    assert all(each.is_lost() for each in reports)
    other = HashStore()
    FailureReports(other, 0).note_error(MEMORY)
    assert FailureReports(other, 1).is_lost()
    assert not FailureReports(None, 0).is_lost()
    assert not FailureReports(DeadStore(), 0).is_lost()


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["ring", "complete"])
@mock.patch("decent_optim_wrapper.gossip.rounds._CLOSE_TIMEOUT", timedelta(seconds=1))
def test_a_dropped_wrapper_waits_and_leaves_the_users_connections_alone(topology: str) -> None:
    dropped = threading.Event()

    def main(rank: int, group: dist.ProcessGroup) -> tuple[float, float]:
        params = make_params()
        optimizer = wrap(params, group, topology=topology, timeout=TIMEOUT)
        # The last round of rank 0 is one that the others never launch.
        take_steps(optimizer, params, rank, range(2 + (rank == 0)))
        start = time.monotonic()
        if rank:
            optimizer.synchronize()
            dropped.wait(TIMEOUT)
        del optimizer
        gc.collect()
        dropped.set()
        seconds = time.monotonic() - start
        total = torch.ones(3)
        group.allreduce([total]).wait(timedelta(seconds=TIMEOUT))
        return seconds, total.sum().item()

    results = run_threads(4, main)
    assert [total for _, total in results] == [12.0] * 4
    assert 0.8 < results[0][0] < TIMEOUT / 2


@pytest.mark.slow
@mock.patch("decent_optim_wrapper.gossip.rounds._CLOSE_TIMEOUT", timedelta(seconds=1))
def test_a_rank_that_ends_before_its_last_round_arrives_is_named_as_one_that_ended() -> None:
    """As with skorch's EarlyStopping on each rank's own part of the data."""
    ended = threading.Event()

    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params()
        optimizer = wrap(params, group)
        take_steps(optimizer, params, rank, range(3 if rank else 4))
        if rank == 0:
            del optimizer
            gc.collect()
            ended.set()
            return ""
        assert ended.wait(TIMEOUT)
        with pytest.raises(PeerError) as caught:
            take_steps(optimizer, params, rank, range(3, 9))
        assert caught.value.rank == 0
        return str(caught.value)

    text = run_threads(2, main)[1]
    assert "lost rank 0, which ended, or has made fewer calls" in text
    assert "look there for the first error" not in text


class DeadStore(Store):
    """Gone with the process that served it, which was the first to end."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("Broken pipe")


@pytest.mark.parametrize("store", [DeadStore(), None])
def test_without_a_store_a_lost_rank_may_have_ended(store: Any) -> None:
    advice = FailureReports(store, rank=1).find([0], silent=False).advice
    assert "look there for the first error, or for why it has ended before the others" in advice
