"""What every extension promises: the mean stays, a resumed run goes on, and so do lost ranks."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import modules
import pytest
import torch
import torch.distributed as dist
from covering_arrays import VIEWS, pairwise
from problem import (
    OneParameter,
    adamw,
    flatten,
    make_params,
    nesterov,
    of_guide,
    sgd,
    take_steps,
    wrap,
)
from ranks import run_threads
from scripted_ranks import LR, Seen, Spec, Trainer, World, arguments, perform, stack
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.optim import Optimizer

from decent_optim_wrapper import (
    DecentOptimWrapper,
    Elastic,
    Extension,
    GradientTracking,
    Group,
    Late,
    OuterOptimizer,
    Schedule,
    StateAverage,
    StateGossip,
)
from decent_optim_wrapper.elastic.membership import heartbeat, rendezvous
from decent_optim_wrapper.gossip.schedule import WithinStep

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:GradientTracking")]


OUTER = OuterOptimizer(nesterov(0.5))
# Arguments of the wrapper and fields of its schedule.
EXTENSIONS: dict[str, dict[str, Any]] = {
    "tracking and own": {"extensions": [of_guide()["SharedNorm"](), GradientTracking()]},
    "outer": {"extensions": [OUTER]},
    "outer and state on averages": {"extensions": [StateAverage(), OUTER], "global_avg_every": 4},
    "state gossip": {"extensions": [StateGossip("momentum_buffer")]},
}
# Whose momentum is replaced.
TRACKING_OF_ADAM: dict[str, dict[str, Any]] = {
    "tracking of adam": {"extensions": [GradientTracking()], "adam": True}
}
PACES: dict[str, dict[str, Any]] = {
    "each step": {"overlap": True},
    "late": {"overlap": Late(2), "gossip_every": 2},
    "forward": {"overlap": "forward"},
}
WIRES: dict[str, dict[str, Any]] = {
    "exact": {"comm_dtype": torch.float32},
    "bf16": {"comm_dtype": torch.bfloat16},
    "int8": {"comm_dtype": torch.int8},
}
VIEWED = {name: {"param_as_bucket_view": views} for name, views in VIEWS.items()}
SOME_WIRES = {name: WIRES[name] for name in ("exact", "int8")}
# Buckets of two parameters and of one; what grows or thaws later has a bucket of its own, or a
# resumed run would sum in another order.
CAP_MB = 150 / 2**20
SPECS = [
    Spec((3, 4), torch.float64, frozen=False),
    Spec((2,), torch.float64, frozen=False),
    Spec((300,), torch.float64, frozen=False),
    Spec((20,), torch.float64, frozen=True),
]
# A pair and a larger group in turn.
PHASES = [[Group([0, 1], 0.7), Group([2])], [Group([0, 1, 2])]]
ALONE = [[Group([0])]] * len(PHASES)


class Rank(Trainer):
    """One rank with an extension, of which a new wrapper has a new one; its mixing rate changes."""

    # Calls one parameter after the other before every step.
    model: nn.Sequential | None = None

    def make(self, index: int) -> nn.Parameter:
        made = super().make(index)
        if self.model is not None:
            self.model.append(OneParameter(made))
        return made

    def step(self, lr: float = LR) -> float:
        assert self.model is not None
        self.model(torch.zeros(()))
        self.optimizer.mixing_rate = 0.9 ** (self.optimizer.round % 3)
        return super().step(lr)

    def base(self) -> Optimizer:
        if self.world.options.get("adam"):
            return torch.optim.AdamW([{"params": each} for each in self.groups])
        return super().base()

    def wrap(self, **options: Any) -> DecentOptimWrapper:
        self.model = nn.Sequential(*map(OneParameter, self.params))
        if self.world.options.get("overlap") == "forward":
            options["model"] = self.model
        if "elastic" in self.world.options:
            options |= {"rank": self.rank, "world_size": self.world.size}
        optimizer = super().wrap(bucket_cap_mb=CAP_MB, **options)
        assert len(optimizer.buckets) >= 2
        return optimizer


def together(options: Iterable[dict[str, Any]]) -> dict[str, Any]:
    merged = {name: value for each in options for name, value in each.items()}
    # Refused, as a test of state gossip says.
    refused = {**EXTENSIONS["state gossip"], **PACES["late"]}
    return merged | {"overlap": True} if refused.items() <= merged.items() else merged


def cases(*parameters: dict[str, Any]) -> list[Any]:
    """Every pair of values occurs; options are given together, before everything else."""
    return [
        pytest.param(
            together(value for value in case.values if isinstance(value, dict)),
            *(value for value in case.values if not isinstance(value, dict)),
            id=case.id,
        )
        for case in pairwise(*parameters)
    ]


def world_of(options: dict[str, Any]) -> World:
    return World(3, PHASES, SPECS, options)


def perform_alone(world: World, calls: list[str]) -> list[tuple[Seen, ...]]:
    """What each rank sees that trains without the others."""
    ranks = (Rank(world._replace(size=1, phases=ALONE), rank, None) for rank in range(3))
    return list(zip(*(rank.perform(calls) for rank in ranks), strict=True))


def check_that_the_mean_is_that_of_ranks_alone(
    together: Sequence[tuple[Seen, ...]], apart: Sequence[tuple[Seen, ...]]
) -> None:
    """All that they compute is linear, also their gradients."""
    moved = 0.0
    for ours, theirs in zip(together, apart, strict=True):
        for index in range(len(ours[0].values)):
            here, there = stack(ours, index), stack(theirs, index)
            torch.testing.assert_close(here.mean(0), there.mean(0), rtol=0, atol=1e-12)
            moved = max(moved, float((here - there).abs().max()))
    assert moved > 0.01


# Before parameters are added, nothing may be in flight: what is launched again takes them in.
CALLS = [
    *("step", "step", "averaged", "step", "synchronize", "grow", "thaw", "step"),
    *("average", "step", "average_for_good", "step"),
]
# After the last resumption.
LATER = ["grow", "step", "reload", "step"]


@pytest.mark.parametrize(
    ("options", "first"),
    [
        *cases(EXTENSIONS, PACES, WIRES, VIEWED, {"first": 0, "second": 1, "third": 2}),
        *cases(
            TRACKING_OF_ADAM, {name: PACES[name] for name in ("each step", "late")}, {"second": 1}
        ),
    ],
)
def test_a_run_keeps_the_mean_and_is_resumed_between_any_two_calls_bit_for_bit(
    options: dict[str, Any], first: int
) -> None:
    world = world_of(options)
    straight = perform(world, [*CALLS, *LATER], Rank)
    pauses = ["resume" if place % 3 == first else "copies" for place in range(len(CALLS))]
    pauses += ["copies"] * len(LATER)
    calls = [part for pair in zip(pauses, [*CALLS, *LATER], strict=True) for part in pair]
    resumed = perform(world, calls, Rank)[2::2]
    for call, ours, theirs in zip([*CALLS, *LATER], resumed, straight[1:], strict=True):
        for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert all(map(torch.equal, one.values, other.values)), (call, rank)
    assert not torch.equal(straight[-1][0].values[0], straight[-1][1].values[0])
    if options["overlap"] == "forward":
        plain = perform(
            world._replace(options={**options, "overlap": False}), [*CALLS, *LATER], Rank
        )
        for call, ours, theirs in zip([*CALLS, *LATER], straight[1:], plain[1:], strict=True):
            if call in ("synchronize", "average", "average_for_good"):
                for one, other in zip(ours, theirs, strict=True):
                    assert all(map(torch.equal, one.values, other.values)), call
    if "adam" not in options:
        alone = perform_alone(world, [*CALLS, *LATER])
        check_that_the_mean_is_that_of_ranks_alone(straight, alone)


IN_STEPS = {name: PACES[name] for name in ("each step", "forward")}


@pytest.mark.parametrize("options", cases(EXTENSIONS, IN_STEPS, SOME_WIRES, VIEWED))
def test_the_mean_stays_once_a_lost_rank_has_come_back(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From their values then, each rank goes on alone, too."""
    dead: set[int] = set()
    alive = heartbeat.Heartbeat.alive
    monkeypatch.setattr(
        heartbeat.Heartbeat, "alive", lambda own, rank: rank not in dead and alive(own, rank)
    )
    monkeypatch.setattr("decent_optim_wrapper.elastic.membership.heartbeat._LONGEST_PAUSE", 0.02)
    # The threads build their wrappers in any order.
    monkeypatch.setattr(rendezvous, "key_prefix", lambda number: "the only one")
    elastic = {"elastic": Elastic(store=HashStore(), stale_after=60.0), "timeout": 20}
    world, alone = world_of(options | elastic), world_of(options)
    goal, lost, saved, kept = 10**9, threading.Event(), {}, []

    def main(rank: int, group: dist.ProcessGroup) -> list[Seen]:
        nonlocal goal
        trainer = Rank(world, rank, None)
        kept.append(trainer)
        # A pair is in flight: gloo may delay a rank that fails in the sum of a group.
        trainer.perform(["step"] * 5)
        if rank == 1:
            with pytest.raises(ZeroDivisionError):
                trainer.optimizer.step(lambda: 1 // 0)
            dead.add(rank)
            assert lost.wait(60)
            dead.clear()
            trainer = Rank(world, rank, None)
            kept.append(trainer)
            assert trainer.optimizer.round > 5
            # No rank gets as far before this one has made its next steps.
            goal = trainer.optimizer.round + 6
        deadline = time.monotonic() + 60
        while trainer.optimizer.round < goal:
            assert time.monotonic() < deadline, "rank 1 has not come back"
            trainer.step()
            if trainer.optimizer.members == (0, 2):
                lost.set()
        assert trainer.optimizer.members == (0, 1, 2)
        trainer.synchronize()
        saved[rank] = copy.deepcopy((trainer.copies(), trainer.optimizer.state_dict()))
        trainer.steps = 100
        return trainer.perform(["step"] * 5)

    def train_on_alone(rank: int) -> list[Seen]:
        trainer = Rank(alone._replace(size=1, phases=ALONE), rank, None)
        values, state = saved[rank]
        with torch.no_grad():
            torch._foreach_copy_([*trainer.params], values)
        trainer.optimizer.load_state_dict(state)
        trainer.steps = 100
        return trainer.perform(["step"] * 5)

    rows = list(zip(*run_threads(world.size, main), strict=True))
    apart = list(zip(*map(train_on_alone, range(world.size)), strict=True))
    check_that_the_mean_is_that_of_ranks_alone(rows, apart)


def train(rank: int, group: dist.ProcessGroup, way: str, options: dict[str, Any]) -> Tensor:
    training = modules.Training(rank, group, way, **arguments(options))
    training.train(range(6))
    return training.end()


# A module can also wait at the end of its backward pass.
IN_BACKWARD = {
    **IN_STEPS,
    "late": PACES["late"],
    "at the end": {"overlap": WithinStep(), "gossip_every": 2},
}


@pytest.mark.parametrize("options", cases(EXTENSIONS, IN_BACKWARD, VIEWED))
def test_a_step_inside_the_backward_pass_does_the_same_as_one_behind_it(
    options: dict[str, Any],
) -> None:
    one, other = (
        run_threads(2, partial(train, way=way, options=options)) for way in ("backward", "step")
    )
    torch.testing.assert_close(torch.stack(one), torch.stack(other), rtol=0, atol=1e-13)


# Those that save something.
SAVED: dict[str, dict[str, Any]] = {**TRACKING_OF_ADAM, "outer": EXTENSIONS["outer"]}
EACH_SAVED = pytest.mark.parametrize("extension", SAVED.values(), ids=SAVED)


def extended(
    extension: dict[str, Any], group: dist.ProcessGroup | None = None
) -> tuple[list[Tensor], DecentOptimWrapper]:
    params = make_params()
    base = adamw(params) if extension.get("adam") else sgd(params)
    options = {"topology": "ring", "sync_at_start": False, **arguments(extension)}
    return params, wrap(params, group, base, **options)


@EACH_SAVED
def test_a_state_without_the_extension_starts_it_again(extension: dict[str, Any]) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        first, second, third = (extended(extension, group) for _ in range(3))
        take_steps(first[1], first[0], rank, range(5))
        whole = copy.deepcopy(first[1].state_dict())
        without = {key: value for key, value in whole["gossip"].items() if key != "extensions"}
        bare = {**whole, "gossip": without}
        for (params, optimizer), state in ((second, bare), (third, whole), (first, bare)):
            with torch.no_grad():
                torch._foreach_copy_(params, [param.detach().clone() for param in first[0]])
            optimizer.load_state_dict(copy.deepcopy(state))
        for params, optimizer in (first, second, third):
            take_steps(optimizer, params, rank, range(5, 10))
            optimizer.synchronize()
        return tuple(flatten(params) for params, _ in (first, second, third))

    for first, second, third in run_threads(2, main):
        assert torch.equal(first, second)
        assert (first - third).abs().max() > 1e-4


@EACH_SAVED
def test_a_state_of_an_extension_that_is_not_there_is_dropped_with_a_warning(
    extension: dict[str, Any],
) -> None:
    params, optimizer = extended(extension)
    take_steps(optimizer, params, 0, range(2))
    state = optimizer.state_dict()
    (name,) = state["gossip"]["extensions"]
    _, other = extended({})
    with pytest.warns(UserWarning, match=f"the state of {name} is dropped"):
        other.load_state_dict(state)
    assert other.round == 2
    assert "extensions" not in other.state_dict()["gossip"]


class Recorder(Extension):
    """Notes by which methods it is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []


def noted(name: str) -> Callable[..., Any]:
    """A method that notes its name, and what is said of the round."""

    def method(recorder: Recorder, *args: Any, in_flight: bool = False) -> Any:
        kind = f" {args[0].value}" if name == "arrived" else ""
        recorder.calls.append(name + kind + ", in flight" * in_flight)
        if name in ("mixing", "updating"):
            return nullcontext()
        return ()

    return method


for name in (
    *("plan", "begin_step", "received", "arrived", "mixing", "end_round", "updating", "launch"),
    "kept",
):
    setattr(Recorder, name, noted(name))


@pytest.mark.parametrize(("every", "overlap"), [(1, True), (2, Late(2))])
def test_the_methods_are_called_in_the_documented_order(every: int, overlap: Any) -> None:
    recorder = Recorder()
    params = make_params()
    schedule = Schedule(gossip_every=every, global_avg_every=2)
    optimizer = wrap(params, schedule=schedule, overlap=overlap, extensions=[recorder])
    assert len(optimizer.buckets) == 3
    take_steps(optimizer, params, 0, range(4))
    # The round in flight is launched again, in a step that begins once.
    optimizer.load_state_dict(optimizer.state_dict())
    take_steps(optimizer, params, 0, [4])
    assert recorder.calls.count("begin_step") == 5
    optimizer.global_avg(may_revert=False)
    mixed = [*["mixing", "updating", "launch"] * 2, "mixing", "end_round", "updating", "launch"]
    sent, idle = ["updating", "launch"] * 3, ["updating"] * 3
    expected = {
        1: [
            *("plan", "begin_step", "received", *sent),
            *("begin_step", "received", "arrived gossip", *mixed),
            *("begin_step", "received", "arrived average", *mixed),
            *("begin_step", "received", "arrived gossip", *mixed),
        ],
        2: [
            *("plan", "begin_step", "received", *idle),
            *("begin_step", "received", *sent),
            *("begin_step", "received, in flight", *idle),
            *("begin_step", "received", "arrived average", *mixed),
        ],
    }[every]
    assert recorder.calls[: len(expected)] == expected
    assert recorder.calls[-1] == "kept"
