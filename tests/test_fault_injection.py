"""Seeded schedules of faults, overlapping each other, on ranks that are processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
from faults import MILD, Fault, Injector, Kind, draw_faults
from problem import backward, flatten, make_params
from restartable_processes import STEP, RestartableProcesses, wrap_elastic

pytestmark = pytest.mark.slow

RANKS = 4
PATIENCE = 2.5
EVERYONE = tuple(range(RANKS))


class Life(NamedTuple):
    """What a process that reached the end has seen.

    Args:
        params: after the average over those who are there.
        members: at the end.
        first: members when it came.
        changes: of the members since, old and new.
        round: of the end.
    """

    params: list[float]
    members: tuple[int, ...]
    first: tuple[int, ...]
    changes: list[tuple[tuple[int, ...], tuple[int, ...]]]
    round: int


def train(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None], topology: str
) -> Life:
    """Train until the launcher says up to which round, and sleep when it says so."""
    params = make_params(seed=rank)
    changes: list[Any] = []
    optimizer = wrap_elastic(
        *(params, rank, world_size, store, changes), topology=topology, timeout=PATIENCE
    )
    first = optimizer.members
    while not store.check(["finish"]) or optimizer.round < int(store.get("finish")):
        if store.check([f"delay {rank}"]):
            time.sleep(float(store.get(f"delay {rank}")))
            store.delete_key(f"delay {rank}")
        backward(params, rank, optimizer.round)
        optimizer.step()
        if optimizer.round % 5 == 0:
            report(f"round {optimizer.round}", optimizer.members)
        time.sleep(STEP)
    optimizer.global_avg(may_revert=False)
    return Life(flatten(params).tolist(), optimizer.members, first, changes, optimizer.round)


def survive(
    topology: str, seed: int, faults: int, kinds: tuple[Kind, ...]
) -> tuple[Injector, list[Life]]:
    with RestartableProcesses(RANKS, train, topology) as processes:
        injector = Injector(processes, RANKS)
        injector.settle()
        for fault in islice(draw_faults(seed, RANKS, PATIENCE, kinds), faults):
            injector.inject(fault)
        injector.settle()
        processes.finish(margin=60)
        lives = [processes.wait_for(rank, "result") for rank in EVERYONE]
    return injector, lives


def check_all_there_and_equal(lives: list[Life]) -> None:
    rows = torch.tensor([life.params for life in lives], dtype=torch.float64)
    assert rows.isfinite().all()
    torch.testing.assert_close(rows, rows[:1].expand_as(rows), rtol=0, atol=1e-12)
    assert not torch.equal(rows[0], flatten(make_params()))
    assert [life.members for life in lives] == [EVERYONE] * RANKS
    assert len({life.round for life in lives}) == 1
    assert lives[0].round >= 60


def check_changes(lives: list[Life]) -> None:
    """Every change of the members starts from the one before, and all are there at the end."""
    for rank, life in enumerate(lives):
        seen = life.first
        for old, new in life.changes:
            assert old == seen != new
            assert rank in new
            seen = new
        assert seen == EVERYONE


@pytest.mark.timeout(110)
def test_ranks_killed_stopped_and_held_up_at_random_all_end_together() -> None:
    injector, lives = survive("ring", seed=5, faults=14, kinds=tuple(Kind))
    assert set(injector.done) == set(Kind)
    check_all_there_and_equal(lives)
    check_changes(lives)
    assert sum(len(life.changes) for life in lives) > 0


@pytest.mark.timeout(110)
def test_ranks_that_stop_for_less_than_the_timeout_stay_members() -> None:
    injector, lives = survive("complete", seed=1, faults=8, kinds=MILD)
    assert set(injector.done) == set(MILD)
    check_all_there_and_equal(lives)
    assert [life.changes for life in lives] == [[]] * RANKS


@pytest.mark.timeout(110)
def test_a_rank_that_comes_back_waits_for_others_held_up_beyond_the_timeout() -> None:
    with RestartableProcesses(RANKS, train, "ring") as processes:
        injector = Injector(processes, RANKS)
        injector.inject(Fault(Kind.KILL, 1, seconds=PATIENCE + 4, pause=PATIENCE))
        for rank in (0, 2, 3):
            processes.delay(rank, 2 * PATIENCE + 4)
        injector.settle()
        processes.finish(margin=60)
        lives = [processes.wait_for(rank, "result") for rank in EVERYONE]
    check_all_there_and_equal(lives)
    # Ranks that are held up for longer than the timeout may lose each other, too.
    check_changes(lives)
