"""The 8-bit codec on a GPU: one kernel that codes a vector, and one that decodes it.

Operation by operation, each would start some ten kernels, which each read and write all values.
Torch compiles the functions below, if it can for this GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from loguru import logger
from torch import Tensor

from decent_optim_wrapper.codecs.base import wide

# The reciprocal of a smaller scale may overflow, so such a block is coded as zeros.
SMALLEST_SCALE = 2.0**-126


def encode(values: Tensor, reference: Tensor | None, codes: Tensor) -> Tensor:
    """Code a vector, or its difference to a reference, as `ScaledCodec.encode` does.

    Args:
        values: a vector of floats.
        reference: a vector of the same shape, in the dtype in which values are scaled; or None.
        codes: the result, int8 of shape (chunks, blocks, block).

    Returns:
        The scales, float32 of shape (chunks, blocks). To write them, too, torch would have to
        compile a function that changes two views of one tensor with different dtypes, which it does
        not.
    """
    dtype = wide(values.dtype)
    change = values.to(dtype) if reference is None else values - reference
    rows = torch.nn.functional.pad(change, (0, codes.numel() - change.numel())).view(codes.shape)
    scale = (rows.abs().amax(2) / 127).to(torch.float32)
    # The reciprocal of the scale as it is sent, which is rounded.
    inverse = torch.where(scale < SMALLEST_SCALE, 0, scale.to(dtype).reciprocal())
    codes.copy_((rows * inverse.unsqueeze(2)).round())
    return scale


def decode(codes: Tensor, scales: Tensor, values: Tensor) -> Tensor:
    """Decode whole blocks: one multiplication, so that all ranks get the same bits."""
    return values.copy_(codes.to(values.dtype) * scales.to(values.dtype).unsqueeze(2))


@cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function as one kernel, for vectors of any length."""
    return torch.compile(function, dynamic=True, fullgraph=True)


class Fused:
    """Calls compiled functions as long as torch can compile them."""

    def __init__(self) -> None:
        self._fails = False

    def call(self, function: Callable[..., Tensor], *args: Tensor | None) -> Tensor | None:
        """Call a function of this module, compiled.

        Args:
            function: the function.
            args: its arguments, of which the first is a tensor on the device of all.

        Returns:
            Its result; None if it was not called, because this is no GPU or torch cannot compile.
        """
        first = args[0]
        if not isinstance(first, Tensor) or not self.serves(first.device):
            return None
        try:
            return compiled(function)(*args)
        except Exception as error:
            # Some machines have no Triton, or no compiler for C, which it needs.
            self._fails = True
            logger.warning("torch cannot make the fused kernels of int8: {}", error)
            return None

    def serves(self, device: torch.device) -> bool:
        """Return whether functions are compiled for a device."""
        return device.type == "cuda" and not self._fails


FUSED = Fused()
