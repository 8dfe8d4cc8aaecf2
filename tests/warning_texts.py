"""The texts of warnings on all threads."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def warned_texts() -> Iterator[list[str]]:
    """The texts of the warnings of this package in the body, in their order."""
    texts: list[str] = []

    def note(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if category is UserWarning:
            texts.append(str(message))

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(warnings, "showwarning", note)
        yield texts
