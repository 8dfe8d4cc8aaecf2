"""Codes: what a vector becomes on the wire, and back; no communication.

Both ends decode a message to the same bits: every operation on values is one multiplication or
addition, rounded once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

# Missing in torch's stubs.
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
# Elements that share a scale.
_BLOCK = 256
# Elements that are coded at once, so that they stay in the cache. Part of the format of four bits.
_SLICE = 1 << 17
# Below this the reciprocal of a scale may overflow: such a block is coded as zeros.
_SMALLEST_SCALE = 2.0**-126


class Codec(ABC):
    """Codes vectors of floats as messages of bytes.

    Args:
        block: elements that are coded together; vectors are cut at multiples of it.
        refers: whether the difference to a reference costs fewer bytes, or errs less, than the
            vector itself.
    """

    def __init__(self, block: int, refers: bool) -> None:
        self.block = block
        self.refers = refers

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Bytes of the message of so many elements."""

    @abstractmethod
    def is_finite(self, message: Tensor) -> Tensor:
        """Whether the coded values were finite: bool of shape ()."""

    @abstractmethod
    def _write(self, message: Tensor, place: slice, values: Tensor, spare: Tensor) -> None:
        """Code one slice of a vector.

        Args:
            message: the message of the whole vector.
            place: the slice.
            values: whole blocks, which may be overwritten.
            spare: memory of the same size.
        """

    @abstractmethod
    def _read(self, message: Tensor, place: slice, values: Tensor) -> None:
        """Decode one slice, in whole blocks, into `values`."""

    @torch.no_grad()
    def encode(self, values: Tensor, message: Tensor, reference: Tensor | None = None) -> None:
        """Code a vector, or its difference to a reference.

        Args:
            values: a vector of floats.
            message: overwritten; uint8 of `nbytes(values.numel())`, on the same device.
            reference: of the shape of `values` and of `wide(values.dtype)`.
        """
        buffer = self._buffer(values.numel(), wide(values.dtype), values.device)
        spare = torch.empty_like(buffer)
        for place in slices(values.numel()):
            whole = self._in_blocks(place, buffer)
            part = whole[: place.stop - place.start]
            if reference is None:
                part.copy_(values[place])
            else:
                torch.sub(values[place], reference[place], out=part)
            whole[part.numel() :].zero_()
            self._write(message, place, whole, spare[: whole.numel()])

    def decode(self, *messages: Tensor, numel: int, dtype: torch.dtype) -> Iterator[Decoded]:
        """Decode messages side by side, slice by slice.

        Args:
            messages: one or more, of `numel` elements each.
            numel: elements of each vector.
            dtype: float32 or float64.

        Yields:
            A slice, and the values there of each message, which the next slice overwrites.
        """
        buffers = [self._buffer(numel, dtype, message.device) for message in messages]
        for place in slices(numel):
            values = []
            for message, buffer in zip(messages, buffers, strict=True):
                whole = self._in_blocks(place, buffer)
                self._read(message, place, whole)
                values.append(whole[: place.stop - place.start])
            yield place, values

    def _buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(
            min(self._blocks(numel) * self.block, _SLICE), dtype=dtype, device=device
        )

    def _in_blocks(self, place: slice, buffer: Tensor) -> Tensor:
        return buffer[: self._blocks(place.stop - place.start) * self.block]

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)


Decoded = tuple[slice, list[Tensor]]


class BlockCodec(Codec):
    """Rounds to 8 or 4 bits, with a scale for each block of 256.

    With d a block, the scale is s = max|d| / L, the codes are k = round(d / s), and they stand for
    s k; L is 127 or 7. A message is the codes and then the float32 scales. With four bits, a byte
    holds a code of the first half of a slice and one of the second, as k + 16 k'.

    Args:
        bits: 8 or 4.
    """

    def __init__(self, bits: int) -> None:
        super().__init__(_BLOCK, refers=True)
        self._bits = bits
        self._levels = 2 ** (bits - 1) - 1
        self._code_bytes = _BLOCK * bits // 8

    def __repr__(self) -> str:
        return f"{self._bits} bits"

    def nbytes(self, numel: int) -> int:
        """Bytes of the message of so many elements."""
        return self._blocks(numel) * (self._code_bytes + torch.float32.itemsize)

    def is_finite(self, message: Tensor) -> Tensor:
        """Whether the coded values were finite: a block that is not has no finite scale."""
        return is_finite_on_device(self._split(message)[1])

    def _write(self, message: Tensor, place: slice, values: Tensor, spare: Tensor) -> None:
        codes, scales = self._parts(message, place, values.numel())
        rows = values.view(-1, _BLOCK)
        torch.abs(rows, out=spare.view(-1, _BLOCK))
        scales.copy_(spare.view(-1, _BLOCK).amax(1).div_(self._levels))
        # Of the scale as it travels, which is rounded.
        inverse = scales.to(values.dtype).reciprocal().masked_fill_(scales < _SMALLEST_SCALE, 0)
        rows.mul_(inverse.unsqueeze(1)).round_()
        if self._bits == 4:
            low, high = values.view(2, -1)
            values = high.mul_(16).add_(low)
        codes.copy_(values)

    def _read(self, message: Tensor, place: slice, values: Tensor) -> None:
        codes, scales = self._parts(message, place, values.numel())
        if self._bits == 4:
            low, high = values.view(2, -1)
            low.copy_(codes)
            torch.mul(low, 1 / 16, out=high).round_()
            low.sub_(high, alpha=16)
        else:
            values.copy_(codes)
        values.view(-1, _BLOCK).mul_(scales.to(values.dtype).unsqueeze(1))

    def _parts(self, message: Tensor, place: slice, numel: int) -> tuple[Tensor, Tensor]:
        """The codes and the scales of a slice of so many elements in whole blocks."""
        codes, scales = self._split(message)
        first, last = place.start // _BLOCK, (place.start + numel) // _BLOCK
        return codes[first * self._code_bytes : last * self._code_bytes], scales[first:last]

    def _split(self, message: Tensor) -> tuple[Tensor, Tensor]:
        blocks = message.numel() // (self._code_bytes + torch.float32.itemsize)
        codes, scales = message[: blocks * self._code_bytes], message[blocks * self._code_bytes :]
        return codes.view(torch.int8), scales.view(torch.float32)


class CastCodec(Codec):
    """Rounds to another dtype.

    Args:
        dtype: a dtype of floats.
        refers: as in `Codec`.
    """

    def __init__(self, dtype: torch.dtype, refers: bool = False) -> None:
        super().__init__(1, refers)
        self._dtype = dtype

    def __repr__(self) -> str:
        return str(self._dtype)

    def nbytes(self, numel: int) -> int:
        """Bytes of the message of so many elements."""
        return numel * self._dtype.itemsize

    def is_finite(self, message: Tensor) -> Tensor:
        """Whether the values are finite after the cast."""
        return is_finite_on_device(message.view(self._dtype))

    def _write(self, message: Tensor, place: slice, values: Tensor, spare: Tensor) -> None:
        message.view(self._dtype)[place].copy_(values)

    def _read(self, message: Tensor, place: slice, values: Tensor) -> None:
        values.copy_(message.view(self._dtype)[place])


def codec_of(comm_dtype: torch.dtype) -> Codec:
    """The codec of a `comm_dtype`."""
    bits = {torch.int8: 8, INT4: 4}.get(comm_dtype)
    return CastCodec(comm_dtype) if bits is None else BlockCodec(bits)


def is_finite_on_device(values: Tensor) -> Tensor:
    """Whether all elements are finite, as a bool of shape () that the host has not read."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    largest: Tensor = torch.linalg.vector_norm(values.detach(), torch.inf)
    return largest < torch.inf


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of a dtype are coded: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def slices(numel: int) -> Iterator[slice]:
    """Cut a vector into the slices that are coded at once."""
    for start in range(0, numel, _SLICE):
        yield slice(start, min(start + _SLICE, numel))
