"""The mixing rate as a function of the learning rate."""

from __future__ import annotations

from torch.optim import Optimizer


def mixing_rate_from_lr(
    optimizer: Optimizer, lr_max: float, power: float = 1.0, at_least: float = 1e-3
) -> float:
    """γ = (lr / lr_max)^p: mix less when the steps, which drive the ranks apart, get smaller.

    ``optimizer.mixing_rate = mixing_rate_from_lr(optimizer, lr_max=0.1)`` after every step of the
    learning rate's schedule, the same on all ranks.

    Args:
        optimizer: the base or the wrapper; the learning rate of its first group counts.
        lr_max: the rate at which γ is 1, above 0; γ stays 1 beyond it.
        power: p; 0 mixes in full.
        at_least: lower bound of γ, in (0, 1].

    Raises:
        ValueError: an argument is out of range.
    """
    if not (lr_max > 0 and power >= 0 and 0 < at_least <= 1):
        raise ValueError(
            f"expected lr_max above 0, power of 0 or more and at_least in (0, 1], got {lr_max=}, "
            f"{power=}, {at_least=}"
        )
    rate = float(optimizer.param_groups[0]["lr"])
    return min(1.0, max(at_least, float((rate / lr_max) ** power)))
