"""Broadcasts tensors from one rank, and computes digests that compare them without sending."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.wire.bucket import as_real
from decent_optim_wrapper.wire.layout import Layout
from decent_optim_wrapper.wire.plan import plan_buckets

# Integers of few bytes. Larger values are words of 4 bytes: of a difference in the highest bit of 8
# bytes, such as a sign, 63 bits of a sum would not show anything.
_WORDS = {1: torch.uint8, 2: torch.int16}
# Odd, so that a product loses no bit.
_FACTOR = 6364136223846793005


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
        flat = bucket.pack(bucket.wire.new(bucket.dtype))
        transport.broadcast(flat.data, source)
        if not keep:
            bucket.unpack_(flat)


@torch.no_grad()
def digest(tensor: Tensor) -> int:
    """A number of 63 bits that differs if the bytes of two tensors differ; 0 if all of them are 0.

    It is computed on the tensor's device, and does not depend on the number of threads.
    """
    values = as_real(tensor)
    # A single element may have any stride, and could not be viewed with another dtype.
    row = values.contiguous().view(-1).as_strided([values.numel()], [1])
    words = row.view(_WORDS.get(values.itemsize, torch.int32))
    # As many at a time as a CPU caches.
    size = min(words.numel(), 2**16 if values.device.type == "cpu" else 2**22) or 1
    places = (torch.arange(size, device=values.device) + 1) * _FACTOR
    # Not in proportion to the places, or differences of 1, -2 and 1 in a row would cancel.
    weights = (places ^ (places >> 29)) * _FACTOR | 1
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for part in torch.split(words, size):
        total = total * _FACTOR + (part * weights[: len(part)]).sum()
    return int(total) & (2**63 - 1)
