"""Statistics of batch norms, estimated again for averaged parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def recalibrated(
    given: tuple[nn.Module, Iterable[Any]] | None, restores: Callable[[], bool]
) -> Iterator[None]:
    """Run the body with batch norm statistics that are estimated on these batches.

    Norms in evaluation mode in a model in training mode are frozen and keep their statistics. All
    other buffers, and the mode of every module, are as before when the body begins.

    Args:
        given: a model and batches (tensors, or tuples whose first element is the input); None
            changes nothing.
        restores: function that returns whether the old statistics are restored after the body.
    """
    if given is None:
        yield
        return
    model, batches = given
    own: dict[Tensor, Tensor] = {}
    try:
        with _restoring("training", model.modules()):
            # A model's own train() may leave frozen norms as they are.
            if not model.training:
                model.train()
            norms = [module for module in model.modules() if _is_estimated(module)]
            own = {b: b.clone() for norm in norms for b in norm.buffers(recurse=False)}
            if norms:
                with _restoring("momentum", norms):
                    _estimate(model, norms, batches)
        yield
    finally:
        if restores():
            for buffer, value in own.items():
                buffer.copy_(value)


def _is_estimated(module: nn.Module) -> TypeGuard[_BatchNorm]:
    tracks = isinstance(module, _BatchNorm) and module.num_batches_tracked is not None
    return tracks and module.training


@contextmanager
def _restoring(name: str, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore an attribute of modules after the body."""
    before = [(module, getattr(module, name)) for module in modules]
    try:
        yield
    finally:
        for module, value in before:
            setattr(module, name, value)


def _estimate(model: nn.Module, norms: Sequence[_BatchNorm], batches: Iterable[Any]) -> None:
    """Set the statistics of these norms to their means over the batches.

    `torch.optim.swa_utils.update_bn` resets all norms and puts all modules into training mode.
    """
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    for norm in norms:
        norm.reset_running_stats()
        # None makes the statistics the mean over all batches.
        norm.momentum = None
    # A forward pass in training mode also moves or replaces other buffers, such as the vectors of
    # spectral norms, so it runs on copies. DecentralizedDataParallel overrides named_buffers().
    estimated = {b for norm in norms for b in norm.buffers(recurse=False)}
    others = {n: b.clone() for n, b in nn.Module.named_buffers(model) if b not in estimated}
    # Dropout draws random numbers, which must not change the numbers that the training draws.
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        for batch in batches:
            inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
            functional_call(model, others, (inputs.to(device),))
    if any(norm.num_batches_tracked == 0 for norm in norms):
        raise ValueError(
            "recalibrate expects batches that reach every batch norm, but one saw none; pass "
            "something that can be iterated again, such as a DataLoader"
        )
