"""Codecs of 8, 4, 2.7 and 1.6 bits, with a scale for each block."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from decent_optim_wrapper.codecs.base import Codec, Place, in_rows, is_finite_on_device

# The reciprocal of a smaller scale may overflow, so such a block is coded as zeros.
_SMALLEST_SCALE = 2.0**-126
_SCALE_BYTES = torch.float32.itemsize


class ScaledCodec(Codec):
    """Codes each block d as integers d / s, with a scale s.

    A message consists of the codes and then the float32 scales. Every operation on values is one
    multiplication or addition, which is rounded once, so all ranks decode the same bits.

    Attributes:
        largest: absolute value of the largest code.
        per_byte: number of codes in a byte, which is k + base k' + base^2 k'' and so on, from -127
            to 127. Each code comes from another of `per_byte` equal parts of a slice; `block`
            must be a multiple of it.
        base: at least the number of levels, 2 largest + 1; unused for one code in a byte.
    """

    block = 256
    largest: int
    per_byte, base = 1, 0

    def of_first_rounds(self) -> ScaledCodec | None:
        """A few rounds with 15 levels come near enough, and with fewer ones they would not."""
        return Int4Codec() if self.largest <= Int4Codec.largest else None

    def scales(self, values: Tensor) -> Tensor:
        """The scale of each block: the largest absolute value is the largest code.

        Args:
            values: of shape (chunks, blocks, block).

        Returns:
            The scales, of shape (chunks, blocks).
        """
        # Without a pass that writes absolute values.
        return torch.maximum(values.amin(2).neg_(), values.amax(2)).div_(self.largest)

    def pack(self, values: Tensor, codes: Tensor) -> None:
        """Write scaled values of whole blocks as codes.

        Args:
            values: values over scales, of shape (chunks, blocks, block); overwritten.
            codes: the result, int8 of shape (chunks, blocks * block / per_byte).
        """
        total, *others = self._in_parts(values.round_())
        for place, other in enumerate(others, 1):
            total.add_(other, alpha=self.base**place)
        codes.view(total.shape).copy_(total)

    def unpack(self, codes: Tensor, values: Tensor) -> None:
        """Read codes as scaled values; arguments as in `pack`."""
        parts = self._in_parts(values)
        parts[0].copy_(codes.view(parts[0].shape))
        for low, high in pairwise(parts):
            torch.mul(low, 1 / self.base, out=high).round_()
            low.sub_(high, alpha=self.base)

    @property
    def block_bytes(self) -> int:
        """The bytes of the codes and of the scale."""
        return self.block // self.per_byte + _SCALE_BYTES

    def is_finite(self, messages: Tensor) -> Tensor:
        """Return whether all blocks are finite; one that is not has a scale that is not."""
        rows = in_rows(messages)
        _, scales = self._parts(rows, slice(None), slice(0, rows.shape[1] // self.block_bytes))
        # A scale that was rounded up may be finite, and the value of the largest code infinite.
        return is_finite_on_device(scales * self.largest)

    def write(self, messages: Tensor, place: Place, values: Tensor) -> None:
        """Scale some blocks, and code them."""
        codes, scales = self._parts(messages, place.chunks, place.blocks)
        scales.copy_(self.scales(values))
        # The scale as it is sent, which is rounded, or infinity from the next smaller float32 on.
        sent = torch.threshold(scales.to(values.dtype), _SMALLEST_SCALE - 2.0**-149, torch.inf)
        self.pack(values.mul_(sent.reciprocal_().unsqueeze(2)), codes)

    def read(self, messages: Tensor, place: Place, values: Tensor) -> None:
        """Decode some blocks, and scale them back."""
        codes, scales = self._parts(messages, place.chunks, place.blocks)
        self.unpack(codes, values)
        values.mul_(scales.to(values.dtype).unsqueeze(2))

    def _parts(self, messages: Tensor, chunks: slice, blocks: slice) -> tuple[Tensor, Tensor]:
        """The codes of some blocks, as in `pack`, and their scales, as from `scales`."""
        width = self.block // self.per_byte
        codes = messages[chunks, blocks.start * width : blocks.stop * width].view(torch.int8)
        scales = messages[chunks, messages.shape[1] // self.block_bytes * width :]
        return codes, scales.view(torch.float32)[:, blocks]

    def _in_parts(self, values: Tensor) -> tuple[Tensor, ...]:
        """The parts of each slice of which a byte holds a code each."""
        slices = max(1, values.shape[1] // self.most_blocks)
        return values.view(len(values), slices, self.per_byte, -1).unbind(2)


class Int8Codec(ScaledCodec):
    """Rounds to 255 levels: 1.016 bytes per element."""

    largest = 127


class Int4Codec(ScaledCodec):
    """Rounds to 15 levels: 0.516 bytes per element."""

    largest, per_byte, base = 7, 2, 16


class Int2Codec(ScaledCodec):
    """Rounds to -s, 0 and s, of which five share a byte: 0.213 bytes per element.

    The scale s of a block is the sum of the squares of its values over the sum of their absolute
    values. It is the best one for values that are evenly or exponentially distributed, or that have
    one size where they are not 0. Whatever they are, the rest is smaller than the values: those
    above s / 2 become smaller, and the largest one is not below s.
    """

    block, largest, per_byte, base = 320, 1, 5, 3

    def scales(self, values: Tensor) -> Tensor:
        """The scale of each block; argument as in `ScaledCodec.scales`."""
        squares: Tensor = torch.linalg.vector_norm(values, dim=2).square_()
        # Blocks of zeros have no mean size.
        return squares.div_(values.abs().sum(2).clamp_min_(_SMALLEST_SCALE))

    def pack(self, values: Tensor, codes: Tensor) -> None:
        """Like `ScaledCodec.pack`; values beyond the levels become the largest."""
        super().pack(values.clamp_(-self.largest, self.largest), codes)


class Int3Codec(Int2Codec):
    """Rounds to -2 s, -s, 0, s and 2 s, of which three share a byte: 0.344 bytes per element.

    The largest value of a block is 2.9 s and becomes 2 s, so that most values have finer levels.
    What is left of a block is at most 0.32 times its largest value. A mean of larger groups has
    the scale of the least squares for the same codes. Equal codes keep theirs: they are then coded
    as they are, and ranks that agree stay together.
    """

    block, largest, per_byte, base = 384, 2, 3, 5

    def of_means(self, size: int) -> ScaledCodec:
        """Fit the scale to the codes."""
        return _FittedInt3Codec()

    def scales(self, values: Tensor) -> Tensor:
        """The scale of each block; argument as in `ScaledCodec.scales`."""
        return ScaledCodec.scales(self, values).mul_(self.largest / 2.9)


class _FittedInt3Codec(Int3Codec):
    """Takes the scale of the least squares."""

    def scales(self, values: Tensor) -> Tensor:
        """The scale of each block; argument as in `ScaledCodec.scales`."""
        first = super().scales(values).clamp_min_(_SMALLEST_SCALE).unsqueeze(2)
        codes = values.div(first).round_().clamp_(-self.largest, self.largest)
        return (values * codes).sum(2).div_(codes.square_().sum(2).clamp_min_(1))
