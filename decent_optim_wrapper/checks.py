"""Checks of arguments: of the base optimizer, and of fields, in the annotations of a record.

    steps: Annotated[int, check_steps] = 2

A check takes the name and the value of a field. It returns the value to keep, or raises a
`TypeError` or `ValueError` that says what was expected.
"""

from __future__ import annotations

import inspect
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, get_type_hints

from torch.optim import LBFGS, Optimizer

from decent_optim_wrapper.optim.delegating import DelegatingOptimizer
from decent_optim_wrapper.topo.base import did_you_mean

Check = Callable[[str, Any], Any]
Record = TypeVar("Record")
Params = ParamSpec("Params")


def known_options(init: Callable[Params, None]) -> Callable[Params, None]:
    """Decorate a constructor: its error names the option that was meant if one is misspelt.

    Arguments that begin with an underscore are not in its signature: only this package passes them.
    """
    signature = inspect.signature(init)
    public = [each for name, each in signature.parameters.items() if not name.startswith("_")]

    @wraps(init)
    def checked(*args: Params.args, **options: Params.kwargs) -> None:
        check_options(options, init)
        init(*args, **options)

    checked.__signature__ = signature.replace(parameters=public)  # type: ignore[attr-defined]
    return checked


def check_options(options: Iterable[str], *constructors: Callable[..., object]) -> None:
    """Check that one of these constructors knows each option.

    Raises:
        TypeError: none knows one; the text has the argument of whose record it is a field, or the
            most similar one.
    """
    signatures = [inspect.signature(each).parameters for each in constructors]
    known = {name: each.default for found in signatures for name, each in found.items()}
    for name in set(options).difference(known):
        records = [each for each in known.items() if name in checks_of(each[1].__class__)]
        inside = "".join(f" (pass {at}={type(of).__name__}({name}=...))" for at, of in records)
        raise TypeError(f"got an unknown option {name!r}{inside or did_you_mean(name, known)}")


def take_fields(kind: Callable[..., Record], options: Mapping[str, Any]) -> Record:
    """Build a dataclass from options by name; options that are no fields are ignored."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in options.items() if name in names})


def check_fields(record: Any) -> None:
    """Check the fields of a frozen dataclass, and replace each value by what its check returns.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of range.
    """
    for name, check in checks_of(record.__class__).items():
        object.__setattr__(record, name, check(name, getattr(record, name)))


@cache
def checks_of(kind: type) -> dict[str, Check]:
    """The check of each field of a dataclass whose annotation has one."""
    hints = get_type_hints(kind, include_extras=True).items()
    return {name: hint.__metadata__[0] for name, hint in hints if hasattr(hint, "__metadata__")}


class CheckedFields:
    """A base of dataclasses, whose fields are checked when an instance is made."""

    __post_init__ = check_fields


def expect(condition: bool, text: str, value: Any) -> None:
    """Raise a `TypeError` with this text and the value unless the condition is true."""
    if not condition:
        raise TypeError(f"{text}, got {value!r}")


def instance_of(expected: str, *kinds: Any) -> Check:
    """Expect an instance of one of these classes; `expected` describes them in the error."""

    def check(name: str, value: Any) -> Any:
        expect(isinstance(value, kinds), f"{name} expects {expected}", value)
        return value

    return check


def optional(check: Check) -> Check:
    """Expect None, or what another check accepts."""
    return lambda name, value: None if value is None else check(name, value)


def converted(convert: Callable[[Any], Any]) -> Check:
    """Expect what a function accepts, and keep what it returns."""
    return lambda name, value: convert(value)


def one_of(*choices: str) -> Check:
    """Expect one of these strings."""

    def check(name: str, value: Any) -> Any:
        expect(isinstance(value, str), f"{name} expects one of {choices}", value)
        if value not in choices:
            hint = did_you_mean(value, choices)
            raise ValueError(f"{name} expects one of {choices}, got {value!r}{hint}")
        return value

    return check


def positive(unit: str) -> Check:
    """Expect a finite number above 0 of this unit, and keep it as a float."""

    def check(name: str, value: Any) -> float:
        expect(is_real(value), f"{name} expects a number of {unit}", value)
        if not 0 < value <= sys.float_info.max:
            raise ValueError(f"{name} must be above 0 {unit} and finite, got {value}")
        return float(value)

    return check


def whole(least: int, expected: str, unit: str = "") -> Check:
    """Expect a whole number from `least` on; `expected` describes it in the error."""

    def check(name: str, value: Any) -> Any:
        is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        expect(is_whole, f"{name} expects {expected}", value)
        if value < least:
            raise ValueError(f"{name} must be {least}{unit} or more, got {value}")
        return value

    return check


def is_real(value: Any) -> bool:
    """Return whether the value is a number, and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_mixing_rate(rate: Any) -> float:
    """Return the rate as a float, if it lies in (0, 1].

    Raises:
        TypeError: not a number.
        ValueError: out of range.
    """
    expect(is_real(rate), "mixing_rate expects a number", rate)
    if not 0 < rate <= 1:
        raise ValueError(f"mixing_rate must be above 0 and at most 1, got {rate}")
    return float(rate)


def check_base(optimizer: Any) -> None:
    """Check that the optimizer can be wrapped.

    Raises:
        TypeError: it is not an optimizer, or it is a wrapper already.
        ValueError: it has no parameters, or exchanges them itself.
    """
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, DelegatingOptimizer):
        raise TypeError(
            f"optimizer expects a torch.optim.Optimizer that is not wrapped yet, got an instance "
            f"of {type(optimizer)}"
        )
    if not any(group["params"] for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer expects parameters to train, got a {type(optimizer).__name__} without any"
        )
    kind = type(optimizer)
    # By name, because the import takes longer than everything else here.
    if any(each.__name__ == "ZeroRedundancyOptimizer" for each in kind.__mro__):
        raise ValueError(
            f"optimizer expects one that updates all parameters of this rank, got a "
            f"{kind.__name__}, of which each rank broadcasts a part; wrap the plain optimizer"
        )


def check_closures(optimizer: Optimizer, overlaps: bool) -> None:
    """Check that an optimizer may evaluate its closures where it does.

    Args:
        optimizer: the base.
        overlaps: whether its step comes after a mixing, or inside a backward pass.

    Raises:
        ValueError: it evaluates them inside its step, which must not overlap with anything.
    """
    if overlaps and (reason := evaluates_inside_step(optimizer)):
        raise ValueError(
            f"{type(optimizer).__name__} {reason}, which does not work with overlap: the gradient "
            f"belongs to the parameters before the mixing; pass overlap=False"
        )


def evaluates_inside_step(optimizer: Optimizer) -> str | None:
    """Return why a step of the optimizer needs the parameters at which the gradient was computed.

    Returns:
        The reason, as a part of a sentence; None if the step only reads gradients.
    """
    kind = type(optimizer)
    if isinstance(optimizer, LBFGS):
        return "evaluates its closure several times per step"
    if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
        # The interface of SAM (Foret et al., 2021) and its variants.
        return "evaluates its closure at parameters that it has moved"
    if getattr(optimizer, "is_second_order", False) or kind.__name__.lower() == "adahessian":
        return "differentiates the gradient once more in its step"
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        return "evaluates its closure inside its step"
    return None
