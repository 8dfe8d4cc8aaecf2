"""Flat vectors, the memory behind them, and tensors that move into one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.optim.shards import local

# Addresses are multiples of this, for vectorised kernels.
_ALIGN_BYTES = 64


class Flat(NamedTuple):
    """A flat vector and its views, one for each tensor of a bucket."""

    data: Tensor
    views: tuple[Tensor, ...]


def new_vector(
    numel: int, dtype: torch.dtype, device: torch.device, pinned: bool = False
) -> Tensor:
    """Make an uninitialised vector that may be changed in any mode."""
    # A vector made under inference_mode could not be changed outside of it.
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned)


def move_together(tensors: Sequence[Tensor]) -> Tensor:
    """Move tensors of one device and dtype into one storage, each with its shape.

    Args:
        tensors: the tensors, which become views of the storage; dense ones keep their strides.

    Returns:
        The whole storage as a vector of reals; the gaps between the tensors are 0.
    """
    dtype, device = tensors[0].dtype, tensors[0].device
    starts = _starts(tensors)
    with torch.inference_mode(False), torch.no_grad():
        elements = torch.zeros(starts[-1], dtype=dtype, device=device)
        for tensor, start in zip(tensors, starts, strict=False):
            view = elements.as_strided(tensor.shape, torch.empty_like(tensor).stride(), start)
            view.copy_(tensor)
            tensor.data = view
        return torch.view_as_real(elements).view(-1) if dtype.is_complex else elements


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    """The start of each tensor, in elements, and the end of the last one.

    Small tensors are not aligned: that would multiply their memory.
    """
    starts = [0]
    for tensor in tensors:
        if tensor.nbytes >= _ALIGN_BYTES:
            starts[-1] = aligned(starts[-1] * tensor.itemsize) // tensor.itemsize
        starts.append(starts[-1] + tensor.numel())
    return starts


def overlapping(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Two of the tensors that share memory, if there are any."""
    spans = sorted(
        (str(part.device), part.data_ptr(), _end(part), index)
        for index, part in enumerate(map(local, tensors))
        if part.numel()
    )
    for (device, _, end, one), (other_device, start, _, other) in pairwise(spans):
        if device == other_device and start < end:
            return tensors[one], tensors[other]
    return None


def _end(tensor: Tensor) -> int:
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.itemsize


def aligned(nbytes: int) -> int:
    """The bytes from the start of a vector to the start of the next one."""
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
