"""A codec that sends the largest elements only, in two bits each."""

from __future__ import annotations

import torch
from torch import Tensor

from decent_optim_wrapper.codecs.base import Codec, Place, in_rows, is_finite_on_device

_BLOCK = 256
# What an element becomes, in units of m, the mean size of the sent elements of its block. Whatever
# the values v are, a level L below 2 makes the rest smaller than the values: the sum of (v - L m)^2
# is less than the sum of v^2, by L (2 - L) m^2 for each element.
_SMALL, _LARGE = 0.85, 1.3
_SCALE = torch.bfloat16


class TopKCodec(Codec):
    """Sends the k elements of each block of 256 that are largest in absolute value, in two bits.

    An element becomes +-0.85 or +-1.3 times the mean size of those sent, which is sent as bfloat16.
    Elements below 0.425 times the mean of the k are not sent. The rest stays in the difference to
    the reference and is sent later, which is error feedback (EF21, Richtarik et al. 2021; two bits
    as in SparseLoCo, Sarfi et al. 2025). A message takes (1.25 k + 2) / 256 bytes per element. In a
    group of m > 2 ranks, a mean has k m elements of each block, at most 128.

    Args:
        k: number of elements per block, a multiple of 4 up to 256.

    Raises:
        ValueError: `k` is not such a number.
    """

    block = _BLOCK

    def __init__(self, k: int = 16) -> None:
        # Four codes share a byte.
        if k not in range(4, _BLOCK + 1, 4):
            raise ValueError(f"k expects a multiple of 4 up to {_BLOCK}, got {k}")
        self.k = k

    def of_means(self, size: int) -> TopKCodec:
        """Send all elements that a rank has sent; with k only, the ranks agree slowly."""
        # Two bits are too coarse for most elements of a block: the errors would not shrink.
        return TopKCodec(max(self.k, min(_BLOCK // 2, size * self.k)))

    @property
    def _widths(self) -> list[int]:
        """The bytes of the scale, of the positions and of the codes of a block."""
        return [_SCALE.itemsize, self.k, self.k // 4]

    @property
    def block_bytes(self) -> int:
        """The bytes of the scale, and of the positions and codes of k elements."""
        return sum(self._widths)

    def is_finite(self, messages: Tensor) -> Tensor:
        """Return whether the values are finite; NaN and infinity are the largest of their block."""
        scales = _scales(self._rows(messages)[..., : _SCALE.itemsize])
        return is_finite_on_device(scales.to(torch.float32) * _LARGE)

    def write(self, messages: Tensor, place: Place, values: Tensor) -> None:
        """Write the largest elements of each block."""
        rows = values.view(-1, _BLOCK)
        sizes, found = rows.abs().topk(self.k, dim=1)
        # Where few elements of a block differ, the error would grow and not shrink with the others:
        # they are sent as copies of the largest one, which a reader writes to one place.
        sent = sizes >= _SMALL / 2 * sizes.mean(1, keepdim=True)
        means = (sizes * sent).sum(1, keepdim=True) / sent.sum(1, keepdim=True)
        sizes, found = (each.where(sent, each[:, :1]) for each in (sizes, found))
        scales = means.to(_SCALE)
        bits = (sizes > (_SMALL + _LARGE) / 2 * scales) + 2 * (rows.gather(1, found) < 0)
        codes = (bits.view(len(rows), -1, 4) << _shifts(messages)).sum(2)
        parts = scales.view(torch.uint8), found, codes
        coded = torch.cat([part.to(torch.uint8) for part in parts], dim=1)
        self._rows(messages)[place.chunks, place.blocks] = coded.view(*place.shape, -1)

    def read(self, messages: Tensor, place: Place, values: Tensor) -> None:
        """Read the largest elements of each block; all others are zero."""
        rows, dtype = values.zero_().view(-1, _BLOCK), values.dtype
        coded = self._rows(messages)[place.chunks, place.blocks].flatten(0, 1)
        scales, places, codes = torch.split(coded, self._widths, dim=1)
        bits = (codes.unsqueeze(2) >> _shifts(messages)).view(len(rows), -1)
        large, negative = ((bits & bit).to(dtype) for bit in (1, 2))
        levels = (_SMALL + (_LARGE - _SMALL) * large) * (1 - negative)
        rows.scatter_(1, places.long(), levels * _scales(scales).to(dtype))

    def _rows(self, messages: Tensor) -> Tensor:
        return torch.unflatten(in_rows(messages), 1, (-1, self.block_bytes))


def _scales(coded: Tensor) -> Tensor:
    # A copy: no other dtype can be viewed at an odd byte, where a row may begin.
    return coded.flatten().clone().view(_SCALE).unsqueeze(1)


def _shifts(like: Tensor) -> Tensor:
    """The places of four codes in a byte."""
    return torch.arange(0, 8, 2, dtype=torch.uint8, device=like.device)
