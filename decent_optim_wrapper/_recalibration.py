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
    model, batches = given
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
    try:
        update_bn(batches, model, device)
    finally:
        # Where a batch raises, update_bn leaves them at None: means over all batches to come.
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        model.train(training)
