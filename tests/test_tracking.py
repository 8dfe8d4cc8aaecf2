"""Gradient tracking: sums that hold in every step, loads, giving up, and refusals."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import problem
import pytest
import torch
import torch.distributed as dist
from covering import named, pairwise
from problem import adamw, backward, flatten, make_params, sgd, take_steps
from ranks import run_threads
from torch import Tensor

from decent_optim_wrapper import CallOrderError, DecentOptimWrapper, PeerError, Schedule

STEPS = 8

wrap = partial(problem.wrap, topology="ring", gradient_tracking=True)


def tracked_of(optimizer: DecentOptimWrapper) -> list[dict[str, Any]]:
    """What a checkpoint holds of each parameter."""
    saved = optimizer.state_dict()["gossip"]["extensions"]["gradient_tracking"]
    rows: list[dict[str, Any]] = saved["params"]
    return rows


def sums(rows: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """What a rank adds to the sums of y and of the means."""
    return flatten([row["y"] for row in rows]), flatten([row["mean"] for row in rows])


def check_that_the_sums_agree(results: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Of y and of the means; those of each rank differ."""
    y, means = (sum(result[k] for result in results) for k in range(2))
    torch.testing.assert_close(y, means, rtol=0, atol=1e-12)
    assert all((own - mean).abs().max() > 1e-4 for own, mean in results)


def test_the_sum_of_the_estimates_is_that_of_the_gradients_in_every_step() -> None:
    """Also where a rank skips its update, or has no gradient."""

    def main(rank: int, group: dist.ProcessGroup) -> list[tuple[Tensor, Tensor]]:
        params = make_params()
        optimizer = wrap(params, group, adamw(params))
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

    # In the first step nothing has been mixed yet.
    _, *steps = zip(*run_threads(4, main), strict=True)
    for results in steps:
        check_that_the_sums_agree(results)


@pytest.mark.parametrize("takes", [1, 3])
def test_the_state_of_another_rank_starts_the_estimates_again_on_all_ranks(takes: int) -> None:
    """The corrections would sum to something else than zero, and bias all gradients for good."""
    states: dict[int, Any] = {}

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params()
        optimizer = wrap(params, group, adamw(params))
        take_steps(optimizer, params, rank, range(3))
        states[rank] = copy.deepcopy(optimizer.state_dict())
        optimizer.all_gather(torch.zeros(1))
        optimizer.load_state_dict(states[0 if rank < takes else rank])
        take_steps(optimizer, params, rank, range(3))
        optimizer.synchronize()
        return sums(tracked_of(optimizer))

    # With the first one, every rank has loaded its own: the sums have gone on.
    check_that_the_sums_agree(run_threads(4, main))


AUTO = Schedule(gossip_every="auto", max_staleness=3)
LOADING: dict[str, dict[str, Any]] = {
    "every step": {"schedule": Schedule()},
    "every third": {"schedule": Schedule(gossip_every=3)},
    "late": {"schedule": Schedule(gossip_every=3, staleness=2)},
    # Ranks meet after a load there also without an extension.
    "auto": {"gradient_tracking": False, "schedule": AUTO},
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
def test_ranks_of_which_only_some_have_loaded_raise(
    options: dict[str, Any], loading: tuple[int, ...], topology: str, at: int
) -> None:
    """All of them an error that names the call; one that had waited would miss a peer."""

    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params()
        optimizer = wrap(params, group, **{**options, "topology": topology})
        assert len(optimizer.buckets) > 1
        for step in range(5 + rank * (options["schedule"] is AUTO)):
            if step == at:
                saved = copy.deepcopy(optimizer.state_dict())
            take_steps(optimizer, params, rank, [step])
        optimizer.synchronize()
        if rank in loading:
            optimizer.load_state_dict(optimizer.state_dict() if at == 5 else saved)
        with pytest.raises(CallOrderError) as caught:
            take_steps(optimizer, params, rank, range(50))
        return str(caught.value)

    for text in run_threads(4, main):
        assert "after load_state_dict()" in text
        assert "on all ranks, or on none" in text


def test_ranks_that_give_tracking_up_at_different_steps_hear_of_it() -> None:
    def give_up(optimizer: DecentOptimWrapper) -> None:
        optimizer.gradient_tracking = False

    def go_on(optimizer: DecentOptimWrapper) -> None:
        optimizer.step()
        optimizer.synchronize()

    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params()
        optimizer = wrap(params, group, topology="complete", timeout=20)
        take_steps(optimizer, params, rank, range(3))
        backward(params, rank, 3)
        with pytest.raises((CallOrderError, PeerError)) as caught:
            (go_on if rank else give_up)(optimizer)
        assert optimizer.gradient_tracking
        return str(caught.value)

    assert any("gradient_tracking = False" in text for text in run_threads(4, main))


def test_tracking_that_is_given_up_frees_its_memory_and_trains_on() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params()
        optimizer = wrap(params, group, adamw(params))
        take_steps(optimizer, params, rank, range(4))
        before = optimizer.stats().bytes_sent
        optimizer.gradient_tracking = False
        given_up = flatten(params)
        take_steps(optimizer, params, rank, range(4, STEPS))
        assert before == 2 * optimizer.stats().bytes_sent > 0
        optimizer.synchronize()
        assert (flatten(params) - given_up).abs().max() > 1e-2
        assert "extensions" not in optimizer.state_dict()["gossip"]
        with pytest.raises(ValueError, match="expects False during the training"):
            optimizer.gradient_tracking = True

    run_threads(4, main)


def test_half_precision_parameters_have_estimates_in_single_precision() -> None:
    params = make_params(dtype=torch.bfloat16)
    optimizer = wrap(params)
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
        optimizer = wrap(params, group, adamw(params), schedule=schedule)
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
        return flatten(closed), sums(rows)[1]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "gradient_tracking")
        check_that_the_sums_agree(run_threads(4, main))


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (torch.optim.LBFGS, {"overlap": False}, "gradient_tracking=True"),
        (sgd, {"on_nonfinite": "skip"}, "on_nonfinite"),
    ],
)
def test_what_does_not_go_with_tracking_is_refused(
    make: Any, options: dict[str, Any], words: str
) -> None:
    params = make_params()
    with pytest.raises(ValueError, match=words):
        wrap(params, None, make(params), **options)


@pytest.mark.parametrize("schedule", [Schedule(gossip_every=2), Schedule(gossip_every="auto")])
def test_rare_rounds_are_warned_of(schedule: Schedule) -> None:
    with pytest.warns(UserWarning, match="gradient_tracking"):
        wrap(make_params(), schedule=schedule)
