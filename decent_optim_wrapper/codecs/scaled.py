"""Codecs of 8 and 4 bits, with a scale for each block of 256 elements."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from decent_optim_wrapper.codecs import fused
from decent_optim_wrapper.codecs.base import Codec, Place, in_rows, is_finite_on_device

_BLOCK = 256
_SCALE_BYTES = torch.float32.itemsize


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
            values: scaled values from -largest to largest, of shape (chunks, blocks, 256); may be
                overwritten.
            codes: the result, int8 of shape (chunks, blocks, 32 * bits).
        """

    @abstractmethod
    def unpack(self, codes: Tensor, values: Tensor) -> None:
        """Read codes as scaled values; arguments as in `pack`."""

    @property
    def block_bytes(self) -> int:
        """The bytes of the codes and of the scale."""
        return self._code_bytes + _SCALE_BYTES

    @property
    def _code_bytes(self) -> int:
        return _BLOCK * self.bits // 8

    def is_finite(self, messages: Tensor) -> Tensor:
        """Return whether all blocks are finite; one that is not has a scale that is not."""
        scales = in_rows(messages)[:, self._scales_at(messages) :].view(torch.float32)
        # A scale that was rounded up may be finite, and the value of the largest code infinite.
        return is_finite_on_device(scales * self.largest)

    def write(self, messages: Tensor, place: Place, values: Tensor) -> None:
        """Scale some blocks, and code them."""
        codes, scales = self._parts(messages, place)
        # The largest absolute value, without a pass that writes them.
        scales.copy_(torch.maximum(values.amin(2).neg_(), values.amax(2)).div_(self.largest))
        # The reciprocal of the scale as it is sent, which is rounded.
        inverse = scales.to(values.dtype).reciprocal()
        inverse.masked_fill_(scales < fused.SMALLEST_SCALE, 0)
        self.pack(values.mul_(inverse.unsqueeze(2)), codes)

    def read(self, messages: Tensor, place: Place, values: Tensor) -> None:
        """Decode some blocks, and scale them back."""
        self._restore(*self._parts(messages, place), values)

    def _restore(self, codes: Tensor, scales: Tensor, values: Tensor) -> None:
        self.unpack(codes, values)
        values.mul_(scales.to(values.dtype).unsqueeze(2))

    def _parts(self, messages: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        """The codes of some blocks, of shape (chunks, blocks, bytes), and their scales."""
        chunks, blocks, width = place.chunks, place.blocks, self._code_bytes
        at = self._scales_at(messages)
        codes = messages[chunks, blocks.start * width : blocks.stop * width]
        start, stop = (at + block * _SCALE_BYTES for block in (blocks.start, blocks.stop))
        scales = messages[chunks, start:stop].view(torch.float32)
        return codes.view(torch.int8).view(*place.shape, width), scales

    def _scales_at(self, messages: Tensor) -> int:
        return messages.shape[-1] // self.block_bytes * self._code_bytes


class Int8Codec(ScaledCodec):
    """Rounds to 255 levels: 1.016 bytes per element."""

    bits, largest = 8, 127

    @torch.no_grad()
    def encode(self, values: Tensor, message: Tensor, reference: Tensor | None = None) -> None:
        """Like `Codec.encode`, on a GPU in one kernel."""
        chunks, blocks, _ = self._sizes(messages := in_rows(message))
        whole = Place(slice(0, len(values)), slice(0, chunks), slice(0, blocks))
        codes, scales = self._parts(messages, whole)
        found = fused.FUSED.call(fused.encode, values, reference, codes)
        if found is None:
            super().encode(values, message, reference)
        else:
            scales.copy_(found)

    def _restore(self, codes: Tensor, scales: Tensor, values: Tensor) -> None:
        # On a GPU in one kernel.
        if fused.FUSED.call(fused.decode, codes, scales, values) is None:
            super()._restore(codes, scales, values)

    def pack(self, values: Tensor, codes: Tensor) -> None:
        """One code in each byte."""
        codes.copy_(values.round_())

    def unpack(self, codes: Tensor, values: Tensor) -> None:
        """One code in each byte."""
        values.copy_(codes)


class Int4Codec(ScaledCodec):
    """Rounds to 15 levels: 0.516 bytes per element.

    A byte holds a code k of the first half of a chunk's slice and one of the second, as k + 16 k'.
    """

    bits, largest = 4, 7
    is_coarse = in_slices = True

    def pack(self, values: Tensor, codes: Tensor) -> None:
        """Two codes in each byte."""
        # Of a quarter of the bytes, which are added faster.
        low, high = values.round_().to(torch.int8).view(len(values), 2, -1).unbind(1)
        torch.add(low, high, alpha=16, out=codes.view(len(codes), -1))

    def unpack(self, codes: Tensor, values: Tensor) -> None:
        """Two codes in each byte."""
        low, high = values.view(len(values), 2, -1).unbind(1)
        low.copy_(codes.view(len(codes), -1))
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
