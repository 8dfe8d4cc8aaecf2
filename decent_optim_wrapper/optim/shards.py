"""The local parts of tensors, and numbers of several devices."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The local part of a tensor: this rank's shard of a DTensor, all of another tensor.

    Look at it again each time: FSDP may put another shard in its place.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def largest_shard_bytes(tensor: Tensor) -> int:
    """Bytes of the largest local part of a tensor on any rank, the same on all ranks.

    Along a dimension, torch gives each rank the size divided by their number and rounded up, until
    nothing is left.
    """
    shape: list[int] = [*tensor.shape]
    if isinstance(tensor, DTensor):
        for ranks, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            if (dim := getattr(placement, "dim", None)) is not None:
                shape[dim] = -(-shape[dim] // ranks)
    return math.prod(shape) * tensor.dtype.itemsize


def local_grad(param: Tensor) -> Tensor:
    """The part of a parameter's gradient that belongs to the part of the parameter.

    Args:
        param: has a gradient.
    """
    grad: Tensor = param.grad  # type: ignore[assignment]
    if not isinstance(grad, DTensor) or not isinstance(param, DTensor):
        return grad
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local(grad)


def on_cpu(numbers: Iterable[Tensor]) -> Tensor:
    """A vector of zero and these numbers; waits once for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for number in numbers:
        by_device.setdefault(number.device, []).append(number)
    fetched = [torch.stack(each).cpu() for each in by_device.values()]
    return torch.cat([torch.zeros(1, dtype=torch.float64, device="cpu"), *fetched])
