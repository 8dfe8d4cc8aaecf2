"""One step of AccumAdam: tensor by tensor, in torch's foreach kernels, and inside a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Slot(NamedTuple):
    """A parameter and what its update reads and writes; complex tensors are viewed as real.

    Args:
        param: updated in place.
        grad: left as it is.
        exp_avg: first moment of the averages of the finished windows.
        exp_avg_sq: second moment of them.
        grad_sum: sum of the gradients of the window in progress.
        step: finished windows, shape ().
        position: gradients in the window in progress, shape ().
    """

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad_sum: Tensor
    step: Tensor
    position: Tensor


class Hyper(NamedTuple):
    """The numbers of a parameter group; `decoupled` is AdamW's weight decay, else Adam's."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    accum_iter: int


def update_single(slot: Slot, hyper: Hyper) -> None:
    """Update one parameter: the reference."""
    beta1, beta2 = hyper.beta1, hyper.beta2
    lr = float(hyper.lr)
    grad = _decay(slot, lr, hyper)
    slot.grad_sum.add_(grad)
    slot.position.add_(1)
    windows = slot.step.item() + 1
    average = slot.exp_avg.lerp(grad, 1 - beta1)
    spread = slot.exp_avg_sq.mul(beta2).addcmul_(grad, grad, value=1 - beta2).sqrt_()
    spread.div_((1 - beta2**windows) ** 0.5).add_(hyper.eps)
    slot.param.addcdiv_(average, spread, value=-lr / (1 - beta1**windows))
    if slot.position.item() >= hyper.accum_iter:
        mean = slot.grad_sum.div_(slot.position.item())
        slot.exp_avg.lerp_(mean, 1 - beta1)
        slot.exp_avg_sq.mul_(beta2).addcmul_(mean, mean, value=1 - beta2)
        slot.grad_sum.zero_()
        slot.position.zero_()
        slot.step.add_(1)


def update_foreach(slots: Sequence[Slot], hyper: Hyper) -> None:
    """Update many parameters by a kernel for each operation, not for each tensor.

    Tensors of several dtypes or devices are allowed, but then torch takes them one by one.
    """
    beta1, beta2 = hyper.beta1, hyper.beta2
    lr = float(hyper.lr)
    params = [slot.param for slot in slots]
    grads = [slot.grad for slot in slots]
    if hyper.weight_decay and hyper.decoupled:
        torch._foreach_mul_(params, 1 - lr * hyper.weight_decay)
    elif hyper.weight_decay:
        grads = list(torch._foreach_add(grads, params, alpha=hyper.weight_decay))
    torch._foreach_add_([slot.grad_sum for slot in slots], grads)
    torch._foreach_add_([slot.position for slot in slots], 1)
    windows = [slot.step.item() + 1 for slot in slots]
    averages = torch._foreach_lerp([slot.exp_avg for slot in slots], grads, 1 - beta1)
    spreads = torch._foreach_mul([slot.exp_avg_sq for slot in slots], beta2)
    torch._foreach_addcmul_(spreads, grads, grads, 1 - beta2)
    torch._foreach_sqrt_(spreads)
    torch._foreach_div_(spreads, [(1 - beta2**count) ** 0.5 for count in windows])
    torch._foreach_add_(spreads, hyper.eps)
    sizes = [-lr / (1 - beta1**count) for count in windows]
    torch._foreach_addcdiv_(params, averages, spreads, sizes)
    full = [slot for slot in slots if slot.position.item() >= hyper.accum_iter]
    if full:
        _close_windows(full, hyper)


def update_capturable(slot: Slot, hyper: Hyper) -> None:
    """Update one parameter without asking for a value, so that a CUDA graph can replay it."""
    grad = _decay(slot, hyper.lr, hyper)
    slot.grad_sum.add_(grad)
    slot.position.add_(1)
    windows = slot.step.double() + 1
    average = slot.exp_avg.lerp(grad, 1 - hyper.beta1)
    average.mul_(-hyper.lr / (1 - hyper.beta1**windows))
    spread = slot.exp_avg_sq.mul(hyper.beta2).addcmul_(grad, grad, value=1 - hyper.beta2)
    spread.sqrt_().div_((1 - hyper.beta2**windows).sqrt()).add_(hyper.eps)
    slot.param.addcdiv_(average, spread)
    # 1 where the window is full: moments then move, sums start again. Else 0, which changes none.
    full = (slot.position >= hyper.accum_iter).double()
    mean = slot.grad_sum / slot.position
    slot.exp_avg.lerp_(mean, (full * (1 - hyper.beta1)).to(mean.dtype))
    slot.exp_avg_sq.lerp_(mean.square(), (full * (1 - hyper.beta2)).to(mean.dtype))
    slot.grad_sum.mul_(1 - full)
    slot.position.mul_(1 - full)
    slot.step.add_(full)


def _close_windows(slots: Sequence[Slot], hyper: Hyper) -> None:
    sums = [slot.grad_sum for slot in slots]
    exp_avg_sqs = [slot.exp_avg_sq for slot in slots]
    means = torch._foreach_div(sums, [slot.position.item() for slot in slots])
    torch._foreach_lerp_([slot.exp_avg for slot in slots], means, 1 - hyper.beta1)
    torch._foreach_mul_(exp_avg_sqs, hyper.beta2)
    torch._foreach_addcmul_(exp_avg_sqs, means, means, 1 - hyper.beta2)
    torch._foreach_zero_(sums)
    torch._foreach_zero_([slot.position for slot in slots])
    torch._foreach_add_([slot.step for slot in slots], 1)


def _decay(slot: Slot, lr: float | Tensor, hyper: Hyper) -> Tensor:
    """Apply weight decay; returns the gradient, in Adam with the penalty's added."""
    if not hyper.weight_decay:
        return slot.grad
    if not hyper.decoupled:
        return slot.grad.add(slot.param, alpha=hyper.weight_decay)
    slot.param.mul_(1 - lr * hyper.weight_decay)
    return slot.grad
