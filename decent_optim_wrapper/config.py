"""The wrapper's options: checked one by one, and told to the other ranks."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from decent_optim_wrapper.gossip.outer import OuterNesterov, Rule, SlowMomentum
from decent_optim_wrapper.optim.delegating import OptimizerFacade

# What torch's stores and backends can wait for: whole milliseconds, counted in 32 bits.
_SHORTEST_TIMEOUT, _LONGEST_TIMEOUT = 0.001, 2_000_000

_CHOICES = {
    "on_nonfinite": ("raise", "skip", "ignore"),
    "on_peer_failure": ("raise", "continue"),
    "average_state": ("keep", "average", "reset"),
}


class Settings(NamedTuple):
    """Options in which the ranks must agree; what they mean is in `DecentOptimWrapper`."""

    bucket_cap_mb: float
    overlap: bool
    sync_at_start: bool
    comm_dtype: torch.dtype | None
    param_as_bucket_view: bool
    timeout: timedelta | float | None
    on_nonfinite: str
    on_peer_failure: str
    gossip_every: int
    global_avg_every: int | None
    outer: Rule | None
    average_state: str
    mixing_rate: float

    @property
    def patience(self) -> timedelta | None:
        """The timeout as a timedelta."""
        return read_timeout(self.timeout)

    def lines(self) -> list[str]:
        """A line for each option."""
        return [f"{name}={value!r}" for name, value in self._asdict().items()]

    def check(self) -> Settings:
        """Return the settings, if each is what it should be.

        Raises:
            TypeError: one is of the wrong type.
            ValueError: one is out of range.
        """
        for name in ("overlap", "sync_at_start", "param_as_bucket_view"):
            flag = getattr(self, name)
            _expect(isinstance(flag, bool), f"{name} expects a bool", flag)
        cap_mb = _positive("bucket_cap_mb", "MiB", self.bucket_cap_mb)
        _check_steps("gossip_every", self.gossip_every)
        if self.global_avg_every is not None:
            _check_steps("global_avg_every", self.global_avg_every)
        self._check_outer()
        read_timeout(self.timeout)
        if self.comm_dtype is not None:
            is_dtype = isinstance(self.comm_dtype, torch.dtype)
            _expect(is_dtype, "comm_dtype expects a torch.dtype or None", self.comm_dtype)
            if self.comm_dtype not in (torch.bfloat16, torch.float16):
                raise ValueError(
                    f"comm_dtype expects torch.bfloat16, torch.float16 or None, got "
                    f"{self.comm_dtype}"
                )
        for name, choices in _CHOICES.items():
            choice = getattr(self, name)
            _expect(isinstance(choice, str), f"{name} expects one of {choices}", choice)
            if choice not in choices:
                raise ValueError(f"{name} expects one of {choices}, got {choice!r}")
        return self._replace(bucket_cap_mb=cap_mb, mixing_rate=check_mixing_rate(self.mixing_rate))

    def _check_outer(self) -> None:
        if isinstance(self.outer, SlowMomentum) and self.global_avg_every is None:
            raise ValueError(
                "slow_momentum steps at every exact average: pass global_avg_every, too"
            )
        if isinstance(self.outer, OuterNesterov) and self.global_avg_every is not None:
            raise ValueError(
                "outer_momentum steps at every meeting of gossip, and an exact average would undo "
                "it: leave out global_avg_every, or use slow_momentum"
            )


class Extras(NamedTuple):
    """What a module adds that has the optimizer inside.

    Args:
        order: the parameters as buckets are filled with them, others last; empty means the order
            of the groups.
        carried: what else the ranks have in common at the start, and tell one that comes back.
        parts: have a `state_dict` that one that comes back takes over.
    """

    order: tuple[Tensor, ...] = ()
    carried: tuple[Tensor, ...] = ()
    parts: tuple[Any, ...] = ()

    def places(self, tensors: Iterable[Tensor]) -> list[int]:
        """Where each of them stands in the order."""
        places = {id(tensor): place for place, tensor in enumerate(self.order)}
        return [places.get(id(tensor), len(places)) for tensor in tensors]


def check_mixing_rate(rate: Any) -> float:
    """Return the rate as a float, if it lies in (0, 1].

    Raises:
        TypeError: not a number.
        ValueError: out of range.
    """
    real = isinstance(rate, numbers.Real) and not isinstance(rate, bool)
    _expect(real, "mixing_rate expects a number", rate)
    if not 0 < rate <= 1:
        raise ValueError(f"mixing_rate must be above 0 and at most 1, got {rate}")
    return float(rate)


def read_timeout(timeout: Any) -> timedelta | None:
    """The timeout as a timedelta; None takes the process group's.

    Raises:
        TypeError: neither a timedelta nor a number.
        ValueError: out of range.
    """
    if timeout is None:
        return None
    seconds = timeout
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout expects a timedelta, seconds or None, got {timeout!r}")
    number = _positive("timeout", "seconds", seconds)
    if not _SHORTEST_TIMEOUT <= number <= _LONGEST_TIMEOUT:
        raise ValueError(
            f"timeout must be {_SHORTEST_TIMEOUT} to {_LONGEST_TIMEOUT} seconds (which torch "
            f"counts in milliseconds of 32 bits), got {number}"
        )
    return timedelta(seconds=number)


def check_base(optimizer: Any, overlap: bool) -> None:
    """Make sure that the base can be wrapped.

    Raises:
        TypeError: not an optimizer.
        ValueError: it has no parameters, exchanges them itself, or does not work with `overlap`.
    """
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, OptimizerFacade):
        raise TypeError(
            f"optimizer expects a torch.optim.Optimizer that is not wrapped yet, "
            f"got {type(optimizer).__name__}"
        )
    if not any(group["params"] for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer expects parameters to train, got a {type(optimizer).__name__} without any"
        )
    kind = type(optimizer)
    # By name: importing them takes longer than all else here.
    if any(each.__name__ == "ZeroRedundancyOptimizer" for each in kind.__mro__):
        raise ValueError(
            f"optimizer expects one that updates all parameters of this rank, got a "
            f"{kind.__name__}: each rank updates a part of them and broadcasts it, which would "
            f"undo the gossip; wrap the plain optimizer"
        )
    if overlap and (reason := _reason_against_overlap(optimizer)):
        raise ValueError(
            f"{kind.__name__} {reason}, which overlap=True cannot do: the gradient belongs to the "
            f"parameters before the mixing; pass overlap=False"
        )


def _reason_against_overlap(optimizer: Optimizer) -> str | None:
    """What the optimizer does at the parameters of the gradient, once they are mixed already."""
    kind = type(optimizer)
    if isinstance(optimizer, LBFGS):
        return "evaluates its closure several times per step"
    if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
        # The interface of SAM (Foret et al., 2021) and its kin.
        return "evaluates its closure at parameters that it has moved"
    second_order = bool(getattr(optimizer, "is_second_order", False))
    if second_order or kind.__name__.lower() == "adahessian":
        return "differentiates the gradient once more in its step"
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        return "evaluates its closure inside its step"
    return None


def _expect(condition: bool, text: str, value: Any) -> None:
    if not condition:
        raise TypeError(f"{text}, got {value!r}")


def _check_steps(name: str, value: Any) -> None:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    _expect(whole, f"{name} expects a number of steps", value)
    if value < 1:
        raise ValueError(f"{name} must be 1 step or more, got {value}")


def _positive(name: str, unit: str, value: Any) -> float:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    _expect(real, f"{name} expects a number of {unit}", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not number > 0 or math.isinf(number):
        raise ValueError(f"{name} must be above 0 {unit} and finite, got {value}")
    return number
