"""Checks the extensions of a wrapper, adds what every wrapper has, and puts them into an order."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

from torch.optim import Optimizer

from decent_optim_wrapper.checks import expect
from decent_optim_wrapper.extensions.gradient_tracking import GradientTracking
from decent_optim_wrapper.extensions.outer_optimizer import OuterOptimizer
from decent_optim_wrapper.extensions.own_copy import OwnCopyCheck
from decent_optim_wrapper.extensions.state_average import StateAverage
from decent_optim_wrapper.extensions.state_gossip import StateGossip
from decent_optim_wrapper.gossip.extension import Extension, Extensions
from decent_optim_wrapper.optim.splittable import SPLITTABLE
from decent_optim_wrapper.warn import warn

# The order in which a step calls the extensions of this package; a user's own come after them.
_ORDER: Any = (GradientTracking, StateGossip, OwnCopyCheck, OuterOptimizer, StateAverage)


def arrange(given: Sequence[Extension], optimizer: Optimizer) -> Extensions:
    """Put extensions into the order in which a step of this base calls them.

    Raises:
        TypeError: one of them is not an `Extension`.
        ValueError: two have the same name or class, or one that has a state has no name.
    """
    expected = "extensions expects a sequence of instances of Extension"
    is_list = isinstance(given, Sequence) and all(isinstance(each, Extension) for each in given)
    expect(is_list, expected, given)
    for each in given:
        if not each.name and type(each).state_dict is not Extension.state_dict:
            raise ValueError(
                f"extensions expects a name for each extension with a state, as its key in "
                f"checkpoints; set {type(each).__name__}.name"
            )
    kinds = [type(each) for each in given]
    if twice := [kind.__name__ for kind in _ORDER if kinds.count(kind) > 1]:
        raise ValueError(f"extensions expects one instance of a class, got several of {twice}")
    # They keep nothing before they are attached, so users may pass the same ones to each wrapper.
    found = [copy(each) if type(each) in _ORDER else each for each in given]
    if type(optimizer) not in SPLITTABLE:
        found.append(OwnCopyCheck())
        mixed = [name for each in given if isinstance(each, StateGossip) for name in each.names]
        _check_iterate(optimizer, mixed)
    places = {kind: place for place, kind in enumerate(_ORDER)}
    return Extensions(sorted(found, key=lambda each: places.get(type(each), len(places))))


def _check_iterate(optimizer: Optimizer, mixed: Sequence[str]) -> None:
    """Warn of a base that keeps an iterate in its state, unless it is mixed."""
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    if any("ScheduleFree" in kind for kind in kinds) and "z" not in mixed:
        warn(
            f"{kinds[0]} keeps an iterate in its state, which drifts apart if only parameters are "
            f'mixed; pass extensions=[StateGossip("z")]'
        )
