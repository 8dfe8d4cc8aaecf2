"""Codecs of 8 and 4 bits, with a scale for each block of 256 elements."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from decent_optim_wrapper.codecs import fused
from decent_optim_wrapper.codecs.base import SLICE, Codec, is_finite_on_device

_BLOCK = 256


class ScaledCodec(Codec):
    """Codes each block d as d / s, with the scale s = max|d| / largest.

    A message consists of the codes and then the float32 scales. Every operation on values is one
    multiplication or addition, which is rounded once, so all ranks decode the same bits.

    Attributes:
        bits: number of bits of a code.
        largest: absolute value of the largest code.
    """

    block = _BLOCK
    bits: int
    largest: float

    @abstractmethod
    def pack(self, values: Tensor, codes: Tensor) -> None:
        """Write scaled values of whole blocks as codes.

        Args:
            values: scaled values from -largest to largest; may be overwritten.
            codes: the result, int8, with `bits` bits for each value.
        """

    @abstractmethod
    def unpack(self, codes: Tensor, values: Tensor) -> None:
        """Read codes as scaled values; arguments as in `pack`."""

    @property
    def _code_bytes(self) -> int:
        return _BLOCK * self.bits // 8

    def nbytes(self, numel: int) -> int:
        """The bytes of the codes of whole blocks, and of their scales."""
        return -(-numel // _BLOCK) * (self._code_bytes + torch.float32.itemsize)

    def is_finite(self, message: Tensor) -> Tensor:
        """Return whether all blocks are finite; one that is not has a scale that is not."""
        # A scale that was rounded up may be finite, and the value of the largest code infinite.
        return is_finite_on_device(self._split(message)[1] * self.largest)

    def write(self, message: Tensor, place: slice, values: Tensor) -> None:
        """Scale a slice, and code it."""
        codes, scales = self._parts(message, place, values.numel())
        rows = values.view(-1, _BLOCK)
        # The largest absolute value, without a pass that writes them.
        scales.copy_(torch.maximum(rows.amin(1).neg_(), rows.amax(1)).div_(self.largest))
        # The reciprocal of the scale as it is sent, which is rounded.
        inverse = scales.to(values.dtype).reciprocal()
        inverse.masked_fill_(scales < fused.SMALLEST_SCALE, 0)
        rows.mul_(inverse.unsqueeze(1))
        self.pack(values, codes)

    def read(self, message: Tensor, place: slice, values: Tensor) -> None:
        """Decode a slice, and scale it back."""
        self._restore(*self._parts(message, place, values.numel()), values)

    def _restore(self, codes: Tensor, scales: Tensor, values: Tensor) -> None:
        self.unpack(codes, values)
        values.view(-1, _BLOCK).mul_(scales.to(values.dtype).unsqueeze(1))

    def _parts(self, message: Tensor, place: slice, numel: int) -> tuple[Tensor, Tensor]:
        """The codes and the scales of a slice of `numel` elements, in whole blocks."""
        codes, scales = self._split(message)
        first, last = place.start // _BLOCK, (place.start + numel) // _BLOCK
        return codes[first * self._code_bytes : last * self._code_bytes], scales[first:last]

    def _split(self, message: Tensor) -> tuple[Tensor, Tensor]:
        blocks = message.numel() // (self._code_bytes + torch.float32.itemsize)
        codes, scales = message[: blocks * self._code_bytes], message[blocks * self._code_bytes :]
        return codes.view(torch.int8), scales.view(torch.float32)


class Int8Codec(ScaledCodec):
    """Rounds to 255 levels: 1.016 bytes per element."""

    bits, largest = 8, 127

    @torch.no_grad()
    def encode(self, values: Tensor, message: Tensor, reference: Tensor | None = None) -> None:
        """Like `Codec.encode`, on a GPU in one kernel."""
        codes, scales = self._split(message)
        found = fused.FUSED.call(fused.encode, values, reference, codes.view(-1, _BLOCK))
        if found is None:
            super().encode(values, message, reference)
        else:
            scales.copy_(found)

    def _restore(self, codes: Tensor, scales: Tensor, values: Tensor) -> None:
        # On a GPU in one kernel.
        args = codes.view(-1, _BLOCK), scales, values.view(-1, _BLOCK)
        if fused.FUSED.call(fused.decode, *args) is None:
            super()._restore(codes, scales, values)

    def pack(self, values: Tensor, codes: Tensor) -> None:
        """One code in each byte."""
        codes.copy_(values.round_())

    def unpack(self, codes: Tensor, values: Tensor) -> None:
        """One code in each byte."""
        values.copy_(codes)


class Int4Codec(ScaledCodec):
    """Rounds to 15 levels: 0.516 bytes per element.

    A byte holds a code k of the first half of a slice and one of the second, as k + 16 k'.
    """

    bits, largest = 4, 7

    def _slice(self, numel: int, device: torch.device) -> int:
        # Part of the format, on every device.
        return SLICE

    def pack(self, values: Tensor, codes: Tensor) -> None:
        """Two codes in each byte."""
        low, high = values.round_().view(2, -1)
        codes.copy_(high.mul_(16).add_(low))

    def unpack(self, codes: Tensor, values: Tensor) -> None:
        """Two codes in each byte."""
        low, high = values.view(2, -1)
        low.copy_(codes)
        torch.mul(low, 1 / 16, out=high).round_()
        low.sub_(high, alpha=16)


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
