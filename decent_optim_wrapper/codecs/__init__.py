"""How values are coded on the wire, with one codec per file."""

import torch

from decent_optim_wrapper.codecs.base import Codec, Place, is_finite_on_device, wide
from decent_optim_wrapper.codecs.cast import CastCodec
from decent_optim_wrapper.codecs.scaled import (
    Int2Codec,
    Int3Codec,
    Int4Codec,
    Int8Codec,
    ScaledCodec,
)
from decent_optim_wrapper.codecs.top_k import TopKCodec

__all__ = [
    "INT2",
    "INT3",
    "INT4",
    "CastCodec",
    "Codec",
    "Int2Codec",
    "Int3Codec",
    "Int4Codec",
    "Int8Codec",
    "Place",
    "ScaledCodec",
    "TopKCodec",
    "codec_of",
    "is_finite_on_device",
    "wide",
]

# Missing in torch's stubs.
INT4, INT3, INT2 = (getattr(torch, f"int{bits}") for bits in (4, 3, 2))
_CODECS: dict[torch.dtype, Codec | None] = {
    torch.float32: None,
    torch.bfloat16: CastCodec(torch.bfloat16),
    torch.float16: CastCodec(torch.float16),
    torch.int8: Int8Codec(),
    INT4: Int4Codec(),
    INT3: Int3Codec(),
    INT2: Int2Codec(),
}


def codec_of(comm_dtype: torch.dtype | Codec) -> Codec | None:
    """Return the codec for a `comm_dtype`; None for torch.float32, which sends values as they are.

    Raises:
        ValueError: there is no codec for this dtype.
    """
    if isinstance(comm_dtype, Codec):
        return comm_dtype
    if comm_dtype not in _CODECS:
        *names, last = map(str, _CODECS)
        raise ValueError(
            f"comm_dtype expects {', '.join(names)}, {last}, a Codec or None, got {comm_dtype}"
        )
    return _CODECS[comm_dtype]
