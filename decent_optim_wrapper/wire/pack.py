"""The form in which a bucket is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from decent_optim_wrapper.codecs import Codec
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.coded import CodedGroup, CodedPair
from decent_optim_wrapper.wire.exchange import Exchange, LaunchSnapshot, PlainGroup, PlainPair, Wire

# Tags of an exchange: two for small messages, then one for each bucket.
_FIRST_BUCKET_TAG = 2
# For each bucket again: the means of coded buckets.
_FIRST_MEAN_TAG = 1 << 18


def pack(wire: Wire, bucket: Bucket, snapshot: Mapping[Tensor, Tensor], position: int) -> Exchange:
    """Pack a bucket in the form in which it is sent.

    Args:
        wire: what the buckets of the round have in common.
        bucket: the bucket.
        snapshot: the values that are sent in place of its members'.
        position: its number among the buckets of the round.
    """
    tag, mean_tag = _FIRST_BUCKET_TAG + position, _FIRST_MEAN_TAG + position
    size = wire.group.size
    if size == 1:
        return LaunchSnapshot(wire, bucket, snapshot, position)
    codec = _codec_of(wire, bucket)
    if codec is not None and size == 2:
        return CodedPair(wire, bucket, codec, snapshot, position, tag)
    if codec is not None:
        return CodedGroup(wire, bucket, codec, snapshot, position, (tag, mean_tag))
    if size > 2 or wire.is_average:
        return PlainGroup(wire, bucket, snapshot, position)
    return PlainPair(wire, bucket, snapshot, position, tag)


def receiving_ahead(wire: Wire, bucket: Bucket, position: int) -> Callable[[], None]:
    """What starts to receive a bucket that is packed later, if a pair sends in the order of need.

    A peer sends only what this rank has begun to receive. If this rank began when it has packed the
    bucket, its notice would wait behind other data on the wire.

    Args:
        wire: as in `pack`.
        bucket: as in `pack`.
        position: as in `pack`.
    """
    if wire.sends is None or wire.is_average or not wire.transport.sends_alone(bucket.wire_device):
        return lambda: None
    codec = _codec_of(wire, bucket)
    if codec is None:
        incoming = bucket.pair(wire.needs_snapshot).incoming.data
    else:
        _, incoming = bucket.messages(codec.nbytes(bucket.flat_numel) + 1)
    received = wire.sends.received

    def start() -> None:
        received[position] = wire.receive(incoming, _FIRST_BUCKET_TAG + position)

    return start


def _codec_of(wire: Wire, bucket: Bucket) -> Codec | None:
    """The codec of a bucket; None if its values are sent unchanged."""
    if wire.references is None or wire.is_average:
        return None
    if wire.group.size > 2 and not wire.transport.sends_alone(bucket.wire_device):
        return None
    return bucket.codec(wire.group.size)
