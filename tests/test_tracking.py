"""Gradient tracking in float64 against dense matrices."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import OVERLAP, named, pairwise
from dense import due_matrix, put, rows_of
from problem import (
    TINY_CAP_MB,
    adamw,
    backward,
    flatten,
    in_one_call,
    make_params,
    sgd,
    take_steps,
)
from ranks import run_threads
from torch import Tensor
from torch.optim import SGD, Optimizer, RMSprop

from decent_optim_wrapper import (
    CallOrderError,
    DecentOptimWrapper,
    PeerError,
    Schedule,
    Topology,
    TopologyFactory,
)

STEPS = 8
DAMPING = 0.3
BASES: dict[str, Callable[[Sequence[Tensor]], Optimizer]] = {
    "adamw": adamw,
    "adamw in one call": lambda params: in_one_call(adamw(params)),
    "sgd": sgd,
    "nesterov": lambda params: SGD(params, lr=0.05, momentum=0.9, nesterov=True, maximize=True),
    "rmsprop": lambda params: RMSprop(params, lr=0.01),
}
TOPOLOGIES = {name: TopologyFactory.create(name, 4, 1) for name in ("ring", "complete")}
SCHEDULES = {
    "every step": Schedule(),
    "slow": Schedule(mixing_rate=0.4),
    "every third": Schedule(gossip_every=3),
    "late": Schedule(gossip_every=3, staleness=2),
    "averages": Schedule(global_avg_every=3),
}


def gradient(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def parts_of(row: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(row, [param.numel() for param in params])
    return [part.view(param.shape) for part, param in zip(parts, params, strict=True)]


def simulate(
    topology: Topology, schedule: Schedule, name: str, overlap: bool, damping: float = DAMPING
) -> Tensor:
    """All ranks in one place: y = m + c, c <- c + 0.3 (W y - y), x <- W x - u(g + c)."""
    n = topology.world_size
    worlds = [make_params() for _ in range(n)]
    bases = [BASES[name](params) for params in worlds]
    replaces = name.startswith("adam")
    for base in bases if replaces else ():
        base.param_groups[0]["betas"] = (0.0, 0.999)
    means = corrections = torch.zeros_like(rows_of(worlds))
    launched: dict[int, tuple[Tensor, ...]] = {}
    collected = 0

    def land(step: int) -> None:
        nonlocal corrections
        if step in launched:
            matrix, start, y = launched.pop(step)
            put(worlds, rows_of(worlds) + matrix @ start - start)
            corrections = corrections + damping * (matrix @ y - y)

    for step in range(STEPS):
        for rank in range(n):
            backward(worlds[rank], rank, step)
        if overlap:
            land(step)
        grads = torch.stack([flatten([gradient(p) for p in params]) for params in worlds])
        if not launched:
            collected += 1
            means = means + max(0.1, replaces / collected) * (grads - means)
        read = corrections + (means if replaces else grads)
        for params, base, row in zip(worlds, bases, read, strict=True):
            for param, part in zip(params, parts_of(row, params), strict=True):
                gradient(param).copy_(part)
            base.step()
        every = int(schedule.gossip_every), schedule.global_avg_every
        matrix = due_matrix(topology, *every, schedule.mixing_rate, step)
        if (step + 1) % every[0] == 0 or (every[1] and (step + 1) % every[1] == 0):
            launched[step + int(schedule.staleness) if overlap else step] = (
                matrix,
                rows_of(worlds),
                corrections + means,
            )
        if not overlap:
            land(step)
    for step in sorted(launched):
        land(step)
    return rows_of(worlds)


def wrap(
    base: Optimizer, group: dist.ProcessGroup | None, topology: Topology | str, **options: Any
) -> DecentOptimWrapper:
    return DecentOptimWrapper(
        base,
        topology=topology,
        bucket_cap_mb=TINY_CAP_MB,
        process_group=group,
        **{"gradient_tracking": True, **options},
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradient_tracking")
@pytest.mark.parametrize(
    ("name", "schedule", "topology", "overlap"),
    pairwise(named(*BASES), SCHEDULES, TOPOLOGIES, OVERLAP),
)
def test_follows_the_oracle(
    name: str, schedule: Schedule, topology: Topology, overlap: bool
) -> None:
    overlap = overlap or schedule.staleness > 1

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params()
        optimizer = wrap(BASES[name](params), group, topology, schedule=schedule, overlap=overlap)
        take_steps(optimizer, params, rank, range(STEPS))
        optimizer.synchronize()
        return flatten(params)

    rows = torch.stack(run_threads(4, main))
    expected = simulate(topology, schedule, name, overlap)
    torch.testing.assert_close(rows, expected, rtol=1e-11, atol=1e-11)
    uncorrected = simulate(topology, schedule, name, overlap, damping=0.0)
    # Exact averages in every step leave it nothing to do.
    if overlap or topology is TOPOLOGIES["ring"] or schedule.gossip_every != 1:
        assert (expected - uncorrected).abs().max() > 1e-3, "tracking made no difference"


def tracked_of(optimizer: DecentOptimWrapper) -> list[dict[str, Any]]:
    """What a checkpoint holds of each parameter."""
    saved = optimizer.state_dict()["gossip"]["extensions"]["gradient_tracking"]
    rows: list[dict[str, Any]] = saved["params"]
    return rows


def sums(rows: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """What a rank adds to the sums of y and of the means."""
    return flatten([row["y"] for row in rows]), flatten([row["mean"] for row in rows])


def test_the_sum_of_the_estimates_is_that_of_the_gradients_in_every_step() -> None:
    """Also where a rank skips its update, or has no gradient."""

    def main(rank: int, group: dist.ProcessGroup) -> list[tuple[Tensor, Tensor]]:
        params = make_params()
        optimizer = wrap(adamw(params), group, "ring")
        history = []
        for step in range(STEPS):
            backward(params, rank, step)
            if (rank, step) == (1, 2):
                params[0].grad = None
            overflow = torch.tensor(float((rank, step) == (2, 4)))
            vars(optimizer).update(found_inf=overflow, grad_scale=None)
            optimizer.step()
            assert (params[0].grad is None) == ((rank, step) == (1, 2))
            history.append(sums(tracked_of(optimizer)))
        optimizer.synchronize()
        return history

    histories = run_threads(4, main)
    for step in range(STEPS):
        y, g = (sum(history[step][k] for history in histories) for k in range(2))
        torch.testing.assert_close(y, g, rtol=0, atol=1e-12)
        assert all((history[step][0] - y / 4).abs().max() > 1e-4 for history in histories)


@pytest.mark.parametrize("takes", [1, 3])
def test_the_state_of_another_rank_starts_the_estimates_again_on_all_ranks(takes: int) -> None:
    """The corrections would sum to something else than zero, and bias all gradients for good."""
    states: dict[int, Any] = {}

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params()
        optimizer = wrap(adamw(params), group, "ring")
        take_steps(optimizer, params, rank, range(3))
        states[rank] = copy.deepcopy(optimizer.state_dict())
        optimizer.all_gather(torch.zeros(1))
        optimizer.load_state_dict(states[0 if rank < takes else rank])
        take_steps(optimizer, params, rank, range(3))
        optimizer.synchronize()
        return sums(tracked_of(optimizer))

    results = run_threads(4, main)
    y, means = (sum(result[k] for result in results) for k in range(2))
    # With the first one, every rank has loaded its own: the sums have gone on.
    torch.testing.assert_close(y, means, rtol=0, atol=1e-12)
    assert (results[1][0] - results[1][1]).abs().max() > 1e-3


LOADING: dict[str, dict[str, Any]] = {
    "every step": {"gradient_tracking": True},
    "every third": {"gradient_tracking": True, "schedule": SCHEDULES["every third"]},
    "late": {"gradient_tracking": True, "schedule": SCHEDULES["late"]},
    # Ranks meet after a load there also without an extension.
    "auto": {
        "gradient_tracking": False,
        "schedule": Schedule(gossip_every="auto", max_staleness=3),
    },
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:gradient_tracking")
@pytest.mark.parametrize(
    ("options", "loading", "topology", "at"),
    pairwise(
        LOADING,
        {"only rank 0": (0,), "only rank 1": (1,), "all but one": (0, 2, 3)},
        named("ring", "one-peer-exp", "complete"),
        {"this round": 5, "an earlier round": 3},
    ),
)
def test_ranks_of_which_only_some_have_loaded_raise_at_once(
    options: dict[str, Any], loading: tuple[int, ...], topology: str, at: int
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[str, float]:
        params = make_params()
        optimizer = wrap(sgd(params), group, topology, **options)
        assert len(optimizer.buckets) > 1
        for step in range(5 + (0 if options["gradient_tracking"] else rank)):
            if step == at:
                saved = copy.deepcopy(optimizer.state_dict())
            backward(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        if rank in loading:
            optimizer.load_state_dict(optimizer.state_dict() if at == 5 else saved)

        def go_on() -> None:
            take_steps(optimizer, params, rank, range(50))

        start = time.monotonic()
        with pytest.raises(CallOrderError) as caught:
            go_on()
        return str(caught.value), time.monotonic() - start

    texts, seconds = zip(*run_threads(4, main), strict=True)
    assert all("after load_state_dict()" in text for text in texts), texts
    assert all("on all ranks, or on none" in text for text in texts), texts
    # Below gloo's own timeout. One rank may wait for that: gloo forgets a send whose write fails
    # when the receiver's notice arrives, once in some hundred worlds on a busy machine.
    assert sorted(seconds)[-2] < 20


def give_up(optimizer: DecentOptimWrapper) -> None:
    optimizer.gradient_tracking = False


def go_on(optimizer: DecentOptimWrapper) -> None:
    optimizer.step()
    optimizer.synchronize()


def test_ranks_that_give_tracking_up_at_different_steps_hear_of_it() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params()
        optimizer = wrap(adamw(params), group, "complete", timeout=20)
        take_steps(optimizer, params, rank, range(3))
        backward(params, rank, 3)
        with pytest.raises((CallOrderError, PeerError)) as caught:
            (give_up if rank == 0 else go_on)(optimizer)
        assert optimizer.gradient_tracking
        return str(caught.value)

    assert any("gradient_tracking = False" in text for text in run_threads(4, main))


def test_tracking_that_is_given_up_frees_its_memory_and_trains_on() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[int, int, Tensor]:
        params = make_params()
        optimizer = wrap(adamw(params), group, "ring")
        sent = []
        for step in range(STEPS):
            if step == 4:
                optimizer.gradient_tracking = False
            backward(params, rank, step)
            optimizer.step()
            sent.append(optimizer.stats().bytes_sent)
        optimizer.synchronize()
        assert "extensions" not in optimizer.state_dict()["gossip"]
        with pytest.raises(ValueError, match="expects False during the training"):
            optimizer.gradient_tracking = True
        return sent[3], sent[4], flatten(params)

    rows = run_threads(4, main)
    for before, after, row in rows:
        assert before == 2 * after > 0
        assert (row - flatten(make_params())).abs().max() > 1e-2


def test_half_precision_parameters_have_estimates_in_single_precision() -> None:
    params = make_params(dtype=torch.bfloat16)
    optimizer = wrap(adamw(params), None, "ring")
    take_steps(optimizer, params, 0, range(2))
    rows = tracked_of(optimizer)
    assert {row["y"].dtype for row in rows} == {torch.float32}
    assert sums(rows)[0].abs().max() > 1e-2


@pytest.mark.parametrize("rounds", ["automatic", "joined"])
def test_the_sums_agree_where_ranks_make_different_numbers_of_steps(rounds: str) -> None:
    """They hold once all are at one round."""
    schedule = Schedule(gossip_every="auto") if rounds == "automatic" else Schedule()

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params()
        optimizer = wrap(adamw(params), group, "ring", schedule=schedule)
        take_steps(optimizer, params, rank, range(6 + 2 * rank))
        if rounds == "joined":
            # As torch's Join calls it while the data of other ranks last.
            idle = optimizer.join_hook()
            for _ in range(6 - 2 * rank):
                idle.main_hook()
        optimizer.synchronize()
        assert optimizer.round > 2
        rows = tracked_of(optimizer)
        closed = [row["y"] + row["mean"] * row["is_open"] for row in rows]
        return flatten(closed), flatten([row["mean"] for row in rows])

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "gradient_tracking")
        results = run_threads(4, main)
    y, g = (sum(result[k] for result in results) for k in range(2))
    torch.testing.assert_close(y, g, rtol=0, atol=1e-12)
    assert all((one - own).abs().max() > 1e-3 for one, own in results)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (torch.optim.LBFGS, {"overlap": False}, "gradient_tracking=True"),
        (adamw, {"on_nonfinite": "skip"}, "on_nonfinite"),
    ],
)
def test_what_does_not_go_with_tracking_is_refused(
    make: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        wrap(make(make_params()), None, "ring", **options)


@pytest.mark.parametrize("schedule", [Schedule(gossip_every=2), Schedule(gossip_every="auto")])
def test_rare_rounds_are_warned_of(schedule: Schedule) -> None:
    with pytest.warns(UserWarning, match="gradient_tracking"):
        wrap(adamw(make_params()), None, "ring", schedule=schedule)
