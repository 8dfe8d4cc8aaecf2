"""When a round is mixed by default, and whether the model allows it before a forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from decent_optim_wrapper.config import Overlap, Settings
from decent_optim_wrapper.wire.parameters import Named


def overlap_of(
    overlap: Overlap | None, extensions: object, model: object, params: Iterable[Tensor]
) -> Overlap:
    """The given `overlap`, or the default.

    Args:
        overlap: the user's; None for the default.
        extensions: the user's extensions.
        model: the model; None if it is not known.
        params: the parameters of the optimizer.

    Returns:
        By default "forward". True without the model, if an extension would wait for all ranks in
        the forward pass, or if the modules of the model do not announce all parameters.
    """
    if overlap is not None:
        return overlap
    given = extensions if isinstance(extensions, Sequence) else ()
    meets = any(getattr(each, "collective", False) for each in given)
    if meets or not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        return True
    return "forward" if set(params) <= set(model.parameters()) else True


def check_forward(settings: Settings, model: nn.Module | None, parameters: Sequence[Named]) -> None:
    """Check that the model contains all parameters, if the pacing needs that.

    Raises:
        ValueError: there is no model, or it does not contain all parameters.
    """
    if not settings.pacing.mixes_early:
        return
    overlap = settings.overlap
    if model is None or isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"overlap={overlap!r} expects the model, whose modules are about to read the "
            f"parameters when they are called; pass model=model, not in TorchScript"
        )
    held = set(map(id, model.parameters()))
    if missing := [each.name for each in parameters if id(each.tensor) not in held]:
        raise ValueError(
            f"overlap={overlap!r} expects all parameters of the optimizer in the model, but it "
            f"does not have parameters {', '.join(missing)}; pass the module that contains them "
            f"all, such as an nn.ModuleList of several models"
        )
