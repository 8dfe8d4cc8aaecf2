"""The wrapper as a torch.optim.Optimizer, around bases of all kinds, or refusing them."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from modules import backward as backward_of
from problem import backward, flatten, in_one_call, make_params, sgd, take_steps, wrap
from ranks import run_threads
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.amp.grad_scaler import GradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from decent_optim_wrapper import DecentOptimWrapper, Schedule, StateAverage
from decent_optim_wrapper.checkpoint import Checkpoints


def arguments(kind: type, name: str) -> list[tuple[str, Any, Any]]:
    signature = inspect.signature(inspect.unwrap(getattr(kind, name)))
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


def test_the_signatures_are_torchs_and_the_positional_arguments_decent_dps() -> None:
    torchs = {name for name, _ in inspect.getmembers(Optimizer, inspect.isfunction)}
    classes = (DecentOptimWrapper, DecentOptimWrapper.__base__)
    overridden = {name for kind in classes for name in vars(kind)} & torchs - {"__init__"}
    assert {"step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"} <= overridden
    for name in overridden:
        assert arguments(DecentOptimWrapper, name) == arguments(Optimizer, name), name
    published = arguments(DecentOptimWrapper, "__init__")
    assert [name for name, kind, _ in published if kind is not inspect.Parameter.KEYWORD_ONLY] == [
        *("self", "optimizer", "rank", "world_size", "local_world_size", "topology"),
        "bucket_cap_mb",
    ]


def test_tensors_of_all_dtypes_and_shapes_are_gathered() -> None:
    ones = torch.ones(3, 2)
    tensors = [
        *(ones.t(), torch.ones(2, requires_grad=True), torch.zeros(0, 3), torch.tensor(True)),
        *(ones.to(dtype) for dtype in (torch.int16, torch.complex64, torch.float8_e4m3fn)),
    ]

    def main(rank: int, group: dist.ProcessGroup) -> None:
        wrapper = wrap(make_params(), group, topology="ring")
        for tensor in tensors:
            gathered = wrapper.all_gather(tensor if rank else torch.zeros_like(tensor))
            assert not gathered.requires_grad
            assert torch.equal(gathered, torch.stack([torch.zeros_like(tensor), tensor.detach()]))
        take_steps(wrapper, wrapper.param_groups[0]["params"], rank, range(2))

    run_threads(2, main)


def test_what_is_read_from_the_wrapper_is_the_bases_also_after_loading() -> None:
    params = make_params()
    wrapper = wrap(params, topology="ring")
    base = wrapper.optimizer
    seen: list[Optimizer] = []
    wrapper.register_state_dict_pre_hook(seen.append)
    wrapper.register_load_state_dict_post_hook(seen.append)
    for step in range(2):
        take_steps(wrapper, params, 0, [step])
        assert wrapper.param_groups is base.param_groups
        assert wrapper.state is base.state
        assert wrapper.defaults is base.defaults
        assert wrapper.state[params[0]]["momentum_buffer"].abs().sum() > 0
        stale = base.param_groups
        wrapper.load_state_dict(wrapper.state_dict())
        assert base.param_groups is not stale
    assert seen == [base] * 4
    for set_to_none in (False, True):
        wrapper.zero_grad(set_to_none)
        assert all((p.grad is None) == set_to_none for p in params)
        assert all(p.grad is None or not p.grad.any() for p in params)
    for word in ("SGD", "Ring(world_size=1", "rank 0 of 1"):
        assert word in repr(wrapper)


@pytest.mark.parametrize("on", ["base", "wrapper"])
def test_schedulers_drive_the_base_also_after_loading(on: str) -> None:
    params, reference = make_params(), make_params()
    wrapper, plain = wrap(params), sgd(reference)
    scheduled = wrapper if on == "wrapper" else wrapper.optimizer
    schedulers = [OneCycleLR(each, max_lr=0.1, total_steps=9) for each in (scheduled, plain)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            take_steps(wrapper, params, 0, [step])
            take_steps(plain, reference, 0, [step])
            for scheduler in schedulers:
                scheduler.step()
            if step == 2:
                wrapper.load_state_dict(copy.deepcopy(wrapper.state_dict()))
            assert wrapper.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert torch.equal(flatten(params), flatten(reference))
    assert plain.param_groups[0]["lr"] != 0.05


class Unlisted(torch.optim.SGD):
    """As good as SGD, but it might update parameters together."""


@pytest.mark.parametrize("own_hooks", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, Unlisted])
def test_every_hook_runs_once_for_each_optimizer_whose_step_is_called(
    kind: type[torch.optim.SGD], own_hooks: bool
) -> None:
    params, reference = make_params(), make_params()
    base, plain = (kind(each, lr=0.05, momentum=0.9) for each in (params, reference))
    wrapper = wrap(params, base=base)
    calls: list[tuple[str, Optimizer]] = []

    def recording(name: str) -> Any:
        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            assert args[0] is optimizer
            calls.append((name, optimizer))

        return hook

    for hooked in (wrapper, base) if own_hooks else (wrapper,):
        hooked.register_step_pre_hook(recording("pre"))
        hooked.register_step_post_hook(recording("post"))
    names = ("all pre", "pre", "post", "all post")
    expected: list[tuple[str, Optimizer]] = [(name, wrapper) for name in names]
    if own_hooks or kind is Unlisted:
        # The base is updated in one call.
        expected[2:2] = [(name, base) for name in (names if own_hooks else names[::3])]
    with (
        register_optimizer_step_pre_hook(recording("all pre")),
        register_optimizer_step_post_hook(recording("all post")),
    ):
        for step in range(2):
            calls.clear()
            take_steps(wrapper, params, 0, [step])
            assert calls == expected
            take_steps(plain, reference, 0, [step])
            assert calls[-1] == ("all post", plain)
    assert torch.equal(flatten(params), flatten(reference))
    assert not torch.equal(flatten(params), flatten(make_params()))


@pytest.mark.parametrize("kind", [torch.optim.SGD, Unlisted])
def test_a_closure_is_evaluated_once_with_gradients_and_before_the_mixing(
    kind: type[torch.optim.SGD],
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        ends = []
        for has_closure in (True, False):
            params = make_params()
            wrapper = wrap(params, group, kind(params, lr=0.05), topology="ring")
            losses: list[float] = []

            def closure() -> float:
                assert torch.is_grad_enabled()
                losses.append(backward(params, rank, len(losses)).item())  # noqa: B023
                return losses[-1]  # noqa: B023

            for step in range(4):
                if has_closure:
                    with torch.no_grad():
                        assert wrapper.step(closure) == losses[-1]
                    assert len(losses) == step + 1
                else:
                    take_steps(wrapper, params, rank, [step])
            wrapper.synchronize()
            ends.append(flatten(params))
        assert torch.equal(*ends)
        assert not torch.equal(ends[0], flatten(make_params()))

    run_threads(2, main)


def test_groups_may_be_added_and_taken_out() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params, late = make_params(), make_params(seed=10 + rank)
        base = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.05)
        wrapper = wrap(params, group, base, topology="complete")
        take_steps(wrapper, params, rank, [0])
        wrapper.param_groups.pop()
        own = flatten(params)
        wrapper.add_param_group({"params": []})
        assert torch.equal(flatten(params), own)
        wrapper.add_param_group({"params": late, "lr": 0.01})
        assert torch.equal(flatten(late), flatten(make_params(seed=10))), "the values of rank 0"
        take_steps(wrapper, [*params, *late], rank, range(3))
        for each in wrapper.param_groups:
            each["lr"] = 0.0
        wrapper.step()
        wrapper.synchronize()
        with pytest.raises(ValueError, match="the ranks disagree"):
            wrapper.add_param_group({"params": make_params()[: 1 + rank]})
        assert len(wrapper.param_groups) == 3
        # An error of the base on one rank only.
        added = late if rank else make_params(seed=20)
        said = "more than one parameter group" if rank else "rank 1 raised ValueError"
        with pytest.raises(ValueError, match=said):
            wrapper.add_param_group({"params": added})
        with (
            mock.patch.object(base, "add_param_group", side_effect=NotImplementedError("no")),
            pytest.raises(ValueError, match="NotImplementedError: no"),
        ):
            wrapper.add_param_group({"params": make_params(seed=20)})
        assert len(wrapper.param_groups) == 3
        wrapper.step()
        assert not torch.equal(flatten(late), flatten(make_params(seed=10)))
        return flatten([*params, *late])

    torch.testing.assert_close(*run_threads(2, main))


def assign_groups(base: torch.optim.Optimizer, late: list[Tensor]) -> None:
    base.param_groups = [*base.param_groups, {**base.param_groups[0], "params": late}]


@pytest.mark.parametrize(
    "add",
    [
        lambda base, late: base.add_param_group({"params": late}),
        lambda base, late: base.param_groups[0]["params"].extend(late),
        assign_groups,
        lambda base, late: [param.requires_grad_(True) for param in base.param_groups[0]["params"]],
    ],
    ids=["base", "append", "assign", "unfreeze"],
)
def test_parameters_that_only_the_base_knows_are_named_before_they_are_trained(add: Any) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params, late = make_params(), make_params(seed=1)
        params[1].requires_grad_(False)
        # As a whole, or bucket by bucket.
        base = in_one_call(sgd(params)) if add is assign_groups else sgd(params)
        wrapper = wrap(params, group, base, topology="complete", overlap=False)
        live = [param for param in params if param.requires_grad]
        take_steps(wrapper, live, rank, [0])
        add(base, late)
        take_steps(wrapper, live, rank, [1])
        live = [param for each in base.param_groups for param in each["params"]]
        live = [param for param in live if param.requires_grad]
        assert len(live) >= len(params)
        before = flatten(live)
        name = r"0\.1 " if len(live) == len(params) else r"(0\.5|1\.0), .*"
        error = rf"rank {rank}: .* gossiped, but {name}.*rebuild_buckets\(\) on all ranks"
        with pytest.raises(RuntimeError, match=error):
            take_steps(wrapper, live, rank, [2])
        assert torch.equal(flatten(live), before)
        wrapper.rebuild_buckets()
        wrapper.step()
        take_steps(wrapper, live, rank, [3])
        assert not torch.equal(flatten(live), before)
        return flatten(live)

    torch.testing.assert_close(*run_threads(2, main))


@pytest.mark.parametrize("views", [False, True])
def test_frozen_parameters_are_mixed_on_after_their_buckets_are_rebuilt(views: bool) -> None:
    """Freezing later changes nothing, so that the ranks end with the same values."""

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params(rank)
        options: Any = {"topology": "ring", "sync_at_start": False, "param_as_bucket_view": views}
        wrapper = wrap(params, group, **options)
        frozen, live = params[1:3], [params[0], *params[3:]]
        for param in frozen:
            param.requires_grad_(False)
        before = flatten(frozen)
        wrapper.rebuild_buckets()
        assert len(wrapper.buckets) > 1
        take_steps(wrapper, live, rank, range(4))
        wrapper.synchronize()
        assert not torch.equal(flatten(live), flatten(make_params(rank))[: len(flatten(live))])
        return before, flatten(frozen)

    before, after = map(torch.stack, zip(*run_threads(4, main), strict=True))
    assert not torch.equal(before[0], before[1])
    # Two rounds of a ring of four average exactly.
    torch.testing.assert_close(after, before.mean(dim=0).expand_as(after))


def test_a_state_dict_loads_into_a_bare_base_and_back() -> None:
    params = make_params()
    wrapper, bare, twin = wrap(params), sgd(make_params()), wrap(make_params())
    take_steps(wrapper, params, 0, range(3))
    bare.load_state_dict(wrapper.state_dict())
    twin.load_state_dict(wrapper.state_dict())
    assert twin.round == 3
    twin.load_state_dict(bare.state_dict())
    assert twin.round == 0
    momenta, expected = (
        flatten([state["momentum_buffer"] for state in each.state.values()])
        for each in (twin, wrapper)
    )
    assert torch.equal(momenta, expected)
    assert momenta.abs().sum() > 0


def test_a_dropped_wrapper_is_freed_at_once() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params()
        wrapper = wrap(params, group, topology="ring")
        CosineAnnealingLR(wrapper, T_max=3)
        take_steps(wrapper, params, rank, [0])
        reference = weakref.ref(wrapper)
        del wrapper
        assert reference() is None, "a cycle would keep buffers and connections alive"

    gc.disable()
    try:
        run_threads(2, main)
    finally:
        gc.enable()


class Wrapping(Optimizer):
    """An optimizer around another one, as in Accelerate: without torch's tables of hooks."""

    _step_supports_amp_scaling = True
    is_second_order = False
    _flag_of_the_base = True

    def __init__(self, base: Optimizer) -> None:
        self._base_optimizer = base
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state

    @torch.no_grad()
    def halve(self) -> None:
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 0.5)

    @staticmethod
    def _get_lr(group: dict[str, Any], state: dict[str, Any]) -> float:
        """AdafactorSchedule of Hugging Face calls it."""
        return 0.25

    def step(self, closure: Any = None) -> Any:
        return self._base_optimizer.step(closure)


def test_public_attributes_and_methods_of_the_base_are_reached_and_no_others() -> None:
    params = make_params()
    base: Any = Wrapping(sgd(params))
    wrapper: Any = wrap(params, base=base)
    assert wrapper.is_second_order is False
    before = flatten(params)
    wrapper.halve()
    assert torch.equal(flatten(params), before / 2)
    assert wrapper._get_lr(wrapper.param_groups[0], {}) == 0.25  # noqa: SLF001
    for name in ("_flag_of_the_base", "__fspath__", "anything_else", "_anything_else"):
        assert not hasattr(wrapper, name)
    with pytest.raises(AttributeError, match="'Wrapping' object has no attribute 'anything_else'"):
        _ = wrapper.anything_else
    # Nor does the wrapper take the numbers or the flag that a scaler has given to the base.
    base.found_inf, base.grad_scale = torch.ones(1), torch.full((1,), 2.0)
    base._step_supports_amp_scaling = False
    assert wrapper._step_supports_amp_scaling is True
    before = flatten(params)
    take_steps(wrapper, params, 0, [0])
    assert not wrapper.stats().skipped
    assert not torch.equal(flatten(params), before)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy, lambda w: torch.save(w, io.BytesIO())):
        with pytest.raises(TypeError, match=r"state_dict\(\)"):
            attempt(wrapper)


class NeedsItsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class SAM(torch.optim.SGD):
    first_step = second_step = torch.optim.SGD.step


class Adahessian(torch.optim.SGD): ...


class SecondOrder(torch.optim.SGD):
    is_second_order = True


@pytest.mark.parametrize("kind", [NeedsItsClosure, SAM, Adahessian, SecondOrder])
def test_what_needs_the_gradients_parameters_in_its_step_is_refused_with_overlap(
    kind: type[torch.optim.SGD],
) -> None:
    base = kind(make_params(), lr=0.1)
    with pytest.raises(ValueError, match=f"{kind.__name__} .* pass overlap=False"):
        DecentOptimWrapper(base)
    assert DecentOptimWrapper(base, overlap=False).round == 0


def test_a_sharded_optimizer_is_refused() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        base = ZeroRedundancyOptimizer(make_params(), torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match=r"ZeroRedundancyOptimizer.*wrap the plain optimizer"):
            DecentOptimWrapper(base)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_the_step_of_the_base_may_be_compiled() -> None:
    ends = []
    for compiles in (True, False):
        params = make_params()
        base: Any = sgd(params)
        if compiles:
            base.step = torch.compile(base.step, backend="eager")
        take_steps(wrap(params, base=base), params, 0, range(3))
        ends.append(flatten(params))
    torch.testing.assert_close(*ends)
    assert not torch.equal(ends[1], flatten(make_params()))


@pytest.mark.parametrize("fused", [True, False])
def test_a_rank_without_any_gradient_takes_part_in_a_scaled_step(fused: bool) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(dtype=torch.float32)
        optimizer = wrap(
            params, group, torch.optim.SGD(params, lr=0.1, fused=fused), topology="ring"
        )
        unwrapped = torch.ones((), requires_grad=True)
        other = torch.optim.SGD([unwrapped], lr=0.1)
        scaler = GradScaler("cpu", init_scale=8.0)
        for _ in range(3):
            used = [unwrapped, *params] if rank == 0 else [unwrapped]
            backward_of(scaler.scale(torch.stack([each.sum() for each in used]).sum()))
            for each in (optimizer, other):
                scaler.step(each)
                each.zero_grad()
            assert not optimizer.stats().skipped
            scaler.update()
        optimizer.synchronize()
        return flatten(params) - flatten(make_params(dtype=torch.float32))

    assert run_threads(2, main)[1].abs().max() > 1e-2


def test_a_fused_update_counts_as_a_change_of_the_parameters() -> None:
    """Its kernels do not count it, and a graph that still needs the old values would not notice."""
    params = make_params(dtype=torch.float32)
    optimizer = wrap(params, base=torch.optim.SGD(params, lr=0.1, fused=True))
    assert len(optimizer.buckets) > 1
    backward_of(torch.stack([param.square().sum() for param in params]).sum())
    before, versions = flatten(params), [param._version for param in params]
    optimizer.step()
    assert not torch.equal(flatten(params), before)
    assert all(param._version > old for param, old in zip(params, versions, strict=True))


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_a_default_device_does_not_reach_the_messages_between_ranks(
    topology: str, tmp_path: Path
) -> None:
    def main(rank: int, group: dist.ProcessGroup, device: str) -> list[Tensor]:
        params, late = make_params(), make_params(seed=3)
        with torch.device(device):
            options: Any = {
                "schedule": Schedule(global_avg_every=2),
                "extensions": [StateAverage()],
            }
            wrapper = wrap(params, group, topology=topology, **options)
            checkpoints = Checkpoints(tmp_path / device, wrapper)
            for step in range(4):
                with torch.device("cpu"):
                    backward(params, rank, step)
                wrapper.step()
            wrapper.add_param_group({"params": late})
            with wrapper.averaged():
                averaged = flatten(params)
            wrapper.global_avg(may_revert=False)
            distance = torch.tensor(wrapper.consensus_distance(), device="cpu")
            wrapper.synchronize()
            checkpoints.save(4, {"optimizer": wrapper.state_dict()})
            assert checkpoints.load() is not None
        return [flatten(params), flatten(late), averaged, distance]

    usual, odd = (run_threads(2, partial(main, device=device)) for device in ("cpu", "meta"))
    for one, other in zip(usual, odd, strict=True):
        assert all(map(torch.equal, one, other))
    assert not torch.equal(usual[0][0], flatten(make_params()))
