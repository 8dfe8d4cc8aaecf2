"""Stopping at any step and resuming on every rank from its own file."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering_arrays import VIEWS, named, pairwise
from problem import OneParameter, adamw, flatten, make_params, nesterov, take_steps, wrap
from ranks import run_threads
from torch import Tensor, nn
from torch.optim import AdamW

from decent_optim_wrapper import DecentOptimWrapper, Late, OuterOptimizer, Schedule
from decent_optim_wrapper.codecs import TopKCodec
from decent_optim_wrapper.optim import AccumAdam
from decent_optim_wrapper.optim.gradients import params_of

STEPS = 6

OUTER = OuterOptimizer(nesterov(0.5))


def start(
    group: dist.ProcessGroup, seed: int = 0, **options: Any
) -> tuple[list[Tensor], DecentOptimWrapper]:
    params = make_params(seed)
    return params, wrap(params, group, adamw(params), **{"topology": "ring", **options})


def grown(is_grown: bool = True) -> nn.Sequential:
    """A model of parameters that are read one after the other; what is added comes first."""
    model = nn.Sequential(*map(OneParameter, make_params(dtype=torch.float32)))
    return grow(model) if is_grown else model


def grow(model: nn.Sequential) -> nn.Sequential:
    return model.insert(0, nn.Sequential(*map(OneParameter, make_params(1, dtype=torch.float32))))


def train_model(
    model: nn.Module, optimizer: DecentOptimWrapper, rank: int, steps: Sequence[int]
) -> None:
    params = params_of(optimizer)
    for step in steps:
        model(torch.zeros(()))
        take_steps(optimizer, params, rank, [step])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "views", "overlap", "code"),
    pairwise(
        named("added", "unfrozen"),
        VIEWS,
        {"delayed": True, "forward": "forward"},
        {"topk": TopKCodec(16), "int8": torch.int8},
    ),
)
def test_a_run_is_resumed_bit_for_bit_after_its_parameters_have_changed(
    change: str, views: bool, overlap: Any, code: Any
) -> None:
    """With views a new wrapper would put parameters together that stay apart in their storage."""

    def main(rank: int, group: dist.ProcessGroup) -> None:
        def wrap_model(model: nn.Module, *groups: Sequence[Tensor]) -> DecentOptimWrapper:
            base = AdamW([{"params": each} for each in groups], lr=0.02)
            options: Any = {"overlap": overlap, "param_as_bucket_view": views, "model": model}
            return wrap(params_of(base), group, base, comm_dtype=code, **options)

        model, others = grown(is_grown=False), grown(change == "added")
        first = [*model.parameters()]
        first[0].requires_grad_(change == "added")
        straight = wrap_model(model, first)
        train_model(model, straight, rank, range(3))
        if change == "added":
            late = [*grow(model)[0].parameters()]
            straight.add_param_group({"params": late})
        first[0].requires_grad_(True)
        straight.rebuild_buckets()
        train_model(model, straight, rank, range(3, STEPS))

        groups = [[*others.parameters()]]
        if change == "added":
            groups = [groups[0][len(late) :], groups[0][: len(late)]]
        resumed = wrap_model(others, *groups)
        resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
        others.load_state_dict(model.state_dict())
        for each, optimizer in ((model, straight), (others, resumed)):
            train_model(each, optimizer, rank, range(STEPS, 2 * STEPS))
            optimizer.synchronize()
        assert torch.equal(flatten(params_of(straight)), flatten(params_of(resumed)))
        start = grown(change == "added").parameters()
        pairs = zip(model.parameters(), start, strict=True)
        assert not any(torch.equal(*pair) for pair in pairs)

    run_threads(3, main)


@pytest.mark.parametrize("is_saved_again", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"overlap": Late(2), "schedule": Schedule(gossip_every=2)}]
)
def test_the_round_in_flight_keeps_the_rate_of_its_launch_in_a_checkpoint(
    options: dict[str, Any], is_saved_again: bool
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params, straight = start(group, **options)
        take_steps(straight, params, rank, range(3))
        straight.mixing_rate = 0.25
        others, resumed = start(group, seed=7, **options)
        resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
        for other, param in zip(others, params, strict=True):
            other.data.copy_(param.detach())
        if is_saved_again:
            resumed.load_state_dict(copy.deepcopy(resumed.state_dict()))
        assert resumed.mixing_rate == 0.25
        before = flatten(params)
        for each, optimizer in ((params, straight), (others, resumed)):
            take_steps(optimizer, each, rank, range(3, STEPS))
            optimizer.synchronize()
        assert torch.equal(flatten(params), flatten(others))
        assert not torch.equal(flatten(params), before)
        return flatten(params)

    rows = run_threads(4, main)
    assert not torch.equal(rows[0], rows[1])


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_in_a_group_twice_is_loaded() -> None:
    options: Any = {"overlap": Late(2), "schedule": Schedule(gossip_every=2)}

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        def start() -> tuple[list[Tensor], Any]:
            params = make_params()
            base = torch.optim.SGD([*params, params[0]], lr=0.05)
            return params, wrap(params, group, base, topology="ring", **options)

        params, straight = start()
        take_steps(straight, params, rank, range(3))
        others, resumed = start()
        resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
        for other, param in zip(others, params, strict=True):
            other.data.copy_(param.detach())
        for each, optimizer in ((params, straight), (others, resumed)):
            take_steps(optimizer, each, rank, range(3, STEPS))
            optimizer.synchronize()
        assert torch.equal(flatten(params), flatten(others))
        return flatten(params)

    rows = run_threads(2, main)
    assert not torch.equal(rows[0], rows[1])


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
    """The state of the gossip, or of the base, which notices only when it has taken the groups."""

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
