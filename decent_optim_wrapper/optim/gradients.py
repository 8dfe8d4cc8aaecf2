"""What the optimizers ask of a gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_grad(param: Tensor) -> Tensor:
    """Return the gradient of a parameter that has one.

    Raises:
        RuntimeError: it is sparse, or there is none.
    """
    grad = param.grad
    if grad is None:
        raise RuntimeError(
            f"expected a gradient of a parameter of shape {tuple(param.shape)}, got None; leave "
            f"parameters without one out"
        )
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"expected dense gradients, got one of layout {grad.layout} for a parameter of shape "
            f"{tuple(param.shape)}; build its layer with sparse=False"
        )
    return grad
