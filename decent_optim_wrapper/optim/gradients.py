"""The parameters of an optimizer, and its gradients under GradScaler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from decent_optim_wrapper.optim.shards import local_grad


def params_of(optimizer: Any) -> list[Tensor]:
    """The parameters of an optimizer, in the order of its groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def unscale_(optimizer: Optimizer, grad_scale: Tensor) -> None:
    """Divide all gradients of an optimizer by the scale of GradScaler.

    Raises:
        ValueError: a gradient is float16.
    """
    # Kernels take no plain tensors and DTensors together, and no DTensors of several meshes.
    grads = [local_grad(p) for p in params_of(optimizer) if p.grad is not None]
    if any(grad.dtype == torch.float16 for grad in grads):
        raise ValueError(
            "expected gradients of float32 or wider under GradScaler, got float16; keep the "
            "parameters in float32 and use autocast, since float16 underflows when unscaled"
        )
    # Without a read on the host, which would wait for a GPU.
    inverse = grad_scale.double().reciprocal()
    for device in dict.fromkeys(grad.device for grad in grads):
        torch._foreach_mul_([g for g in grads if g.device == device], inverse.to(device))
