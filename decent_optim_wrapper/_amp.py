"""The local update under mixed precision: an overflow skips it, and it alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from loguru import logger
from torch import Tensor
from torch.optim import Optimizer


def local_update(
    optimizer: Optimizer,
    closure: Callable[[], float] | None,
    found_inf: Tensor | None,
    grad_scale: Tensor | None,
) -> float | None:
    """Step the base optimizer on gradients that may be scaled.

    Args:
        optimizer: the base.
        closure: handed to the base, which evaluates it as often as it needs.
        found_inf: not zero where a gradient overflowed; None without a GradScaler.
        grad_scale: the factor still in the gradients; None when they are unscaled already.

    Returns:
        What the base's step returns; None where it is skipped.

    Raises:
        ValueError: float16 gradients that would have to be unscaled, as GradScaler has it.
    """
    if found_inf is None:
        return optimizer.step() if closure is None else optimizer.step(closure)
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return _fused_step(optimizer, found_inf, grad_scale)
    if found_inf.item():
        logger.debug("gradients overflowed: this rank's local update is skipped")
        return None
    if grad_scale is not None:
        _unscale_(optimizer, grad_scale)
    return optimizer.step()


def _fused_step(optimizer: Any, found_inf: Tensor, grad_scale: Tensor | None) -> float | None:
    """A fused kernel unscales and skips by itself, from these two attributes."""
    optimizer.found_inf, optimizer.grad_scale = found_inf, grad_scale
    try:
        return optimizer.step()  # type: ignore[no-any-return]
    finally:
        del optimizer.found_inf, optimizer.grad_scale


def _unscale_(optimizer: Optimizer, grad_scale: Tensor) -> None:
    params = (p for group in optimizer.param_groups for p in group["params"])
    grads = [p.grad for p in params if p.grad is not None]
    if any(grad.dtype == torch.float16 for grad in grads):
        raise ValueError(
            "expected gradients of float32 or wider under GradScaler, got float16, which would "
            "underflow when unscaled; keep the parameters in float32 and use autocast"
        )
    torch._foreach_mul_(grads, 1.0 / grad_scale.double().item())
