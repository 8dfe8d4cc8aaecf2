"""Going on without lost ranks, and with those that come back."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from modules import flat, make_model
from modules import train as train_module
from modules import wrap as wrap_module
from problem import backward, flatten, make_params
from restartable_processes import (
    STALE_AFTER,
    Failure,
    Life,
    RestartableProcesses,
    TrainingProcesses,
    agree,
    train,
    train_or_tell,
    wrap_elastic,
)

from decent_optim_wrapper import (
    CallOrderError,
    DecentOptimWrapper,
    Elastic,
    NonFiniteError,
    Schedule,
    Topology,
)
from decent_optim_wrapper.codecs import INT4
from decent_optim_wrapper.elastic.heartbeat import Heartbeat
from decent_optim_wrapper.elastic.recovery import fitting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PATIENCE = 5.0
# Longer than any of these tests waits for anybody.
LONG = 60.0
# What two busy cores may take longer than a promise.
SLACK = 8.0
# When a rank that sends no heartbeats is noticed, whatever the timeout is.
NOTICED = STALE_AFTER + 2.0 + SLACK
LATE, AUTO = Schedule(gossip_every=3, staleness=3), Schedule(gossip_every="auto")


def trained(world_size: int, **options: Any) -> TrainingProcesses:
    options = {"topology": "ring", "timeout": PATIENCE, **options}
    return TrainingProcesses(world_size, train, **options)


@pytest.mark.parametrize(
    ("victim", "fewer", "options"),
    [
        (1, "Greedy", {"param_as_bucket_view": True, "schedule": LATE, "comm_dtype": torch.int8}),
        (0, "Complete", {"param_as_bucket_view": True, "schedule": AUTO, "comm_dtype": INT4}),
        # Back before the others have given it up.
        (1, "", {"comm_dtype": INT4, "stale_after": 4.0}),
    ],
    ids=["late-int8", "auto-int4", "at once"],
)
def test_the_others_go_on_without_a_killed_rank_and_with_it_when_it_is_started_again(
    victim: int, fewer: str, options: dict[str, Any]
) -> None:
    others = tuple(rank for rank in range(4) if rank != victim)
    topology = "ring" if fewer == "Greedy" else "complete"
    with trained(4, topology=topology, **options) as processes:
        for rank in range(4):
            assert processes.wait_for(rank, "joined") == 0
        processes.wait_for(victim, "round 3")
        processes.kill(victim)
        if fewer:
            processes.wait_for_members(others[0], others)
        processes.start(victim)
        assert processes.wait_for(victim, "joined") >= 3
        processes.finish()
        lives = processes.results()
    agree(lives)
    everyone = (0, 1, 2, 3)
    changes = [(everyone, others), (others, everyone)] if fewer else []
    for rank in others:
        assert lives[rank].members == everyone
        # Who has not been missed is taken in as if it had not been away.
        assert lives[rank].changes == changes
        assert not fewer or lives[rank].topologies[1].startswith(f"{fewer}(world_size=3")
        assert lives[rank].round >= 15


def test_two_ranks_lost_at_once_one_in_the_rebuilding_and_then_all_but_the_last() -> None:
    """Nobody waits for the timeout: neighbours that close for another's sake are not lost."""
    with trained(6, timeout=LONG) as processes:
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
        processes.finish()
        lives = processes.results(2, 3)
    agree(lives)
    assert lives[0].changes[0][0] == tuple(range(6))
    assert lives[0].members == (2, 3)
    assert any(each.startswith("Greedy(world_size=3") for each in lives[0].topologies)
    assert 0 < lives[0].longest < LONG / 2


def die_early(rank: int, optimizer: DecentOptimWrapper) -> None:
    if (rank, optimizer.round) == (1, 2):
        os._exit(1)
    if (rank, optimizer.round) == (3, 3):
        # The others have agreed to gather before this rank comes.
        time.sleep(0.1)


def test_a_rank_lost_before_the_first_beats_takes_nobody_with_it() -> None:
    with trained(4, before=die_early) as processes:
        processes.finish()
        lives = processes.results(0, 2, 3)
    agree(lives)
    assert [life.members for life in lives] == [(0, 2, 3)] * 3


def overflow_after_a_loss(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> tuple[str, str]:
    params = make_params()
    options: dict[str, Any] = {"topology": "complete", "timeout": PATIENCE}
    optimizer = wrap_elastic(params, rank, world_size, store, [], **options)
    while len(optimizer.members) == 3 or optimizer.round < 10:
        if (rank, optimizer.round) == (0, 4):
            os._exit(1)
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


def test_errors_after_a_loss_name_ranks_as_at_the_start() -> None:
    with RestartableProcesses(3, overflow_after_a_loss) as processes:
        (overflow, disorder), (same, back) = processes.results(1, 2)
    assert overflow.startswith("rank 1: expected finite parameters in global_avg(), but those of")
    assert "ranks [2] hold" in overflow
    assert same.startswith("rank 2: ")
    assert disorder.startswith("rank 1: expected rank 2 to mix")
    assert back.startswith("rank 2: expected rank 1 to mix")


class ForFour(Topology):
    """A user's topology that looks beyond its table for any other number of ranks."""

    def assign_groups(self) -> list[list[Any]]:
        table = [(0, 1), (0, 1), (2, 3), (2, 3)]
        return [[table[rank + 4 * (4 - self.world_size)]] for rank in range(self.world_size)]


class Picky(ForFour):
    """One that cannot even say whether it fits."""

    @classmethod
    def fits(cls, world_size: int, local_world_size: int = 1) -> bool:
        return {4: True}[world_size]


@pytest.mark.parametrize("kind", [ForFour, Picky])
def test_a_topology_that_fails_for_fewer_ranks_is_replaced(kind: type[Topology]) -> None:
    full = kind(4)
    assert fitting(full, (0, 1, 2, 3)) is full
    assert repr(fitting(full, (0, 1, 3))).startswith("Greedy(world_size=3")
    assert repr(fitting(full, (0, 3))).startswith("Complete(world_size=2")


def die_before_an_average(victim: int, in_flight: bool, rank: int, optimizer: Any) -> None:
    if optimizer.round == 4 and not in_flight:
        optimizer.synchronize()
    if (rank, optimizer.round) == (victim, 4):
        os._exit(1)


@pytest.mark.parametrize(("averages", "victim", "in_flight"), [(True, 1, False), (False, 0, True)])
def test_a_callback_that_raises_is_an_error_of_its_own_rank_and_leaves_no_average_in_place(
    averages: bool, victim: int, in_flight: bool
) -> None:
    left = tuple(rank for rank in range(4) if rank != victim)
    with trained(
        4,
        topology="complete" if averages else "ring",
        averages=averages,
        refuses=2,
        after=partial(die_before_an_average, victim, in_flight),
    ) as processes:
        processes.finish()
        lives = processes.results(*left)
    agree(lives)
    for rank, life in zip(left, lives, strict=True):
        assert life.members == left
        assert life.caught == ([f"no data for {left}"] if rank == 2 else [])


def step_with_a_callback_that_raises(
    rank: int,
    world_size: int,
    store: Any,
    report: Callable[[str, Any], None],
    in_backward: bool,
) -> dict[str, Any]:
    """Lose rank 0 in a backward pass, and go on after what the callback raises at its end."""
    caught = []

    def refuse(old: tuple[int, ...], new: tuple[int, ...]) -> None:
        if rank == 2:
            raise LookupError(f"no data for {new}")

    model = wrap_module(
        make_model(),
        None,
        lr_scheduler_fn=lambda base: torch.optim.lr_scheduler.StepLR(base, 1, 0.5),
        topology="complete",
        update_in_backward=in_backward,
        rank=rank,
        world_size=world_size,
        timeout=PATIENCE,
        elastic=Elastic(store=store, on_membership_change=refuse, stale_after=STALE_AFTER),
    )
    for step in range(6):
        if (rank, step) == (0, 3):
            os._exit(1)
        try:
            train_module(model, rank, range(step, step + 1))
        except LookupError as error:
            caught.append(str(error))
    rate = model.get_lr()
    model.global_avg(will_revert=False)
    members = model.optimizer.members
    return {"params": flat(model).tolist(), "members": members, "caught": caught, "rate": rate}


@pytest.mark.parametrize("in_backward", [True, False])
def test_a_callback_that_raises_does_not_tear_a_backward_pass(in_backward: bool) -> None:
    with RestartableProcesses(3, step_with_a_callback_that_raises, in_backward) as processes:
        results = processes.results(1, 2)
    rows = torch.tensor([each["params"] for each in results], dtype=torch.float64)
    torch.testing.assert_close(rows[0], rows[1])
    assert not torch.equal(rows[0], flat(make_model()))
    assert [each["caught"] for each in results] == [[], ["no data for (1, 2)"]]
    assert [each["rate"] for each in results] == [0.05 / 2**6] * 2
    assert [each["members"] for each in results] == [(1, 2)] * 2


CALLS: dict[str, Callable[[DecentOptimWrapper], object]] = {
    "synchronize": DecentOptimWrapper.synchronize,
    "average": DecentOptimWrapper.global_avg,
}


def interrupt_waits(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> list[str]:
    """Press Ctrl-C on rank 0 while it waits for rank 1, which comes late; once for each call."""
    texts = []
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for name, call in CALLS.items():
        params = make_params(seed=rank)
        options: dict[str, Any] = {"topology": "complete", "timeout": 300}
        optimizer = wrap_elastic(params, rank, world_size, store, [], **options)
        for step in range(3):
            backward(params, rank, step)
            if (rank, step) == (1, 2):
                store.wait([f"{name} interrupted"])
            optimizer.step()
        if rank == 1:
            optimizer.synchronize()
            assert optimizer.members == (1,)
            continue
        before = flatten(params)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            call(optimizer)
        store.set(f"{name} interrupted", "1")
        assert torch.equal(flatten(params), before)
        for action in (optimizer.step, optimizer.global_avg):
            with pytest.raises(RuntimeError) as caught:
                action()
            texts.append(str(caught.value))
    return texts


def test_an_interrupted_wait_mixes_nothing_and_does_not_hold_up_the_end() -> None:
    with RestartableProcesses(2, interrupt_waits) as processes:
        texts, _ = processes.results()
        assert len(texts) == 4
        assert all("this rank failed with KeyboardInterrupt" in text for text in texts)
        # An interrupted rank is gone within 5 s.
        assert processes.join(0, 5 + SLACK) == 0


def test_a_rank_that_stood_still_comes_back_and_a_process_too_many_ends() -> None:
    """Who sends no heartbeats is missed at once, whatever the timeout of the exchanges is."""
    everyone, options = (0, 1, 2, 3), {"topology": "ring", "timeout": 10 * LONG}
    with TrainingProcesses(4, train_or_tell, **options) as processes:
        processes.all_reach("joined")
        processes.wait_for(1, "round 3")
        first = processes.pid(1)
        processes.start(1)
        second: Failure = processes.wait_for(1, "result")
        assert (second.kind, second.seconds < 10) == ("ValueError", True), second
        assert "rank 1: another process with this rank number is alive" in second.text

        processes.delay(3, STALE_AFTER / 4)
        processes.signal(2, signal.SIGSTOP)
        time.sleep(STALE_AFTER / 4)
        processes.signal(2, signal.SIGCONT)
        processes.wait_for_members(2, everyone)
        processes.signal(2, signal.SIGSTOP)
        processes.wait_for_members(0, (0, 1, 3))
        processes.signal(2, signal.SIGCONT)
        processes.wait_for_members(0, everyone)

        os.kill(first, signal.SIGSTOP)
        processes.wait_for_members(0, (0, 2, 3))
        processes.start(1)
        assert processes.wait_for(1, "joined") >= 3
        os.kill(first, signal.SIGCONT)
        replaced: Failure = processes.wait_for(1, "result")
        assert replaced.kind == "PeerError", replaced
        assert "a later process with this rank number has taken the place" in replaced.text
        processes.finish()
        lives: list[Life] = processes.results()
    agree(lives)
    # Nobody has noticed the process that was refused, nor the short stop.
    away = [(0, 1, 3), (0, 2, 3)]
    changes = [change for left in away for change in ((everyone, left), (left, everyone))]
    assert lives[0].changes == changes


def take_the_place_of_a_living_process(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> Life | Failure:
    """A second life that has not seen the first, and asks for nothing before that has ended."""
    options: dict[str, Any] = {"topology": "ring", "timeout": 10 * LONG}
    start = Heartbeat.start

    def start_and_wait(self: Heartbeat, life: int) -> None:
        start(self, life)
        store.wait(["the older has ended"])

    is_first = store.add(f"lives of {rank}", 1) == 1
    with mock.patch.multiple(
        Heartbeat,
        is_taken=Heartbeat.is_taken if is_first else lambda self: False,
        start=start if is_first else start_and_wait,
    ):
        return train_or_tell(rank, world_size, store, report, **options)


def test_of_two_living_processes_of_a_rank_the_older_ends_although_nobody_has_left_it_out() -> None:
    """By the heartbeats alone: nobody asks for another epoch, and nobody is dead."""
    everyone = (0, 1, 2, 3)
    with TrainingProcesses(4, take_the_place_of_a_living_process) as processes:
        processes.all_reach("joined")
        processes.all_reach("round 3")
        agreed = processes.epoch()
        processes.start(1)
        older: Failure = processes.wait_for(1, "result")
        # Until then it was a member.
        assert (older.kind, processes.epoch()) == ("PeerError", agreed)
        assert older.text.startswith("rank 1: a later process with this rank number has taken")
        assert older.seconds < NOTICED
        processes.put("the older has ended")
        assert processes.wait_for(1, "joined") >= 3
        processes.wait_for_members(0, everyone)
        processes.finish()
        lives: list[Life] = processes.results()
    agree(lives)
    # The newer one sends heartbeats under the same number, so nobody has missed that rank.
    assert [life.changes for life in lives] == [[]] * 4
    assert [life.members for life in lives] == [everyone] * 4


def let_rank_1_go_ahead(rank: int, optimizer: DecentOptimWrapper) -> None:
    """Come late to the round in which rank 1 stops itself."""
    if rank != 1 and optimizer.round == 5:
        time.sleep(0.3)


def stop_ahead_of_the_others(rank: int, optimizer: DecentOptimWrapper) -> None:
    """Stop rank 1 when it has sent its part of a round that the others have not begun."""
    if (rank, optimizer.round) == (1, 6):
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_rank_stopped_in_a_collective_comes_back_at_once_whatever_the_timeout_is() -> None:
    """A collective of gloo may not notice that the others have gone, and go on until then."""
    everyone, left = (0, 1, 2), (0, 2)
    hooks = {"before": let_rank_1_go_ahead, "after": stop_ahead_of_the_others}
    with trained(3, topology="complete", timeout=10 * LONG, **hooks) as processes:
        processes.wait_for_members(0, left)
        processes.signal(1, signal.SIGCONT)
        processes.wait_for_members(0, everyone)
        processes.finish()
        lives = processes.results()
        # Nor does the collective hold up the end.
        assert [processes.join(rank, 30) for rank in everyone] == [0, 0, 0]
    agree(lives)
    assert lives[0].changes == [(everyone, left), (left, everyone)]
    assert max(life.longest for life in lives) < NOTICED


def hold_the_lock(rank: int, optimizer: DecentOptimWrapper) -> None:
    """Keep all threads of Python from running, as extensions in C may do."""
    if (rank, optimizer.round) == (1, 3):
        ctypes.PyDLL(None).sleep(int(4 * STALE_AFTER))


def test_a_rank_that_holds_pythons_lock_for_long_is_missed_and_comes_back() -> None:
    everyone, left = (0, 1, 2, 3), (0, 2, 3)
    with trained(4, timeout=10 * LONG, before=hold_the_lock) as processes:
        processes.wait_for_members(0, left)
        processes.wait_for_members(0, everyone)
        processes.finish()
        lives = processes.results()
    agree(lives)
    assert lives[0].changes == [(everyone, left), (left, everyone)]
    assert max(life.longest for life in lives) < NOTICED


def train_with_another_option_in_the_second_life(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> Life | Failure:
    overlap = (rank, store.add(f"lives of {rank}", 1)) != (2, 2)
    options: dict[str, Any] = {"topology": "complete", "timeout": PATIENCE, "overlap": overlap}
    return train_or_tell(rank, world_size, store, report, **options)


def test_a_rank_that_comes_back_as_another_is_refused_and_all_may_start_again() -> None:
    with TrainingProcesses(3, train_with_another_option_in_the_second_life) as processes:
        processes.all_reach("joined")
        processes.wait_for(0, "round 3")
        processes.kill(2)
        processes.wait_for_members(0, (0, 1))
        agreed = processes.epoch()
        processes.start(2)
        other: Failure = processes.wait_for(2, "result")
        assert "rank 2: this rank comes back with <overlap=False> where everyone" in other.text
        processes.wait_for_members(0, (0, 1))
        # Nobody has stopped for it.
        assert processes.epoch() == agreed
        # The last members were fewer than all.
        for rank in (0, 1):
            processes.kill(rank)
        processes.reports.clear()
        for rank in range(3):
            processes.start(rank)
        for rank in range(3):
            assert processes.wait_for(rank, "joined") == 0
        processes.finish()
        lives: list[Life] = processes.results()
    agree(lives)
    assert [life.members for life in lives] == [(0, 1, 2)] * 3
    assert [life.changes for life in lives] == [[]] * 3


def test_ranks_come_back_while_the_others_are_in_averages() -> None:
    with trained(4, averages=True, schedule=Schedule(average_state="average")) as processes:
        processes.all_reach("joined")
        processes.wait_for(0, "round 3")
        for rank in (3, 1):
            processes.kill(rank)
            processes.start(rank)
            assert processes.wait_for(rank, "joined") > 0
        processes.finish(margin=20)
        lives = processes.results()
    agree(lives)
    assert lives[0].members == (0, 1, 2, 3)
    for life in lives[1:]:
        common = lives[0].averages.keys() & life.averages.keys()
        assert len(common) >= 8
        for round in common:
            # Both made the same calls, with the same members.
            assert life.averages[round] == pytest.approx(lives[0].averages[round], abs=1e-12)


def test_a_rank_that_comes_back_waits_for_others_held_up_beyond_the_timeout() -> None:
    timeout = 2.5
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
        processes.wait_for_members(1, (0, 1, 2, 3))
        processes.finish()
        lives = processes.results()
    # Ranks that are held up for longer than the timeout may lose each other, too.
    agree(lives)
    assert lives[0].members == (0, 1, 2, 3)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"bucket_cap_mb": "x"}, "TypeError", "bucket_cap_mb expects a number of MiB, got 'x'"),
    ({"topology": "rung"}, "ValueError", "rung"),
]


def build_with_bad_arguments(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> list[tuple[str, str, float]] | tuple[int, ...]:
    """Rank 1 builds wrappers that cannot be; in its second life all build one that can."""
    errors: list[tuple[str, str, float]] = []
    first_life = store.add(f"lives of {rank}", 1) == 1
    for wrong in [each for each, *_ in WRONG] if first_life else [{}]:
        options = {"topology": "ring", "timeout": 30, **(wrong if rank == 1 else {})}
        start, params = time.monotonic(), make_params(seed=rank)
        try:
            optimizer = wrap_elastic(params, rank, world_size, store, [], **options)
        except (TypeError, ValueError) as error:
            errors.append((type(error).__name__, str(error), time.monotonic() - start))
            continue
        backward(params, rank, 0)
        optimizer.step()
        optimizer.synchronize()
        return optimizer.members
    return errors


def test_all_ranks_learn_why_one_cannot_start() -> None:
    with RestartableProcesses(4, build_with_bad_arguments) as processes:
        results = processes.results()
        for rank, errors in enumerate(results):
            for (kind, text, seconds), (_, own, words) in zip(errors, WRONG, strict=True):
                assert kind == (own if rank == 1 else "ValueError")
                assert words in text
                assert rank == 1 or f"rank {rank}: rank 1 could not start" in text
                assert rank == 1 or f"{own}: " in text
                # Not only when the timeout is over; starting takes as long as the last one does.
                assert seconds < 20
        for rank in range(4):
            processes.start(rank)
        # Once it is mended, all start on the same store.
        assert processes.results() == [(0, 1, 2, 3)] * 4
