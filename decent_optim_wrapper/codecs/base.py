"""The interface of codecs, which code vectors for the wire; no communication."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor

# Elements of a slice, which are coded at a time on a CPU, so that they stay in the cache.
SLICE = 1 << 19

Decoded = tuple[slice, list[Tensor]]


class Place(NamedTuple):
    """Blocks of a vector that are coded at once: some chunks, or a part of one.

    Args:
        part: their elements, as a slice of the vector; the last block may not be full, and the last
            chunks may be empty.
        chunks: the chunks.
        blocks: the blocks of each of these chunks.
    """

    part: slice
    chunks: slice
    blocks: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Number of chunks, and of blocks in each."""
        return self.chunks.stop - self.chunks.start, self.blocks.stop - self.blocks.start


class Codec(ABC):
    """Codes vectors of floats as messages of bytes; the same on all ranks.

    All ranks of a group must decode a message to the same bits, so `read` must depend on the
    message only. A message of zeros is decoded as zeros. A codec has no state. Its methods may run
    on any thread, several of them at the same time and next to the training, so they must not draw
    random numbers from torch's global generator.

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

    @property
    def most_blocks(self) -> int:
        """Number of blocks in a slice: a chunk is cut into slices, and the last may be shorter."""
        return max(1, SLICE // self.block)

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """Number of bytes that a block takes in a message."""

    def nbytes(self, numel: int) -> int:
        """Number of bytes of the message for `numel` elements; the last block is padded."""
        return -(-numel // self.block) * self.block_bytes

    def of_means(self, size: int) -> Codec:
        """The codec of the means in groups of more than two ranks, with the same blocks and slices.

        Args:
            size: number of ranks.
        """
        return self

    def of_first_rounds(self) -> Codec | None:
        """The codec of the first rounds, if this one would throw ranks apart that agree.

        A reference that has just started at zero is far from the values, which are coded whole.
        Three rounds in that codec move the reference near, and not the parameters. Each of them
        must leave about a seventh of the values, or less. None if no such rounds are needed.
        """
        return None

    @abstractmethod
    def is_finite(self, messages: Tensor) -> Tensor:
        """Return whether all coded values are finite.

        Args:
            messages: one or more, as in `encode`.

        Returns:
            bool tensor of shape (), on the device of the messages.
        """

    @abstractmethod
    def write(self, messages: Tensor, place: Place, values: Tensor) -> None:
        """Code some blocks.

        Args:
            messages: the messages of equal chunks of a vector, uint8 of shape (chunks, bytes), with
                gaps between them.
            place: the blocks.
            values: their elements, of shape (chunks, blocks, block), padded with zeros; may be
                overwritten.
        """

    @abstractmethod
    def read(self, messages: Tensor, place: Place, values: Tensor) -> None:
        """Decode some blocks into `values`; arguments as in `write`."""

    @torch.no_grad()
    def encode(self, values: Tensor, message: Tensor, reference: Tensor | None = None) -> None:
        """Code a vector, or its difference to a reference.

        Args:
            values: a vector of floats.
            message: the result, on the same device: uint8 of `nbytes(values.numel())` elements. Or
                the messages of equal chunks, as in `write`; the last ones may not be full.
            reference: a vector of the shape of `values` and of dtype `wide(values.dtype)`; None
                codes the values themselves.
        """
        messages = in_rows(message)
        places = [*self._places(messages, values.numel())]
        buffer = self._buffer(places, wide(values.dtype), values.device)
        for place in places:
            part, whole = self._in_blocks(place, buffer)
            if reference is None:
                part.copy_(values[place.part])
            else:
                torch.sub(values[place.part], reference[place.part], out=part)
            if len(part) < whole.numel():
                whole.view(-1)[len(part) :].zero_()
            self.write(messages, place, whole)

    def decode(self, *messages: Tensor, numel: int, dtype: torch.dtype) -> Iterator[Decoded]:
        """Decode messages side by side, slice by slice.

        Args:
            messages: one or more messages of vectors of `numel` elements, as in `encode`.
            numel: number of elements of each vector.
            dtype: dtype of the result, float32 or float64.

        Yields:
            A slice, and the values of each message there, which the next slice overwrites.
        """
        rows = [*map(in_rows, messages)]
        places = [*self._places(rows[0], numel)]
        buffers = [self._buffer(places, dtype, row.device) for row in rows]
        for place in places:
            blocks = [self._in_blocks(place, buffer) for buffer in buffers]
            for row, (_, whole) in zip(rows, blocks, strict=True):
                self.read(row, place, whole)
            yield place.part, [part for part, _ in blocks]

    def _places(self, messages: Tensor, numel: int) -> Iterator[Place]:
        """All blocks, in order; those of a place are coded at once."""
        length, most = messages.shape[1] // self.block_bytes, self.most_blocks
        # On a GPU each operation starts a kernel: all whole slices are coded at once.
        part = most if messages.device.type == "cpu" else max(most, length - length % most)
        # Empty chunks have no message.
        chunks = min(len(messages), -(-numel // max(1, length * self.block)))
        step = max(1, most // max(1, length))
        cuts = pairwise([*range(0, length, part), length])
        for first, (begin, end) in product(range(0, chunks, step), cuts):
            last = min(chunks, first + step)
            start = (first * length + begin) * self.block
            stop = min(numel, ((last - 1) * length + end) * self.block)
            if start < stop:
                yield Place(slice(start, stop), slice(first, last), slice(begin, end))

    def _buffer(self, places: list[Place], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the elements of any of these."""
        blocks = max((math.prod(place.shape) for place in places), default=0)
        return torch.empty(blocks * self.block, dtype=dtype, device=device)

    def _in_blocks(self, place: Place, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """The memory of the elements of some blocks, and the same with padding, as blocks."""
        padded = buffer[: math.prod(place.shape) * self.block]
        return padded[: place.part.stop - place.part.start], padded.view(*place.shape, self.block)


def in_rows(message: Tensor) -> Tensor:
    """View the message of a vector as that of its only chunk."""
    return message.view(message.shape[:-1].numel(), message.shape[-1])


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
