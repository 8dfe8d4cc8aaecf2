"""Base of the optimizers: a step for each group, over its parameters with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from decent_optim_wrapper.optim.shards import local_grad


class OptimizerOfGroups(Optimizer):
    """Updates one group of parameters after the other."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update the parameters once.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            The result of the closure; None without one.

        Raises:
            RuntimeError: a gradient is sparse, or the optimizer cannot step here.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        raise NotImplementedError


def with_gradients(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters that have a gradient, and what this rank holds of the gradients.

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
    return [param for param, _ in pairs], [local_grad(param) for param, _ in pairs]
