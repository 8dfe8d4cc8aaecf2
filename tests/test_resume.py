"""Stopping at any step and resuming on every rank from its own file."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problem import adamw, flatten, make_params, nesterov, take_steps, wrap
from ranks import run_threads
from torch import Tensor
from torch.optim import AdamW

from decent_optim_wrapper import DecentOptimWrapper, OuterOptimizer
from decent_optim_wrapper.codecs import TopKCodec
from decent_optim_wrapper.optim import AccumAdam

STEPS = 6

OUTER = OuterOptimizer(nesterov(0.5))


def start(
    group: dist.ProcessGroup, seed: int = 0, **options: Any
) -> tuple[list[Tensor], DecentOptimWrapper]:
    params = make_params(seed)
    return params, wrap(params, group, adamw(params), **{"topology": "ring", **options})


@pytest.mark.slow
@pytest.mark.parametrize("change", ["added", "unfrozen"])
def test_a_run_is_resumed_bit_for_bit_after_its_parameters_have_changed(change: str) -> None:
    """A new wrapper would put parameters together that stay apart in the storage of views."""

    options: dict[str, Any] = {"comm_dtype": TopKCodec(16), "param_as_bucket_view": True}

    def main(rank: int, group: dist.ProcessGroup) -> None:
        params, late = make_params(dtype=torch.float32), make_params(1, dtype=torch.float32)
        params[0].requires_grad_(change == "added")
        every = [*params, *late] if change == "added" else params
        straight = wrap(params, group, adamw(params), **options)
        take_steps(straight, params, rank, range(3))
        if change == "added":
            straight.add_param_group({"params": late})
        params[0].requires_grad_(True)
        straight.rebuild_buckets()
        take_steps(straight, every, rank, range(3, STEPS))
        others = [param.detach().clone().requires_grad_() for param in every]
        base = AdamW([{"params": others[:5]}, {"params": others[5:]}][: len(others) // 5])
        resumed = wrap(others, group, base, sync_at_start=False, **options)
        resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
        for each, optimizer in ((every, straight), (others, resumed)):
            take_steps(optimizer, each, rank, range(STEPS, 2 * STEPS))
            optimizer.synchronize()
        assert torch.equal(flatten(every), flatten(others))
        assert not torch.equal(flatten(params), flatten(make_params(dtype=torch.float32)))

    run_threads(3, main)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    params = make_params()
    optimizer = wrap(params)
    state = optimizer.state_dict()
    for plan in ([[0, 1], [2, 3]], [[0, 1], [2], [3, 4, 4]], [[0, 1], [2], [3, 5]], 3):
        state["gossip"]["plan"] = plan
        with pytest.raises(ValueError, match="nothing was loaded"):
            optimizer.load_state_dict(state)
    buckets = optimizer.buckets
    state["gossip"]["plan"] = [[4, 0], [2], [3, 1]]
    optimizer.load_state_dict(state)
    assert len(optimizer.buckets) == len(buckets)
    assert optimizer.buckets != buckets
    assert optimizer.state_dict()["gossip"]["plan"] == [[4, 0], [2], [3, 1]]


def test_saving_and_loading_communicate_nothing_and_drop_what_was_there() -> None:
    """Only rank 0 saves and loads, and nobody waits for it."""
    rates = {"mixing_rate": 1.0, "last_rate": 1.0}

    def main(rank: int, group: dist.ProcessGroup) -> None:
        params, optimizer = start(group)
        fresh = optimizer.state_dict()
        take_steps(optimizer, params, rank, range(3))
        if rank == 0:
            in_flight = copy.deepcopy(optimizer.state_dict())
            assert in_flight["gossip"] == {**rates, "round": 3, "in_flight": True, "kept": False}
        take_steps(optimizer, params, rank, range(3, STEPS))
        optimizer.global_avg()
        average = flatten(params)
        if rank == 0:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(in_flight)
            assert optimizer.round == 3
            optimizer.load_state_dict(saved)
            gossip = optimizer.state_dict()["gossip"]
            assert gossip == {**rates, "round": STEPS, "in_flight": False, "kept": True}
        else:
            optimizer.load_state_dict(fresh)
            assert optimizer.round == 0
        optimizer.synchronize()
        assert torch.equal(flatten(params), average)
        with pytest.raises(RuntimeError, match="call global_avg"):
            optimizer.revert_global_avg()

    run_threads(2, main)


BROKEN: list[dict[str, Any]] = [
    {"mixing_rate": None},
    {"mixing_rate": float("nan")},
    {"mixing_rate": 0.0},
    {"last_rate": float("nan")},
    {"last_rate": "fast"},
    {"round": None},
    {"round": 1.5},
    {"round": -1},
    {"round": 0, "in_flight": True},
    {"extensions": {"outer_optimizer": {}}},
    {"extensions": {"outer_optimizer": {"params": []}}},
    {"extensions": {"outer_optimizer": {"params": [{}] * 5}}},
]


def load_what_does_not_fit(optimizer: DecentOptimWrapper, state: dict[str, Any], rank: int) -> None:
    state["param_groups"][0]["lr"] = 7.0
    not_ours = rf"rank {rank}: load_state_dict expects what state_dict\(\) .* nothing was"
    for broken in BROKEN:
        with pytest.raises(ValueError, match=not_ours):
            optimizer.load_state_dict({**state, "gossip": {**state["gossip"], **broken}})
    of_adam = {"state": {key: {"step": 1} for key in state["state"]}}
    for unfit in (of_adam, {"param_groups": [{"params": [0]}]}):
        with pytest.raises((ValueError, KeyError)):
            optimizer.load_state_dict({**state, **unfit})


def test_a_state_that_is_refused_changes_nothing() -> None:
    """Of the gossip, or of the base, which does not notice before it has taken over the groups."""

    def main(rank: int, group: dist.ProcessGroup, loads: bool) -> Tensor:
        params = make_params()
        base = AccumAdam(params, lr=0.02)
        optimizer = wrap(params, group, base, topology="ring", extensions=[OUTER])
        take_steps(optimizer, params, rank, [0])
        early = copy.deepcopy(optimizer.state_dict())
        take_steps(optimizer, params, rank, [1, 2])
        if loads:
            load_what_does_not_fit(optimizer, early, rank)
        assert optimizer.round == 3
        assert optimizer.param_groups is base.param_groups
        take_steps(optimizer, params, rank, range(3, STEPS))
        optimizer.synchronize()
        return flatten(params)

    refused, undisturbed = (run_threads(2, partial(main, loads=each)) for each in (True, False))
    assert all(map(torch.equal, refused, undisturbed))
    assert not torch.equal(refused[0], flatten(make_params()))


@pytest.mark.parametrize(
    "options",
    [{"extensions": [OUTER]}, {"param_as_bucket_view": True}, {"comm_dtype": torch.int8}],
    ids=["outer", "views", "int8"],
)
def test_what_is_mixed_and_loaded_under_inference_mode_is_trained_on(
    options: dict[str, Any],
) -> None:
    def main(rank: int, group: dist.ProcessGroup, infers: bool) -> Tensor:
        params, optimizer = start(group, **options)
        for begin in (0, 2):
            take_steps(optimizer, params, rank, range(begin, begin + 2))
            with torch.inference_mode(infers):
                optimizer.synchronize()
                with optimizer.averaged():
                    optimizer.consensus_distance()
                optimizer.load_state_dict(optimizer.state_dict())
        take_steps(optimizer, params, rank, range(4, STEPS))
        return flatten(params)

    inside, outside = (run_threads(2, partial(main, infers=each)) for each in (True, False))
    assert all(map(torch.equal, inside, outside))
    assert not torch.equal(inside[0], flatten(make_params()))
