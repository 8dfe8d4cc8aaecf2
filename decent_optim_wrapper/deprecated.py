"""Spellings that work for one more release, with a DeprecationWarning.

To remove them, delete this module and what refers to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from decent_optim_wrapper.checks import Check, one_of
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
        """Deprecated: True if there is a `GradientTracking`; False drops it."""
        return any(isinstance(each, GradientTracking) for each in self.extensions)

    @gradient_tracking.setter
    def gradient_tracking(self: Any, tracks: bool) -> None:
        warn("gradient_tracking=False is deprecated; call drop_extension()", DeprecationWarning)
        if not tracks:
            self.drop_extension(GradientTracking)
        elif not self.gradient_tracking:
            raise ValueError("pass extensions=[GradientTracking()] to the constructor instead")


def number_or_auto(check: Check) -> Check:
    """Accept "auto", too."""
    return lambda name, value: value if value == "auto" else check(name, value)


def _state(value: Any) -> Extension | None:
    if not isinstance(value, str):
        return StateGossip(*value)
    known = one_of("keep", "average")("average_state", value)
    return StateAverage() if known == "average" else None


# What an old spelling with some value stands for; None for what is the default.
_MEANINGS: Mapping[str, Callable[[Any], Extension | Pacing | None]] = {
    "gradient_tracking": lambda _: GradientTracking(),
    "outer": OuterOptimizer,
    "average_state": _state,
    "max_staleness": AsItArrives,
    "gossip_every": lambda _: AsItArrives(),
    "staleness": lambda steps: None if steps == 1 else Late(steps),
}


def respelled(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace old spellings in the options of a wrapper, with a warning.

    Raises:
        ValueError: a spelling has no meaning, or `overlap` says otherwise when a round is mixed.
    """
    new, old = dict(options), dict[str, Any]()
    if new.pop("gradient_tracking", False):
        old["gradient_tracking"] = True
    if isinstance(schedule := new.get("schedule"), OldFields):
        reset: dict[str, Any] = dict.fromkeys(OldFields.__dataclass_fields__)
        if vars(schedule)["gossip_every"] == "auto":
            reset["gossip_every"] = 1
        passed_on = {name: getattr(schedule, name) for name in reset}
        old |= {name: value for name, value in passed_on.items() if value is not None}
        new["schedule"] = replace(schedule, **reset)
    if not old:
        return new
    is_auto = "gossip_every" in old
    # Each belongs to the other kind of rounds, and its default value meant nothing there.
    stray, default = ("staleness", 1) if is_auto else ("max_staleness", AsItArrives.max_steps)
    if old.get(stray, default) != default:
        raise ValueError(
            f"{stray}={old[stray]!r} has no meaning {'with' if is_auto else 'without'} "
            f'gossip_every="auto"; pass overlap=Late(steps) or overlap=AsItArrives(max_steps)'
        )
    # "auto" comes last, so that a maximal staleness counts.
    found = [_MEANINGS[name](value) for name, value in old.items() if name != stray]
    extensions = [each for each in found if isinstance(each, Extension)]
    pacings = [each for each in found if isinstance(each, Pacing)]
    passed = [f"overlap={pacing!r}" for pacing in pacings[:1]]
    spelled = ", ".join(f"{name}={value!r}" for name, value in old.items())
    if pacings:
        # True was the default of the overlap.
        if (given := new.get("overlap")) not in (None, True, pacings[0]):
            raise ValueError(f"overlap={given!r} contradicts {spelled}; pass {passed[0]} alone")
        new["overlap"] = pacings[0]
    if extensions:
        passed.append(f"extensions=[{', '.join(f'{type(e).__name__}(...)' for e in extensions)}]")
    warn(
        f"{spelled} will be removed in the next release; pass {' and '.join(passed) or 'nothing'} "
        f"to the wrapper instead",
        DeprecationWarning,
    )
    new["extensions"] = [*extensions, *new.get("extensions", ())]
    return new
