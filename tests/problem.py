"""A small regression that differs on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.codecs import INT4

# Shapes that fill three buckets of TINY_CAP_MB: two of them with two parameters each, one with a
# parameter beyond the cap. More buckets would test nothing more, and take twice the time.
SHAPES = [(3, 3), (4,), (5, 6), (), (2, 3, 2)]
TINY_CAP_MB = 105 / 2**20

# How the bytes travel must not matter here, but for the rounding of `CODED`.
MODES: dict[str, dict[str, Any]] = {
    "copies": {},
    "views": {"param_as_bucket_view": True},
    "bf16": {"comm_dtype": torch.bfloat16},
    "bf16-views": {"comm_dtype": torch.bfloat16, "param_as_bucket_view": True},
}
CODED: dict[str, dict[str, Any]] = {
    "int8": {"comm_dtype": torch.int8},
    "int4-views": {"comm_dtype": INT4, "param_as_bucket_view": True},
}

MakeOptimizer = Callable[[Sequence[Tensor]], Optimizer]


def sgd(params: Sequence[Tensor]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(params: Sequence[Tensor]) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


class Masters(torch.optim.SGD):
    """Updates float32 masters in its state, and copies them into the parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("master", param.detach().float().clone())
                if param.grad is not None:
                    state["master"].sub_(param.grad.float(), alpha=group["lr"])
                param.copy_(state["master"])


def in_one_call(base: Optimizer) -> Optimizer:
    """A base that is not updated bucket by bucket: a hook of its own may look at all of it."""
    base.register_step_post_hook(lambda *_: None)
    return base


def nesterov(momentum: float, lr: float = 0.7) -> Callable[[list[Tensor]], Optimizer]:
    """Makes an outer optimizer, as of DiLoCo."""
    return partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=True)


def make_params(
    seed: int = 0, dtype: torch.dtype = torch.float64, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draws = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return [draw.requires_grad_() for draw in draws]


def draw_gradients(params: Sequence[Tensor], rank: int, step: int) -> Tensor:
    """Set gradients that do not depend on the parameters, so that the mean is known."""
    draws = make_params(1000 * rank + step, params[0].dtype, [param.shape for param in params])
    for param, draw in zip(params, draws, strict=True):
        param.grad = draw.detach()
    return flatten(draws)


def backward(params: Sequence[Tensor], rank: int, step: int) -> Tensor:
    """Set the gradients of a loss that depends on rank and step, nonlinear in the parameters."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    loss = torch.zeros((), dtype=torch.float64)
    for param in params:
        target = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        loss = loss + ((param.to(torch.float64) - target) ** 2).sum() + param.double().sin().sum()
    for param in params:
        param.grad = None
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def wrap(
    params: Sequence[Tensor],
    group: ProcessGroup | None = None,
    base: Optimizer | None = None,
    **options: Any,
) -> DecentOptimWrapper:
    """A wrapper of `base`, or of SGD, with three buckets."""
    options = {"bucket_cap_mb": TINY_CAP_MB, **options}
    return DecentOptimWrapper(base or sgd(params), process_group=group, **options)


def take_steps(
    optimizer: Optimizer,
    params: Sequence[Tensor],
    rank: int,
    steps: Iterable[int],
    give_gradients: Callable[[Sequence[Tensor], int, int], object] = backward,
) -> None:
    """Train for these steps: the regression, unless the gradients are others."""
    for step in steps:
        give_gradients(params, rank, step)
        optimizer.step()


# With gradients that do not depend on the parameters, so that the mean is known.
take_drawn_steps = partial(take_steps, give_gradients=draw_gradients)


def flatten(params: Sequence[Tensor]) -> Tensor:
    return torch.cat([param.detach().reshape(-1).double() for param in params])


@cache
def of_guide() -> dict[str, Any]:
    """What the guide about extending defines, by name."""
    text = (Path(__file__).parent.parent / "examples/guides/extending.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    # The last one trains with all that the others define.
    exec("".join(blocks[:-1]), names)
    return names


class OneParameter(nn.Module):
    """A parameter that is read when this is called."""

    def __init__(self, param: Tensor) -> None:
        super().__init__()
        self.param = param if isinstance(param, nn.Parameter) else nn.Parameter(param.detach())

    def forward(self, total: Tensor) -> Tensor:
        return total + self.param.detach().sum()
