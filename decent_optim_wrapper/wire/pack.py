"""The form in which a bucket is sent."""

from __future__ import annotations

from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.coded import CodedGroup, CodedPair
from decent_optim_wrapper.wire.exchange import Exchange, PlainGroup, PlainPair, Wire


def exchange_of(wire: Wire, bucket: Bucket, position: int) -> Exchange:
    """The exchange of a bucket in the form in which it is sent; arguments as of `Exchange`."""
    size = wire.group.size
    codec = None if wire.references is None or wire.is_average else bucket.codec(size)
    if size == 1:
        return Exchange(wire, bucket, position)
    if codec is not None and size == 2:
        return CodedPair(wire, bucket, position, codec)
    if codec is not None and wire.transport.sends_alone(bucket.wire_device):
        return CodedGroup(wire, bucket, position, codec)
    if size > 2 or wire.is_average:
        return PlainGroup(wire, bucket, position)
    return PlainPair(wire, bucket, position)
