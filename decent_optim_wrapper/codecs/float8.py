"""A codec of 8-bit floats."""

from __future__ import annotations

import torch
from torch import Tensor

from decent_optim_wrapper.codecs.scaled import ScaledCodec


class Float8Codec(ScaledCodec):
    """Rounds to float8_e4m3fn, with three bits of mantissa: 1.016 bytes per element.

    The error is smaller than with `Int8Codec` for small elements of a block, and larger for large
    ones.
    """

    bits, largest = 8, 448.0

    def pack(self, values: Tensor, codes: Tensor) -> None:
        """One code in each byte."""
        codes.view(torch.float8_e4m3fn).copy_(values)

    def unpack(self, codes: Tensor, values: Tensor) -> None:
        """One code in each byte."""
        values.copy_(codes.view(torch.float8_e4m3fn))
