"""The mean of a bucket over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from decent_optim_wrapper.codecs import wide
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.storage import Flat


def average(bucket: Bucket, transport: Transport, shares: Sequence[bool] | None = None) -> Flat:
    """The bucket's average over the ranks, in a new flat vector; collective.

    Half precision is summed in float32.

    Args:
        bucket: the bucket; not changed.
        transport: connects the ranks.
        shares: which ranks' values count, at least one; None means all.
    """
    total = bucket.pack(bucket.new_flat(bucket.wire_device, wide(bucket.dtype)))
    if shares is not None and not shares[transport.rank]:
        total.data.zero_()
    transport.sum_(total.data)
    total.data.div_(transport.world_size if shares is None else sum(shares))
    return total
