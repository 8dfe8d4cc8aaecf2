"""Covering arrays: fewer cases than the full product of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, combinations, islice, product
from typing import Any

import pytest

# A value is known by the place of its parameter and by its name.
Value = tuple[int, str]
Pair = frozenset[Value]


def pairwise(*parameters: Mapping[str, Any]) -> list[Any]:
    """Cases for `parametrize` in which every pair of values of two parameters occurs.

    Args:
        parameters: the values of each by the names that they have in the test's id.
    """
    values = [[(place, name) for name in names] for place, names in enumerate(parameters)]
    pairs = chain.from_iterable(product(*two) for two in combinations(values, 2))
    missing = dict.fromkeys(map(frozenset, pairs))
    cases = []
    while missing:
        # From a few beginnings: the best of all would take long to find, and save no case.
        drafts = [_completed(pair, values, missing) for pair in islice(missing, 10)]
        best = max(drafts, key=lambda case: sum(pair in missing for pair in _pairs(case)))
        for pair in _pairs(best):
            missing.pop(pair, None)
        chosen = [parameters[place][name] for place, name in best]
        cases.append(pytest.param(*chosen, id="-".join(name for _, name in best)))
    return cases


def _completed(pair: Pair, values: list[list[Value]], missing: Mapping[Pair, None]) -> list[Value]:
    """A case with this pair, and as many other missing ones as each further value adds."""
    case = dict(pair)

    def gain(value: Value) -> int:
        return sum(frozenset((value, other)) in missing for other in case.items())

    for place, names in enumerate(values):
        if place not in case:
            _, case[place] = max(names, key=gain)
    return sorted(case.items())


def _pairs(case: list[Value]) -> list[Pair]:
    return [frozenset(two) for two in combinations(case, 2)]


def named(*values: str) -> dict[str, str]:
    """Values that are their own names."""
    return {value: value for value in values}


OVERLAP = {"overlap": True, "no_overlap": False}
VIEWS = {"views": True, "copies": False}
