"""The wrapper as a torch.optim.Optimizer: groups, schedulers, hooks, closures, checkpoints."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import warnings
import weakref
from collections import OrderedDict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import pairwise
from problem import TINY_CAP_MB, backward, flatten, make_params, sgd, take_steps
from ranks import run_processes, run_threads
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import decent_optim_wrapper
from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.gossip.local_update import LocalUpdate


def wrap(params: list[Tensor], group: dist.ProcessGroup | None = None, **kw: Any) -> Any:
    kw.setdefault("bucket_cap_mb", TINY_CAP_MB)
    return DecentOptimWrapper(kw.pop("make", sgd)(params), process_group=group, **kw)


class Unlisted(torch.optim.SGD):
    """As good as SGD, but it might update parameters together."""


def unlisted(params: list[Tensor]) -> Optimizer:
    return Unlisted(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def test_every_overridden_method_has_torchs_signature() -> None:
    def is_method(name: str) -> bool:
        return inspect.isfunction(getattr(Optimizer, name, None)) and name != "__init__"

    classes = (DecentOptimWrapper, DecentOptimWrapper.__base__)
    overridden = {name for kind in classes for name in vars(kind) if is_method(name)}
    assert {"step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"} <= overridden
    for name in overridden:
        own = inspect.signature(inspect.unwrap(getattr(DecentOptimWrapper, name)))
        torchs = inspect.signature(inspect.unwrap(getattr(Optimizer, name)))
        assert [(p.name, p.kind, p.default) for p in own.parameters.values()] == [
            (p.name, p.kind, p.default) for p in torchs.parameters.values()
        ], name


def test_the_published_arguments_keep_names_and_order() -> None:
    names = list(inspect.signature(DecentOptimWrapper.__init__).parameters)[1:]
    assert names == [
        *("optimizer", "rank", "world_size", "local_world_size", "topology", "bucket_cap_mb"),
        *("overlap", "process_group", "buffers", "sync_at_start"),
        *("comm_dtype", "param_as_bucket_view", "gradient_tracking", "timeout", "on_nonfinite"),
        *("schedule", "elastic", "mesh", "gossip_dim", "model", "extensions"),
    ]
    wrapper = DecentOptimWrapper(
        optimizer=sgd(make_params()),
        rank=0,
        world_size=1,
        local_world_size=1,
        topology="ring",
        bucket_cap_mb=0.5,
    )
    assert wrapper.world_size == 1


def test_both_spellings_of_the_imports_are_the_same_objects() -> None:
    from decent_optim_wrapper import topo, wrapper

    assert wrapper.DecentOptimWrapper is decent_optim_wrapper.DecentOptimWrapper
    assert topo.Topology is decent_optim_wrapper.Topology
    assert topo.TopologyFactory is decent_optim_wrapper.TopologyFactory


def test_what_is_read_from_the_wrapper_is_the_bases_also_after_loading() -> None:
    params = make_params()
    wrapper = wrap(params, topology="ring")
    base = wrapper.optimizer
    assert isinstance(wrapper, Optimizer)
    seen: list[Optimizer] = []
    wrapper.register_state_dict_pre_hook(seen.append)
    wrapper.register_load_state_dict_post_hook(seen.append)
    for _ in range(2):
        backward(params, 0, 0)
        wrapper.step()
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
    text = repr(wrapper)
    for word in ("SGD", "Ring(world_size=1", "rank: 0 of 1", "buckets: 3"):
        assert word in text


@pytest.mark.parametrize("on", ["base", "wrapper"])
@pytest.mark.parametrize("make", [StepLR, CosineAnnealingLR, OneCycleLR])
def test_schedulers_drive_the_base_also_after_loading(on: str, make: type[LRScheduler]) -> None:
    arguments: dict[type[LRScheduler], dict[str, Any]] = {
        StepLR: {"step_size": 1, "gamma": 0.5},
        CosineAnnealingLR: {"T_max": 9},
        OneCycleLR: {"max_lr": 0.1, "total_steps": 9},
    }
    params, reference = make_params(), make_params()
    wrapper, plain = wrap(params), sgd(reference)
    scheduler = make(wrapper if on == "wrapper" else wrapper.optimizer, **arguments[make])
    expected = make(plain, **arguments[make])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            backward(params, 0, step)
            backward(reference, 0, step)
            wrapper.step()
            plain.step()
            scheduler.step()
            expected.step()
            if step == 2:
                wrapper.load_state_dict(copy.deepcopy(wrapper.state_dict()))
            assert wrapper.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert torch.equal(flatten(params), flatten(reference))
    assert plain.param_groups[0]["lr"] != 0.05


@pytest.mark.parametrize(
    ("options", "own_hooks", "scheduled"),
    pairwise(
        {"split": {}, "unlisted": {"make": unlisted}, "no overlap": {"overlap": False}},
        {"hooks of the base": True, "none": False},
        {"scheduled": True, "not": False},
    ),
)
def test_every_hook_runs_once_per_step_those_on_all_optimizers_around_the_wrappers(
    options: dict[str, Any], own_hooks: bool, scheduled: bool
) -> None:
    params, reference = make_params(), make_params()
    wrapper, plain = wrap(params, **options), sgd(reference)
    base = wrapper.optimizer
    schedulers = [StepLR(each, 1) for each in (base, plain) if scheduled]
    calls: list[tuple[str, Optimizer]] = []

    def recording(name: str) -> Any:
        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            assert args[0] is optimizer
            calls.append((name, optimizer))

        return hook

    handles = [
        register_optimizer_step_pre_hook(recording("all pre")),
        register_optimizer_step_post_hook(recording("all post")),
    ]
    wrapper.register_step_pre_hook(recording("pre"))
    wrapper.register_step_post_hook(recording("post"))
    expected = [("all pre", wrapper), ("pre", wrapper), ("post", wrapper), ("all post", wrapper)]
    if own_hooks:
        base.register_step_pre_hook(recording("pre"))
        base.register_step_post_hook(recording("post"))
        expected[2:2] = [("pre", base), ("post", base)]
    try:
        for step in range(2):
            backward(params, 0, step)
            calls.clear()
            wrapper.step()
            assert calls == expected
            backward(reference, 0, step)
            plain.step()
            assert calls[-1] == ("all post", plain)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for scheduler in schedulers:
                    scheduler.step()
    finally:
        for handle in handles:
            handle.remove()
    assert torch.equal(flatten(params), flatten(reference))
    assert not torch.equal(flatten(params), flatten(make_params()))


def test_a_hook_of_the_base_may_change_its_arguments_next_to_hooks_on_all_optimizers() -> None:
    params = make_params()
    wrapper = wrap(params, overlap=False)
    losses: list[float] = []

    def closure() -> float:
        losses.append(1.0)
        return 1.0

    def hand_over(optimizer: Any, args: Any, kwargs: Any) -> Any:
        return (optimizer,), {"closure": closure}

    wrapper.optimizer.register_step_pre_hook(hand_over)
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        backward(params, 0, 0)
        assert wrapper.step() == 1.0
    finally:
        handle.remove()
    assert losses == [1.0]


def test_a_closure_sees_the_parameters_before_the_mixing() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params()
        wrapper = wrap(params, group, topology="ring")
        for step in range(3):
            before = flatten(params)
            seen: list[Tensor] = []

            def closure(step: int = step, seen: list[Tensor] = seen) -> float:
                assert torch.is_grad_enabled()
                seen.append(flatten(params))
                return backward(params, rank, step).item()

            with torch.no_grad():
                loss = wrapper.step(closure)
            assert isinstance(loss, float)
            assert len(seen) == 1
            assert torch.equal(seen[0], before)
            assert not torch.equal(flatten(params), before)

    run_threads(2, main)


def test_lbfgs_works_without_overlap_and_is_refused_with_it() -> None:
    with pytest.raises(ValueError, match="overlap=False"):
        DecentOptimWrapper(torch.optim.LBFGS(make_params()))

    def main(rank: int, group: dist.ProcessGroup) -> tuple[float, float, Tensor]:
        params = make_params()
        base = torch.optim.LBFGS(params, lr=0.1, max_iter=5)
        wrapper = DecentOptimWrapper(
            base, process_group=group, overlap=False, bucket_cap_mb=TINY_CAP_MB
        )
        losses = [float(wrapper.step(lambda: backward(params, rank, 0)) or 0.0) for _ in range(4)]
        return losses[0], losses[-1], flatten(params)

    results = run_threads(2, main)
    assert sum(last for _, last, _ in results) < 0.8 * sum(first for first, _, _ in results)
    torch.testing.assert_close(results[0][2], results[1][2], rtol=1e-14, atol=1e-14)


def test_groups_may_be_added_and_taken_out() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params, late = make_params(), make_params(seed=10 + rank)
        base = sgd(params[:2])
        base.add_param_group({"params": params[2:]})
        wrapper = wrap([], group, make=lambda _: base, topology="complete")
        backward(params, rank, 0)
        wrapper.step()
        wrapper.param_groups.pop()
        own = flatten(params)
        wrapper.add_param_group({"params": []})
        assert torch.equal(flatten(params), own)
        wrapper.add_param_group({"params": late, "lr": 0.01})
        assert torch.equal(flatten(late), flatten(make_params(seed=10))), "those of rank 0"
        take_steps(wrapper, [*params, *late], rank, range(3))
        for each in wrapper.param_groups:
            each["lr"] = 0.0
        wrapper.step()
        wrapper.synchronize()
        with pytest.raises(ValueError, match="the ranks disagree"):
            wrapper.add_param_group({"params": make_params()[: 1 + rank]})
        assert len(wrapper.param_groups) == 3
        return flatten(params), flatten(late)

    (one, late), (other, their_late) = run_threads(2, main)
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(late, their_late)
    assert not torch.equal(one, flatten(make_params()))
    assert not torch.equal(late, flatten(make_params(seed=10)))


def test_a_parameter_that_is_listed_twice_is_mixed_once() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> float:
        param = torch.full((3,), float(rank), requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            base = torch.optim.SGD([param, param], lr=0.0)
        wrapper = DecentOptimWrapper(
            base, process_group=group, sync_at_start=False, overlap=False, topology=Gentle(2)
        )
        wrapper.step()
        return param[0].item()

    assert run_threads(2, main) == pytest.approx([0.1, 0.9])


class Gentle(decent_optim_wrapper.Topology):
    def assign_groups(self) -> list[list[decent_optim_wrapper.Group]]:
        return [[decent_optim_wrapper.Group([0, 1], 0.9)]] * 2


def test_a_converted_parameter_is_named() -> None:
    model = nn.Linear(3, 2)
    wrapper = DecentOptimWrapper(torch.optim.SGD(model.named_parameters(), lr=0.1))
    model.double()
    with pytest.raises(RuntimeError, match=r"rank 0: .* storage of weight, bias"):
        wrapper.step()


def test_a_launched_rank_without_a_process_group_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match=r"WORLD_SIZE=4, but .* call torch\.distributed\.init"):
        wrap(make_params())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap(make_params(), world_size=1)


def test_frozen_parameters_are_broadcast_and_gossiped_once_rebuilt() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params(seed=rank)
        params[1].requires_grad_(False)
        wrapper = wrap(params, group, topology="complete", overlap=False)
        assert torch.equal(flatten(params), flatten(make_params(seed=0)))

        def step_from(values: float) -> None:
            for param in params:
                param.grad = None
                param.data.fill_(values)
            wrapper.step()

        step_from(rank)
        assert params[0].mean().item() == 0.5
        assert params[1].mean().item() == rank, "frozen, so not gossiped"
        params[1].requires_grad_(True)
        step_from(rank)
        assert params[1].mean().item() == rank, "not before rebuild_buckets()"
        wrapper.rebuild_buckets()
        wrapper.rebuild_buckets()
        members = [m for bucket in wrapper.buckets for m in bucket.members]
        assert len(members) == len({id(member) for member in members}) == len(params)
        step_from(rank)
        assert params[1].mean().item() == 0.5
        params[0].requires_grad_(False)
        step_from(rank)
        assert params[0].mean().item() == 0.5, "freezing later changes nothing"

    run_threads(2, main)


def test_a_state_dict_survives_a_weights_only_file_and_loads_into_a_bare_base(
    tmp_path: Path,
) -> None:
    params = make_params()
    wrapper = wrap(params)
    take_steps(wrapper, params, 0, range(3))
    torch.save(wrapper.state_dict(), tmp_path / "optimizer.pt")
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    twin = wrap(make_params())
    twin.load_state_dict(loaded)
    assert twin.round == 3
    bare = sgd(make_params())
    bare.load_state_dict(loaded)
    twin.load_state_dict(bare.state_dict())
    assert twin.round == 0
    buffers = [s["momentum_buffer"] for s in twin.state.values()]
    expected = [s["momentum_buffer"] for s in wrapper.state.values()]
    assert all(map(torch.equal, buffers, expected))
    assert flatten(buffers).abs().sum() > 0


def test_torchs_state_dict_helper_takes_the_base_and_does_not_gossip() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    base = torch.optim.AdamW(model.parameters())
    wrapper = DecentOptimWrapper(base, bucket_cap_mb=TINY_CAP_MB)
    before = flatten(list(model.parameters()))
    state = get_optimizer_state_dict(model, base)
    assert "0.weight" in state["state"]
    assert wrapper.round == 0
    assert torch.equal(flatten(list(model.parameters())), before)


def test_two_wrappers_in_one_process_do_not_mix_with_each_other() -> None:
    def main(rank: int, group: dist.ProcessGroup, seeds: tuple[int, ...]) -> list[Tensor]:
        nets = [make_params(seed) for seed in seeds]
        wrappers = [
            wrap(net, group, topology=("ring", "complete")[seed])
            for net, seed in zip(nets, seeds, strict=True)
        ]
        for step in range(5):
            for net, wrapper in zip(nets, wrappers, strict=True):
                backward(net, rank, step)
                wrapper.step()
        return [flatten(net) for net in nets]

    together, *alone = (run_threads(4, partial(main, seeds=each)) for each in ((0, 1), (0,), (1,)))
    for both, (first,), (second,) in zip(together, *alone, strict=True):
        assert torch.equal(both[0], first)
        assert torch.equal(both[1], second)
        assert not torch.equal(first, second)


@pytest.mark.slow
def test_compiling_model_and_base_step_works() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    twin = copy.deepcopy(model)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    base.step = torch.compile(base.step, backend="eager")  # type: ignore[method-assign]
    wrapper = DecentOptimWrapper(base, bucket_cap_mb=TINY_CAP_MB)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="eager")
    before = flatten(list(model.parameters()))
    for _ in range(3):
        batch = torch.randn(8, 4)
        for net, optimizer in ((compiled, wrapper), (twin, plain)):
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(flatten(list(model.parameters())), flatten(list(twin.parameters())))
    assert not torch.equal(before, flatten(list(model.parameters())))


def test_a_dropped_wrapper_is_freed_at_once() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params()
        wrapper = wrap(params, group, topology="ring")
        CosineAnnealingLR(wrapper, T_max=3)
        backward(params, rank, 0)
        wrapper.step()
        reference = weakref.ref(wrapper)
        gc.collect()
        gc.disable()
        try:
            del wrapper
            assert reference() is None, "a cycle would keep buffers and connections alive"
        finally:
            gc.enable()

    run_threads(2, main)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"world_size": 4}, RuntimeError, "torchrun --nproc-per-node 4"),
        ({"rank": 1}, ValueError, "rank=1"),
        ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb"),
        ({"world_size": 0}, ValueError, "world_size must be 1 or more"),
        ({"topology": "rign"}, ValueError, "unknown topology 'rign'"),
        ({"topology": 3}, TypeError, "a name or a Topology"),
        ({"make": wrap}, TypeError, "not wrapped yet"),
        ({"make": list}, TypeError, "got list"),
    ],
)
def test_bad_arguments_say_what_to_do(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        wrap(make_params(), **arguments)


def test_sizes_that_contradict_the_process_group_are_named() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        other = decent_optim_wrapper.TopologyFactory.create("ring", 4)
        for arguments, words in (
            ({"rank": 1 - rank}, f"rank={1 - rank} .* whose rank is {rank}"),
            ({"world_size": 3}, "world_size=3 .* whose world_size is 2"),
            ({"topology": other}, "world_size=4, but here it is 2"),
        ):
            with pytest.raises(ValueError, match=words):
                wrap(make_params(), group, **arguments)

    run_threads(2, main)


@pytest.mark.parametrize("state", [None, [], "checkpoint.pt"])
def test_a_state_that_is_no_dict_is_refused_with_what_is_expected(state: Any) -> None:
    params = make_params()
    wrapper = wrap(params)
    backward(params, 0, 0)
    wrapper.step()
    expected = r"rank 0: .* expects the dict that state_dict\(\) of a DecentOptimWrapper .* got "
    with pytest.raises(TypeError, match=expected):
        wrapper.load_state_dict(state)
    assert wrapper.round == 1


def of_inner(name: str) -> Any:
    """A property that is the inner optimizer's."""
    return property(
        lambda outer: getattr(outer.optimizer, name),
        lambda outer, value: setattr(outer.optimizer, name, value),
    )


class Inner(Optimizer):
    """Stands in front of another optimizer and skips Optimizer.__init__, as Accelerate's does."""

    param_groups, state, defaults = map(of_inner, ("param_groups", "state", "defaults"))
    step_was_skipped = False

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.modes: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        self.optimizer.zero_grad(set_to_none is not False)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def train(self) -> None:
        self.modes.append("train")

    def eval(self) -> None:
        self.modes.append("eval")


class Lookahead(Optimizer):
    """Slow weights that follow those of another optimizer; skips Optimizer.__init__, as timm's."""

    _step_supports_amp_scaling = True
    is_second_order = False

    def __init__(self, base: Optimizer, alpha: float = 0.5, k: int = 2) -> None:
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self._base_optimizer = base
        self.param_groups = base.param_groups
        self.defaults = {**base.defaults, "alpha": alpha, "k": k}
        self.state: Any = {}
        self._steps = 0

    @torch.no_grad()
    def sync_lookahead(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                slow = self.state.setdefault(param, {}).setdefault("slow", param.clone())
                slow.lerp_(param, self.defaults["alpha"])
                param.copy_(slow)

    def step(self, closure: Any = None) -> Any:
        loss = self._base_optimizer.step(closure)
        self._steps += 1
        if self._steps % self.defaults["k"] == 0:
            self.sync_lookahead()
        return loss


@pytest.mark.parametrize("kind", [Inner, Lookahead])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_base_that_skips_torchs_constructor_is_wrapped(
    kind: type[Inner | Lookahead], overlap: bool
) -> None:
    def run(group: dist.ProcessGroup | None, rank: int, bare: bool) -> Tensor:
        params = make_params()
        base: Any = kind(sgd(params))
        optimizer = base if bare else wrap_base(base, group, overlap)
        StepLR(optimizer, step_size=1, gamma=0.9)
        for step in range(5):
            optimizer.zero_grad()
            backward(params, rank, step)
            optimizer.step()
        return flatten(params)

    def wrap_base(base: Any, group: dist.ProcessGroup | None, overlap: bool) -> Any:
        wrapper = DecentOptimWrapper(
            base, process_group=group, overlap=overlap, bucket_cap_mb=TINY_CAP_MB
        )
        assert not LocalUpdate(base).splits
        wrapper.register_step_post_hook(lambda *_: None)
        wrapper.register_state_dict_pre_hook(lambda *_: None)
        return wrapper

    assert torch.equal(run(None, 0, bare=True), run(None, 0, bare=False))
    rows = run_threads(2, lambda rank, group: run(group, rank, bare=False))
    assert not torch.equal(rows[0], run(None, 0, bare=True)), "they mixed"


def test_public_attributes_of_the_base_are_reached_through_the_wrapper_and_no_others() -> None:
    params = make_params()
    inner, base = Inner(sgd(params)), Lookahead(sgd(params))
    other: Any = DecentOptimWrapper(inner)
    other.eval()
    other.train()
    assert inner.modes == ["eval", "train"]
    assert other.step_was_skipped is False
    wrapper: Any = DecentOptimWrapper(base)
    assert hasattr(wrapper, "is_second_order")
    before = flatten(params)
    wrapper.sync_lookahead()
    with torch.no_grad():
        params[0].add_(1.0)
    wrapper.sync_lookahead()
    assert (flatten(params) - before).max() == 0.5
    # What the wrapper has itself stays its own, and assignments do not reach the base.
    assert wrapper.optimizer is base
    wrapper.note = "mine"
    assert not hasattr(base, "note")
    assert "_steps" in vars(base)
    for name in ("_steps", "_base_optimizer", "__fspath__", "anything_else"):
        assert not hasattr(wrapper, name)
    both = "neither 'DecentOptimWrapper' object nor its base optimizer, a Lookahead, has"
    with pytest.raises(AttributeError, match=f"{both} attribute 'anything_else'"):
        _ = wrapper.anything_else
    assert not hasattr(DecentOptimWrapper.__new__(DecentOptimWrapper), "is_second_order"), (
        "as while it is unpickled"
    )
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy, lambda w: torch.save(w, io.BytesIO())):
        with pytest.raises(TypeError, match=r"state_dict\(\)"):
            attempt(wrapper)


def test_the_numbers_of_a_scaler_are_those_that_it_gives_to_the_wrapper() -> None:
    """Not some that the base still has, nor its flag."""
    params = make_params()
    base: Any = Lookahead(sgd(params))
    wrapper = DecentOptimWrapper(base)
    base._step_supports_amp_scaling = False
    assert wrapper._step_supports_amp_scaling is True
    base.found_inf, base.grad_scale = torch.ones(1), torch.full((1,), 2.0)
    backward(params, 0, 0)
    before = flatten(params)
    wrapper.step()
    assert not wrapper.stats().skipped
    assert not torch.equal(flatten(params), before)


class Proxy:
    """What Lightning Fabric puts in front of an optimizer: a copy of its attributes."""

    def __init__(self, optimizer: Any) -> None:
        self.__dict__ = dict(optimizer.__dict__)
        self.__class__ = type("Fabric", (Proxy, type(optimizer)), {})
        self._optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)


def join_through_a_proxy(rank: int) -> tuple[int, list[float]]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    params = make_params()
    optimizer = wrap(params)
    proxy: Any = Proxy(optimizer)
    with Join([proxy]):
        take_steps(proxy, params, rank, range(3 + 2 * rank))
    optimizer.synchronize()
    rounds = optimizer.round
    dist.destroy_process_group()
    return rounds, list(flatten(params).tolist())


@pytest.mark.slow
def test_join_reaches_the_wrapper_through_fabrics_proxy() -> None:
    rows = run_processes(2, join_through_a_proxy)
    assert [rounds for rounds, _ in rows] == [5, 5]
    assert rows[0][1] == pytest.approx(rows[1][1], rel=1e-12)
    assert rows[0][1] != pytest.approx(flatten(make_params()).tolist(), rel=1e-3)
