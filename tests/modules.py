"""A small network whose batches differ on every rank, trained by backward passes or by steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from decent_optim_wrapper.ddp import DecentralizedDataParallel
from decent_optim_wrapper.ddp.backward_step import BackwardOptimizer
from decent_optim_wrapper.optim import AccumAdam
from decent_optim_wrapper.start.tensors import ModuleExtras
from decent_optim_wrapper.wrapper import DecentOptimWrapper

# Four buckets for `make_model`, of which one is a parameter beyond the cap.
CAP_MB = 200 / 2**20


def sgd(named: Any) -> Optimizer:
    return torch.optim.SGD(named, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(named: Any, eps: float = 1e-8) -> Optimizer:
    return torch.optim.AdamW(named, lr=0.02, weight_decay=0.1, eps=eps)


def accum_adam(named: Any, eps: float = 1e-8) -> Optimizer:
    return AccumAdam(named, lr=0.02, accum_iter=2, eps=eps)


def fill(model: nn.Module, seed: int = 0) -> None:
    # Ranks are threads here and share torch's global generator.
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        nn.init.normal_(param, std=0.5, generator=generator)


class Odd(nn.Module):
    """Reads its parameters in many ways: out of order, tied, by functions, from frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.first = nn.Linear(4, 6)
        self.tied = nn.Linear(4, 6, bias=False)
        self.tied.weight = self.first.weight
        # Its projection is read by a function, outside of the module's own forward pass.
        self.attention = nn.MultiheadAttention(6, 2)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(5, 5)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.own = nn.Parameter(torch.ones(6))
        self.double()
        fill(self)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.linear(inputs, self.tied.weight) + self.first(inputs) * self.own
        hidden, _ = self.attention(hidden, hidden, hidden)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        result: Tensor = self.last(self.frozen(hidden).tanh())
        return result


class Detached(nn.Linear):
    """A layer that builds no graph: on a GPU the autograd engine asks the driver for streams."""

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight.detach(), self.bias.detach())


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
    """The module, which mixes as a wrapper without a model does by default."""
    options = {"comm_dtype": torch.float32, "overlap": True, **options}
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
    options = {"comm_dtype": torch.float32, "process_group": group, **options}
    options = {"bucket_cap_mb": CAP_MB, **options}
    if reverse:
        extras = ModuleExtras(in_backward=True, averages_state=False)
        return BackwardOptimizer(base, model=model, _extras=extras, **options)
    return DecentOptimWrapper(base, model=model, **options)


def train(model: DecentralizedDataParallel, rank: int, steps: range) -> None:
    for step in steps:
        loss = loss_of(model, rank, step)
        backward(loss if model.scaler is None else model.scaler.scale(loss))


class Training:
    """A rank that trains a model by calls of `step()` or by backward passes.

    Args:
        rank: this rank; the models of the ranks differ.
        group: its process group.
        way: "step", or "backward" for the module. That always overlaps: without, steps are made
            with its buckets.
        model: the model; None makes one by `make_model`.
        base: makes the optimizer.
        cap_mb: size of a bucket in MiB.
        options: of the wrapper.
    """

    def __init__(
        self,
        rank: int,
        group: dist.ProcessGroup | None,
        /,
        way: str = "step",
        model: nn.Module | None = None,
        base: Any = sgd,
        cap_mb: float = CAP_MB,
        **options: Any,
    ) -> None:
        options = {"topology": "ring", "overlap": "forward", "comm_dtype": torch.float32, **options}
        self.rank = rank
        # Of any class: tests read its parts.
        self.model: Any = make_model(seed=rank) if model is None else model
        self.called: Any = self.model
        self.optimizer: DecentOptimWrapper
        in_backward = way == "backward"
        if in_backward and options["overlap"]:
            self.called = wrap(self.model, group, base, bucket_size_in_mb=cap_mb, **options)
            self.optimizer = self.called.optimizer
        else:
            options["bucket_cap_mb"] = cap_mb
            self.optimizer = wrap_base(self.model, group, base, in_backward, **options)
            assert len(self.optimizer.buckets) >= 2
        self._start = flat(self.model)

    def train(self, steps: Iterable[int], loss: Callable[..., Tensor] = loss_of) -> None:
        """Make these steps, with the loss of a model, a rank and a step."""
        for step in steps:
            self.optimizer.zero_grad()
            backward(loss(self.called, self.rank, step))
            if self.called is self.model:
                self.optimizer.step()

    def end(self) -> Tensor:
        """The parameters, which have moved."""
        self.optimizer.synchronize()
        assert (flat(self.model) - self._start).abs().max() > 1e-3
        return flat(self.model)
