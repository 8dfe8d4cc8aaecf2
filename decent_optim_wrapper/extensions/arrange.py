"""Checks the extensions of a wrapper, adds what every wrapper has, and puts them into an order."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from torch.optim import Optimizer

from decent_optim_wrapper.checks import expect
from decent_optim_wrapper.gossip.extension import Extension, Extensions
from decent_optim_wrapper.optim.splittable import is_splittable
from decent_optim_wrapper.warn import warn

# The order in which a step calls the extensions of this package; a user's own come after them.
_ORDER = ["GradientTracking", "StateGossip", "OwnCopyCheck", "OuterOptimizer", "StateAverage"]


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
    own = [type(each).__name__ for each in given if _place(each) < len(_ORDER)]
    if twice := [name for name in _ORDER if own.count(name) > 1]:
        raise ValueError(f"extensions expects one instance of a class, got several of {twice}")
    # They keep nothing before they are attached, so users may pass the same ones to each wrapper.
    found = [copy(each) if _place(each) < len(_ORDER) else each for each in given]
    if not is_splittable(type(optimizer)):
        found.append(_check_own_copies(given, optimizer))
    return Extensions(sorted(found, key=_place))


def _place(extension: Extension) -> int:
    """The place of an extension of this package; the last one for any other."""
    kind = type(extension)
    is_own = kind.__module__.rpartition(".")[0] == __package__
    return _ORDER.index(kind.__name__) if is_own else len(_ORDER)


def _check_own_copies(given: Sequence[Extension], optimizer: Optimizer) -> Extension:
    """Warn of a base that keeps an iterate in its state, unless it is mixed, and look for more."""
    # Most bases need none of this.
    from decent_optim_wrapper.extensions.own_copy import OwnCopyCheck
    from decent_optim_wrapper.extensions.state_gossip import StateGossip

    mixed = [name for each in given if isinstance(each, StateGossip) for name in each.names]
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    if any("ScheduleFree" in kind for kind in kinds) and "z" not in mixed:
        warn(
            f"{kinds[0]} keeps an iterate in its state, which drifts apart if only parameters are "
            f'mixed; pass extensions=[StateGossip("z")]'
        )
    return OwnCopyCheck()
