"""Backward passes as users make them: accumulated, shared, partial, checkpointed, broken."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from covering import pairwise
from modules import (
    adamw,
    backward,
    batch,
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
from ranks import run_threads
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.checkpoint import checkpoint

from decent_optim_wrapper import PeerError
from decent_optim_wrapper.gossip.gossip import Gossip

IN_BACKWARD = pytest.mark.parametrize("in_backward", [None, False], ids=["in-backward", "at-end"])


class Shared(nn.Module):
    """A weight used twice, one that is never used, a frozen one in between, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.unused = nn.Linear(7, 2)
        self.middle = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 3)
        self.double()
        fill(self)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(self.first(inputs).tanh()).tanh()
        hidden = self.norm(self.middle(hidden)).tanh()
        return self.last(hidden)  # type: ignore[no-any-return]


def convolutions() -> nn.Module:
    layers = [nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Conv2d(3, 3, 1), nn.Flatten()]
    model = nn.Sequential(*layers).double()
    fill(model)
    return model.to(memory_format=torch.channels_last)


def freeze(model: Shared, step: int) -> None:
    """Freeze a layer for two steps."""
    model.middle.requires_grad_(step not in (2, 3))


# A model, what happens to it before a step, and the size of the buckets.
TRAINED: dict[str, tuple[Callable[[], nn.Module], Callable[..., None], int]] = {
    "a weight that is used twice": (Shared, lambda model, step: None, 200),
    # In smaller buckets `last` would complete that of `middle`, which the pass has yet to go
    # through.
    "a layer that is frozen for a while": (Shared, freeze, 350),
    "channels last": (convolutions, lambda model, step: None, 100),
}


@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
@pytest.mark.parametrize("name", TRAINED)
def test_models_of_every_kind_train_as_with_the_wrapper_bit_for_bit(name: str, views: bool) -> None:
    make, prepare, cap = TRAINED[name]

    def main(rank: int, group: dist.ProcessGroup, ours: bool) -> Tensor:
        module = make()
        if ours:
            options = {"bucket_size_in_mb": cap / 2**20, "param_as_bucket_view": views}
            model = wrap(module, group, topology="ring", **options)
        else:
            optimizer = wrap_base(module, group, topology="ring")
        for step in range(6):
            prepare(module, step)
            if ours:
                train(model, rank, range(step, step + 1))
            else:
                train_by_steps(module, optimizer, rank, range(step, step + 1))
        return flat(module)

    expected = run_threads(4, partial(main, ours=False))
    assert all(map(torch.equal, run_threads(4, partial(main, ours=True)), expected))
    assert (expected[0] - flat(make())).abs().max() > 1e-2


def test_a_gradient_that_is_none_on_one_rank_keeps_nobody_waiting() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        model = wrap(module := make_model(), group, topology="ring")
        for step in range(4):
            if (rank, step) == (0, 3):
                model.optimizer.step()
            elif rank == 0:
                backward(module[0](batch(rank, step)).sum())
            else:
                train(model, rank, range(step, step + 1))
        assert model.optimizer.round == 4
        model.optimizer.synchronize()
        return flat(module[2])

    for row in run_threads(2, main):
        assert not torch.equal(row, flat(make_model()[2]))


@IN_BACKWARD
@pytest.mark.parametrize("late", [True, False], ids=["before-backward", "before-forward"])
def test_micro_batches_make_one_step(late: bool, in_backward: bool | None) -> None:
    def ours(rank: int, group: dist.ProcessGroup) -> Tensor:
        model = wrap(make_model(), group, update_in_backward=in_backward)
        for step in range(3):
            model.set_accumulate_grad(True)
            backward(loss_of(model, rank, 2 * step))
            assert model.optimizer.round == step
            if not late:
                model.set_accumulate_grad(False)
            loss = loss_of(model, rank, 2 * step + 1)
            model.set_accumulate_grad(False)
            backward(loss)
            assert model.optimizer.round == step + 1
        return flat(model)

    def theirs(rank: int, group: dist.ProcessGroup) -> Tensor:
        model = make_model()
        optimizer = wrap_base(model, group)
        for step in range(3):
            optimizer.zero_grad()
            backward(loss_of(model, rank, 2 * step))
            backward(loss_of(model, rank, 2 * step + 1))
            optimizer.step()
        return flat(model)

    expected = run_threads(2, theirs)
    assert all(map(torch.equal, run_threads(2, ours), expected))
    assert not torch.equal(expected[0], flat(make_model()))


def test_only_a_backward_pass_of_the_parameters_is_a_step_and_calls_its_hooks() -> None:
    model = wrap(make_model(), None)
    calls: list[str] = []
    model.optimizer.register_step_post_hook(lambda *_: calls.append("wrapper"))
    before = flat(model)
    with torch.no_grad():
        loss_of(model, 0, 0)
    model.eval()
    loss_of(model, 0, 0)
    model.train()
    inputs = batch(0, 0).requires_grad_()
    (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    model.zero_grad()
    assert (model.optimizer.round, calls) == (0, [])
    assert torch.equal(flat(model), before)
    backward(model(inputs).sum() + slope.square().sum())
    assert (model.optimizer.round, calls) == (1, ["wrapper"])
    assert not torch.equal(flat(model), before)


def test_zero_grad_is_harmless_anywhere() -> None:
    rows = []
    for clears in (True, False):
        model = wrap(make_model(), None)
        for step in range(3):
            if clears:
                model.zero_grad()
            loss = loss_of(model, 0, step)
            if clears:
                model.optimizer.zero_grad()
            backward(loss)
            if clears:
                model.zero_grad()
        rows.append(flat(model))
    assert torch.equal(*rows)
    assert not torch.equal(rows[0], flat(make_model()))


class Pair(NamedTuple):
    one: Tensor
    other: Tensor


@dataclass
class Output:
    logits: dict[str, list[Pair]]


class Checkpointed(nn.Module):
    """Every layer in a checkpoint; the weight of `tied` in two of them."""

    def __init__(self, reentrant: bool, ties: int = 1, count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count)).double()
        self.order = [*range(count), *[count - 1] * (ties - 1)]
        self.reentrant = reentrant
        fill(self)

    def forward(self, inputs: Tensor) -> Output:
        hidden = inputs.clone().requires_grad_()
        for index in self.order:
            layer = self.layers[index]
            hidden = checkpoint(layer, hidden, use_reentrant=self.reentrant).tanh()
        return Output({"logits": [Pair(hidden, hidden * 2)]})


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_make_one_step_in_a_pass(reentrant: bool) -> None:
    def run(module: nn.Module, model: Any, finish: Any) -> Tensor:
        for step in range(3):
            output = model(batch(0, step)).logits["logits"][0]
            backward((output.one * output.other).mean())
            finish()
        return flat(module)

    module, plain = Checkpointed(reentrant), Checkpointed(reentrant)
    model = wrap(module, None)
    base = sgd(plain.parameters())
    assert base.defaults["momentum"]
    row = run(module, model, lambda: None)
    assert model.optimizer.round == 3

    def finish() -> None:
        base.step()
        base.zero_grad()

    assert torch.equal(row, run(plain, plain, finish))
    assert not torch.equal(row, flat(Checkpointed(reentrant)))


@IN_BACKWARD
def test_a_gradient_that_comes_too_late_is_an_error_or_waited_for(in_backward: bool | None) -> None:
    module = Checkpointed(reentrant=True, ties=2)
    model = wrap(module, None, update_in_backward=in_backward, bucket_size_in_mb=1e-5)
    loss = model(batch(0, 0)).logits["logits"][0].one.sum()
    if in_backward is False:
        backward(loss)
        assert model.optimizer.round == 1
        return
    with pytest.raises(RuntimeError, match=r"one gradient of layers.5.bias .* use_reentrant"):
        backward(loss)
    with pytest.raises(RuntimeError, match="ended in the middle of a step"):
        model(batch(0, 0))


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise KeyError("mine")


class Breakable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)).double()
        self.breaks_at: int | None = None
        fill(self)

    def forward(self, inputs: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index == self.breaks_at:
                inputs = Breaks.apply(inputs)
            inputs = layer(inputs).tanh()
        return inputs[:, :3]


def test_an_error_of_the_user_in_the_middle_of_a_step_is_remembered() -> None:
    model = wrap(module := Breakable(), None)
    train(model, 0, range(2))
    module.breaks_at = 2
    loss = loss_of(model, 0, 2)
    before = flat(model)
    with pytest.raises(KeyError, match="mine"):
        backward(loss)
    assert not torch.equal(flat(model), before)
    module.breaks_at = None
    for refused in (lambda: loss_of(model, 0, 3), model.state_dict, model.global_avg):
        with pytest.raises(RuntimeError, match="the last backward pass ended in the middle of a"):
            refused()
    with pytest.raises(RuntimeError, match="the last backward pass ended in the middle of a"):
        backward(loss_of(module, 0, 3))


@pytest.mark.parametrize(
    ("in_backward", "has_gradients"), [(None, False), (False, False), (False, True)]
)
def test_an_error_of_the_user_before_the_first_update_changes_nothing(
    in_backward: bool | None, has_gradients: bool
) -> None:
    options: Any = {"scaler": GradScaler("cpu", init_scale=8.0)} if has_gradients else {}
    model = wrap(module := Breakable(), None, update_in_backward=in_backward, **options)
    train(model, 0, range(2))
    before = flat(model)
    module.breaks_at = 3
    loss = model(batch(0, 2)).sum()
    # Or a loss of which the last layer has no part.
    loss = loss if has_gradients else Breaks.apply(loss)
    with pytest.raises(KeyError):
        backward(loss if model.scaler is None else model.scaler.scale(loss))
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(flat(model), before)
    module.breaks_at = None
    train(model, 0, range(2, 3))
    assert model.optimizer.round == 3
    assert not torch.equal(flat(model), before)


def test_a_backward_pass_raises_the_loss_of_a_peer() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = wrap(make_model(), group, topology="ring", timeout=1.0)
        train(model, rank, range(2))
        if rank == 0:
            loss = loss_of(model, rank, 2)
            before = flat(model)
            backward(loss)
            loss = loss_of(model, rank, 3)
            assert not torch.equal(flat(model), before)
            before = flat(model)
            with pytest.raises(PeerError) as error:
                backward(loss)
            assert error.value.rank == 1
            assert torch.equal(flat(model), before)

    run_threads(2, main)


@pytest.mark.parametrize("overflows", [True, False])
def test_values_that_the_pass_still_wants_are_not_changed_in_silence(overflows: bool) -> None:
    """Also where an overflow leaves it at the mixing, which autograd does not see in views."""

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.first(inputs) * self.last.weight.detach().sum(0)
            hidden = hidden @ self.last.weight.detach()
            return self.last(hidden)  # type: ignore[no-any-return]

    def main(rank: int, group: dist.ProcessGroup) -> None:
        module = Detached()
        fill(module, rank)
        scaler = GradScaler("cpu", init_scale=1.0)
        options = {"bucket_size_in_mb": 1e-5, "scaler": scaler, "sync_at_start": False}
        model = wrap(module, group, **options)
        # A round that the next pass mixes.
        model.idle_step()
        if overflows:
            weight = module.last.weight
            weight.register_hook(lambda grad: grad * float("inf"))  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward(scaler.scale(model(batch(rank, 0)).sum()))

    run_threads(2, main)


def test_sparse_gradients_are_refused() -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4, sparse=True).double()
            self.last = nn.Linear(4, 40).double()

        def forward(self, words: Tensor) -> Tensor:
            return self.last(self.words(words))  # type: ignore[no-any-return]

    model = wrap(Embeds(), None)
    with pytest.raises(RuntimeError, match=r"expected dense gradients, but that of words.weight"):
        backward(model(torch.tensor([1, 2])).sum())


@pytest.mark.parametrize(
    ("in_backward", "fused", "clip"),
    pairwise(
        {"in-backward": None, "at-end": False},
        {"fused": True, "unfused": False},
        {"clips": 0.01, "does not clip": 0.0},
    ),
)
def test_gradients_are_unscaled_once(in_backward: bool | None, fused: bool, clip: float) -> None:
    rows = []
    for scale in (1024.0, None):
        scaler = GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        model = wrap(
            make_model(dtype=torch.float32),
            None,
            lambda named: torch.optim.SGD(named, lr=0.1, fused=fused),
            scaler=scaler,
            grad_clip_norm=clip,
            update_in_backward=in_backward,
        )
        for step in range(4):
            backward(scaler.scale(loss_of(model, 0, step)))
        rows.append(flat(model))
        assert scaler.get_scale() == (scale or 1.0)
    torch.testing.assert_close(*rows, rtol=1e-6, atol=1e-7)
    assert (rows[0] - flat(make_model(dtype=torch.float32))).abs().max() > 1e-3


@IN_BACKWARD
def test_an_overflow_on_one_rank_skips_an_update_there_and_halves_its_scale_once(
    in_backward: bool | None,
) -> None:
    """One bucket of rank 0 overflows in step 1; at lr 1 and no momentum an update is a gradient."""

    def main(rank: int, group: dist.ProcessGroup) -> tuple[list[float], int]:
        scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        module = make_model(dtype=torch.float32)
        last = module.get_parameter("4.bias")
        model = wrap(
            module,
            group,
            lambda named: torch.optim.SGD(named, lr=0.1),
            scaler=scaler,
            topology="ring",
            update_in_backward=in_backward,
        )
        scales = []
        for step in range(4):
            overflows = (rank, step) == (0, 1)
            factor = float("inf") if overflows else 1.0
            hook = last.register_hook(lambda grad, factor=factor: grad * factor)  # type: ignore[no-untyped-call]
            loss = scaler.scale(loss_of(model, rank, step))
            before = {p: p.detach().clone() for p in module.parameters()}
            backward(loss)
            hook.remove()
            scales.append(scaler.get_scale())
            assert model.optimizer.stats().skipped is overflows
            assert all(p.isfinite().all() for p in module.parameters())
            if step == 1:
                # Ranks agree before the second step up to their first updates.
                assert not torch.equal(last, before[last])
        model.optimizer.synchronize()
        return scales, model.optimizer.round

    (zero, rounds), (one, _) = run_threads(2, main)
    assert rounds == 4
    assert zero == [1024.0, 512.0, 512.0, 512.0]
    assert one == [1024.0] * 4


def test_an_overflow_skips_its_bucket_only() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    module = make_model(dtype=torch.float32)
    model = wrap(module, None, scaler=scaler)
    first, *_, last = model.optimizer.buckets
    overflowing = module.get_parameter("4.bias")
    overflowing.register_hook(lambda grad: grad * float("inf"))  # type: ignore[no-untyped-call]
    before = [[p.detach().clone() for p in bucket.members] for bucket in (first, last)]
    backward(scaler.scale(loss_of(model, 0, 0)))
    assert any(member is overflowing for member in first.members)
    assert all(map(torch.equal, first.members, before[0]))
    assert not any(map(torch.equal, last.members, before[1]))
    assert scaler.get_scale() == 4.0


def test_clipping_is_by_bucket_inside_the_pass_and_by_the_model_at_its_end() -> None:
    moved = {}
    for in_backward in (True, False):
        model = wrap(
            make_model(),
            None,
            lambda named: torch.optim.SGD(named, lr=1.0),
            grad_clip_norm=1.0,
            update_in_backward=in_backward,
        )
        buckets = model.optimizer.buckets
        before = flat(model)
        backward(1000 * loss_of(model, 0, 0))
        moved[in_backward] = (flat(model) - before).norm().item()
        assert len(buckets) >= 2
    assert moved[False] == pytest.approx(1.0, rel=1e-4)
    assert moved[True] == pytest.approx(len(buckets) ** 0.5, rel=1e-4)


@pytest.mark.parametrize("averaged", [True, False])
def test_buffers_and_frozen_parameters_start_the_same_and_buffers_are_averaged_if_asked(
    averaged: bool,
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        module = Shared()
        fill(module, seed=rank)
        module.first.requires_grad_(False)
        running = module.get_buffer("norm.running_mean").fill_(float(rank + 1))
        model = wrap(module, group, sync_buffer_in_global_avg=averaged)
        assert running[0] == 1
        first = flat(module.first)
        running.fill_(float(rank + 1))
        model.global_avg()
        mean = running.clone()
        model.revert_global_avg()
        return first, mean, running

    (first, mean, back), (other, other_mean, other_back) = run_threads(2, main)
    assert torch.equal(first, other)
    assert [mean[0].item(), other_mean[0].item()] == ([1.5, 1.5] if averaged else [1.0, 2.0])
    assert [back[0].item(), other_back[0].item()] == [1.0, 2.0]


class TwoLayers(nn.Module):
    """The same names and shapes, registered in either order."""

    def __init__(self, backwards: bool) -> None:
        super().__init__()
        for name in ("two", "one") if backwards else ("one", "two"):
            self.add_module(name, nn.Linear(8, 8))


def test_the_ranks_must_fill_buckets_in_the_same_order() -> None:
    def sorted_sgd(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        return sgd(sorted(named))

    def main(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"the ranks disagree.*buckets filled in the order"):
            wrap(TwoLayers(backwards=rank == 1), group, sorted_sgd)

    run_threads(2, main)
    run_threads(2, lambda rank, group: wrap(TwoLayers(backwards=True), group, sorted_sgd))


def test_a_module_that_is_dropped_leaves_its_model_alone() -> None:
    module = make_model()
    dropped = wrap(module, None)
    train(dropped, 0, range(1))
    gone = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert gone() is None
    before = flat(module)
    backward(loss_of(module, 0, 1))
    assert torch.equal(flat(module), before)
    assert module[0].weight.grad is not None
    module.zero_grad()
    again = wrap(module, None, adamw)
    train(again, 0, range(1, 3))
    assert again.optimizer.round == 2


@IN_BACKWARD
def test_what_is_in_no_bucket_is_unscaled_and_clipped(in_backward: bool | None) -> None:
    model = make_model(dtype=torch.float32)
    weight = next(model.parameters())
    model[0].requires_grad_(False)
    scaler = GradScaler("cpu", init_scale=1024.0)
    wrapped = wrap(
        model,
        None,
        lambda named: torch.optim.SGD(model.parameters(), lr=1.0),
        scaler=scaler,
        grad_clip_norm=0.1,
        update_in_backward=in_backward,
    )
    model[0].requires_grad_(True)
    before = weight.detach().clone()
    backward(scaler.scale(1000 * loss_of(wrapped, 0, 0)))
    assert 0 < (weight - before).norm().item() <= 0.1 + 1e-5


def test_a_layer_that_is_added_later_steps_alone() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    wrapped = wrap(model, None)
    model.requires_grad_(False)
    model[0].requires_grad_(True)
    group = {"params": [*model[0].named_parameters(prefix="0")]}
    wrapped.optimizer.add_param_group(group)
    before = flat(model)
    train(wrapped, 0, range(2))
    assert wrapped.optimizer.round == 2
    moved = (flat(model) != before).sum().item()
    assert moved == sum(param.numel() for param in model[0].parameters())


def test_an_idle_step_is_a_round_without_an_update_and_a_step_of_the_schedule() -> None:
    def schedule(base: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(base, 1, gamma=0.5)

    def main(rank: int, group: dist.ProcessGroup) -> tuple[float, int, Tensor]:
        model = wrap(make_model(), group, topology="complete", lr_scheduler_fn=schedule)
        train(model, rank, range(1))
        if rank:
            train(model, rank, range(1, 2))
        else:
            model.idle_step()
        before = flat(model)
        model.optimizer.synchronize()
        assert not torch.equal(flat(model), before)
        return model.get_lr(), model.optimizer.round, flat(model)

    (rate, rounds, one), (same, also, other) = run_threads(2, main)
    assert rate == same == 0.0125
    assert rounds == also == 2
    torch.testing.assert_close(one, other)


def test_an_idle_step_that_fails_leaves_nothing_to_the_next_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: Gossip) -> None:
        raise ArithmeticError("out of luck")

    model = wrap(make_model(), None)
    with monkeypatch.context() as patch:
        patch.setattr(Gossip, "begin_step", fail)
        with pytest.raises(ArithmeticError, match="out of luck"):
            model.idle_step()
    train(model, 0, range(1))
    assert model.optimizer.round == 1
    assert not torch.equal(flat(model), flat(make_model()))
