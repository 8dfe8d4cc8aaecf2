"""The form in which a bucket travels."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from decent_optim_wrapper.codecs import Codec
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.coded import CodedGroup, CodedPair
from decent_optim_wrapper.wire.exchange import (
    Exchange,
    LaunchSnapshot,
    PlainGroup,
    PlainPair,
    Wire,
)

# Tags of an exchange: two for small messages, then one for each bucket.
_FIRST_BUCKET_TAG = 2
# For each bucket again: the means of coded buckets.
_FIRST_MEAN_TAG = 1 << 18


def pack(wire: Wire, bucket: Bucket, snapshot: Mapping[Tensor, Tensor], position: int) -> Exchange:
    """Pack a bucket in the form in which it travels.

    Args:
        wire: what the buckets of the round have in common.
        bucket: the bucket.
        snapshot: what is sent in place of its members' values.
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


def _codec_of(wire: Wire, bucket: Bucket) -> Codec | None:
    """The codec with which a bucket travels; None for its values as they are."""
    if wire.references is None or wire.is_average:
        return None
    if wire.group.size > 2 and not wire.transport.sends_alone(bucket.wire_device):
        return None
    return bucket.codec(wire.group.size)
