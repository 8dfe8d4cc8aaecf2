"""Backward passes as users make them: shared, partial, checkpointed, scaled, broken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modules import (
    Training,
    backward,
    batch,
    fill,
    flat,
    loss_of,
    make_model,
    sgd,
    train,
    wrap,
)
from ranks import run_threads
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

IN_BACKWARD = pytest.mark.parametrize("in_backward", [None, False], ids=["in-backward", "at-end"])


@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
def test_a_layer_that_is_frozen_for_a_while_trains_as_with_the_wrapper_bit_for_bit(
    views: bool,
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        ends = []
        for way in ("step", "backward"):
            options: Any = {"overlap": True, "param_as_bucket_view": views}
            training = Training(rank, group, way, cap_mb=500 / 2**20, **options)
            for step in range(6):
                training.model[2].requires_grad_(step not in (2, 3))
                training.train([step])
            ends.append(training.end())
        assert torch.equal(*ends)

    run_threads(4, main)


def test_a_gradient_that_is_none_on_one_rank_keeps_nobody_waiting() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
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
        assert not torch.equal(flat(module[2]), flat(make_model()[2]))

    run_threads(2, main)


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


@dataclass
class Output:
    logits: dict[str, list[tuple[Tensor, ...]]]


class Checkpointed(nn.Module):
    """Every layer in a checkpoint; the weight of the last one in several of them."""

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
        return Output({"logits": [(hidden, hidden * 2)]})


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_make_one_step_in_a_pass(reentrant: bool) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        one, other = model(batch(rank, step)).logits["logits"][0]
        result: Tensor = (one * other).mean()
        return result

    ends = []
    for way in ("step", "backward"):
        training = Training(0, None, way, Checkpointed(reentrant))
        training.train(range(3), loss)
        assert training.optimizer.round == 3
        ends.append(training.end())
    assert torch.equal(*ends)


@IN_BACKWARD
def test_a_gradient_that_comes_too_late_is_an_error_or_waited_for(in_backward: bool | None) -> None:
    module = Checkpointed(reentrant=True, ties=2)
    model = wrap(module, None, update_in_backward=in_backward, bucket_size_in_mb=1e-5)
    loss = model(batch(0, 0)).logits["logits"][0][0].sum()
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


@pytest.mark.parametrize("has_gradients", [True, False], ids=["in a layer", "in the loss"])
@IN_BACKWARD
def test_an_error_of_the_user_changes_nothing_or_is_remembered(
    in_backward: bool | None, has_gradients: bool
) -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    module = make_model()
    model = wrap(module, None, update_in_backward=in_backward, scaler=scaler)
    train(model, 0, range(2))
    before = flat(model)
    # Behind the last layer, or before all of them.
    broken = module[3] if has_gradients else module
    hook = broken.register_forward_hook(lambda _, args, out: Breaks.apply(out))
    loss = loss_of(model, 0, 2)
    hook.remove()
    with pytest.raises(KeyError, match="mine"):
        backward(scaler.scale(loss))
    if in_backward is None and has_gradients:
        # The last layer was updated by then.
        assert not torch.equal(flat(model), before)
        loss = loss_of(module, 0, 3)
        for refused in (
            *(lambda: loss_of(model, 0, 3), lambda: backward(loss)),
            *(model.state_dict, model.global_avg, model.idle_step),
            lambda: model.load_state_dict({}),
        ):
            with pytest.raises(RuntimeError, match="the last backward pass ended in the middle of"):
                refused()
        return
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(flat(model), before)
    train(model, 0, range(2, 3))
    assert model.optimizer.round == 3
    assert not torch.equal(flat(model), before)


def overflow(param: Tensor) -> None:
    """Make its gradients overflow from now on."""
    param.register_hook(lambda grad: grad * torch.inf)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("overflows", [True, False])
def test_values_that_the_pass_still_wants_are_not_changed_in_silence(overflows: bool) -> None:
    """Also where an overflow leaves it at the mixing, which autograd does not see in views."""

    def main(rank: int, group: dist.ProcessGroup) -> None:
        module = make_model(rank)
        last = module.get_parameter("4.weight")

        def read(_: Any, args: Any, out: Tensor) -> Tensor:
            # Without a gradient there.
            return out @ last.detach().T @ last.detach()

        module[3].register_forward_hook(read)
        scaler = GradScaler("cpu", init_scale=1.0)
        options = {"bucket_size_in_mb": 1e-5, "scaler": scaler, "sync_at_start": False}
        model = wrap(module, group, **options)
        # A round that the next pass mixes.
        model.idle_step()
        if overflows:
            overflow(last)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward(scaler.scale(model(batch(rank, 0)).sum()))

    run_threads(2, main)


@IN_BACKWARD
def test_an_overflow_skips_its_bucket_or_all_at_the_end_and_halves_the_scale_once(
    in_backward: bool | None,
) -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    module = make_model(dtype=torch.float32)
    model = wrap(module, None, scaler=scaler, update_in_backward=in_backward)
    overflow(module.get_parameter("4.bias"))
    values = [[*map(Tensor.clone, bucket.members)] for bucket in model.optimizer.buckets]
    backward(scaler.scale(loss_of(model, 0, 0)))
    assert model.optimizer.stats().skipped
    assert scaler.get_scale() == 4.0
    moved = [
        not any(map(torch.equal, bucket.members, before))
        for bucket, before in zip(model.optimizer.buckets, values, strict=True)
    ]
    assert moved == [False, *[in_backward is None] * (len(moved) - 1)]


@IN_BACKWARD
def test_what_is_in_no_bucket_is_not_trained_by_each_rank(in_backward: bool | None) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    wrapped = wrap(model, None, lambda _: sgd(model.parameters()), update_in_backward=in_backward)
    train(wrapped, 0, range(1))
    model[0].requires_grad_(True)
    weight = next(model.parameters())
    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match="call rebuild_buckets"):
        backward(loss_of(wrapped, 0, 1))
    assert torch.equal(weight, before)


def test_an_idle_step_is_a_round_without_an_update_and_a_step_of_the_schedule() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        options: Any = {"lr_scheduler_fn": lambda base: StepLR(base, 1, gamma=0.5)}
        model = wrap(make_model(), group, topology="complete", **options)
        train(model, rank, range(1))
        if rank:
            train(model, rank, range(1, 2))
        else:
            model.idle_step()
        before = flat(model)
        model.optimizer.synchronize()
        assert not torch.equal(flat(model), before)
        assert model.get_lr() == 0.0125
        assert model.optimizer.round == 2
        return flat(model)

    torch.testing.assert_close(*run_threads(2, main))


@IN_BACKWARD
def test_an_idle_step_drops_gradients_that_were_collected(in_backward: bool | None) -> None:
    model = wrap(make_model(), None, update_in_backward=in_backward)
    before = flat(model)
    model.set_accumulate_grad(True)
    backward(loss_of(model, 0, 0))
    model.set_accumulate_grad(False)
    model.idle_step()
    assert torch.equal(flat(model), before)
    train(model, 0, range(1))
    other = wrap(make_model(), None, update_in_backward=in_backward)
    train(other, 0, range(1))
    assert torch.equal(flat(model), flat(other))
    assert not torch.equal(flat(model), before)
