"""A small network whose batches differ on every rank, trained by backward passes or by steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from decent_optim_wrapper.ddp import DecentralizedDataParallel
from decent_optim_wrapper.ddp.backward_step import BackwardOptimizer
from decent_optim_wrapper.optim import AccumAdam
from decent_optim_wrapper.wrapper import DecentOptimWrapper

# Four buckets for `make_model`, of which one is a parameter beyond the cap.
CAP_MB = 200 / 2**20


def sgd(named: Any) -> Optimizer:
    return torch.optim.SGD(named, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(named: Any) -> Optimizer:
    return torch.optim.AdamW(named, lr=0.02, weight_decay=0.1)


def accum_adam(named: Any) -> Optimizer:
    return AccumAdam(named, lr=0.02, accum_iter=2)


def fill(model: nn.Module, seed: int = 0) -> None:
    # Ranks are threads here and share torch's global generator.
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        nn.init.normal_(param, std=0.5, generator=generator)


def make_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    layers = [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)]
    model = nn.Sequential(*layers).to(dtype)
    fill(model, seed)
    return model


def batch(rank: int, step: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(*(shape or (8, 4)), generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: Callable[[Tensor], Tensor], rank: int, step: int) -> Tensor:
    dtype = next(model.parameters()).dtype if isinstance(model, nn.Module) else torch.float64
    inputs = batch(rank, step, dtype=dtype)
    return (model(inputs) - inputs[:, :3]).square().mean()


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()]).clone()


def wrap(
    model: nn.Module, group: dist.ProcessGroup | None, optim_fn: Any = sgd, **options: Any
) -> DecentralizedDataParallel:
    options = {"bucket_size_in_mb": CAP_MB, "process_group": group, **options}
    wrapped = DecentralizedDataParallel(model, optim_fn, **options)
    assert len(wrapped.optimizer.buckets) >= 2
    return wrapped


def wrap_base(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    optim_fn: Any = sgd,
    reverse: bool = False,
    **options: Any,
) -> DecentOptimWrapper:
    """What a training loop has, with the buckets in either order."""
    base = optim_fn(list(model.named_parameters()))
    options = {"bucket_cap_mb": CAP_MB, "process_group": group, **options}
    ours = partial(BackwardOptimizer, base, model, average_buffers=False)
    return (ours if reverse else partial(DecentOptimWrapper, base))(**options)


def train(model: DecentralizedDataParallel, rank: int, steps: range) -> None:
    for step in steps:
        loss = loss_of(model, rank, step)
        backward(loss if model.scaler is None else model.scaler.scale(loss))


def train_by_steps(
    model: nn.Module, optimizer: DecentOptimWrapper, rank: int, steps: range
) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(loss_of(model, rank, step))
        optimizer.step()
