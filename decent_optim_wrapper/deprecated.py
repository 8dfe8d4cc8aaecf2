"""Spellings that work for one more release, with a DeprecationWarning.

To remove them, delete this module and what refers to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from decent_optim_wrapper.checks import Check, instance_of, one_of
from decent_optim_wrapper.extensions.gradient_tracking import GradientTracking
from decent_optim_wrapper.extensions.outer_optimizer import OuterOptimizer
from decent_optim_wrapper.extensions.state_average import StateAverage
from decent_optim_wrapper.extensions.state_gossip import StateGossip
from decent_optim_wrapper.gossip.extension import Extension
from decent_optim_wrapper.gossip.schedule import AsItArrives, Late, Pacing
from decent_optim_wrapper.warn import warn


@dataclass(frozen=True, kw_only=True)
class OldFields:
    """Fields of a schedule that are now pacings and extensions; None if they are not passed."""

    average_state: Any = field(default=None, repr=False)
    outer: Any = field(default=None, repr=False)
    staleness: Any = field(default=None, repr=False)
    max_staleness: Any = field(default=None, repr=False)


class OldProperties:
    """A property of a wrapper that is now a method."""

    @property
    def gradient_tracking(self: Any) -> bool:
        """Deprecated: whether there is a `GradientTracking`; False drops it."""
        return any(isinstance(each, GradientTracking) for each in self.extensions)

    @gradient_tracking.setter
    def gradient_tracking(self: Any, tracks: bool) -> None:
        warn(
            "gradient_tracking=False will be removed in the next release; call drop_extension()",
            DeprecationWarning,
        )
        if tracks and not self.gradient_tracking:
            raise ValueError("gradient_tracking expects False during the training, got True")
        if self.gradient_tracking and not tracks:
            self.drop_extension(GradientTracking)


def number_or_auto(check: Check) -> Check:
    """Accept "auto", too."""
    return lambda name, value: value if value == "auto" else check(name, value)


def respelled(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace old spellings in the options of a wrapper, with a warning.

    Raises:
        TypeError: an old option has the wrong type.
        ValueError: an old option is out of range, or contradicts another option.
    """
    new = dict(options)
    tracks = instance_of("a bool", bool)("gradient_tracking", new.pop("gradient_tracking", False))
    old: dict[str, Any] = {"gradient_tracking": True} if tracks else {}
    if isinstance(schedule := new.get("schedule"), OldFields):
        names = [each.name for each in fields(OldFields)]
        old |= {name: value for name in names if (value := getattr(schedule, name)) is not None}
        reset: dict[str, Any] = dict.fromkeys(names)
        if vars(schedule)["gossip_every"] == "auto":
            old["gossip_every"], reset["gossip_every"] = "auto", 1
        new["schedule"] = replace(schedule, **reset)
    if not old:
        return new
    pacing, extensions = _pacing(old), [*_extensions(old)]
    passed = [f"overlap={pacing!r}"] if pacing else []
    if extensions:
        passed.append(f"extensions=[{', '.join(f'{type(e).__name__}(...)' for e in extensions)}]")
    warn(
        f"{', '.join(f'{k}={v!r}' for k, v in old.items())} will be removed in the next release; "
        f"pass {' and '.join(passed) or 'nothing'} to the wrapper instead",
        DeprecationWarning,
    )
    if pacing:
        if new.get("overlap") not in (None, True):
            raise ValueError(
                f"overlap={new['overlap']!r} and the schedule both say when a round is mixed, and "
                f"the schedule means overlap={pacing!r}; pass one of them as overlap"
            )
        new["overlap"] = pacing
    own = new.get("extensions", ())
    new["extensions"] = [*extensions, *own] if isinstance(own, Sequence) else own
    return new


def _pacing(old: Mapping[str, Any]) -> Pacing | None:
    is_auto = "gossip_every" in old
    if ("staleness" if is_auto else "max_staleness") in old:
        raise ValueError(
            "staleness expects a number of steps as gossip_every, and max_staleness expects "
            '"auto"; pass overlap=Late(steps) or overlap=AsItArrives(max_steps) instead'
        )
    if is_auto:
        return AsItArrives(old.get("max_staleness", AsItArrives.max_steps))
    return None if old.get("staleness", 1) == 1 else Late(old["staleness"])


def _extensions(old: Mapping[str, Any]) -> Iterator[Extension]:
    if "gradient_tracking" in old:
        yield GradientTracking()
    if "outer" in old:
        yield OuterOptimizer(old["outer"])
    state = old.get("average_state", "keep")
    if isinstance(state, tuple) and state:
        yield StateGossip(*state)
    elif one_of("keep", "average")("average_state", state) == "average":
        yield StateAverage()
