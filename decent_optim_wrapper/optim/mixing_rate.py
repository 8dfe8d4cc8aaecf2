"""The mixing rate as a function of the learning rate."""

from __future__ import annotations

from numbers import Real
from typing import Any

from torch.optim import Optimizer


def mixing_rate_from_lr(
    optimizer: Optimizer, lr_max: float, power: float = 1.0, at_least: float = 1e-3
) -> float:
    """Return γ = (lr / lr_max)^p: mix less as the steps, which drive the ranks apart, get smaller.

    Assign ``optimizer.mixing_rate = mixing_rate_from_lr(optimizer, lr_max=0.1)`` on all ranks,
    after every step of the learning rate scheduler.

    Args:
        optimizer: the base or the wrapper; lr is the learning rate of its first group.
        lr_max: the learning rate at and above which γ is 1; above 0.
        power: p; with 0, γ is always 1.
        at_least: lower bound of γ, in (0, 1].

    Returns:
        γ, in (0, 1].
    """
    rate = float(optimizer.param_groups[0]["lr"])
    return min(1.0, max(at_least, float((rate / lr_max) ** power)))


def check_mixing_rate(rate: Any) -> float:
    """Return the rate as a float, if it lies in (0, 1].

    Raises:
        TypeError: not a number.
        ValueError: out of range.
    """
    if not isinstance(rate, Real) or isinstance(rate, bool):
        raise TypeError(f"mixing_rate expects a number, got {rate!r}")
    number = float(rate)
    if not 0 < number <= 1:
        raise ValueError(f"mixing_rate must be above 0 and at most 1, got {rate}")
    return number
