"""The interface of codecs, which code vectors for the wire; no communication."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

# Elements that are coded at a time on a CPU, so that they stay in the cache.
SLICE = 1 << 18

Decoded = tuple[slice, list[Tensor]]


class Codec(ABC):
    """Codes vectors of floats as messages of bytes; the same on all ranks.

    All ranks of a group must decode a message to the same bits, so `read` must depend on the
    message only. A codec has no state. Its methods may run on any thread, several of them at the
    same time and next to the training, so they must not draw random numbers from torch's global
    generator.

    Attributes:
        block: number of elements that are coded together; vectors are cut at multiples of it.
        uses_reference: whether to code the difference to a reference that the ranks of a group
            share and that moves with each round. What a message leaves out is then sent by a later
            one, and ranks that do not train converge to the same values. It costs a copy of the
            parameters for each group of the rank.
    """

    block: int = 1
    uses_reference: bool = True

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({settings})"

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Number of bytes of the message for `numel` elements; the last block may not be full."""

    def of_means(self, size: int) -> Codec:
        """The codec of the means in a group of more than two ranks, with blocks of the same size.

        Args:
            size: number of ranks.
        """
        return self

    @abstractmethod
    def is_finite(self, message: Tensor) -> Tensor:
        """Return whether the coded values are finite: bool of shape (), on the message's device."""

    @abstractmethod
    def write(self, message: Tensor, place: slice, values: Tensor) -> None:
        """Code one slice of a vector.

        Args:
            message: the message of the whole vector, uint8.
            place: the slice of the vector, which starts at a multiple of `block`.
            values: the elements of the slice, padded with zeros to whole blocks; may be
                overwritten.
        """

    @abstractmethod
    def read(self, message: Tensor, place: slice, values: Tensor) -> None:
        """Decode one slice into `values`, padded to whole blocks; arguments as in `write`."""

    @torch.no_grad()
    def encode(self, values: Tensor, message: Tensor, reference: Tensor | None = None) -> None:
        """Code a vector, or its difference to a reference.

        Args:
            values: a vector of floats.
            message: the result, uint8 of `nbytes(values.numel())` elements, on the same device.
            reference: a vector of the shape of `values` and of dtype `wide(values.dtype)`; None
                codes the values themselves.
        """
        buffer = self._buffer(values.numel(), wide(values.dtype), values.device)
        for place in self._slices(values.numel(), values.device):
            whole = self._in_blocks(place, buffer)
            part = whole[: place.stop - place.start]
            if reference is None:
                part.copy_(values[place])
            else:
                torch.sub(values[place], reference[place], out=part)
            whole[part.numel() :].zero_()
            self.write(message, place, whole)

    def decode(self, *messages: Tensor, numel: int, dtype: torch.dtype) -> Iterator[Decoded]:
        """Decode messages side by side, slice by slice.

        Args:
            messages: one or more messages of vectors of `numel` elements.
            numel: number of elements of each vector.
            dtype: dtype of the result, float32 or float64.

        Yields:
            A slice, and the values of each message there. The next slice overwrites them.
        """
        buffers = [self._buffer(numel, dtype, message.device) for message in messages]
        for place in self._slices(numel, messages[0].device):
            values = []
            for message, buffer in zip(messages, buffers, strict=True):
                whole = self._in_blocks(place, buffer)
                self.read(message, place, whole)
                values.append(whole[: place.stop - place.start])
            yield place, values

    def _buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        longest = min(self._blocks(numel) * self.block, self._slice(numel, device))
        return torch.empty(longest, dtype=dtype, device=device)

    def _slice(self, numel: int, device: torch.device) -> int:
        """Number of elements of a vector that are coded at a time, a multiple of `block`."""
        # On a GPU each operation starts a kernel.
        blocks = SLICE // self.block if device.type == "cpu" else self._blocks(numel)
        return max(1, blocks) * self.block

    def _slices(self, numel: int, device: torch.device) -> Iterator[slice]:
        size = self._slice(numel, device)
        for start in range(0, numel, size):
            yield slice(start, min(start + size, numel))

    def _in_blocks(self, place: slice, buffer: Tensor) -> Tensor:
        return buffer[: self._blocks(place.stop - place.start) * self.block]

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)


def is_finite_on_device(values: Tensor) -> Tensor:
    """Return whether all elements are finite: bool of shape (), which the host does not read."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    values = values.detach()
    if values.device.type == "cpu":
        # A norm takes twenty times as long on a CPU; on a GPU it is one kernel.
        low, high = torch.aminmax(values)
        return torch.maximum(-low, high) < torch.inf
    largest: Tensor = torch.linalg.vector_norm(values, torch.inf)
    return largest < torch.inf


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values are computed before coding: float64 for float64, else float32."""
    # Torch promotes no dtype of 8 bits.
    return torch.float32 if dtype.itemsize == 1 else torch.promote_types(dtype, torch.float32)
