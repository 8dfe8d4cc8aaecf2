"""The module that steps in its backward pass trains as the wrapper does, with less memory."""

from __future__ import annotations

import math
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import VIEWS, named, pairwise
from dense import mix, train_densely
from modules import (
    accum_adam,
    adamw,
    backward,
    fill,
    flat,
    loss_of,
    make_model,
    sgd,
    train,
    train_by_steps,
    wrap,
    wrap_base,
)
from problem import deviations, nesterov
from ranks import run_processes, run_threads
from restartable_processes import STEP, RestartableProcesses
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.join import Join
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from decent_optim_wrapper import Elastic, Schedule, TopologyFactory
from decent_optim_wrapper.ddp import DecentralizedDataParallel
from decent_optim_wrapper.optim import optim_fn_adamw

STEPS = 7
OPTIMIZERS = {"sgd": sgd, "adamw": adamw, "accum_adam": accum_adam}


def by_backward(rank: int, group: dist.ProcessGroup, optim_fn: Any = sgd, **kw: Any) -> Tensor:
    model = wrap(make_model(), group, optim_fn, **kw)
    train(model, rank, range(STEPS))
    assert model.optimizer.round == STEPS
    model.optimizer.synchronize()
    return flat(model)


def by_steps(rank: int, group: dist.ProcessGroup, optim_fn: Any = sgd, **kw: Any) -> Tensor:
    model = make_model()
    optimizer = wrap_base(model, group, optim_fn, **kw)
    train_by_steps(model, optimizer, rank, range(STEPS))
    optimizer.synchronize()
    return flat(model)


SCHEDULES = {
    "plain": Schedule(),
    "idle steps": Schedule(gossip_every=2, mixing_rate=0.4),
    "averages": Schedule(global_avg_every=3, average_state="average"),
    "outer at averages": Schedule(global_avg_every=3, gossip_every=2, outer=nesterov(0.5, 1.0)),
    "outer": Schedule(gossip_every=2, outer=nesterov(0.5)),
}
IN_BACKWARD = {"in-backward": None, "at-end": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "schedule", "optim_fn", "views", "in_backward"),
    pairwise(
        named("ring", "complete", "alternating-exp-ring"), SCHEDULES, OPTIMIZERS, VIEWS, IN_BACKWARD
    ),
)
def test_it_trains_as_the_wrapper(
    topology: str, schedule: Schedule, optim_fn: Any, views: bool, in_backward: bool | None
) -> None:
    """Bit for bit in pairs; larger groups sum otherwise in other buckets."""
    options: Any = {
        "optim_fn": optim_fn,
        "topology": topology,
        "local_world_size": 2,
        "param_as_bucket_view": views,
        "schedule": schedule,
    }
    ours = run_threads(
        4, lambda rank, group: by_backward(rank, group, update_in_backward=in_backward, **options)
    )
    theirs = run_threads(4, lambda rank, group: by_steps(rank, group, **options))
    if topology == "ring" and schedule.global_avg_every is None:
        assert all(map(torch.equal, ours, theirs))
    else:
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-10, atol=1e-11)
    assert (ours[0] - flat(make_model())).abs().max() > 1e-2
    assert topology == "complete" or not torch.equal(ours[0], ours[-1])


def test_it_mixes_before_the_forward_pass_unless_rounds_take_longer_than_a_step() -> None:
    def main(rank: int, group: dist.ProcessGroup, **options: Any) -> Tensor:
        return by_backward(rank, group, topology="ring", **options)

    def delays(rank: int, group: dist.ProcessGroup) -> list[str]:
        elsewhere = nn.Parameter(torch.ones(3))
        with_another = partial(wrap, optim_fn=lambda named: sgd([*named, ("other", elsewhere)]))
        late = partial(wrap, schedule=Schedule(gossip_every=2, staleness=2))
        return [
            repr(each(make_model(), group, topology="ring", overlap=None).optimizer)
            for each in (late, with_another)
        ]

    unsaid, forward, delayed = (
        run_threads(2, partial(main, overlap=overlap)) for overlap in (None, "forward", True)
    )
    assert all(map(torch.equal, unsaid, forward))
    assert not any(map(torch.equal, unsaid, delayed))
    for shown in run_threads(2, delays)[0]:
        assert "overlap: True" in shown


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["plain", "outer at averages"])
def test_larger_groups_train_as_with_a_wrapper_of_the_same_buckets_bit_for_bit(
    schedule: str,
) -> None:
    options: Any = {"topology": "alternating-exp-ring", "local_world_size": 2}
    options |= {"optim_fn": adamw, "schedule": SCHEDULES[schedule]}
    ours = run_threads(4, lambda rank, group: by_backward(rank, group, **options))
    options["param_as_bucket_view"] = True
    equal = run_threads(4, lambda rank, group: by_steps(rank, group, reverse=True, **options))
    assert all(map(torch.equal, ours, equal))
    assert (ours[0] - flat(make_model())).abs().max() > 1e-2


@pytest.mark.parametrize(("name", "optim_fn"), [("ring", adamw), ("complete", sgd)])
def test_it_follows_the_dense_oracle(name: str, optim_fn: Any) -> None:
    topology = TopologyFactory.create(name, 4)
    models = [make_model() for _ in range(4)]
    bases = [optim_fn(list(model.named_parameters())) for model in models]

    worlds = [list(model.parameters()) for model in models]

    def compute(rank: int, step: int) -> None:
        bases[rank].zero_grad()
        backward(loss_of(models[rank], rank, step))

    expected = train_densely(
        worlds,
        STEPS,
        True,
        compute,
        update=lambda rank, step: bases[rank].step(),
        land=lambda step: mix(worlds, topology.mixing_matrix(step)),
    )
    rows = run_threads(
        4, lambda rank, group: by_backward(rank, group, optim_fn=optim_fn, topology=topology)
    )
    torch.testing.assert_close(torch.stack(rows), expected, rtol=1e-11, atol=1e-12)


class Peak:
    """Bytes of gradients whenever one is complete, before anything is done with it."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes = 0
        self._params = list(model.parameters())
        for param in self._params:
            param.register_post_accumulate_grad_hook(self.look)  # type: ignore[no-untyped-call]

    def look(self, _: Tensor) -> None:
        live = sum(p.grad.nbytes for p in self._params if p.grad is not None)
        self.bytes = max(self.bytes, live)


@pytest.mark.parametrize(("optim_fn", "views"), [(sgd, False), (optim_fn_adamw, True)])
def test_no_more_gradients_than_those_of_one_bucket_are_there_at_a_time(
    optim_fn: Any, views: bool
) -> None:
    """Also where the biases are a group of their own."""

    def main(rank: int, group: dist.ProcessGroup) -> None:
        module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
        fill(module)
        peak = Peak(module)
        largest = 16 * 16 * 4
        options: Any = {"param_as_bucket_view": views, "topology": "ring"}
        model = wrap(module, group, optim_fn, bucket_size_in_mb=3000 / 2**20, **options)
        buckets = model.optimizer.buckets
        for step in range(3):
            backward(model(torch.ones(2, 16) * step).sum())
            assert all(param.grad is None for param in model.parameters())
        total = sum(bucket.nbytes for bucket in buckets)
        filled = [id(member) for bucket in buckets for member in bucket.members]
        assert filled == [id(param) for param in reversed(list(model.parameters()))]
        assert 0 < peak.bytes <= max(bucket.nbytes for bucket in buckets) + largest < total / 3

    run_threads(2, main)


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_at_lr_zero_the_mean_stays_from_the_first_round_on(topology: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        model = wrap(
            make_model(seed=rank),
            group,
            lambda named: torch.optim.SGD(named, lr=0.0),
            topology=topology,
            sync_at_start=False,
        )
        history = [flat(model)]
        for step in range(8):
            backward(loss_of(model, rank, step))
            history.append(flat(model))
        return torch.stack(history)

    spread = deviations(run_threads(4, main)).norm(dim=(1, 2))
    # The first step has nothing to mix yet, the second one has.
    assert spread[1] == spread[0] > 1
    assert spread[2] < 0.9 * spread[0]


def test_an_average_before_the_first_and_the_second_step_works() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = wrap(make_model(seed=rank), group, topology="ring", sync_at_start=False)
        for step in range(2):
            own = flat(model)
            distance = model.global_avg(return_d2c=True)
            average = flat(model)
            assert distance is not None
            assert distance > 0.1
            assert distance == pytest.approx((own - average).norm().item(), rel=1e-12)
            model.revert_global_avg()
            assert torch.equal(flat(model), own)
            train(model, rank, range(step, step + 1))
            assert not torch.equal(flat(model), own)
        assert model.global_avg(will_revert=False) is None
        with pytest.raises(RuntimeError, match="expects an average in place"):
            model.revert_global_avg()

    run_threads(2, main)


def test_an_average_that_is_kept_is_where_the_next_step_starts() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        rows = []
        for return_d2c in (True, False):
            model = wrap(make_model(), group, topology="ring")
            train(model, rank, range(3))
            distance = model.global_avg(will_revert=False, return_d2c=return_d2c)
            assert (distance is not None and distance > 0) is return_d2c
            with pytest.raises(RuntimeError, match="expects an average in place"):
                model.revert_global_avg()
            train(model, rank, range(3, 5))
            rows.append(flat(model))
        return rows

    for one, other in run_threads(4, main):
        assert torch.equal(one, other)


@pytest.mark.parametrize("stop", [0, 4])
def test_a_resumed_run_continues_bit_for_bit(stop: int, tmp_path: Path) -> None:
    def start(group: dist.ProcessGroup, seed: int) -> DecentralizedDataParallel:
        def schedule(base: torch.optim.Optimizer) -> CosineAnnealingLR:
            return CosineAnnealingLR(base, T_max=STEPS)

        scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)
        options: Any = {"lr_scheduler_fn": schedule, "scaler": scaler, "topology": "one-peer-exp"}
        return wrap(make_model(seed), group, adamw, **options)

    def end(model: DecentralizedDataParallel, rank: int) -> Tensor:
        train(model, rank, range(stop, STEPS))
        assert model.scaler is not None
        assert model.scaler.get_scale() == 64.0 * 2 ** (STEPS // 2)
        return flat(model)

    def uninterrupted(rank: int, group: dist.ProcessGroup) -> Tensor:
        model = start(group, 0)
        train(model, rank, range(stop))
        torch.save(model.state_dict(), tmp_path / f"{rank}.pt")
        return end(model, rank)

    def resumed(rank: int, group: dist.ProcessGroup) -> Tensor:
        model = start(group, 7)
        model.load_state_dict(torch.load(tmp_path / f"{rank}.pt", weights_only=True))
        assert model.optimizer.round == stop
        return end(model, rank)

    expected = run_threads(4, uninterrupted)
    assert all(map(torch.equal, run_threads(4, resumed), expected))
    assert not torch.equal(expected[0], flat(make_model()))


def survive(rank: int, world_size: int, store: Store, report: Any) -> tuple[Any, list[float]]:
    options: Any = {"rank": rank, "world_size": world_size, "timeout": 20.0}
    model = wrap(make_model(), None, topology="ring", elastic=Elastic(store=store), **options)
    while (round := model.optimizer.round) < 10:
        if (rank, round) == (1, 4):
            report("result", None)
            os._exit(1)
        train(model, rank, range(round, round + 1))
    model.optimizer.synchronize()
    return model.optimizer.members, flat(model).tolist()


@pytest.mark.slow
def test_the_others_train_on_without_a_rank_that_dies() -> None:
    with RestartableProcesses(4, survive) as processes:
        results = [processes.wait_for(rank, "result") for rank in range(4)]
    assert [result and result[0] for result in results] == [(0, 2, 3), None, (0, 2, 3), (0, 2, 3)]
    for rank in (0, 2, 3):
        assert all(map(math.isfinite, results[rank][1]))
        moved = torch.tensor(results[rank][1]) - flat(make_model())
        assert moved.abs().max() > 1e-2


def stand_still(rank: int, world_size: int, store: Store, report: Any) -> Any:
    options: Any = {"rank": rank, "world_size": world_size, "timeout": 2.0}
    options["param_as_bucket_view"] = True
    options["lr_scheduler_fn"] = lambda base: LambdaLR(base, lambda step: 1 / (1 + step / 100))
    model = wrap(make_model(), None, topology="greedy", elastic=Elastic(store=store), **options)
    while not store.check(["finish"]) or model.optimizer.round < int(store.get("finish")):
        round = model.optimizer.round
        train(model, rank, range(round, round + 1))
        if model.optimizer.round % 10 == 0:
            report(f"round {model.optimizer.round}", model.optimizer.members)
        time.sleep(STEP)
    takeovers = model.optimizer.takeovers
    model.global_avg(will_revert=False)
    return model.optimizer.members, takeovers, flat(model).tolist(), model.get_lr()


@pytest.mark.slow
def test_a_backward_pass_in_which_its_rank_comes_back_ends_well() -> None:
    with RestartableProcesses(3, stand_still) as processes:
        processes.wait_for(2, "round 10")
        processes.signal(2, signal.SIGSTOP)
        processes.wait_for_members(0, (0, 1))
        # Longer than the timeout: its own waits are over when it goes on.
        time.sleep(2)
        processes.signal(2, signal.SIGCONT)
        processes.wait_for_members(0, (0, 1, 2))
        processes.finish()
        results = [processes.wait_for(rank, "result") for rank in range(3)]
    assert [members for members, *_ in results] == [(0, 1, 2)] * 3
    assert results[2][1] >= 1
    # The schedule is that of the others, also on the rank that has missed some of their steps.
    assert len({rate for *_, rate in results}) == 1
    for _, _, values, _ in results:
        assert values == pytest.approx(results[0][2], abs=1e-12)
        assert all(map(math.isfinite, values))


def in_processes(rank: int) -> tuple[list[float], int]:
    dist.init_process_group("gloo")
    try:
        model = wrap(make_model(seed=rank), None, topology="ring")
        with Join([model.optimizer]):
            train(model, rank, range(3 + 2 * rank))
        model.optimizer.synchronize()
        return flat(model).tolist(), model.optimizer.round
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_real_processes_with_uneven_data_train_together() -> None:
    (one, rounds), (other, _) = run_processes(2, in_processes)
    assert rounds == 5
    assert one == pytest.approx(other, rel=1e-12)
    assert (torch.tensor(one) - flat(make_model())).abs().max() > 1e-2


SMALL_CAP_MB = 24 / 2**20


def own_names() -> DecentralizedDataParallel:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return wrap(model, None, bucket_size_in_mb=SMALL_CAP_MB)


def test_parameters_and_buffers_are_found_by_the_names_under_which_they_are_listed() -> None:
    model = own_names()
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    assert set(params) | set(buffers) == set(model.state_dict()["model"])
    for own, get in ((params, model.get_parameter), (buffers, model.get_buffer)):
        assert own
        for name, tensor in own.items():
            assert get(name) is tensor
            # As named_modules() calls them, for code that puts the two together.
            assert get(f"module.{name}") is tensor
        for name in ("missing.weight", f"{next(iter(own)).rpartition('.')[0]}.missing", "missing"):
            with pytest.raises(AttributeError, match="missing"):
                get(name)


@pytest.mark.parametrize("nested", [True, False])
def test_functional_call_says_that_it_takes_the_model(nested: bool) -> None:
    model = own_names() if nested else wrap(nn.Linear(3, 2), None, bucket_size_in_mb=SMALL_CAP_MB)
    before, inputs = flat(model), torch.ones(4, 3)
    zeros = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    with pytest.raises(AttributeError) as error:
        torch.func.functional_call(model, zeros, inputs)
    # Torch puts an error of its own before ours.
    texts = [str(each) for each in (error.value, error.value.__cause__)]
    assert any("use .module" in text for text in texts)
    assert torch.equal(flat(model), before)
    assert not torch.func.functional_call(model.module, zeros, inputs).any()
    model(inputs).square().mean().backward()
    assert not torch.equal(flat(model), before)


def test_an_attribute_of_the_model_is_looked_for_in_the_module() -> None:
    model: Any = own_names()
    model.module.note = "mine"
    assert not hasattr(model, "note")
    with pytest.raises(AttributeError, match=r"'note', but its model has: use \.module"):
        _ = model.note
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = model.nothing


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        (None, TypeError, r"rank 0: .* state_dict\(\) of a DecentralizedDataParallel .* got None"),
        (make_model().state_dict(), ValueError, r"expected the states of \['model', 'optimizer'\]"),
    ],
)
def test_a_state_of_something_else_is_refused(state: Any, error: Any, text: str) -> None:
    model = own_names()
    with pytest.raises(error, match=text):
        model.load_state_dict(state)


def test_modes_reach_the_model() -> None:
    model: Any = own_names()
    assert [*model.named_parameters()] == [*model.module.named_parameters()]
    assert [*model.parameters()] == [*model.module.parameters()]
    assert not model.eval().training
    assert not model.module[1].training
    assert model.train() is model
    assert model.module[1].training


def test_it_is_no_part_of_another_modules_state_and_is_wrapped_once() -> None:
    holder = nn.ModuleDict({"inner": own_names()})
    with pytest.raises(TypeError, match="wrap the outermost module"):
        holder.state_dict()
    with pytest.raises(TypeError, match="not wrapped yet"):
        wrap(own_names(), None)


class Doubled(torch.optim.SGD):
    """A class of which nobody knows whether its update is per parameter."""


def doubled(named: Any) -> torch.optim.Optimizer:
    return Doubled([param for _, param in named], lr=0.1)


def hooked(named: Any) -> torch.optim.Optimizer:
    base = sgd(named)
    base.register_step_post_hook(lambda *_: None)
    return base


def lbfgs(named: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([param for _, param in named])


@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (TypeError, "model expects a torch.nn.Module, got int", {"model": 3}),
        (TypeError, "optimizer expects a torch.optim.Optimizer", {"optim_fn": lambda named: 3}),
        (TypeError, "optim_fn expects a", {"optim_fn": sgd(make_model().parameters())}),
        (TypeError, "scaler expects", {"scaler": True}),
        (TypeError, "grad_clip_norm expects a number", {"grad_clip_norm": "1"}),
        (ValueError, "grad_clip_norm must be 0 or more", {"grad_clip_norm": -1}),
        (TypeError, "update_in_backward expects True, False or None", {"update_in_backward": 1}),
        (ValueError, 'overlap expects True or "forward" here', {"overlap": False}),
        (TypeError, "takes no bucket_cap_mb: bucket_size_in_mb", {"bucket_cap_mb": 5}),
        (TypeError, "local_world_size", {"_local_world_size": 2}),
        (ValueError, "LBFGS evaluates its closure", {"optim_fn": lbfgs}),
        (ValueError, "no step hooks, got SGD", {"optim_fn": hooked, "update_in_backward": True}),
        (
            ValueError,
            r"can be updated bucket by bucket .* got Doubled",
            {"optim_fn": doubled, "update_in_backward": True},
        ),
        (
            ValueError,
            "lr_scheduler_fn expects a scheduler that steps without a metric",
            {"lr_scheduler_fn": torch.optim.lr_scheduler.ReduceLROnPlateau},
        ),
    ],
)
def test_wrong_arguments_are_refused(error: Any, match: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=match):
        DecentralizedDataParallel(**{"model": make_model(), "optim_fn": sgd, **changes})


def test_an_unknown_base_is_updated_at_the_end_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="got Doubled.*updated at the end"):
        model = wrap(make_model(), None, doubled)
    train(model, 0, range(2))
    assert all(p.grad is None for p in model.parameters())
    assert not torch.equal(flat(model), flat(make_model()))
