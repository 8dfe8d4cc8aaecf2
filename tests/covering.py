"""Covering arrays: fewer cases than the full product of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*parameters: Mapping[str, Any]) -> list[Any]:
    """Cases for `parametrize` in which every pair of values of two parameters occurs.

    Args:
        parameters: the values of each by the names that they have in the test's id.
    """
    rows = list(product(*parameters))
    # Every case with the pairs that it covers; a value is known by its parameter and its name.
    covers = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*covers.values())
    cases = []
    while missing:
        best = max(rows, key=lambda row: len(covers[row] & missing))
        missing -= covers[best]
        values = (values[name] for values, name in zip(parameters, best, strict=True))
        cases.append(pytest.param(*values, id="-".join(best)))
    return cases


def named(*values: str) -> dict[str, str]:
    """Values that are their own names."""
    return {value: value for value in values}


OVERLAP = {"overlap": True, "no_overlap": False}
VIEWS = {"views": True, "copies": False}
