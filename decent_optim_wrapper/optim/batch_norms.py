"""Statistics of batch norms, estimated again for averaged parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def recalibrated(
    given: tuple[nn.Module, Iterable[Any]] | None, restores: Callable[[], bool]
) -> Iterator[None]:
    """Run the body with batch norm statistics that are estimated on these batches.

    Norms in evaluation mode in a model in training mode are frozen and keep their statistics. All
    other buffers, and the mode of every module, are restored before the body begins.

    Args:
        given: a model and batches (tensors, or tuples whose first element is the input); None
            changes nothing.
        restores: tells whether the old statistics are restored after the body.
    """
    if given is None:
        yield
        return
    model, batches = _checked(given)
    own = _Buffers(model)
    try:
        # A model's own train() may leave frozen norms as they are.
        with _restoring("training", model.modules()):
            if not model.training:
                model.train()
            norms = [module for module in model.modules() if _is_estimated(module)]
            if norms:
                with _restoring("momentum", norms):
                    _estimate(model, norms, batches)
        # A forward pass in training mode moves other statistics, too, such as the ones of instance
        # norms and the vectors of spectral norms.
        own.restore(but=norms)
        yield
    finally:
        if restores():
            own.restore()


class _Buffers:
    """A copy of the buffers of a model.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owned = [(module, dict(module._buffers)) for module in model.modules()]
        self._values = {b: b.clone() for b in model.buffers() if _is_writable(b)}

    @torch.no_grad()
    def restore(self, but: Sequence[nn.Module] = ()) -> None:
        """Restore the buffers and their values, except for some modules."""
        for module, buffers in self._owned:
            if module in but:
                continue
            # A forward pass may have replaced them.
            module._buffers.clear()
            module._buffers.update(buffers)
            for buffer in buffers.values():
                if buffer is not None and buffer in self._values:
                    buffer.copy_(self._values[buffer])


def _is_writable(buffer: Tensor) -> bool:
    """Return whether the values can be changed in place; elements of an expanded one overlap."""
    if buffer.layout != torch.strided:
        return True
    return all(
        size < 2 or stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
    )


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
    # Dropout draws random numbers, which must not change the numbers that the training draws.
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        for batch in batches:
            inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
            model(inputs.to(device))
    if any(norm.num_batches_tracked == 0 for norm in norms):
        raise ValueError(
            "recalibrate expects batches that reach every batch norm, but one saw none; pass "
            "something that can be iterated again, such as a DataLoader"
        )


def _checked(given: Any) -> tuple[nn.Module, Iterable[Any]]:
    pair = isinstance(given, (tuple, list)) and len(given) == 2
    if not pair or not isinstance(given[0], nn.Module) or not isinstance(given[1], Iterable):
        raise TypeError(
            f"recalibrate expects (model, batches), batches of tensors or of tuples whose first "
            f"element is the input, got {type(given).__name__}"
        )
    return given[0], given[1]
