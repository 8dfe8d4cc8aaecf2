"""What the optimizers read of a parameter group."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def with_gradients(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters that have a gradient, and the gradients.

    Raises:
        RuntimeError: a gradient is sparse.
    """
    pairs = [(param, param.grad) for param in params if param.grad is not None]
    for param, grad in pairs:
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"expected dense gradients, got one of layout {grad.layout} for a parameter of "
                f"shape {tuple(param.shape)}; build its layer with sparse=False"
            )
    return [param for param, _ in pairs], [grad for _, grad in pairs]
