"""Codes of 8 bits that are floats themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from decent_optim_wrapper.codecs.scaled import ScaledCodec


class Float8Codec(ScaledCodec):
    """Rounds to float8_e4m3fn, three bits of mantissa: 1.016 bytes per element.

    Small elements of a block lose less than with `Int8Codec`, large ones more.
    """

    bits, largest = 8, 448.0

    def pack(self, values: Tensor, codes: Tensor) -> None:
        """One code in each byte."""
        codes.view(torch.float8_e4m3fn).copy_(values)

    def unpack(self, codes: Tensor, values: Tensor) -> None:
        """One code in each byte."""
        values.copy_(codes.view(torch.float8_e4m3fn))
