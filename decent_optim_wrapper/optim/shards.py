"""The part of a tensor that this rank holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds: the shard of a DTensor, all of another tensor.

    Look at it again each time: FSDP may put another shard in its place.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def local_grad(param: Tensor) -> Tensor:
    """The part of a parameter's gradient that belongs to the part of the parameter.

    Args:
        param: has a gradient.
    """
    grad = param.grad
    if grad is None:
        raise RuntimeError("local_grad() expects a parameter with a gradient")
    if not isinstance(grad, DTensor) or not isinstance(param, DTensor):
        return grad
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local(grad)
