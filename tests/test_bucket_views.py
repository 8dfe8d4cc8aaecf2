"""Parameters that are views of the buckets: who notices that their values change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import named, pairwise
from modules import batch, fill, flat, make_model, train, wrap_base
from modules import wrap as wrap_module
from problem import (
    CODED,
    MODES,
    TINY_CAP_MB,
    backward,
    flatten,
    in_one_call,
    make_params,
    nesterov,
    sgd,
    take_steps,
)
from ranks import run_threads
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import FakeTensorMode

from decent_optim_wrapper import DecentOptimWrapper, Schedule
from decent_optim_wrapper.ddp.module import wants_views

TRAVEL = {name: (MODES | CODED)[name] for name in ("copies", "views", "bf16-views", "int8")}


def wrap(params: list[Tensor], group: dist.ProcessGroup | None = None, **kw: Any) -> Any:
    kw.setdefault("bucket_cap_mb", TINY_CAP_MB)
    kw.setdefault("topology", "ring")
    return DecentOptimWrapper(kw.pop("base", None) or sgd(params), process_group=group, **kw)


def synchronize(optimizer: DecentOptimWrapper) -> None:
    optimizer.synchronize()


def keep_average(optimizer: DecentOptimWrapper) -> None:
    optimizer.global_avg(may_revert=False)


def put_average(optimizer: DecentOptimWrapper) -> None:
    optimizer.global_avg()


def average_and_revert(optimizer: DecentOptimWrapper) -> None:
    with optimizer.averaged():
        pass


def step_without_a_gradient(optimizer: DecentOptimWrapper) -> None:
    optimizer.zero_grad()
    optimizer.step()


WRITES = [synchronize, keep_average, put_average, average_and_revert, step_without_a_gradient]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "topology"), pairwise(TRAVEL, named("ring", "complete")))
def test_a_backward_pass_notices_that_values_it_saved_were_mixed(
    mode: dict[str, Any], topology: str
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        fill(model, seed=rank)
        params: list[Tensor] = list(model.parameters())
        optimizer = wrap(
            params,
            group,
            topology=topology,
            base=optim.SGD(params, lr=0.1),
            sync_at_start=False,
            **mode,
        )
        assert len(optimizer.buckets) > 1
        x = batch(rank, 0, 2, 4, dtype=torch.float32)
        for write in WRITES:
            for _ in range(2):
                model(x).square().sum().backward()
                optimizer.step()
            loss = model(x).square().sum()
            before = flatten(params)
            write(optimizer)
            assert write is average_and_revert or not torch.equal(flatten(params), before)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            # What is computed after the writing is fine.
            if optimizer.is_averaged:
                optimizer.revert_global_avg()
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.synchronize()

    run_threads(4, main)


@pytest.mark.parametrize("mode", TRAVEL.values(), ids=TRAVEL)
def test_averages_and_mixing_work_under_inference_mode(mode: dict[str, Any]) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> bool:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, topology="ring", sync_at_start=False, **mode)
        before = flatten(params)
        for step in range(2):
            backward(params, rank, step)
            optimizer.step()
            with torch.inference_mode():
                optimizer.synchronize()
                with optimizer.averaged():
                    optimizer.consensus_distance()
        backward(params, rank, 2)
        optimizer.step()
        optimizer.synchronize()
        return torch.equal(flatten(params), before)

    assert run_threads(2, main) == [False, False]


def clamp(param: Tensor) -> None:
    with torch.no_grad():
        param.clamp_(-0.01, 0.01)


def swap(param: Tensor) -> None:
    """As an average of the values does that is put in place and taken out again."""
    with torch.no_grad():
        own = param.clone()
        param.mul_(2)
        param.copy_(own)


def change_a_part(param: Tensor) -> None:
    param.detach()[0] = 1


def change_in_a_list(param: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_add_([param], 1.0)


CHANGES = [clamp, swap, change_a_part, change_in_a_list]
NOTICED = r"the values of 0\.2 were changed .* call synchronize\(\) before"


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_values_changed_while_they_travel_are_named_by_whatever_comes_next(topology: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params(seed=rank)
        optimizer = wrap(
            params, group, topology=topology, sync_at_start=False, param_as_bucket_view=True
        )
        saved = optimizer.state_dict()
        for change in CHANGES:
            take_steps(optimizer, params, rank, range(2))
            change(params[2])
            before = flatten(params)
            for call in (
                optimizer.step,
                optimizer.synchronize,
                optimizer.global_avg,
                optimizer.consensus_distance,
                optimizer.step,
            ):
                with pytest.raises(RuntimeError, match=rf"rank {rank}: .*{NOTICED}"):
                    call()
            assert torch.equal(flatten(params), before)
            optimizer.load_state_dict(saved)
        backward(params, rank, 0)
        optimizer.step()
        optimizer.synchronize()
        assert not torch.equal(flatten(params), before)

    run_threads(4, main)


def test_values_changed_before_a_backward_pass_that_steps_are_named_in_it() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = wrap_module(make_model(), group, topology="ring")
        train(model, rank, range(2))
        clamp(model.module.get_parameter("2.weight"))
        before = flat(model)
        with pytest.raises(RuntimeError, match=r"the values of 2\.weight were changed"):
            train(model, rank, range(2, 3))
        assert torch.equal(flat(model), before)
        model.load_state_dict(model.state_dict())
        train(model, rank, range(3, 5))
        assert not torch.equal(flat(model), before)

    run_threads(2, main)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {"param_as_bucket_view": False}),
        (2, {"param_as_bucket_view": False, "comm_dtype": torch.bfloat16}),
        (2, {"param_as_bucket_view": True, "overlap": False}),
        (2, {"param_as_bucket_view": True, "schedule": Schedule(gossip_every=2)}),
        (2, {"param_as_bucket_view": True, "schedule": Schedule(gossip_every=2, staleness=2)}),
        (1, {"param_as_bucket_view": True}),
    ],
    ids=["copies", "copies in bf16", "no overlap", "idle", "frozen", "alone"],
)
def test_values_may_be_changed_where_none_of_them_travel(
    world_size: int, options: dict[str, Any]
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params()
        optimizer = wrap(params, group, **options)
        assert len(optimizer.buckets) > 1
        for step in range(2 * len(CHANGES)):
            before = flatten(params)
            backward(params, rank, step)
            optimizer.step()
            assert not torch.equal(flatten(params), before)
            if step % 2 == 0:
                CHANGES[step // 2](params[2])
        optimizer.synchronize()
        clamp(params[2])
        optimizer.step()

    run_threads(world_size, main)


def test_values_may_be_changed_after_synchronize_and_on_an_average() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, base=optim.SGD(params, lr=0.0), param_as_bucket_view=True)
        for change in CHANGES:
            optimizer.step()
            optimizer.synchronize()
            change(params[2])
            optimizer.step()
            with optimizer.averaged():
                change(params[2])
        optimizer.synchronize()
        return flatten(params)

    one, other = run_threads(2, main)
    torch.testing.assert_close(one, other)
    assert not torch.equal(one, flatten(make_params()))


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_a_swap_through_data_while_values_travel_moves_the_mean_only_with_views(
    views: bool,
) -> None:
    swapped = threading.Event()

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params(seed=rank)
        optimizer = wrap(
            params,
            group,
            base=optim.SGD(params, lr=0.0),
            sync_at_start=False,
            param_as_bucket_view=views,
        )
        assert len(optimizer.buckets) > 1
        before = flatten(params)
        for step in range(2):
            backward(params, rank, step)
            if rank == 1 and step == 0:
                # Nothing leaves rank 0 before this rank expects it.
                assert swapped.wait(30)
            optimizer.step()
            if rank == 0 and step == 0:
                own = [param.detach().clone() for param in params]
                for param in params:
                    param.data.mul_(2)
                swapped.set()
                # The values come back when they have arrived: before the next step, in any case.
                group.barrier().wait()
                for param, value in zip(params, own, strict=True):
                    param.data.copy_(value)
            elif step == 0:
                optimizer.synchronize()
                group.barrier().wait()
        optimizer.synchronize()
        return before, flatten(params)

    befores, afters = (torch.stack(each) for each in zip(*run_threads(2, main), strict=True))
    assert not torch.equal(befores, afters)
    moved = (afters.mean(0) - befores.mean(0)).norm() / befores.mean(0).norm()
    assert moved > 0.1 if views else moved < 1e-12


BASES: dict[str, Callable[[list[Tensor]], optim.Optimizer]] = {
    "sgd": sgd,
    "sgd, whole update": lambda params: in_one_call(sgd(params)),
    "fused": lambda params: optim.AdamW(params, lr=0.02, fused=True),
    "foreach": lambda params: optim.AdamW(params, lr=0.02, foreach=True),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"comm_dtype": torch.bfloat16},
    "averages": {
        "schedule": Schedule(global_avg_every=2, average_state="average", outer=nesterov(0.5))
    },
    "outer": {"schedule": Schedule(outer=nesterov(0.5))},
    "skip": {"on_nonfinite": "skip"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "base"),
    [*product(OPTIONS, ["sgd"]), *product(["plain"], list(BASES)[1:]), ("averages", "fused")],
)
def test_what_the_library_writes_itself_is_no_change_by_hand(options: str, base: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params, late = make_params(seed=rank), make_params(seed=9)
        optimizer = wrap(
            params,
            group,
            base=BASES[base](params),
            sync_at_start=False,
            param_as_bucket_view=True,
            **OPTIONS[options],
        )
        for step in range(8):
            before = flatten([*params, *late])
            backward([*params, *late], rank, step)
            optimizer.step()
            assert not torch.equal(flatten([*params, *late]), before)
            if step == 1:
                with optimizer.averaged():
                    optimizer.consensus_distance()
            elif step == 2:
                optimizer.global_avg(may_revert=False)
            elif step == 3:
                optimizer.global_avg()
            elif step == 4:
                optimizer.add_param_group({"params": late})
            elif step == 5:
                optimizer.load_state_dict(optimizer.state_dict())
            elif step == 6 and options == "skip" and rank == 0:
                optimizer.synchronize()
                with torch.no_grad():
                    params[0][0, 0] = float("nan")
        optimizer.synchronize()

    run_threads(2, main)


class Recurrent(nn.Module):
    """An LSTM that may move its weights into one storage before it runs, as cuDNN wants them."""

    def __init__(self, flattens: bool) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4)
        self.head = nn.Linear(4, 2)
        if flattens:
            self.rnn.register_forward_pre_hook(flatten_weights)
        fill(self)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(inputs)[0])
        return out


@torch.no_grad()
def flatten_weights(rnn: nn.Module, _: Any) -> None:
    """What flatten_parameters() does on a GPU, and nowhere else."""
    weights = list(rnn.parameters())
    whole = torch.cat([weight.reshape(-1) for weight in weights])
    for weight, part in zip(weights, torch.split(whole, [w.numel() for w in weights]), strict=True):
        weight.set_(part.view(weight.shape))  # type: ignore[call-overload]


def wrap_recurrent(
    model: nn.Module, group: dist.ProcessGroup, in_backward: bool, views: bool
) -> Any:
    make: Any = wrap_module if in_backward else wrap_base
    return make(model, group, topology="ring", param_as_bucket_view=views)


def train_recurrent(wrapped: Any, model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * rank + step)
    model(torch.randn(5, 2, 3, generator=generator)).square().sum().backward()
    if isinstance(wrapped, DecentOptimWrapper):
        wrapped.step()
        wrapped.zero_grad()


@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "backward"])
def test_flattened_weights_of_an_rnn_are_named_with_views(in_backward: bool) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = Recurrent(flattens=False)
        wrapped = wrap_recurrent(model, group, in_backward, views=True)
        run = wrapped if in_backward else model
        for step in range(2):
            train_recurrent(wrapped, run, rank, step)
        model.rnn.register_forward_pre_hook(flatten_weights)
        before = flatten(list(model.parameters()))
        names = ", ".join(rf"rnn\.{name}_l0" for name in ("weight_ih", "weight_hh", "bias_ih"))
        if in_backward:  # its buckets are in the order of the backward pass
            names = r".*rnn\.weight_hh_l0.*"
        remedy = r"flatten_parameters\(\) .* param_as_bucket_view=False"
        with pytest.raises(RuntimeError, match=rf"rank {rank}: .* storage of {names}.* {remedy}"):
            train_recurrent(wrapped, run, rank, 2)
        assert torch.equal(flatten(list(model.parameters())), before)

    run_threads(2, main)


@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "backward"])
def test_copies_train_an_rnn_whose_weights_are_flattened(in_backward: bool) -> None:
    def main(rank: int, group: dist.ProcessGroup, flattens: bool) -> Tensor:
        model = Recurrent(flattens)
        wrapped = wrap_recurrent(model, group, in_backward, views=False)
        optimizer = wrapped.optimizer if in_backward else wrapped
        assert len(optimizer.buckets) > 1
        for step in range(4):
            train_recurrent(wrapped, wrapped if in_backward else model, rank, step)
        optimizer.synchronize()
        return flatten(list(model.parameters()))

    plain = run_threads(2, lambda rank, group: main(rank, group, False))
    flattened = run_threads(2, lambda rank, group: main(rank, group, True))
    assert all(map(torch.equal, plain, flattened))
    assert not torch.equal(plain[0], flatten(list(Recurrent(False).parameters())))


def test_the_module_makes_views_unless_there_is_an_rnn_on_a_gpu_or_a_mesh() -> None:
    # Without cuDNN, or the GRU would look for the addresses of its fake weights.
    with FakeTensorMode(), torch.device("cuda"), torch.backends.cudnn.flags(enabled=False):
        on_gpu = nn.Sequential(nn.Linear(3, 3), nn.GRU(3, 4))
        assert not wants_views(on_gpu, mesh=None)
        assert wants_views(on_gpu[0], mesh=None)
    on_cpu = Recurrent(flattens=False)
    assert wants_views(on_cpu, mesh=None)
    assert not wants_views(on_cpu, mesh=object())
