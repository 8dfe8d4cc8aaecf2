"""Fills buckets with tensors, in the same way on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from decent_optim_wrapper.optim.shards import largest_shard_bytes
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.layout import Layout, kind_of
from decent_optim_wrapper.wire.parameters import Named


def extend_plan(
    buckets: Sequence[Bucket], tensors: Iterable[Tensor], layout: Layout
) -> tuple[Bucket, ...]:
    """Plan the buckets of the tensors that require a gradient or are in a bucket already.

    Args:
        buckets: the present buckets.
        tensors: all parameters, some of them perhaps several times.
        layout: cap and form of the buckets.

    Returns:
        The buckets that a new wrapper on the same parameters would have, so that a resumed run sums
        in the same order. With views, the present buckets, whose members stay in their storage, and
        further ones.
    """
    known = {id(member) for bucket in buckets for member in bucket.members}
    distinct = {id(tensor): tensor for tensor in tensors}
    live = [t for key, t in distinct.items() if t.requires_grad or key in known]
    if not layout.as_view:
        return plan_buckets(live, layout)
    late = [tensor for tensor in live if id(tensor) not in known]
    return (*buckets, *(Bucket(members, layout) for members in _fill(late, layout, live)))


def plan_buckets(tensors: Iterable[Tensor], layout: Layout) -> tuple[Bucket, ...]:
    """Fill buckets in the layout's order, one open bucket for each device and dtype.

    Args:
        tensors: any tensors, in an order that is the same on every rank.
        layout: cap and form of the buckets.

    Returns:
        The buckets, ordered by their first tensor.
    """
    return tuple(Bucket(members, layout) for members in _fill(tensors, layout))


def in_agreed_order(named: Sequence[Named], layout: Layout) -> list[Named]:
    """Sort tensors into the layout's order, in which all ranks have the same names."""
    place_of = layout.places()
    return sorted(named, key=lambda each: place_of(each.tensor))


def saved_plan(buckets: Sequence[Bucket], params: Sequence[Tensor]) -> list[list[int]] | None:
    """Describe the buckets for a checkpoint, if a new wrapper would plan others.

    Args:
        buckets: the buckets of the parameters.
        params: all parameters.

    Returns:
        For each bucket the positions of its members; None if they need not be saved.
    """
    places = {id(param): place for place, param in enumerate(params)}
    found = [[places.get(id(member), -1) for member in bucket.members] for bucket in buckets]
    live = {id(param): param for param in params if param.requires_grad}
    fresh = _fill(live.values(), buckets[0].layout) if buckets else []
    is_fresh = found == [[places[id(member)] for member in members] for members in fresh]
    return None if is_fresh or any(-1 in each for each in found) else found


def read_plan(
    saved: Sequence[Sequence[int]], params: Sequence[Tensor], buckets: Sequence[Bucket]
) -> list[list[Tensor]]:
    """Return the members of each bucket in a result of `saved_plan`; nothing is changed.

    Raises:
        ValueError: they do not fit these parameters.
    """
    planned = [[params[place] for place in places] for places in saved]
    live = {id(param) for param in params if param.requires_grad}
    counts = Counter(id(member) for members in planned for member in members)
    kinds = [{kind_of(member, buckets[0].layout) for member in members} for members in planned]
    if max(counts.values()) > 1 or live - counts.keys() or max(map(len, kinds)) > 1:
        raise ValueError("expected buckets that hold every parameter once, of one kind each")
    return planned


def rebuild(plan: Sequence[Sequence[Tensor]], buckets: Sequence[Bucket]) -> Sequence[Bucket]:
    """Return buckets with these members: the present ones if they have them, else new ones.

    No round may be in flight with the present buckets.
    """
    planned = [[id(member) for member in members] for members in plan]
    if planned == [[id(member) for member in bucket.members] for bucket in buckets]:
        return buckets
    return [Bucket(members, buckets[0].layout) for members in plan]


def _fill(
    tensors: Iterable[Tensor], layout: Layout, all_tensors: Sequence[Tensor] = ()
) -> list[list[Tensor]]:
    """Choose the members of buckets.

    Args:
        tensors: the tensors to put into buckets.
        layout: cap and form of the buckets.
        all_tensors: these and tensors that are in buckets already, whose size sets the cap.
    """
    listed = list(tensors)
    cap_bytes = layout.cap_bytes(sum(map(largest_shard_bytes, all_tensors or listed)))
    filled: list[list[Tensor]] = []
    open_buckets: dict[Any, tuple[list[Tensor], int]] = {}
    for tensor in sorted(listed, key=layout.places()):
        kind = kind_of(tensor, layout)
        # This rank's own shard may be smaller, and would lead to other buckets than its replica's.
        nbytes = largest_shard_bytes(tensor)
        members, used_bytes = open_buckets.get(kind, ([], 0))
        if not members or used_bytes + nbytes > cap_bytes:
            members, used_bytes = [], 0
            filled.append(members)
        members.append(tensor)
        open_buckets[kind] = (members, used_bytes + nbytes)
    return filled


def bucket_bytes(tensors: Iterable[Tensor], layout: Layout) -> dict[torch.device, int]:
    """The bytes of a full bucket, or of all tensors if these are fewer, by device."""
    found: dict[torch.device, int] = {}
    for tensor in tensors:
        found[tensor.device] = found.get(tensor.device, 0) + largest_shard_bytes(tensor)
    cap_bytes = int(layout.cap_bytes(sum(found.values())))
    return {device: min(cap_bytes, nbytes) for device, nbytes in found.items()}
