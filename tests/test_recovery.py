"""Going on without lost ranks, and with those that come back."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import pytest
import torch
from modules import flat, make_model
from modules import train as train_module
from modules import wrap as wrap_module
from problem import TINY_CAP_MB, backward, flatten, make_params, nesterov, sgd
from ranks import threads_end
from restartable_processes import STEP, RestartableProcesses, wrap_elastic
from torch._C._distributed_c10d import HashStore, TCPStore

from decent_optim_wrapper import (
    CallOrderError,
    DecentOptimWrapper,
    Elastic,
    NonFiniteError,
    PeerError,
    Schedule,
    Topology,
)
from decent_optim_wrapper.codecs import INT4
from decent_optim_wrapper.config import AverageState
from decent_optim_wrapper.elastic.recovery import fitting

pytestmark = pytest.mark.slow

PATIENCE = 5.0
LATE, AUTO = Schedule(gossip_every=3, staleness=3), Schedule(gossip_every="auto")


def tensors_of(outer: dict[str, Any] | None) -> list[torch.Tensor]:
    """The momenta and the anchors of an outer optimizer's state."""
    if outer is None:
        return []
    rows = outer["params"]
    return [*(row["state"]["momentum_buffer"] for row in rows), *(row["anchor"] for row in rows)]


def train(
    rank: int,
    world_size: int,
    store: Any,
    report: Callable[[str, Any], None],
    topology: str,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Train until the launcher says up to which round, then average over those who are left."""
    params = make_params(seed=rank)
    changes: list[Any] = []
    optimizer = wrap_elastic(
        *(params, rank, world_size, store, changes),
        topology=topology,
        timeout=PATIENCE,
        **options,
    )
    report("joined", optimizer.round)
    first = tuple(flatten(params).tolist())
    while not store.check(["finish"]) or optimizer.round < int(store.get("finish")):
        backward(params, rank, optimizer.round)
        optimizer.step()
        if optimizer.round % 10 == 0:
            report(f"round {optimizer.round}", optimizer.members)
        time.sleep(STEP)
    outer = optimizer.state_dict()["gossip"].get("extensions", {}).get("outer_optimizer")
    rate = optimizer.mixing_rate
    optimizer.global_avg(may_revert=False)
    return {
        "outer": [t.flatten().tolist() for t in tensors_of(outer)],
        "mixing_rate": rate,
        "params": flatten(params).tolist(),
        "members": optimizer.members,
        "first": first,
        "changes": changes,
        "round": optimizer.round,
        "topology": repr(optimizer.topology),
    }


def agree(results: list[dict[str, Any]]) -> None:
    rows = torch.tensor([result["params"] for result in results], dtype=torch.float64)
    assert rows.isfinite().all()
    torch.testing.assert_close(rows, rows[:1].expand_as(rows), rtol=0, atol=1e-12)
    assert not torch.equal(rows[0], flatten(make_params()))
    assert len({result["members"] for result in results}) == 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("topology", "becomes", "victim", "views", "schedule", "comm"),
    [
        ("ring", "Greedy(world_size=3", 0, False, Schedule(), None),
        ("complete", "Complete(world_size=3", 2, True, Schedule(), torch.int8),
        ("ring", "Greedy(world_size=3", 1, True, LATE, None),
        ("ring", "Greedy(world_size=3", 2, False, AUTO, torch.int8),
        ("complete", "Complete(world_size=3", 0, True, AUTO, INT4),
    ],
)
def test_the_others_go_on_without_a_killed_rank(
    topology: str,
    becomes: str,
    victim: int,
    views: bool,
    schedule: Schedule,
    comm: torch.dtype | None,
) -> None:
    options = {"param_as_bucket_view": views, "schedule": schedule, "comm_dtype": comm}
    with RestartableProcesses(4, train, topology, options) as processes:
        processes.wait_for(victim, "round 20")
        processes.kill(victim)
        processes.finish()
        left = tuple(rank for rank in range(4) if rank != victim)
        results = [processes.wait_for(rank, "result") for rank in left]
    agree(results)
    for result in results:
        assert result["members"] == left
        assert result["changes"] == [((0, 1, 2, 3), left)]
        assert result["round"] >= 50
        assert result["topology"].startswith(becomes)


def train_a_few_steps(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> tuple[int, ...]:
    params = make_params()
    optimizer = DecentOptimWrapper(
        *(sgd(params), rank, world_size, None, "ring", TINY_CAP_MB),
        timeout=PATIENCE,
        elastic=Elastic(store=store),
    )
    while optimizer.round < 10:
        if (rank, optimizer.round) == (1, 4):
            report("result", None)
            os._exit(1)
        if (rank, optimizer.round) == (3, 5):
            # The others have agreed to gather before this rank comes.
            time.sleep(0.1)
        backward(params, rank, optimizer.round)
        optimizer.step()
    optimizer.synchronize()
    return optimizer.members


@pytest.mark.timeout(120)
def test_a_rank_lost_before_the_first_beats_takes_nobody_with_it() -> None:
    with RestartableProcesses(4, train_a_few_steps) as processes:
        results = [processes.wait_for(rank, "result") for rank in range(4)]
    assert results == [(0, 2, 3), None, (0, 2, 3), (0, 2, 3)]


def overflow_after_a_loss(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> tuple[str, str]:
    params = make_params()
    optimizer = DecentOptimWrapper(
        *(sgd(params), rank, world_size, None, "complete", TINY_CAP_MB),
        timeout=PATIENCE,
        elastic=Elastic(store=store),
    )
    while len(optimizer.members) == 3 or optimizer.round < 20:
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


@pytest.mark.timeout(60)
def test_errors_after_a_loss_name_ranks_as_at_the_start() -> None:
    with RestartableProcesses(3, overflow_after_a_loss) as processes:
        (overflow, disorder), (same, back) = (processes.wait_for(rank, "result") for rank in (1, 2))
    assert overflow.startswith("rank 1: expected finite parameters in global_avg(), but those of")
    assert "ranks [2] hold" in overflow
    assert same.startswith("rank 2: ")
    assert disorder.startswith("rank 1: expected rank 2 to mix")
    assert back.startswith("rank 2: expected rank 1 to mix")


@pytest.mark.timeout(120)
def test_two_ranks_killed_at_once_and_one_during_the_rebuilding() -> None:
    with RestartableProcesses(6, train, "ring", {}) as processes:
        processes.wait_for(3, "round 20")
        processes.kill(0)
        processes.kill(4)
        # The others take 2 s to be sure that these are dead.
        time.sleep(1)
        processes.kill(1)
        processes.finish()
        results = [processes.wait_for(rank, "result") for rank in (2, 3, 5)]
    agree(results)
    for result in results:
        assert result["members"] == (2, 3, 5)
        assert result["changes"][0][0] == tuple(range(6))
        assert result["changes"][-1][1] == (2, 3, 5)


@pytest.mark.timeout(120)
def test_the_last_rank_goes_on_alone() -> None:
    with RestartableProcesses(2, train, "complete", {}) as processes:
        processes.wait_for(1, "round 20")
        processes.kill(0)
        processes.finish()
        result = processes.wait_for(1, "result")
    assert result["members"] == (1,)
    assert result["round"] >= 50


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("topology", "views", "given_up", "schedule", "comm"),
    [
        ("ring", True, True, Schedule(), torch.int8),
        ("complete", False, False, Schedule(), INT4),
        ("ring", True, True, LATE, None),
        ("ring", False, True, AUTO, None),
    ],
)
def test_a_killed_rank_is_started_again_and_takes_part(
    topology: str, views: bool, given_up: bool, schedule: Schedule, comm: torch.dtype | None
) -> None:
    options = {"param_as_bucket_view": views, "schedule": schedule, "comm_dtype": comm}
    with RestartableProcesses(4, train, topology, options) as processes:
        for rank in range(4):
            assert processes.wait_for(rank, "joined") == 0
        processes.wait_for(1, "round 20")
        processes.kill(1)
        if given_up:
            processes.wait_for_members(0, (0, 2, 3))
        processes.start(1)
        assert processes.wait_for(1, "joined") >= 20
        processes.finish()
        results = [processes.wait_for(rank, "result") for rank in range(4)]
    agree(results)
    for rank in (0, 2, 3):
        assert results[rank]["members"] == (0, 1, 2, 3)
        # Back before the others have given it up, it is taken in as if it had not been away.
        away = [((0, 1, 2, 3), (0, 2, 3)), ((0, 2, 3), (0, 1, 2, 3))]
        assert results[rank]["changes"] == (away if given_up else [])
        assert results[rank]["topology"] == results[1]["topology"]


@pytest.mark.timeout(120)
def test_a_rank_comes_back_while_another_one_is_away() -> None:
    with RestartableProcesses(4, train, "ring", {}) as processes:
        for rank in range(4):
            assert processes.wait_for(rank, "joined") == 0
        processes.wait_for(1, "round 20")
        processes.kill(1)
        processes.kill(2)
        processes.wait_for_members(0, (0, 3))
        processes.start(1)
        assert processes.wait_for(1, "joined") >= 20
        processes.finish()
        results = [processes.wait_for(rank, "result") for rank in (0, 1, 3)]
    agree(results)
    for result in results:
        assert result["members"] == (0, 1, 3)
        assert result["topology"].startswith("Greedy(world_size=3")


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


def refuse_changes(rank: int) -> Callable[[tuple[int, ...], tuple[int, ...]], None]:
    def refuse(old: tuple[int, ...], new: tuple[int, ...]) -> None:
        if rank == 2:
            raise LookupError(f"no data for {new}")

    return refuse


def raise_at_changes(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> dict[str, Any]:
    """Train with a callback that raises on rank 2 when the members change."""
    params = make_params(seed=rank)
    optimizer = DecentOptimWrapper(
        *(sgd(params), rank, world_size, None, "ring", TINY_CAP_MB),
        timeout=PATIENCE,
        elastic=Elastic(store=store, on_membership_change=refuse_changes(rank)),
    )
    caught = []
    while not store.check(["finish"]) or optimizer.round < int(store.get("finish")):
        backward(params, rank, optimizer.round)
        try:
            optimizer.step()
        except LookupError as error:
            caught.append((str(error), optimizer.members))
            continue
        if optimizer.round % 10 == 0:
            report(f"round {optimizer.round}", optimizer.members)
        time.sleep(STEP)
    optimizer.global_avg(may_revert=False)
    members = optimizer.members
    return {"params": flatten(params).tolist(), "members": members, "caught": caught}


@pytest.mark.timeout(60)
def test_a_callback_that_raises_is_an_error_of_its_own_rank_only() -> None:
    with RestartableProcesses(4, raise_at_changes) as processes:
        processes.wait_for(0, "round 20")
        processes.kill(0)
        processes.finish()
        results = [processes.wait_for(rank, "result") for rank in (1, 2, 3)]
    agree(results)
    for rank, result in zip((1, 2, 3), results, strict=True):
        assert result["members"] == (1, 2, 3)
        own = [("no data for (1, 2, 3)", (1, 2, 3))]
        assert result["caught"] == (own if rank == 2 else [])


def average_with_a_callback_that_raises(
    rank: int,
    world_size: int,
    store: Any,
    report: Callable[[str, Any], None],
    state: Literal["keep", "average"],
    victim: int,
    in_flight: bool,
) -> dict[str, Any]:
    """Lose the victim in the middle of the training in an average, where rank 2 raises."""
    params = make_params(seed=rank)
    optimizer = DecentOptimWrapper(
        *(sgd(params), rank, world_size, None, "complete", TINY_CAP_MB),
        timeout=PATIENCE,
        schedule=Schedule(average_state=state),
        elastic=Elastic(store=store, on_membership_change=refuse_changes(rank)),
    )
    caught = []
    for step in range(8):
        backward(params, rank, step)
        optimizer.step()
        if step == 4 and not in_flight:
            optimizer.synchronize()
        if (rank, step) == (victim, 4):
            report("result", None)
            os._exit(1)
        if step < 4:
            continue
        before = flatten(params)
        try:
            with optimizer.averaged():
                assert not torch.equal(flatten(params), before)
        except LookupError as error:
            caught.append((step, str(error)))
        assert torch.equal(flatten(params), before)
        assert not optimizer.is_averaged
    optimizer.global_avg(may_revert=False)
    return {"params": flatten(params).tolist(), "members": optimizer.members, "caught": caught}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("state", "victim", "in_flight"), [("keep", 1, False), ("average", 1, False), ("keep", 0, True)]
)
def test_a_callback_that_raises_leaves_no_average_in_place(
    state: str, victim: int, in_flight: bool
) -> None:
    with RestartableProcesses(
        4, average_with_a_callback_that_raises, state, victim, in_flight
    ) as processes:
        left = tuple(rank for rank in range(4) if rank != victim)
        results = [processes.wait_for(rank, "result") for rank in left]
    agree(results)
    for rank, result in zip(left, results, strict=True):
        assert result["caught"] == ([(4, f"no data for {left}")] if rank == 2 else [])


def interrupt_a_wait(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None], call: str
) -> Any:
    """Press Ctrl-C on rank 0 while it waits for rank 1, which comes late."""
    params = make_params(seed=rank)
    optimizer = DecentOptimWrapper(
        *(sgd(params), rank, world_size, None, "complete", TINY_CAP_MB),
        timeout=300,
        elastic=Elastic(store=store),
    )
    for step in range(3):
        backward(params, rank, step)
        if (rank, step) == (1, 2):
            store.wait(["interrupted"])
        optimizer.step()
    if rank == 1:
        optimizer.synchronize()
        return optimizer.members
    before = flatten(params)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(KeyboardInterrupt):
        {"synchronize": optimizer.synchronize, "average": optimizer.global_avg}[call]()
    store.set("interrupted", "1")
    assert torch.equal(flatten(params), before)
    texts = []
    for action in (optimizer.step, optimizer.global_avg):
        with pytest.raises(RuntimeError) as caught:
            action()
        texts.append(str(caught.value))
    return texts


@pytest.mark.timeout(60)
@pytest.mark.parametrize("call", ["synchronize", "average"])
def test_an_interrupted_wait_mixes_nothing_and_does_not_hold_up_the_end(call: str) -> None:
    with RestartableProcesses(2, interrupt_a_wait, call) as processes:
        for text in processes.wait_for(0, "result"):
            assert "this rank failed with KeyboardInterrupt" in text
        assert processes.join(0, 30) == 0
        assert processes.wait_for(1, "result") == (1,)


def test_the_callback_is_checked_at_the_start() -> None:
    with pytest.raises(TypeError, match=r"on_membership_change expects a function .* got 5"):
        Elastic(on_membership_change=cast(Any, 5))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(gossip_every=2, outer=nesterov(0.5)),
        Schedule(
            mixing_rate=0.9,
            global_avg_every=4,
            average_state="average",
            outer=partial(torch.optim.SGD, lr=1.0, momentum=0.5),
        ),
    ],
    ids=["nesterov", "slow"],
)
def test_a_rank_that_comes_back_takes_over_the_outer_momentum(schedule: Schedule) -> None:
    with RestartableProcesses(4, train, "complete", {"schedule": schedule}) as processes:
        assert processes.wait_for(1, "joined") == 0
        processes.wait_for(1, "round 20")
        processes.kill(1)
        processes.wait_for_members(0, (0, 2, 3))
        processes.start(1)
        assert processes.wait_for(1, "joined") >= 20
        # Enough outer steps for the momenta to meet.
        processes.finish(margin=110)
        results = [processes.wait_for(rank, "result") for rank in range(4)]
    agree(results)
    for result in results:
        assert result["members"] == (0, 1, 2, 3)
        assert result["mixing_rate"] == schedule.mixing_rate
        # The round in which the rank was lost may have been mixed by some and dropped by others,
        # whose momenta then approach each other.
        for ours, theirs in zip(result["outer"], results[0]["outer"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-7)
    assert max(map(abs, results[0]["outer"][0])) > 1e-3


@pytest.mark.timeout(120)
def test_a_rank_that_stood_still_comes_back_as_one_that_was_restarted() -> None:
    with RestartableProcesses(4, train, "ring", {}) as processes:
        processes.wait_for(2, "round 20")
        processes.signal(2, signal.SIGSTOP)
        processes.wait_for_members(0, (0, 1, 3))
        # Longer than the timeout: its own waits are over when it goes on.
        time.sleep(PATIENCE)
        processes.signal(2, signal.SIGCONT)
        processes.wait_for_members(0, (0, 1, 2, 3))
        processes.finish()
        results = [processes.wait_for(rank, "result") for rank in range(4)]
    agree(results)
    assert results[0]["members"] == (0, 1, 2, 3)
    assert results[0]["changes"] == [
        ((0, 1, 2, 3), (0, 1, 3)),
        ((0, 1, 3), (0, 1, 2, 3)),
    ]


def train_or_tell(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> dict[str, Any] | tuple[str, str, float]:
    start = time.monotonic()
    try:
        return train(rank, world_size, store, report, "complete", {})
    except (PeerError, ValueError) as error:
        return type(error).__name__, str(error), time.monotonic() - start


@pytest.mark.timeout(120)
def test_a_second_process_of_a_living_rank_is_refused_at_once() -> None:
    with RestartableProcesses(3, train_or_tell) as processes:
        processes.wait_for(1, "round 20")
        processes.start(1)
        kind, text, seconds = processes.wait_for(1, "result")
        assert (kind, seconds < 10) == ("ValueError", True), seconds
        assert "rank 1: another process with this rank number is alive" in text
        processes.finish()
        results = [processes.wait_for(rank, "result") for rank in range(3)]
    agree(results)
    for result in results:
        assert result["members"] == (0, 1, 2)
        # The others have not noticed anything.
        assert result["changes"] == []


@pytest.mark.timeout(120)
def test_a_rank_that_continues_after_it_was_replaced_ends_and_leaves_the_others_alone() -> None:
    with RestartableProcesses(3, train_or_tell) as processes:
        assert processes.wait_for(1, "joined") == 0
        processes.wait_for(1, "round 20")
        old = processes.pid(1)
        processes.signal(1, signal.SIGSTOP)
        processes.wait_for_members(0, (0, 2))
        processes.start(1)
        assert processes.wait_for(1, "joined") >= 20
        os.kill(old, signal.SIGCONT)
        kind, text, _ = processes.wait_for(1, "result")
        assert kind == "PeerError", text
        assert "rank 1: a later process with this rank number has taken the place" in text
        processes.finish()
        results = [processes.wait_for(rank, "result") for rank in range(3)]
    agree(results)
    assert results[0]["members"] == (0, 1, 2)
    assert results[0]["changes"] == [((0, 1, 2), (0, 2)), ((0, 2), (0, 1, 2))]


def train_on_the_store_of_rank_0(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None], port: int
) -> tuple[str, bool]:
    own = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    params = make_params()
    optimizer = DecentOptimWrapper(
        *(sgd(params), rank, world_size),
        topology="ring",
        bucket_cap_mb=TINY_CAP_MB,
        timeout=PATIENCE,
        elastic=Elastic(store=own),
    )
    while True:
        if rank == 0 and optimizer.round == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        backward(params, rank, optimizer.round)
        try:
            optimizer.step()
        except PeerError as error:
            return str(error), threads_end(PATIENCE)


@pytest.mark.timeout(60)
def test_the_death_of_the_store_is_one_clear_error_and_holds_up_no_end() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with RestartableProcesses(4, train_on_the_store_of_rank_0, port) as processes:
        for rank in (1, 2, 3):
            text, threads_ended = processes.wait_for(rank, "result")
            assert f"rank {rank}: the store in which the ranks agree does not answer" in text
            assert "a process that outlives the ranks" in text
            assert threads_ended
            assert processes.join(rank, 30) == 0


@pytest.mark.timeout(120)
def test_ranks_that_are_all_restarted_on_the_same_store_start_again() -> None:
    with RestartableProcesses(3, train, "complete", {}) as processes:
        processes.wait_for(0, "round 20")
        # One was lost before, so that the last members were fewer than all.
        processes.kill(2)
        processes.wait_for(0, "joined")
        processes.wait_for_members(0, (0, 1))
        for rank in (0, 1):
            processes.kill(rank)
        processes.reports.clear()
        for rank in range(3):
            processes.start(rank)
        for rank in range(3):
            assert processes.wait_for(rank, "joined") == 0
        processes.wait_for(0, "round 20")
        processes.finish()
        results = [processes.wait_for(rank, "result") for rank in range(3)]
    agree(results)
    for result in results:
        assert result["members"] == (0, 1, 2)
        assert result["changes"] == []
    assert len({result["first"] for result in results}) == 1


def average_often(
    rank: int,
    world_size: int,
    store: Any,
    report: Callable[[str, Any], None],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Train with an average in place every other step, kept every sixth, until told to end."""
    params = make_params(seed=rank)
    optimizer = DecentOptimWrapper(
        *(sgd(params), rank, world_size, None, "ring", TINY_CAP_MB),
        timeout=PATIENCE,
        elastic=Elastic(store=store),
        **options,
    )
    report("joined", optimizer.round)
    averages: dict[int, list[float]] = {}
    while not store.check(["finish"]) or optimizer.round < int(store.get("finish")):
        backward(params, rank, optimizer.round)
        optimizer.step()
        if optimizer.round % 2 == 0:
            with optimizer.averaged():
                seen = [float(param.detach().sum()) for param in params]
                averages[optimizer.round] = [*seen, optimizer.consensus_distance()]
        if optimizer.round % 6 == 0:
            optimizer.global_avg(may_revert=False)
        if optimizer.round % 10 == 0:
            report(f"round {optimizer.round}", optimizer.members)
        time.sleep(STEP)
    optimizer.global_avg(may_revert=False)
    members = optimizer.members
    return {"params": flatten(params).tolist(), "members": members, "averages": averages}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("average_state", ["keep", "average"])
def test_a_rank_comes_back_while_the_others_are_in_averages(average_state: AverageState) -> None:
    options = {"schedule": Schedule(average_state=average_state)}
    with RestartableProcesses(4, average_often, options) as processes:
        for rank in range(4):
            assert processes.wait_for(rank, "joined") == 0
        processes.wait_for(0, "round 20")
        for rank in (1, 3, 1):
            processes.kill(rank)
            processes.start(rank)
            assert processes.wait_for(rank, "joined") > 0
        processes.finish()
        results = [processes.wait_for(rank, "result") for rank in range(4)]
    agree(results)
    assert results[0]["members"] == (0, 1, 2, 3)
    for theirs in results[1:]:
        common = results[0]["averages"].keys() & theirs["averages"].keys()
        assert len(common) > 10
        for round in common:
            # Both made the same calls, with the same members.
            assert theirs["averages"][round] == pytest.approx(
                results[0]["averages"][round], abs=1e-12
            )


def build_with_bad_arguments(
    rank: int,
    world_size: int,
    store: Any,
    report: Callable[[str, Any], None],
    wrong: dict[str, Any],
) -> tuple[str, str, float] | tuple[int, ...]:
    """Rank 1 builds a wrapper that cannot be, at first; all build it again."""
    options: dict[str, Any] = {"topology": "ring", "bucket_cap_mb": TINY_CAP_MB}
    if rank == 1 and store.add(f"lives of {rank}", 1) == 1:
        options |= wrong
    start = time.monotonic()
    try:
        params = make_params(seed=rank)
        optimizer = DecentOptimWrapper(
            *(sgd(params), rank, world_size),
            **options,
            timeout=30,
            elastic=Elastic(store=store),
        )
    except (TypeError, ValueError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    backward(params, rank, 0)
    optimizer.step()
    optimizer.synchronize()
    return optimizer.members


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        ({"bucket_cap_mb": "x"}, "TypeError", "bucket_cap_mb expects a number of MiB, got 'x'"),
        ({"topology": "rung"}, "ValueError", "rung"),
    ],
    ids=["type", "topology"],
)
def test_all_ranks_learn_why_one_cannot_start(wrong: dict[str, Any], kind: str, text: str) -> None:
    with RestartableProcesses(4, build_with_bad_arguments, wrong) as processes:
        results = [processes.wait_for(rank, "result") for rank in range(4)]
        assert results[1][0] == kind
        assert text in results[1][1]
        for rank in (0, 2, 3):
            assert results[rank][0] == "ValueError"
            assert f"rank {rank}: rank 1 could not start" in results[rank][1]
            assert f"{kind}: " in results[rank][1]
            assert text in results[rank][1]
            # Not only when the timeout is over; starting takes as long as the last process does.
            assert results[rank][2] < 20
        for rank in range(4):
            processes.start(rank)
        # Once it is mended, all start on the same store.
        assert [processes.wait_for(rank, "result") for rank in range(4)] == [(0, 1, 2, 3)] * 4


def come_back_as_another(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> str:
    """Train, and in a second life build another model."""
    params = make_params()
    second_life = store.add(f"lives of {rank}", 1) > 1
    try:
        optimizer = DecentOptimWrapper(
            *(sgd(params[:3] if second_life else params), rank, world_size),
            topology="complete",
            timeout=PATIENCE,
            elastic=Elastic(store=store),
        )
    except ValueError as error:
        return str(error)
    report("joined", optimizer.round)
    while rank == 1 or not store.check(["seen"]):
        backward(params, rank, optimizer.round)
        optimizer.step()
    return "went on"


@pytest.mark.timeout(60)
def test_a_rank_that_comes_back_as_another_is_refused() -> None:
    with RestartableProcesses(3, come_back_as_another) as processes:
        for rank in range(3):
            processes.wait_for(rank, "joined")
        processes.kill(1)
        processes.start(1)
        text = processes.wait_for(1, "result")
        processes.put("seen")
        assert "rank 1: this rank comes back with <nothing more> where everyone else has" in text
        assert "parameter 0.3" in text


def test_continuing_needs_a_store() -> None:
    base = sgd(make_params())
    with pytest.raises(ValueError, match="needs a store in which the ranks agree"):
        DecentOptimWrapper(base, elastic=Elastic())
    with pytest.raises(ValueError, match=r"Elastic\(store=\.\.\.\) needs rank and world_size"):
        DecentOptimWrapper(base, elastic=Elastic(store=HashStore()))
    with pytest.raises(TypeError, match=r"store expects a torch\.distributed\.Store"):
        Elastic(store=cast(Any, "tcp://"))


def step_with_a_callback_that_raises(
    rank: int,
    world_size: int,
    store: Any,
    report: Callable[[str, Any], None],
    in_backward: bool,
) -> dict[str, Any]:
    """Lose rank 0 in a backward pass, and go on after what the callback raises at its end."""
    model = wrap_module(
        make_model(),
        None,
        lr_scheduler_fn=lambda base: torch.optim.lr_scheduler.StepLR(base, 1, 0.5),
        topology="complete",
        update_in_backward=in_backward,
        rank=rank,
        world_size=world_size,
        timeout=PATIENCE,
        elastic=Elastic(store=store, on_membership_change=refuse_changes(rank)),
    )
    caught = []
    for step in range(6):
        if (rank, step) == (0, 3):
            report("result", None)
            os._exit(1)
        try:
            train_module(model, rank, range(step, step + 1))
        except LookupError as error:
            caught.append(str(error))
    rate = model.get_lr()
    model.global_avg(will_revert=False)
    members = model.optimizer.members
    return {"params": flat(model).tolist(), "members": members, "caught": caught, "rate": rate}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("in_backward", [True, False])
def test_a_callback_that_raises_does_not_tear_a_backward_pass(in_backward: bool) -> None:
    with RestartableProcesses(3, step_with_a_callback_that_raises, in_backward) as processes:
        results = [processes.wait_for(rank, "result") for rank in (1, 2)]
    rows = torch.tensor([each["params"] for each in results], dtype=torch.float64)
    torch.testing.assert_close(rows[0], rows[1])
    assert not torch.equal(rows[0], flat(make_model()))
    assert [each["caught"] for each in results] == [[], ["no data for (1, 2)"]]
    assert [each["rate"] for each in results] == [0.05 / 2**6] * 2
    assert [each["members"] for each in results] == [(1, 2)] * 2
