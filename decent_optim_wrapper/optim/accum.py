"""Adam and AdamW whose moments follow the average gradient of several steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from decent_optim_wrapper.optim.shards import local, local_grad

_SLOTS = ("exp_avg", "exp_avg_sq", "grad_sum")


class AccumAdam(Optimizer):
    """Adam whose moments move once per `accum_iter` steps, by the average gradient of these steps.

    Every step updates the parameters, with temporary moments that include the step's own gradient.
    With s = `accum_iter`, t the step counted from 1, k = ceil(t / s) and b = 0 at first::

        x <- x - lr * m' / (sqrt(v') + eps),    m' = (β1 m + (1 - β1) g) / (1 - β1^k)
        b <- b + g / s                          v' = (β2 v + (1 - β2) g²) / (1 - β2^k)
        every s steps: m <- β1 m + (1 - β1) b,  v <- β2 v + (1 - β2) b²,  b <- 0

    (Wang et al., "From Promise to Practice", 2025, and decent-dp). The gradient of one rank is
    noisier than the gradient of the global batch, which makes v too large. The average of s
    steps has about the noise of a batch that is s times as large. s = 1 is `torch.optim.Adam`,
    which holds one copy less of the parameters.

    Weight decay is as in Adam: λx is added to g, and so is part of b. The state is per parameter:
    ``step`` is the number of finished windows, k - 1, and ``position`` the number of gradients in
    the current window. A parameter without a gradient is skipped, and its window waits. A state
    dict contains the current window, and a resumed run continues it. If ``group["accum_iter"]`` is
    changed, the current window ends as soon as it has that many gradients, and b is their average.

    All tensors of a group are updated by torch's foreach kernels. The counts are kept on the host,
    so no step waits for a GPU, unless `lr` is a tensor there. A CUDA graph cannot capture a step.

    Args:
        params: tensors, or parameter groups.
        lr: learning rate.
        betas: β1 and β2, decay of the moments per window.
        eps: added to the denominator.
        weight_decay: λ; None takes 0, and 0.01 in `AccumAdamW`.
        accum_iter: s, the number of steps of a window.
        maximize: maximize the objective instead of minimizing it.

    Raises:
        ValueError: a number is out of range.
    """

    _decoupled, _weight_decay = False, 0.0

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        accum_iter: int = 1,
        *,
        maximize: bool = False,
    ) -> None:
        weight_decay = self._weight_decay if weight_decay is None else weight_decay
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        for name, value in numbers.items():
            if not value >= 0:
                raise ValueError(f"{name} must be 0 or more, got {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be at least 0 and below 1, got {betas}")
        if not isinstance(accum_iter, int) or accum_iter < 1:
            raise ValueError(f"accum_iter must be a whole number above 0, got {accum_iter}")
        others = {"betas": betas, "accum_iter": accum_iter, "maximize": maximize}
        super().__init__(params, {**numbers, **others})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if any({"step", "position", *_SLOTS} - slots.keys() for slots in self.state.values()):
            raise ValueError(f"{type(self).__name__} expects its own state, got another one's")

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
            RuntimeError: the optimizer cannot step here.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            if params := [param for param in group["params"] if param.grad is not None]:
                self._step_group(group, params, [*map(local_grad, params)])
        return loss

    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            # A replay would repeat the counts of the captured step.
            raise RuntimeError(
                f"{type(self).__name__} cannot be captured in a CUDA graph; leave step() out of it"
            )
        states = [self._state_of(param) for param in params]
        (beta1, beta2), lr, decay = group["betas"], float(group["lr"]), group["weight_decay"]
        params, grads = _as_real(params), _as_real(grads)
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        if decay and self._decoupled:
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            grads = list(torch._foreach_add(grads, params, alpha=decay))
        windows = [state["step"] + 1 for state in states]
        averages = torch._foreach_lerp(_each(states, "exp_avg"), grads, 1 - beta1)
        roots = torch._foreach_mul(_each(states, "exp_avg_sq"), beta2)
        torch._foreach_addcmul_(roots, grads, grads, 1 - beta2)
        torch._foreach_sqrt_(roots)
        torch._foreach_div_(roots, [(1 - beta2**k) ** 0.5 for k in windows])
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_addcdiv_(params, averages, roots, [-lr / (1 - beta1**k) for k in windows])
        torch._foreach_add_(_each(states, "grad_sum"), grads)
        for state in states:
            state["position"] += 1
        full = [state for state in states if state["position"] >= group["accum_iter"]]
        if full:
            _close_windows(full, beta1, beta2)

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            # Numbers: torch's load_state_dict would cast tensors to the parameter's dtype.
            state["step"] = state["position"] = 0
            for name in _SLOTS:
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state


class AccumAdamW(AccumAdam):
    """`AccumAdam` with the weight decay of AdamW: x <- (1 - lr λ) x in every step, not in g and b.

    s = 1 is `torch.optim.AdamW`. Arguments and errors are as in `AccumAdam`; λ is 0.01 by default.
    """

    _decoupled, _weight_decay = True, 0.01


def _close_windows(states: list[dict[str, Any]], beta1: float, beta2: float) -> None:
    """Move the moments by the average gradients of the windows, and begin the next windows."""
    sums, exp_avg_sqs = _each(states, "grad_sum"), _each(states, "exp_avg_sq")
    means = torch._foreach_div(sums, [float(state["position"]) for state in states])
    torch._foreach_lerp_(_each(states, "exp_avg"), means, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, means, means, 1 - beta2)
    torch._foreach_zero_(sums)
    for state in states:
        state["position"] = 0
        state["step"] += 1


def _each(states: list[dict[str, Any]], name: str) -> list[Tensor]:
    return _as_real([state[name] for state in states])


def _as_real(tensors: list[Tensor]) -> list[Tensor]:
    """The local parts as real tensors: a complex parameter is two real ones."""
    return [torch.view_as_real(t) if t.is_complex() else t for t in map(local, tensors)]
