"""Warnings that point at a line of the user."""

from __future__ import annotations

import sys
import warnings

# Between the user's line and this package: a scheduler's step, a backward pass, a training loop.
_LIBRARIES = {
    *("decent_optim_wrapper", "torch", "contextlib", "functools", "threading"),
    *("lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "transformers"),
}


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning for the innermost line of user code on the stack.

    Python shows a text once per line. If there is no user code on the stack, as on a thread of
    autograd, the warning points at the outermost line.

    Args:
        text: what happened, on which rank, and what to do.
        category: the class of the warning.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
