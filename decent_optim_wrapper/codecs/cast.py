"""Codecs of 16 bits, which cast to another dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from decent_optim_wrapper.codecs.base import Codec, is_finite_on_device


class CastCodec(Codec):
    """Rounds to another dtype.

    Args:
        dtype: a floating-point dtype.
        uses_reference: as in `Codec`.
    """

    def __init__(self, dtype: torch.dtype, uses_reference: bool = True) -> None:
        self.dtype = dtype
        self.uses_reference = uses_reference

    def nbytes(self, numel: int) -> int:
        """One element of the dtype for each element."""
        return numel * self.dtype.itemsize

    def is_finite(self, message: Tensor) -> Tensor:
        """Return whether the values are finite after the cast."""
        return is_finite_on_device(message.view(self.dtype))

    def write(self, message: Tensor, place: slice, values: Tensor) -> None:
        """Cast a slice."""
        message.view(self.dtype)[place].copy_(values)

    @torch.no_grad()
    def encode(self, values: Tensor, message: Tensor, reference: Tensor | None = None) -> None:
        """Like `Codec.encode`, in one pass."""
        if reference is None:
            message.view(self.dtype).copy_(values)
        else:
            torch.sub(values, reference, out=message.view(self.dtype))

    def read(self, message: Tensor, place: slice, values: Tensor) -> None:
        """Cast a slice back."""
        values.copy_(message.view(self.dtype)[place])
