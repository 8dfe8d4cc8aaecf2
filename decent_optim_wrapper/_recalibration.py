"""Statistics of batch norms, estimated anew for averaged parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn


@contextmanager
def recalibrated(
    given: tuple[nn.Module, Iterable[Any]] | None, restores: Callable[[], bool]
) -> Iterator[None]:
    """Run the body with the statistics that a model has on these batches.

    Args:
        given: a model and batches (tensors, or tuples whose first element is the input); None
            changes nothing.
        restores: whether the statistics of before are put back after the body.
    """
    if given is None:
        yield
        return
    model, batches = _checked(given)
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    own = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]
    try:
        _estimate(model, norms, batches)
        yield
    finally:
        if restores():
            with torch.no_grad():
                for buffer, value in own:
                    buffer.copy_(value)


def _estimate(model: nn.Module, norms: Sequence[_BatchNorm], batches: Iterable[Any]) -> None:
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    momenta = [norm.momentum for norm in norms]
    training = model.training
    devices = [device] if device.type == "cuda" else []
    try:
        # In training mode dropout draws numbers that the training after it would miss.
        with torch.random.fork_rng(devices):
            update_bn(batches, model, device)
        if any(norm.num_batches_tracked == 0 for norm in norms):
            raise ValueError(
                "recalibrate expects batches that reach every batch norm, but one saw none; pass "
                "what can be gone through again, such as a DataLoader"
            )
    finally:
        # Where a batch raises, update_bn leaves them at None: means over all batches to come.
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        model.train(training)


def _checked(given: Any) -> tuple[nn.Module, Iterable[Any]]:
    pair = isinstance(given, (tuple, list)) and len(given) == 2
    if not pair or not isinstance(given[0], nn.Module) or not isinstance(given[1], Iterable):
        raise TypeError(
            f"recalibrate expects (model, batches), batches of tensors or of tuples whose first "
            f"element is the input, got {type(given).__name__}"
        )
    return given[0], given[1]
