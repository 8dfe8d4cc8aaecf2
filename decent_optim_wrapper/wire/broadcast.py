"""Broadcasts tensors from one rank, and computes digests that compare them without sending."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.optim.shards import local
from decent_optim_wrapper.wire.layout import Layout
from decent_optim_wrapper.wire.plan import plan_buckets


def broadcast(
    tensors: Iterable[Tensor],
    transport: Transport,
    layout: Layout,
    source: int = 0,
    keep: bool = False,
) -> None:
    """Overwrite the tensors with the values of one rank, bucket by bucket; collective.

    Args:
        tensors: the tensors, of the same kind and order on every rank.
        transport: connects the ranks.
        layout: cap and wire device of the buckets.
        source: the rank whose values are sent.
        keep: receive the values, but keep this rank's own.
    """
    # Without autograd's notice, so that a backward pass in which this happens can still finish.
    for bucket in plan_buckets((tensor.data for tensor in tensors), layout.plain):
        flat = bucket.pack(bucket.new_flat(bucket.wire_device))
        transport.broadcast(flat.data, source)
        if not keep:
            bucket.unpack_(flat)


def digest(tensor: Tensor) -> int:
    """A number of 63 bits that differs if the bytes of two tensors differ."""
    values = local(tensor).detach()
    # A copy: few elements may have strides that allow no view as bytes.
    copy = torch.empty(values.shape, dtype=values.dtype, device="cpu").copy_(values)
    found = hashlib.sha256(_bytes(copy).numpy().data)
    return int.from_bytes(found.digest()[:8], "little") >> 1


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
