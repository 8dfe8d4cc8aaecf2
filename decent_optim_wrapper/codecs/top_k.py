"""A codec that sends the largest elements only."""

from __future__ import annotations

import torch
from torch import Tensor

from decent_optim_wrapper.codecs.base import Codec, is_finite_on_device

_BLOCK = 256


class TopKCodec(Codec):
    """Sends the k elements of each block of 256 that are largest in absolute value, as float32.

    The rest stays in the difference to the reference and is sent later, which is error feedback
    (EF21, Richtarik et al. 2021). A message takes 5 k / 256 bytes per element.

    Args:
        k: number of elements per block, a multiple of 4 up to 256.

    Raises:
        ValueError: `k` is not such a number.
    """

    block = _BLOCK

    def __init__(self, k: int = 16) -> None:
        # The message of each chunk of a vector is viewed as float32.
        if k not in range(4, _BLOCK + 1, 4):
            raise ValueError(f"k expects a multiple of 4 up to {_BLOCK}, got {k}")
        self.k = k

    def nbytes(self, numel: int) -> int:
        """The bytes of the values and positions of k elements of each block."""
        return -(-numel // _BLOCK) * self.k * 5

    def is_finite(self, message: Tensor) -> Tensor:
        """Return whether the values are finite; NaN and infinity are the largest of their block."""
        return is_finite_on_device(self._split(message)[0])

    def write(self, message: Tensor, place: slice, values: Tensor, spare: Tensor) -> None:
        """Write the largest elements of each block."""
        kept, places = self._parts(message, place, values.numel())
        rows = values.view(-1, _BLOCK)
        found = torch.abs(rows, out=spare.view(-1, _BLOCK)).topk(self.k, dim=1).indices
        kept.copy_(rows.gather(1, found))
        places.copy_(found)

    def read(self, message: Tensor, place: slice, values: Tensor) -> None:
        """Read the largest elements of each block; all others are zero."""
        kept, places = self._parts(message, place, values.numel())
        values.zero_().view(-1, _BLOCK).scatter_(1, places.long(), kept.to(values.dtype))

    def _parts(self, message: Tensor, place: slice, numel: int) -> tuple[Tensor, Tensor]:
        first, last = place.start // _BLOCK, (place.start + numel) // _BLOCK
        kept, places = self._split(message)
        return kept[first:last], places[first:last]

    def _split(self, message: Tensor) -> tuple[Tensor, Tensor]:
        count = message.numel() // 5
        kept, places = message[: 4 * count], message[4 * count :]
        return kept.view(torch.float32).view(-1, self.k), places.view(-1, self.k)
