"""Adam and AdamW whose moments see the average of several steps' gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from decent_optim_wrapper.optim._accum_update import (
    Hyper,
    Slot,
    update_capturable,
    update_foreach,
    update_single,
)
from decent_optim_wrapper.optim.gradients import dense_grad


class AccumAdam(Optimizer):
    """Adam whose moments move once every `accum_iter` steps, by the average gradient of those.

    Every step updates the parameters, with moments that the step's own gradient has been added to
    for this step only. With s = `accum_iter`, t the step from 1 on, k = ceil(t / s) and b = 0 at
    first::

        x <- x - lr * m' / (sqrt(v') + eps),    m' = (β1 m + (1 - β1) g) / (1 - β1^k)
        b <- b + g / s                          v' = (β2 v + (1 - β2) g²) / (1 - β2^k)
        every s steps: m <- β1 m + (1 - β1) b,  v <- β2 v + (1 - β2) b²,  b <- 0

    (Wang et al., "From Promise to Practice", 2025, and decent-dp). The gradient of one rank is
    noisier than that of the global batch, which makes v too large; the average of s steps has about
    the noise of a batch s times as large. s = 1 is `torch.optim.Adam`, which holds one copy of the
    parameters less.

    Weight decay is Adam's: λx is added to g, and so is part of b. The state is per parameter,
    ``step`` the number of finished windows, one less than k, ``position`` that of the gradients in
    the window in progress. A parameter without a gradient is skipped, and its window waits. A
    state dict holds the window in progress; a resumed run continues it. When
    ``group["accum_iter"]`` is changed, the window in progress ends as soon as it holds that many
    gradients, and b is the average of those it holds.

    Args:
        params: tensors, or parameter groups.
        lr: learning rate.
        betas: β1 and β2, decay of the moments for every window.
        eps: added to the denominator.
        weight_decay: λ.
        accum_iter: s, the steps of a window.
        foreach: a kernel for all tensors at once; None does so where all are off the CPU. The
            results are the same but for rounding.
        maximize: ascend.
        capturable: ask for no value on the host, so that a CUDA graph may hold `step`; `foreach`
            is then not used, and `lr` must be a tensor to change between replays.

    Raises:
        ValueError: a number is out of range.
    """

    _decoupled = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        accum_iter: int = 1,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} must be 0 or more, got {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be at least 0 and below 1, got {betas}")
        if not isinstance(accum_iter, int) or accum_iter < 1:
            raise ValueError(
                f"accum_iter must be a whole number of steps above 0, got {accum_iter}"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "accum_iter": accum_iter,
            "foreach": foreach,
            "maximize": maximize,
            "capturable": capturable,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for slots in self.state.values():
            # torch's load_state_dict casts all but `step` to the parameter's dtype and device.
            slots["position"] = slots["position"].to(slots["step"])

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update the parameters once.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: a sparse gradient, or a graph capture without `capturable`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        slots = [self._slot(param, group) for param in group["params"] if param.grad is not None]
        if not slots:
            return
        beta1, beta2 = group["betas"]
        hyper = Hyper(
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            self._decoupled,
            group["accum_iter"],
        )
        if group["capturable"]:
            for slot in slots:
                update_capturable(slot, hyper)
        elif slots[0].param.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__} was built with capturable=False, and a CUDA graph is being "
                f"captured; pass capturable=True"
            )
        elif _takes_foreach(group):
            update_foreach(slots, hyper)
        else:
            for slot in slots:
                update_single(slot, hyper)

    def _slot(self, param: Tensor, group: dict[str, Any]) -> Slot:
        grad = dense_grad(param)
        state = self.state[param]
        if not state:
            # On the host unless captured, where reading them would wait for the device.
            device = param.device if group["capturable"] else torch.device("cpu")
            for name in ("step", "position"):
                state[name] = torch.zeros((), dtype=torch.float32, device=device)
            for name in ("exp_avg", "exp_avg_sq", "grad_sum"):
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        if group["maximize"]:
            grad = -grad
        as_real = torch.view_as_real if param.is_complex() else _unchanged
        return Slot(
            as_real(param),
            as_real(grad),
            as_real(state["exp_avg"]),
            as_real(state["exp_avg_sq"]),
            as_real(state["grad_sum"]),
            state["step"],
            state["position"],
        )


class AccumAdamW(AccumAdam):
    """`AccumAdam` with AdamW's weight decay: x <- (1 - lr λ) x in every step, apart from g and b.

    s = 1 is `torch.optim.AdamW`. Arguments and errors are `AccumAdam`'s; λ is 0.01 by default.
    """

    _decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        accum_iter: int = 1,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            accum_iter,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
        )


def _takes_foreach(group: dict[str, Any]) -> bool:
    if group["foreach"] is not None:
        return bool(group["foreach"])
    # Tensor subclasses need not know the foreach kernels.
    return all(type(p) in (Tensor, nn.Parameter) and not p.is_cpu for p in group["params"])


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
