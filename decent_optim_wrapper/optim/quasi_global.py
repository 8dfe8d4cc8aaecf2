"""SGD with quasi-global momentum, for ranks whose shards differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from decent_optim_wrapper.optim.gradients import OptimizerOfGroups
from decent_optim_wrapper.optim.shards import local


class QGSGD(OptimizerOfGroups):
    """SGD whose momentum follows the averaged model, not the rank's own gradients (QG-DSGDm).

    Local momentum accumulates gradients of this rank's shard only. Here the buffer h follows the
    movement of the parameters, including the mixing. At step t, with z_t the parameters at the
    start of `step` and η_t the learning rate::

        h_t     = μ h_{t-1} + (1 - μ) (z_{t-1} - z_t) / η_{t-1}     (h_0 = 0)
        m       = β h_t + g + λ z_t
        u       = m, with nesterov g + λ z_t + β m
        params  = z_t - η_t u

    This is Algorithm 1 of Lin et al., "Quasi-Global Momentum", 2021. Its last line, the update of
    h, is done in the next step, after the mixing. Under `DecentOptimWrapper` with mixing matrix W_t
    of round t, both modes compute ``z_{t+1} = W_t (z_t - η_t u)``:

    - ``overlap=False`` is the algorithm of the paper: g is the gradient at z_t.
    - ``overlap=True`` has a delayed gradient: the parameters are already mixed when `step` updates
      them, and g was computed before that, at z_{t-1} - η_{t-1} u_{t-1}.

    Without mixing and with a constant gradient, u tends to g / (1 - β), as in SGD with momentum β.

    The state is per parameter: h and z_{t-1} (each a copy of the parameter) and η_{t-1}. Steps with
    learning rate 0, and the mixing after them, do not change h. A parameter without a gradient is
    skipped; its next step takes z_{t-1} from its last step that was not skipped. All other
    changes of the parameters between two steps, such as keeping a world average, count as mixing.
    The mixing is also divided by the learning rate: a rate that falls faster than the ranks
    approach each other makes h large.

    Args:
        params: tensors, or parameter groups.
        lr: η, the learning rate.
        momentum: β, the weight of h in the update.
        mu: μ, the decay of h.
        weight_decay: λ, added to the gradient as λ z.
        nesterov: use Nesterov momentum.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        mu: float = 0.9,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
    ) -> None:
        numbers, decays = {"lr": lr, "weight_decay": weight_decay}, {"momentum": momentum, "mu": mu}
        for name, value in numbers.items():
            if not value >= 0:
                raise ValueError(f"{name} must be 0 or more, got {value}")
        for name, value in decays.items():
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {value}")
        super().__init__(params, {**numbers, **decays, "nesterov": nesterov})

    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        beta, lr = group["momentum"], float(group["lr"])
        states = [self._state_of(param) for param in params]
        params = [*map(local, params)]
        buffers = _follow(states, params, group["mu"])
        for state in states:
            state["prev_lr"] = lr
        if group["weight_decay"]:
            grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        update = torch._foreach_mul(buffers, beta)
        torch._foreach_add_(update, grads)
        if group["nesterov"]:
            torch._foreach_mul_(update, beta)
            torch._foreach_add_(update, grads)
        torch._foreach_add_(params, update, alpha=-lr)

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
            state["prev_param"] = param.clone()
            # A number: torch's load_state_dict would cast a tensor to the parameter's dtype.
            state["prev_lr"] = 0.0
        return state


def _follow(states: list[dict[str, Any]], params: list[Tensor], mu: float) -> list[Tensor]:
    """Update the momentum buffers by the last movement of the parameters, and return them."""
    buffers = [local(state["momentum_buffer"]) for state in states]
    previous = [local(state["prev_param"]) for state in states]
    moved = torch._foreach_sub(previous, params)
    rates = [state["prev_lr"] for state in states]
    torch._foreach_mul_(moved, [(1 - mu) / rate if rate else 0.0 for rate in rates])
    torch._foreach_mul_(buffers, [mu if rate else 1.0 for rate in rates])
    torch._foreach_add_(buffers, moved)
    torch._foreach_copy_(previous, params)
    return buffers
