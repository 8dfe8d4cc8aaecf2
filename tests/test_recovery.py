"""Going on without lost ranks, and with those that come back."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from problem import backward, flatten, make_params, take_drawn_steps
from restartable_processes import (
    STALE_AFTER,
    Failure,
    Life,
    Report,
    RestartableProcesses,
    train,
    train_or_tell,
    wrap_elastic,
)

from decent_optim_wrapper import (
    AsItArrives,
    CallOrderError,
    DecentOptimWrapper,
    Late,
    NonFiniteError,
    PeerError,
    Schedule,
    StateAverage,
)
from decent_optim_wrapper.codecs import INT4
from decent_optim_wrapper.elastic.membership import hand_over
from decent_optim_wrapper.gossip import average
from decent_optim_wrapper.gossip.average import WorldAverage
from decent_optim_wrapper.wire.broadcast import broadcast

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TIMEOUT = 5.0
# Longer than any of these tests waits for anybody.
LONG = 60.0
# When a rank that sends no heartbeats is noticed, whatever the timeout is, by two busy cores.
NOTICED = STALE_AFTER + 10.0
EVERYONE = (0, 1, 2, 3)


def trained(world_size: int, **options: Any) -> RestartableProcesses:
    options = {"topology": "ring", "timeout": TIMEOUT, **options}
    return RestartableProcesses(world_size, train, **options)


def test_a_killed_rank_that_is_started_again_at_once_is_not_missed() -> None:
    with trained(4, timeout=LONG, stale_after=LONG / 2, comm_dtype=INT4) as processes:
        for rank in EVERYONE:
            assert processes.wait_for(rank, "joined") == 0
        processes.wait_for(1, "round 3")
        processes.kill(1)
        processes.start(1)
        assert processes.wait_for(1, "joined") >= 3
        lives = processes.end()
    assert [life.members for life in lives] == [EVERYONE] * 4
    assert [life.changes for life in lives] == [[]] * 4


def test_two_ranks_lost_at_once_one_in_the_rebuilding_and_then_all_but_the_last() -> None:
    """Nobody waits for the timeout: neighbours that close for another's sake are not lost."""
    options = {"overlap": Late(3), "schedule": Schedule(gossip_every=3), "comm_dtype": torch.int8}
    with trained(6, timeout=LONG, param_as_bucket_view=True, **options) as processes:
        processes.all_reach("joined")
        processes.wait_for(3, "round 3")
        processes.kill(0)
        processes.kill(4)
        # Before the others are sure that these are dead.
        time.sleep(STALE_AFTER / 2)
        processes.kill(1)
        processes.wait_for_members(2, (2, 3, 5))
        processes.kill(3)
        processes.wait_for_members(2, (2, 5))
        processes.kill(5)
        processes.wait_for_members(2, (2,))
        processes.start(3)
        assert processes.wait_for(3, "joined") >= 3
        lives = processes.end(2, 3)
    assert lives[0].changes[0][0] == tuple(range(6))
    assert lives[0].members == (2, 3)
    assert any(each.startswith("Greedy(world_size=3") for each in lives[0].topologies)
    assert 0 < lives[0].longest < LONG / 2


def fail_after_an_early_loss(
    rank: int, world_size: int, store: Any, report: Report
) -> tuple[str, str]:
    """Lose rank 0 before the first heartbeats, and make mistakes later."""
    params = make_params()
    options: dict[str, Any] = {"topology": "complete", "timeout": TIMEOUT}
    optimizer = wrap_elastic(params, rank, world_size, store, [], **options)
    while len(optimizer.members) == 3 or optimizer.round < 10:
        if (rank, optimizer.round) == (0, 2):
            os._exit(1)
        if (rank, optimizer.round) == (1, 3):
            # The others have agreed to gather before this rank comes.
            time.sleep(0.1)
        backward(params, rank, optimizer.round)
        optimizer.step()
    if rank == 2:
        params[0].data.fill_(float("nan"))
    with pytest.raises(NonFiniteError) as overflow:
        optimizer.global_avg()
    optimizer.mixing_rate = 0.5 if rank == 1 else 1.0
    params[0].data.fill_(0.0)
    optimizer.step()
    with pytest.raises(CallOrderError) as disorder:
        optimizer.step()
    return str(overflow.value), str(disorder.value)


def test_an_early_loss_takes_nobody_with_it_and_errors_name_ranks_as_at_the_start() -> None:
    with RestartableProcesses(3, fail_after_an_early_loss) as processes:
        (overflow, disorder), (same, back) = processes.results(1, 2)
    assert overflow.startswith("rank 1: expected finite parameters in global_avg(), but ranks")
    assert "ranks [2] have" in overflow
    assert same.startswith("rank 2: ")
    assert disorder.startswith("rank 1: expected rank 2 to mix")
    assert back.startswith("rank 2: expected rank 1 to mix")


def die_before_an_average(rank: int, optimizer: DecentOptimWrapper) -> None:
    """Die with no round in flight: the average notices the loss."""
    if optimizer.round == 4 and len(optimizer.members) == 4:
        optimizer.synchronize()
        if rank == 1:
            os._exit(1)


def test_ranks_come_back_in_averages_and_a_callback_that_raises_leaves_none_in_place() -> None:
    options = {"averages": True, "extensions": [StateAverage()], "refuses": 2}
    with trained(4, topology="complete", after=die_before_an_average, **options) as processes:
        processes.all_reach("joined")
        processes.wait_for_members(0, (0, 2, 3))
        processes.start(1)
        assert processes.wait_for(1, "joined") > 0
        processes.wait_for_members(0, EVERYONE)
        processes.kill(3)
        processes.start(3)
        assert processes.wait_for(3, "joined") > 0
        lives = processes.end(margin=20)
    assert lives[0].changes[:2] == [(EVERYONE, (0, 2, 3)), ((0, 2, 3), EVERYONE)]
    assert lives[2].caught == [f"no data for {new}" for _, new in lives[2].changes]
    assert lives[0].topologies[1].startswith("Complete(world_size=3")
    assert lives[0].members == EVERYONE
    # The average of rank 2 may be the call in which its callback has raised.
    for life in (lives[1], lives[3]):
        assert not life.caught
        common = lives[0].averages.keys() & life.averages.keys()
        assert len(common) >= 8
        for round in common:
            # Both made the same calls, with the same members.
            assert life.averages[round] == pytest.approx(lives[0].averages[round], abs=1e-12)


def end_after_a_bucket() -> None:
    """End this process in its next average, between two buckets."""
    exits = mock.Mock(side_effect=lambda *_: os._exit(1))
    parts: Iterator[Callable[..., Any]] = itertools.chain([average.average], [exits])
    average.average = lambda *args: next(parts)(*args)


def fail_at_the_end(rank: int) -> None:
    """Lose the last message of the next average; rank 2 ends."""
    apply = WorldAverage.apply

    def patched(self: WorldAverage, may_revert: bool, may_repeat: bool = False) -> None:
        WorldAverage.apply = apply  # type: ignore[method-assign]
        apply(self, may_revert, may_repeat)
        if rank == 2:
            os._exit(1)
        self.undo()
        raise PeerError("no last message")

    WorldAverage.apply = patched  # type: ignore[method-assign]


def lose_a_rank_in_an_average(
    rank: int,
    world_size: int,
    store: Any,
    report: Report,
    may_revert: bool,
    one_is_done: bool,
    **options: Any,
) -> list[list[float]]:
    """Average while rank 2 ends in it; return the own values before and after, and the average."""
    params = make_params(seed=rank)
    optimizer = wrap_elastic(params, rank, world_size, store, [], topology="greedy", **options)
    assert len(optimizer.buckets) > 2
    take_drawn_steps(optimizer, params, rank, range(3))
    optimizer.synchronize()
    with torch.no_grad():
        torch._foreach_add_(params, rank)
    before = own = flatten(params)
    if one_is_done and rank:
        # Rank 0 has averaged everything, and rank 1 has not heard the end of it.
        fail_at_the_end(rank)
    elif rank == 2:
        end_after_a_bucket()
    optimizer.global_avg(may_revert)
    assert optimizer.members == (0, 1)
    seen = flatten(params)
    if may_revert:
        optimizer.revert_global_avg()
        own = flatten(params)
    return [before.tolist(), own.tolist(), seen.tolist()]


@pytest.mark.parametrize(
    ("overlap", "may_revert", "one_is_done"),
    [(True, False, False), (True, True, True), (AsItArrives(), True, True), (True, False, True)],
    ids=repr,
)
def test_if_a_rank_is_lost_in_an_average_the_others_average_their_own_values(
    overlap: Any, may_revert: bool, one_is_done: bool
) -> None:
    options = {"overlap": overlap, "may_revert": may_revert, "one_is_done": one_is_done}
    with RestartableProcesses(3, lose_a_rank_in_an_average, **options) as processes:
        rows = torch.tensor(processes.results(0, 1), dtype=torch.float64)
    before, own, seen = rows.unbind(1)
    assert (before[0] - before[1]).norm() > 1
    # With AsItArrives, ranks mix while they wait for each other in a call, also in a repeated one.
    assert isinstance(overlap, AsItArrives) or torch.equal(own, before)
    torch.testing.assert_close(seen, own.mean(0).expand_as(seen), rtol=0, atol=1e-12)


def test_a_rank_that_stood_still_comes_back_and_a_process_too_many_ends() -> None:
    """Who sends no heartbeats is missed at once, whatever the timeout of the exchanges is."""
    options = {"overlap": AsItArrives(), "comm_dtype": INT4, "topology": "ring"}
    options = {**options, "param_as_bucket_view": True, "timeout": 10 * LONG}
    with RestartableProcesses(4, train_or_tell, **options) as processes:
        processes.all_reach("joined")
        processes.wait_for(1, "round 3")
        first = processes.workers[1].pid
        processes.start(1)
        second: Failure = processes.wait_for(1, "result")
        assert (second.kind, second.seconds < 10) == ("ValueError", True), second
        assert "rank 1: another process with this rank number is alive" in second.text

        # Who is slow still sends heartbeats.
        processes.delay(3, 2 * STALE_AFTER)
        processes.signal(2, signal.SIGSTOP)
        time.sleep(STALE_AFTER / 4)
        processes.signal(2, signal.SIGCONT)
        processes.wait_for_members(2, EVERYONE)
        processes.signal(2, signal.SIGSTOP)
        processes.wait_for_members(0, (0, 1, 3))
        processes.signal(2, signal.SIGCONT)
        processes.wait_for_members(0, EVERYONE)

        os.kill(first, signal.SIGSTOP)
        processes.wait_for_members(0, (0, 2, 3))
        processes.start(1)
        assert processes.wait_for(1, "joined") >= 3
        os.kill(first, signal.SIGCONT)
        replaced: Failure = processes.wait_for(1, "result")
        assert replaced.kind == "PeerError", replaced
        assert "a later process with this rank number has taken the place" in replaced.text
        lives = processes.end()
    # Nobody has noticed the process that was refused, the slow one, nor the short stop.
    away = [(0, 1, 3), (0, 2, 3)]
    changes = [change for left in away for change in ((EVERYONE, left), (left, EVERYONE))]
    assert lives[0].changes == changes


RETURNED: list[int] = []


def come_late_and_take_the_lock(rank: int, optimizer: DecentOptimWrapper) -> None:
    """Wait while rank 1 goes ahead; when it is back, block all threads of Python on rank 2."""
    if rank != 1 and optimizer.round == 5:
        time.sleep(0.3)
    if rank == 2 and len(optimizer.members) == 2:
        RETURNED.append(optimizer.round)
    elif RETURNED and optimizer.round > RETURNED[-1] + 3:
        # The others have met it, too.
        RETURNED.clear()
        # As extensions in C may do.
        ctypes.PyDLL(None).sleep(int(3 * STALE_AFTER))


def stop_ahead_of_the_others(rank: int, optimizer: DecentOptimWrapper) -> None:
    """Stop rank 1 when it has sent its part of a round that the others have not begun."""
    if (rank, optimizer.round) == (1, 6):
        os.kill(os.getpid(), signal.SIGSTOP)


def test_ranks_that_hang_are_missed_and_come_back_at_once_whatever_the_timeout_is() -> None:
    """A collective of gloo may not notice that the others have gone, and go on until then."""
    everyone, hooks = (0, 1, 2), (come_late_and_take_the_lock, stop_ahead_of_the_others)
    options = {"topology": "complete", "timeout": 10 * LONG, "before": hooks[0], "after": hooks[1]}
    with trained(3, **options) as processes:
        processes.wait_for_members(0, (0, 2))
        processes.signal(1, signal.SIGCONT)
        processes.wait_for_members(0, (0, 1))
        processes.wait_for_members(0, everyone)
        lives = processes.end()
        # Nor does the collective delay the end.
        for worker in processes.workers.values():
            worker.join(30)
            assert worker.exitcode == 0
    assert lives[0].changes == [
        *((everyone, (0, 2)), ((0, 2), everyone)),
        *((everyone, (0, 1)), ((0, 1), everyone)),
    ]
    assert max(life.longest for life in lives) < NOTICED


def train_with_another_option_in_the_second_life(
    rank: int, world_size: int, store: Any, report: Report
) -> Life | Failure:
    overlap = (rank, store.add(f"lives of {rank}", 1)) != (2, 2)
    options: dict[str, Any] = {"topology": "complete", "timeout": TIMEOUT, "overlap": overlap}
    return train_or_tell(rank, world_size, store, report, **options)


def test_a_rank_that_comes_back_as_another_is_refused_and_all_may_start_again() -> None:
    with RestartableProcesses(3, train_with_another_option_in_the_second_life) as processes:
        processes.all_reach("joined")
        processes.wait_for(0, "round 3")
        processes.kill(2)
        processes.wait_for_members(0, (0, 1))
        processes.start(2)
        other: Failure = processes.wait_for(2, "result")
        assert "rank 2: this rank comes back with <overlap=False> where everyone" in other.text
        processes.wait_for_members(0, (0, 1))
        # The last members were fewer than all.
        for rank in (0, 1):
            processes.kill(rank)
        processes.reports.clear()
        for rank in range(3):
            processes.start(rank)
        for rank in range(3):
            assert processes.wait_for(rank, "joined") == 0
        lives = processes.end()
    assert [life.members for life in lives] == [(0, 1, 2)] * 3
    assert [life.changes for life in lives] == [[]] * 3


def train_with_a_donor_that_dies(
    rank: int, world_size: int, store: Any, report: Report
) -> Life | Failure:
    """Rank 0 of the first life sends the values of two parameters to a rank that comes back."""

    def send(tensors: Any, transport: Any, layout: Any, donor: int, keep: bool = False) -> None:
        dies = transport.rank == donor and (rank, lives) == (0, 1)
        broadcast(tensors[:2] if dies else tensors, transport, layout, donor, keep=keep)
        if dies:
            report("sent", None)
            time.sleep(LONG)

    lives = store.add(f"lives of {rank}", 1)
    with mock.patch.object(hand_over, "broadcast", send):
        return train_or_tell(rank, world_size, store, report, topology="complete", timeout=TIMEOUT)


@pytest.mark.parametrize("stops", [False, True])
def test_a_rank_with_part_of_a_state_does_not_begin_a_new_run_with_it(stops: bool) -> None:
    """Neither a new process nor one that stood still, whose own values belong to another round."""
    with RestartableProcesses(2, train_with_a_donor_that_dies) as processes:
        processes.all_reach("joined")
        processes.wait_for(0, "round 3")
        processes.signal(1, signal.SIGSTOP) if stops else processes.kill(1)
        processes.wait_for_members(0, (0,))
        processes.signal(1, signal.SIGCONT) if stops else processes.start(1)
        processes.wait_for(0, "sent")
        processes.kill(0)
        processes.start(0)
        torn: Failure = processes.wait_for(1, "result")
        assert "rank 1: all ranks with a state were lost; restart this one, too" in torn.text
        processes.reports.clear()
        processes.start(1)
        processes.all_reach("joined")
        lives = processes.end()
    assert [life.start for life in lives] == [flatten(make_params(seed=0)).tolist()] * 2


def test_a_rank_that_comes_back_waits_for_others_delayed_beyond_the_timeout() -> None:
    timeout = 2.0
    with trained(4, timeout=timeout) as processes:
        processes.all_reach("joined")
        # Of all ranks: they may be a round apart.
        processes.all_reach("round 3")
        for rank in (0, 2, 3):
            processes.delay(rank, 2 * timeout)
        # When they sleep.
        time.sleep(timeout / 4)
        processes.kill(1)
        processes.start(1)
        assert processes.wait_for(1, "joined") >= 3
        processes.wait_for_members(1, EVERYONE)
        lives = processes.end()
    # Meanwhile, ranks that are delayed for longer than the timeout may have lost each other, too.
    assert lives[0].members == EVERYONE
