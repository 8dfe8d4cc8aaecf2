"""The interface of codes: what a vector becomes on the wire, and back; no communication."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

# Elements that are coded at once, so that they stay in the cache. Part of the format of four bits.
_SLICE = 1 << 17

Decoded = tuple[slice, list[Tensor]]


class Codec(ABC):
    """Codes vectors of floats as messages of bytes.

    All ranks of a group decode a message to the same bits: `read` must not depend on anything but
    the message. A codec is the same on all ranks, and has no state of its own.

    Attributes:
        block: elements that are coded together; vectors are cut at multiples of it.
        uses_reference: whether the difference to a reference is coded, which the ranks of a group
            share and which moves with each round. What a message leaves out then comes with a later
            one, and ranks that do not train come together. It costs a copy of the parameters for
            each group of the rank.
    """

    block: int = 1
    uses_reference: bool = True

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({settings})"

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Bytes of the message of so many elements, the last block perhaps not full."""

    @abstractmethod
    def is_finite(self, message: Tensor) -> Tensor:
        """Whether the coded values were finite: bool of shape (), on the device of the message."""

    @abstractmethod
    def write(self, message: Tensor, place: slice, values: Tensor, spare: Tensor) -> None:
        """Code one slice of a vector.

        Args:
            message: uint8, the message of the whole vector.
            place: the slice, which starts at a multiple of `block`.
            values: the elements there, filled up with zeros to whole blocks; may be overwritten.
            spare: memory of the same size and dtype.
        """

    @abstractmethod
    def read(self, message: Tensor, place: slice, values: Tensor) -> None:
        """Decode one slice into `values`, in whole blocks; as in `write`."""

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
            self.write(message, place, whole, spare[: whole.numel()])

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
                self.read(message, place, whole)
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


def is_finite_on_device(values: Tensor) -> Tensor:
    """Whether all elements are finite, as a bool of shape () that the host has not read."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    values = values.detach()
    if values.device.type == "cpu":
        # There a norm takes twenty times as long; on a GPU it is one kernel.
        low, high = torch.aminmax(values)
        return torch.maximum(-low, high) < torch.inf
    largest: Tensor = torch.linalg.vector_norm(values, torch.inf)
    return largest < torch.inf


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of a dtype are coded: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def slices(numel: int) -> Iterator[slice]:
    """Cut a vector into the slices that are coded at once."""
    for start in range(0, numel, _SLICE):
        yield slice(start, min(start + _SLICE, numel))
