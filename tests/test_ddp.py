"""The module that steps in its backward pass: memory, averages, states, names, and its errors."""

from __future__ import annotations

import copy
import math
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modules import (
    Training,
    adamw,
    backward,
    fill,
    flat,
    loss_of,
    make_model,
    sgd,
    train,
    wrap,
    wrap_base,
)
from problem import in_one_call
from ranks import run_threads
from restartable_processes import STALE_AFTER, STEP, RestartableProcesses
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from decent_optim_wrapper import DecentOptimWrapper, Elastic, Late, Schedule
from decent_optim_wrapper.ddp import DecentralizedDataParallel
from decent_optim_wrapper.optim import optim_fn_adamw

STEPS = 7
OTHER = make_model()


class Personal(nn.Module):
    """A trunk behind an expert and a buffer that have another shape on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.expert = nn.Linear(4, 3 + rank, bias=rank == 1, dtype=torch.float64)
        self.expert.register_buffer("seen", torch.zeros(1 + rank))
        self.trunk = make_model()
        fill(self, seed=rank)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.trunk(inputs) + self.expert(inputs)[:, :3]
        return out


@pytest.mark.parametrize("in_backward", [True, False])
@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler")
def test_a_scheduler_of_the_users_on_its_optimizer_knows_that_a_step_was_made(
    in_backward: bool,
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> list[float]:
        model = wrap(make_model(), group, sgd, update_in_backward=in_backward)
        before, rate = flat(model), model.optimizer.param_groups[0]["lr"]
        scheduler = LambdaLR(model.optimizer, lambda step: 0.5**step)
        for step in range(3):
            backward(loss_of(model, rank, step))
            scheduler.step()
        assert not torch.equal(before, flat(model))
        return [group["lr"] / rate for group in model.optimizer.param_groups]

    for rates in run_threads(2, main):
        assert rates == [0.125] * len(rates)


@pytest.mark.parametrize(
    ("way", "overlap"), [("backward", "forward"), ("end", True), ("step", "forward")]
)
def test_what_is_personal_to_a_rank_is_neither_compared_nor_mixed(way: str, overlap: Any) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        model = Personal(rank)
        start, own = flat(model.trunk), [each.clone() for each in model.expert.parameters()]
        options: Any = {"overlap": overlap, "topology": "ring"}
        if way == "step":
            optimizer = wrap_base(model, group, lambda _: sgd(model.trunk.parameters()), **options)
            called: Any = model
        else:
            options["update_in_backward"] = way == "backward"
            ignored = (each for each in (*model.expert.parameters(), *model.expert.buffers()))
            called = wrap(model, group, ignored_params=ignored, **options)
            optimizer = called.optimizer
        assert all(map(torch.equal, model.expert.parameters(), own))
        personal = torch.optim.SGD(model.expert.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            personal.zero_grad()
            backward(loss_of(called, rank, step))
            if way == "step":
                optimizer.step()
            assert all(param.grad is not None for param in model.expert.parameters())
            personal.step()
        optimizer.global_avg(may_revert=False)
        moved = [*model.expert.parameters(), flat(model.trunk)]
        assert not any(map(torch.equal, moved, [*own, start]))
        return [flat(model.trunk), model.expert.weight.detach()[:3]]

    (one, first), (other, second) = run_threads(2, main)
    assert torch.equal(one, other)
    assert not torch.equal(first, second)


class OfNoLength(nn.Sequential):
    """A model that is false where a bool is expected, as one with nothing remembered yet."""

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("in_backward", [False, True])
def test_buckets_have_the_order_of_a_model_of_length_0(in_backward: bool) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        module = OfNoLength(*(nn.Linear(16, 16) for _ in range(6)))
        fill(module)
        params = [*module.parameters()]
        size = 3000 / 2**20
        if in_backward:
            buckets = wrap(module, group, sgd, bucket_size_in_mb=size).optimizer.buckets
        else:
            options: Any = {"process_group": group, "bucket_cap_mb": size}
            base = sgd([*params[4:], *params[:4]])
            buckets = DecentOptimWrapper(base, model=module, **options).buckets
        assert len(buckets) > 1
        members = [member for bucket in buckets for member in bucket.members]
        assert [*map(id, members)] == [*map(id, params[:: -1 if in_backward else 1])]

    run_threads(2, main)


@pytest.mark.parametrize(("optim_fn", "views"), [(sgd, False), (optim_fn_adamw, True)])
def test_only_the_gradients_of_one_bucket_exist_at_a_time(optim_fn: Any, views: bool) -> None:
    """Also where the biases are a group of their own."""

    def main(rank: int, group: dist.ProcessGroup) -> None:
        module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
        fill(module)
        params, peak = [*module.parameters()], 0

        def look(_: Tensor) -> None:
            # Whenever a gradient is complete, before anything is done with it.
            nonlocal peak
            peak = max(peak, sum(p.grad.nbytes for p in params if p.grad is not None))

        for param in params:
            param.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
        options: Any = {"param_as_bucket_view": views, "topology": "ring"}
        model = wrap(module, group, optim_fn, bucket_size_in_mb=3000 / 2**20, **options)
        for step in range(3):
            backward(model(torch.ones(2, 16) * step).sum())
            assert all(param.grad is None for param in params)
        buckets = [bucket.members for bucket in model.optimizer.buckets]
        assert [*map(id, sum(buckets, ()))] == [*map(id, reversed(params))]
        sizes = [sum(member.nbytes for member in members) for members in buckets]
        # Of the largest parameter, another gradient may be there.
        assert 0 < peak <= max(sizes) + 16 * 16 * 4 < sum(sizes) / 3

    run_threads(2, main)


@pytest.mark.parametrize("averaged", [True, False])
def test_an_average_is_measured_and_reverted_or_kept_and_is_one_of_buffers_if_asked(
    averaged: bool,
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        fill(module, seed=rank)
        running = module.get_buffer("1.running_mean").fill_(float(rank + 1))
        model = wrap(module, group, sync_buffer_in_global_avg=averaged)
        assert running[0] == 1, "the values of rank 0"
        train(model, rank, range(2))
        running.fill_(float(rank + 1))
        own = flat(model)
        distance = model.global_avg(return_d2c=True)
        moved = (own - flat(model)).norm().item()
        assert distance == pytest.approx(moved, rel=1e-12)
        assert moved > 1e-2
        assert running[0] == (1.5 if averaged else rank + 1)
        model.revert_global_avg()
        assert torch.equal(flat(model), own)
        assert running[0] == rank + 1
        assert model.global_avg(will_revert=False) is None
        with pytest.raises(RuntimeError, match="expects an average in place"):
            model.revert_global_avg()
        return flat(model)

    assert torch.equal(*run_threads(2, main))


def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    stop = 4

    def main(rank: int, group: dist.ProcessGroup) -> None:
        def start(seed: int) -> DecentralizedDataParallel:
            scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)
            options: Any = {"scaler": scaler, "topology": "one-peer-exp"}
            options["lr_scheduler_fn"] = lambda base: CosineAnnealingLR(base, T_max=STEPS)
            return wrap(make_model(seed), group, adamw, **options)

        first, second = start(seed=0), start(seed=7)
        train(first, rank, range(stop))
        torch.save(first.state_dict(), tmp_path / f"{rank}.pt")
        second.load_state_dict(torch.load(tmp_path / f"{rank}.pt", weights_only=True))
        for model in (first, second):
            assert model.optimizer.round == stop
            train(model, rank, range(stop, STEPS))
            assert model.scaler is not None
            assert model.scaler.get_scale() == 64.0 * 2 ** (STEPS // 2)
        assert torch.equal(flat(first), flat(second))
        assert not torch.equal(flat(first), flat(make_model()))

    run_threads(4, main)


@pytest.mark.parametrize("in_backward", [True, False])
def test_a_state_that_is_saved_after_a_step_has_all_that_belongs_to_it(in_backward: bool) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        def start() -> DecentralizedDataParallel:
            options: Any = {"scaler": GradScaler("cpu", init_scale=64.0, growth_interval=1)}
            options["lr_scheduler_fn"] = lambda base: CosineAnnealingLR(base, T_max=STEPS)
            return wrap(make_model(), group, sgd, update_in_backward=in_backward, **options)

        first, second = start(), start()
        saved: list[Any] = []
        first.optimizer.after_step(lambda: saved.append(copy.deepcopy(first.state_dict())))
        train(first, rank, range(STEPS))
        assert [state["scheduler"]["last_epoch"] for state in saved] == [*range(1, STEPS + 1)]
        second.load_state_dict(saved[3])
        train(second, rank, range(4, STEPS))
        assert torch.equal(flat(first), flat(second))
        assert second.scaler is not None
        assert second.scaler.get_scale() == 64.0 * 2**STEPS

    run_threads(2, main)


@pytest.mark.parametrize("change", ["added", "rebuilt"])
@pytest.mark.parametrize(
    "options", [{}, {"overlap": Late(2), "schedule": Schedule(gossip_every=2)}]
)
def test_buckets_that_are_replaced_in_flight_are_mixed_when_the_backward_pass_has_read_them(
    change: str, options: dict[str, Any]
) -> None:
    options = {"overlap": True, "param_as_bucket_view": False, **options}

    def main(rank: int, group: dist.ProcessGroup, way: str) -> Tensor:
        training = Training(rank, group, way, **options)
        optimizer = training.optimizer
        training.train(range(3))
        assert optimizer.state_dict()["gossip"]["in_flight"]
        if change == "added":
            late = nn.Linear(4, 4, dtype=torch.float64)
            fill(late)
            training.model.insert(0, late)
            optimizer.add_param_group({"params": [*late.named_parameters("late")]})
        else:
            optimizer.rebuild_buckets()
        before = flat(training.model)
        training.train(range(3, STEPS))
        optimizer.synchronize()
        assert (flat(training.model) - before).abs().max() > 1e-3
        return flat(training.model)

    inside, behind = (run_threads(4, partial(main, way=way)) for way in ("backward", "step"))
    assert all(map(torch.equal, inside, behind))
    assert not torch.equal(inside[0], inside[2])


TIMEOUT = 2.0


def stand_still(rank: int, world_size: int, store: Store, report: Any) -> Any:
    options: Any = {"rank": rank, "world_size": world_size, "timeout": TIMEOUT}
    options["param_as_bucket_view"] = True
    options["lr_scheduler_fn"] = lambda base: LambdaLR(base, lambda step: 1 / (1 + step / 100))
    options["elastic"] = Elastic(store=store, stale_after=STALE_AFTER)
    model = wrap(make_model(), None, topology="greedy", **options)
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
        stopped = time.monotonic()
        processes.wait_for_members(0, (0, 1))
        # Its own waits are over when it goes on.
        time.sleep(max(0.0, stopped + TIMEOUT + 0.1 - time.monotonic()))
        processes.signal(2, signal.SIGCONT)
        processes.wait_for_members(0, (0, 1, 2))
        processes.finish()
        results = processes.results()
    assert [members for members, *_ in results] == [(0, 1, 2)] * 3
    assert results[2][1] >= 1
    # The schedule is that of the others, also on the rank that has missed some of their steps.
    assert len({rate for *_, rate in results}) == 1
    for _, _, values, _ in results:
        assert values == pytest.approx(results[0][2], abs=1e-12)
        assert all(map(math.isfinite, values))


def norms() -> DecentralizedDataParallel:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return wrap(model, None, bucket_size_in_mb=24 / 2**20)


def test_the_bound_of_a_bucket_may_be_given_by_the_name_of_the_wrapper() -> None:
    def buckets(**options: float) -> int:
        return len(wrap(make_model(), None, **options).optimizer.buckets)

    assert buckets(bucket_cap_mb=1e-5) == buckets(bucket_size_in_mb=1e-5) > buckets() > 1


def test_the_parts_of_the_model_are_found_by_their_own_names_and_have_its_mode() -> None:
    model: Any = norms()
    assert [*model.named_parameters()] == [*model.module.named_parameters()]
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    assert set(params) | set(buffers) == set(model.state_dict()["model"])
    for own, get in ((params, model.get_parameter), (buffers, model.get_buffer)):
        for name, tensor in own.items():
            # The second as named_modules() calls them, for code that puts the two together.
            assert get(name) is get(f"module.{name}") is tensor
        for name in ("missing.weight", f"{next(iter(own)).rpartition('.')[0]}.missing", "missing"):
            with pytest.raises(AttributeError, match="missing"):
                get(name)
    assert not model.eval().training
    assert not model.module[1].training
    assert model.train() is model
    assert model.module[1].training


@pytest.mark.parametrize("nested", [True, False])
def test_functional_call_says_that_it_takes_the_model(nested: bool) -> None:
    model = norms() if nested else wrap(nn.Linear(3, 2), None, bucket_size_in_mb=1e-5)
    before, inputs = flat(model), torch.ones(4, 3)
    zeros = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    with pytest.raises(AttributeError) as error:
        torch.func.functional_call(model, zeros, inputs)
    # Torch puts an error of its own before ours.
    texts = [str(each) for each in (error.value, error.value.__cause__)]
    assert any("use .module" in text for text in texts)
    assert torch.equal(flat(model), before)
    assert not torch.func.functional_call(model.module, zeros, inputs).any()


@pytest.mark.parametrize(
    ("error", "match", "use"),
    [
        (AttributeError, r"'note', but its model has: use \.module", lambda model: model.note),
        (
            ValueError,
            r"expected the states of \['model', 'optimizer'\]",
            lambda model: model.load_state_dict(OTHER.state_dict()),
        ),
        (TypeError, "wrap the outermost", lambda model: nn.ModuleDict({"a": model}).state_dict()),
        (TypeError, "not wrapped yet", lambda model: wrap(model, None)),
    ],
)
def test_what_the_module_is_not_is_an_error(error: Any, match: str, use: Any) -> None:
    model: Any = norms()
    model.module.note = "mine"
    assert not hasattr(model, "note")
    with pytest.raises(error, match=match):
        use(model)


class Doubled(torch.optim.SGD):
    """A class of which nobody knows whether its update is per parameter."""


doubled = partial(Doubled, lr=0.1)


def hooked(named: Any) -> torch.optim.Optimizer:
    return in_one_call(sgd(named))


@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (TypeError, "model expects a torch.nn.Module, got 3", {"model": 3}),
        (TypeError, "optimizer expects a torch.optim.Optimizer", {"optim_fn": lambda named: 3}),
        (
            TypeError,
            r"as partial\(AdamW, lr=1e-3\) does, got .*SGD",
            {"optim_fn": torch.optim.SGD(OTHER.parameters())},
        ),
        (TypeError, "grad_clip_norm expects a number", {"grad_clip_norm": "1"}),
        (ValueError, "grad_clip_norm must be 0 or more", {"grad_clip_norm": -1}),
        (TypeError, "update_in_backward expects True, False or None", {"update_in_backward": 1}),
        (ValueError, "ignored_params expects .* of the model", {"ignored_params": [torch.ones(1)]}),
        (ValueError, "LBFGS evaluates its closure", {"optim_fn": torch.optim.LBFGS}),
        (ValueError, "no step hooks, .*sgd.SGD", {"optim_fn": hooked, "update_in_backward": True}),
        (ValueError, "bucket .*ddp.Doubled", {"optim_fn": doubled, "update_in_backward": True}),
    ],
)
def test_wrong_arguments_are_refused(error: Any, match: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=match):
        DecentralizedDataParallel(**{"model": make_model(), "optim_fn": sgd, **changes})


def test_an_unknown_base_is_updated_at_the_end_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"got a <class '.*Doubled'>.*updated at the end"):
        model = wrap(make_model(), None, doubled)
    train(model, 0, range(2))
    assert all(p.grad is None for p in model.parameters())
    assert not torch.equal(flat(model), flat(make_model()))
