"""AdamW whose second moments have the noise of all ranks' gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from decent_optim_wrapper.optim.shards import local, local_grad

_STEP: Any = torch.optim.AdamW.step


class AdamW(torch.optim.AdamW):
    """AdamW for ranks that average parameters: it has DDP's loss at DDP's learning rate.

    The gradient of one rank is noisier than the mean over n ranks, which DDP's AdamW squares. Here
    the second moments follow the square of a short average b of the rank's own gradients, which has
    about the variance of that mean. With t the step counted from 1 and β = (n - 1) / (n + 1)::

        b <- b + (1 - β) / (1 - β^t) (g - b)
        m <- β1 m + (1 - β1) g
        v <- β2 v + (1 - β2) b²

    The rest is `torch.optim.AdamW`, and with n = 1 this is torch's optimizer, bit for bit. The
    state has one tensor more for each parameter, ``short_avg``, which is b. If the state of torch's
    AdamW is loaded, or n was 1 before, b begins as m. A run may resume with another n: `ranks` is
    not loaded.

    Do not use it under DDP, which averages gradients. A GradScaler unscales gradients before the
    step, also with ``fused=True``. A compiled step runs uncompiled.

    Args:
        params: tensors, or parameter groups.
        lr: learning rate.
        ranks: n, the number of ranks; None takes it from the wrapper, also when ranks come and go,
            and without a wrapper from the default process group. A parameter group may have its
            own.
        **options: the other arguments of `torch.optim.AdamW`.

    Raises:
        ValueError: a number is out of range.

    Attributes:
        members: n of the groups whose `ranks` is None; None if no wrapper has set it.
    """

    # An attribute of the class, since torch copies and pickles only the defaults of an instance.
    members: int | None = None
    # Dynamo runs `_init_group` only while it traces: b would move in the first step only. Torch
    # adds the hooks of steps to each class again.
    step = torch.compiler.disable(  # type: ignore[no-untyped-call]
        _STEP.__wrapped__ if hasattr(_STEP, "hooked") else _STEP
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        ranks: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, **options)
        # Torch's constructor makes the defaults. It has added the groups already.
        self.defaults["ranks"] = ranks
        for group in self.param_groups:
            _check(group.setdefault("ranks", ranks), group["betas"][0])
        # The fused kernel would unscale b.
        self._step_supports_amp_scaling = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = [group["ranks"] for group in vars(self).get("param_groups", [])]
        super().__setstate__(state)
        for group, ranks in zip(self.param_groups, own, strict=False):
            group["ranks"] = ranks
            _check(ranks, group["betas"][0])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; it may have its own `ranks`."""
        if "ranks" in self.defaults:
            group = {**self.defaults, **param_group}
            _check(group["ranks"], group["betas"][0])
        super().add_param_group(param_group)

    def set_members(self, count: int) -> None:
        """Set n for the groups whose `ranks` is None.

        Args:
            count: number of ranks that average parameters.
        """
        self.members = count

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        *others: list[Tensor],
    ) -> Any:
        """Collect what a step of torch's AdamW reads, with b in place of the gradients."""
        result = super()._init_group(group, params, grads, exp_avgs, *others)  # type: ignore[no-untyped-call]
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        ranks = group["ranks"] or self.members or world_size
        if ranks > 1 and params:
            grads[:] = self._short_averages(group, params, (ranks - 1) / (ranks + 1))
        for param in params if ranks == 1 else ():
            self.state[param].pop("short_avg", None)
        return result

    def _short_averages(
        self, group: dict[str, Any], params: list[Tensor], decay: float
    ) -> list[Tensor]:
        """Move b, and m by what torch's step leaves out of it when it has b in place of g."""
        states = [self.state[param] for param in params]
        for state in states:
            if "short_avg" not in state:
                state["short_avg"] = state["exp_avg"].clone(memory_format=torch.preserve_format)
                # Of torch's moments, which follow -g.
                if group["maximize"]:
                    state["short_avg"].neg_()
        grads = [local_grad(param) for param in params]
        shorts = [local(state["short_avg"]) for state in states]
        steps = [state["step"] for state in states]
        # Counts on a GPU stay there, and nothing waits.
        if on_host := all(step.is_cpu for step in steps):
            steps = [step.item() for step in steps]
        # The first weight is 1.
        weights = [(1 - decay) / (1 - decay ** (step + 1)) for step in steps]
        if on_host:
            torch._foreach_lerp_(shorts, grads, weights)
        else:
            for short, grad, weight in zip(shorts, grads, weights, strict=True):
                short.lerp_(grad, weight.to(short))
        # Torch sets m <- β1 m + (1 - β1) b next.
        missing = (1 - group["betas"][0]) / group["betas"][0]
        if group["maximize"]:
            missing = -missing
        averages = [local(state["exp_avg"]) for state in states]
        torch._foreach_add_(averages, grads, alpha=missing)
        torch._foreach_add_(averages, shorts, alpha=-missing)
        read = [state["short_avg"] for state in states]
        # Autograd needs the b of this step, which the next one moves.
        return [short.clone() for short in read] if group["differentiable"] else read


def _check(ranks: Any, beta1: float | Tensor) -> None:
    """Check the n and the β1 of a group."""
    if ranks is not None and (not isinstance(ranks, int) or ranks < 1):
        raise ValueError(f"ranks must be a whole number above 0, or None, got {ranks!r}")
    if ranks != 1 and (isinstance(beta1, Tensor) or not beta1):
        raise ValueError(
            f"betas[0] must be a number above 0 unless ranks is 1, got {beta1}; without a first "
            f"moment, use torch.optim.AdamW"
        )
