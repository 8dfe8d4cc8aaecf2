"""Functions that build an optimizer from named parameters, and schedules of its rates.

`functools.partial` sets their other arguments:
``optim_fn = partial(optim_fn_adamw, lr=3e-4)``, then ``optim_fn(list(model.named_parameters()))``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from decent_optim_wrapper.optim.accum import AccumAdam, AccumAdamW

Named = Sequence[tuple[str, Tensor]]

# A part "bn", "bn1", …; not any "bn", which "subnet" contains, too.
_EXEMPT = re.compile(r"bias|norm|(^|[._])bn\d*([._]|$)", re.IGNORECASE)


def optim_fn_adam(
    params: Named,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 1 / 32768,
    eps: float = 1e-8,
) -> Optimizer:
    """Build `torch.optim.Adam`, without weight decay on biases and norms.

    Biases and norms are recognised by shape and name: tensors of at most one dimension, and those
    whose name contains ``bias`` or ``norm`` or has a part ``bn``, ``bn1``, ….

    Args:
        params: pairs of name and parameter.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        weight_decay: weight decay of all other parameters.
        eps: added to the denominator.
    """
    return Adam(_groups(params, weight_decay), lr=lr, betas=(beta1, beta2), eps=eps)


def optim_fn_adamw(
    params: Named,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 0.1,
    eps: float = 1e-8,
) -> Optimizer:
    """Build `torch.optim.AdamW`, with the arguments and exemptions of `optim_fn_adam`."""
    return AdamW(_groups(params, weight_decay), lr=lr, betas=(beta1, beta2), eps=eps)


def optim_fn_accum_adam(
    params: Named,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1 / 32768,
    accum_iter: int = 4,
) -> Optimizer:
    """Build `AccumAdam` with windows of `accum_iter` steps, else as `optim_fn_adam` does."""
    groups = _groups(params, weight_decay)
    return AccumAdam(groups, lr=lr, betas=(beta1, beta2), eps=eps, accum_iter=accum_iter)


def optim_fn_accum_adamw(
    params: Named,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    accum_iter: int = 4,
) -> Optimizer:
    """Build `AccumAdamW` with windows of `accum_iter` steps, else as `optim_fn_adam` does."""
    groups = _groups(params, weight_decay)
    return AccumAdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps, accum_iter=accum_iter)


def lr_scheduler_fn_cosine_with_warmup(
    optimizer: Optimizer,
    t_max: int,
    t_warmup: int,
    cosine_eta_min: float = 1e-6,
    warmup_decay: float = 0.01,
) -> LRScheduler:
    """Linear warm-up, then half a cosine (Loshchilov and Hutter, 2017), then a constant rate.

    With lr the optimizer's own rate, the rate before step t (counted from 0) is::

        t < t_warmup:                      lr * (warmup_decay + (1 - warmup_decay) t / t_warmup)
        τ = t - t_warmup from 0 to t_max:  eta_min + (lr - eta_min) (1 + cos(π τ / t_max)) / 2
        afterwards:                        eta_min

    Args:
        optimizer: the base or the wrapper; each of its groups keeps its own lr.
        t_max: number of steps of the cosine, which begins after the warm-up.
        t_warmup: number of steps of the warm-up; 0 for none.
        cosine_eta_min: eta_min, the last rate.
        warmup_decay: the first rate, as a fraction of lr.

    Returns:
        The schedule; call its `step()` after every step of the optimizer.

    Raises:
        ValueError: `t_max` is below 1 or `t_warmup` negative.
    """
    if t_max < 1 or t_warmup < 0:
        raise ValueError(f"expected t_max >= 1 and t_warmup >= 0, got {t_max=} and {t_warmup=}")

    def factor(step: int, floor: float) -> float:
        if step < t_warmup:
            return warmup_decay + (1 - warmup_decay) * step / t_warmup
        annealed = min((step - t_warmup) / t_max, 1.0)
        return floor + (1 - floor) * (1 + math.cos(math.pi * annealed)) / 2

    # In a resumed group `lr` has been scheduled already; `initial_lr` has not.
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    floors = [cosine_eta_min / rate if rate else 1.0 for rate in rates]
    return LambdaLR(optimizer, [partial(factor, floor=floor) for floor in floors])


def _groups(params: Named, weight_decay: float) -> list[dict[str, Any]]:
    exempt = [tensor for name, tensor in params if _is_exempt(name, tensor)]
    others = [tensor for name, tensor in params if not _is_exempt(name, tensor)]
    groups = (others, weight_decay), (exempt, 0.0)
    return [{"params": tensors, "weight_decay": decay} for tensors, decay in groups if tensors]


def _is_exempt(name: str, tensor: Tensor) -> bool:
    return tensor.ndim <= 1 or _EXEMPT.search(name) is not None
