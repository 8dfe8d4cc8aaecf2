"""Which optimizers evaluate the model, or a second derivative, inside their step."""

from __future__ import annotations

import inspect

from torch.optim import LBFGS, Optimizer


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
