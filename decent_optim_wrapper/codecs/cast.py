"""Codecs of 16 bits, which cast to another dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from decent_optim_wrapper.codecs.base import Codec, Place, is_finite_on_device


class CastCodec(Codec):
    """Rounds to another dtype.

    Args:
        dtype: a floating-point dtype.
        uses_reference: as in `Codec`.
    """

    def __init__(self, dtype: torch.dtype, uses_reference: bool = True) -> None:
        self.dtype = dtype
        self.uses_reference = uses_reference

    @property
    def block_bytes(self) -> int:
        """One element of the dtype for each element."""
        return self.dtype.itemsize

    def is_finite(self, messages: Tensor) -> Tensor:
        """Return whether the values are finite after the cast."""
        return is_finite_on_device(messages.view(self.dtype))

    def write(self, messages: Tensor, place: Place, values: Tensor) -> None:
        """Cast some values."""
        messages.view(self.dtype)[place.chunks, place.blocks].copy_(values.view(place.shape))

    def read(self, messages: Tensor, place: Place, values: Tensor) -> None:
        """Cast some values back."""
        values.view(place.shape).copy_(messages.view(self.dtype)[place.chunks, place.blocks])
