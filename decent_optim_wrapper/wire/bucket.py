"""Buckets: tensors of one device and dtype that are exchanged as one flat vector.

Layout, packing and mixing; no communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from decent_optim_wrapper.codecs import Codec, is_finite_on_device, wide
from decent_optim_wrapper.optim.shards import local
from decent_optim_wrapper.wire.layout import MIB, Layout, kind_of, saving
from decent_optim_wrapper.wire.storage import Flat, aligned, move_together, new_vector

_version_of = attrgetter("_version")
_dtype_of = attrgetter("dtype")
HALF_DTYPES = (torch.float16, torch.bfloat16)


class Buffers:
    """Memory of one device for the vectors of a bucket, as large as the largest set of them.

    Whoever takes a set of vectors gets memory that others have used before: the contents are lost.

    Args:
        shapes: the shapes of the tensors in a flat vector, one after the other, as reals.
        device: the device.
        pinned: whether a GPU copies to and from it.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], device: torch.device, pinned: bool = False
    ) -> None:
        self._shapes = shapes
        self._sizes = [shape.numel() for shape in shapes]
        # Number of elements of a flat vector.
        self.numel = sum(self._sizes)
        self._device = device
        self._pinned = pinned
        self._bytes = new_vector(0, torch.uint8, device)
        # Made once: a round costs calls per bucket, not per parameter.
        self._flats: dict[tuple[int, torch.dtype], tuple[Flat, ...]] = {}

    def flats(self, count: int, dtype: torch.dtype) -> tuple[Flat, ...]:
        """View the memory as `count` uninitialised flat vectors."""
        found = self._flats.get((count, dtype))
        if found is None:
            vectors = self.vectors(count, self.numel, dtype)
            found = self._flats[count, dtype] = tuple(map(self.view, vectors))
        return found

    def flat(self, dtype: torch.dtype) -> Flat:
        """View the memory as one uninitialised flat vector."""
        return self.flats(1, dtype)[0]

    def vectors(self, count: int, numel: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """View the memory as `count` uninitialised vectors of `numel` elements."""
        stride = aligned(numel * dtype.itemsize)
        if count * stride > self._bytes.numel():
            self._flats.clear()
            # The old bytes are freed first; otherwise both would count at the peak.
            self._bytes = new_vector(0, torch.uint8, self._device)
            self._bytes = new_vector(count * stride, torch.uint8, self._device, self._pinned)
        rows = self._bytes[: count * stride].view(count, stride)
        return tuple(row[: numel * dtype.itemsize].view(dtype) for row in rows)

    def new(self, dtype: torch.dtype) -> Flat:
        """Make an uninitialised flat vector in memory of its own."""
        return self.view(new_vector(self.numel, dtype, self._device, self._pinned))

    def view(self, data: Tensor) -> Flat:
        """View a vector as a flat vector."""
        parts = zip(torch.split(data, self._sizes), self._shapes, strict=True)
        return Flat(data, tuple(part.view(shape) for part, shape in parts))


class Bucket:
    """Tensors of one device and dtype, which are exchanged as one flat vector.

    Complex tensors are sent as pairs of reals. The order on the wire is the logical order of the
    elements, so ranks need not agree on memory layouts; with `as_view` it is the memory order.

    Args:
        tensors: the members, of one device and dtype.
        layout: the device and dtype in which they are exchanged.
        rate: how far a round mixes them: x <- x + rate * (W x - x).
        dtype: the real dtype of the flat vector; None takes the members' dtype.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        layout: Layout,
        rate: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        # The tensors themselves.
        self.members = tuple(tensors)
        self.layout = layout
        # The number of ranks of a replica with the same values.
        *_, mesh, self.copies = kind_of(self.members[0], layout)
        self.rate = rate
        self.is_sharded = mesh is not None
        first = as_real(self.members[0])
        self.device, self.dtype = first.device, dtype or first.dtype
        self.wire_device = layout.wire_device(self.device)
        # Without a codec, larger groups send half precision in float32: one of 16 bits saves there.
        self.pair_codec = saving(layout.codec, self.dtype)
        self.group_codec = saving(layout.codec, wide(self.dtype))
        self.may_use_reference = layout.uses_reference
        # Whether a GPU exchanges it, or copies it to the CPU before it is sent.
        self.on_gpu = self.wire_device.type == "cuda"
        self.via_cpu = self.wire_device.type != self.device.type
        shapes = [as_real(member).shape for member in self.members]
        self.numel = sum(map(torch.Size.numel, shapes))
        self.nbytes = self.numel * self.dtype.itemsize
        # Whether the members' own storage is sent.
        self.is_sent_in_place = layout.as_view
        self._storage: Flat | None = None
        if layout.as_view:
            data = move_together(self.members)
            self._storage = Flat(data, (data,))
            # As a whole, with the gaps that align its tensors.
            shapes = [data.shape]
            # Noted now: the members may move to another bucket, which copies parts of this one.
            self._parts = [_part_of(data, as_real(member)) for member in self.members]
        self._planned = self._metadata()
        # An inference tensor has no version counter.
        self.counted = [m for m in self.members if not local(m).is_inference()]
        # Whether others have changed members while a round was in flight; None before the first.
        self.changes_in_flight: bool | None = None
        # For what is sent and received. It is pinned for copies to and from a GPU, since they would
        # use one more buffer otherwise.
        self.wire = Buffers(shapes, self.wire_device, pinned=self.via_cpu)
        # For values that are coded next, and for changes that are mixed in.
        self.on_device = Buffers(shapes, self.device)

    def __repr__(self) -> str:
        count = len(self.members)
        return (
            f"{count} parameter{'s' * (count > 1)}, {self.members[0].dtype} on {self.device}, "
            f"{self.nbytes / MIB:.3f} MiB"
        )

    def codec(self, size: int) -> Codec | None:
        """The codec in a group of this size; None for none, as in larger groups over NCCL."""
        return self.pair_codec if size == 2 else None if self.on_gpu else self.group_codec

    def pair(self, needs_snapshot: bool = False) -> tuple[Flat, Flat]:
        """The wire buffers for one peer, outgoing and incoming.

        If possible, the tensors' own storage is sent: it must not change in flight.

        Args:
            needs_snapshot: whether the tensors may change in flight.
        """
        if self._storage is not None and not (self.via_cpu or needs_snapshot):
            return self._storage, self.wire.flat(self.dtype)
        outgoing, incoming = self.wire.flats(2, self.dtype)
        return outgoing, incoming

    def values(self, others: Mapping[Tensor, Tensor], needs_snapshot: bool) -> Flat:
        """The tensors as one vector: if possible their own storage, otherwise packed.

        Args:
            others: as in `pack`.
            needs_snapshot: whether the vector must not change when the tensors do.
        """
        if self._storage is not None and not others and not needs_snapshot:
            return self._storage
        return self.pack(self.on_device.flat(self.dtype), others)

    def copy(self) -> Flat:
        """The tensors as a flat vector in memory of its own."""
        return self.pack(self.on_device.new(self.dtype))

    @torch.no_grad()
    def pack(
        self, flat: Flat, others: Mapping[Tensor, Tensor] | None = None, waits: bool = True
    ) -> Flat:
        """Copy the tensors into `flat`.

        Args:
            flat: overwritten.
            others: tensors of the same shapes to copy in place of members.
            waits: whether to wait for a GPU until `flat` on the CPU has the values.
        """
        if flat.data.device != self.device and self.via_cpu:
            # In one copy, not in one for each tensor. A round in flight may keep the values that
            # it has sent in `on_device`.
            own = None if others else self._storage
            packed = own or self.pack(self.on_device.new(flat.data.dtype), others)
            flat.data.copy_(packed.data, non_blocking=not waits)
            return flat
        if flat is not self._storage:
            torch._foreach_copy_(flat.views, self._tensors())
        if others:
            for member, part in zip(self.members, self.parts(flat), strict=True):
                part.copy_(as_real(others.get(member, member)))
        return flat

    def parts(self, flat: Flat) -> Sequence[Tensor]:
        """View `flat` as the members, complex ones as pairs of reals."""
        if self._storage is None:
            return flat.views
        first = flat.data.storage_offset()
        return [
            flat.data.as_strided(shape, strides, first + start)
            for shape, strides, start in self._parts
        ]

    @torch.no_grad()
    def unpack_(self, flat: Flat) -> None:
        """Copy `flat` into the tensors."""
        torch._foreach_copy_(self._tensors(), self._as_own(flat).views)
        self._notify_autograd()

    @torch.no_grad()
    def mix_(self, flat: Flat, weight: float) -> None:
        """In place, x <- x + weight * (flat - x); equal values stay the same bit for bit."""
        torch._foreach_lerp_(self._tensors(), self._as_own(flat).views, weight)
        self._notify_autograd()

    @torch.no_grad()
    def shift_(
        self, theirs: Flat, ours: Flat, weight: float, changed: Collection[int] | None = None
    ) -> None:
        """In place, x <- x + weight * (theirs - ours), with ours the values of x when it was sent.

        The peer adds the exact opposite, so the mean of the two does not move. `theirs` is
        overwritten.

        Args:
            theirs: received values.
            ours: the values that were sent.
            weight: how far to move.
            changed: the ids of the members that are shifted, unless they share a storage; the
                others are mixed as in `mix_`. None shifts all.
        """
        # In place, since another copy of the bucket would be needed otherwise.
        if changed is None:
            theirs.data.sub_(ours.data)
            self.add_(self._as_own(theirs), weight)
            return
        is_shifted = [id(member) in changed for member in self.members]
        for there, here in compress(zip(theirs.views, ours.views, strict=True), is_shifted):
            there.sub_(here)
        rows = zip(self._tensors(), self._as_own(theirs).views, is_shifted, strict=True)
        for own, values, shifts in rows:
            own.add_(values, alpha=weight) if shifts else own.lerp_(values, weight)

    @torch.no_grad()
    def absorb_(self, parts: Iterable[tuple[slice, Tensor]], weight: float, keeps: bool) -> None:
        """In place, x <- x + weight * part.

        Args:
            parts: slices of a flat vector, and the values there, which the next part overwrites.
            weight: the same for all.
            keeps: whether to keep the result of `values`.
        """
        if self._storage is None:
            self.add_(self.joined(parts, keeps), weight)
            return
        for place, part in parts:
            self._storage.data[place].add_(part, alpha=weight)
        self._notify_autograd()

    def joined(self, parts: Iterable[tuple[slice, Tensor]], keeps: bool) -> Flat:
        """The parts as one flat vector, in the tensors' dtype and on their device."""
        make = self.on_device.new if keeps else self.on_device.flat
        whole: Flat | None = None
        for place, part in parts:
            if len(part) == self.on_device.numel and part.dtype == self.dtype:
                return self.on_device.view(part)
            whole = whole or make(self.dtype)
            whole.data[place].copy_(part)
        return whole or make(self.dtype)

    @torch.no_grad()
    def add_(self, flat: Flat, factor: float) -> None:
        """In place, x <- x + factor * flat."""
        torch._foreach_add_(self._tensors(), flat.views, alpha=factor)
        self._notify_autograd()

    @torch.no_grad()
    def is_finite(self) -> Tensor:
        """Return whether the tensors contain neither NaN nor infinity.

        Returns:
            bool tensor of shape () on their device, without a read by the host.
        """
        return torch.stack([*map(is_finite_on_device, self._tensors())]).all()

    @property
    def stamps(self) -> tuple[int, ...]:
        """The version counters and addresses of the members, by which a change is noticed.

        Changes of values through `.data` are not counted, and an inference tensor has no counter.
        """
        tensors = [*map(local, self.counted)] if self.is_sharded else self.counted
        return (*map(_version_of, tensors), *map(Tensor.data_ptr, tensors))

    def note_flight(self, changed: bool) -> None:
        """Note whether others have changed members while a round was in flight."""
        self.changes_in_flight = self.changes_in_flight or changed

    def relocated(self) -> list[Tensor]:
        """The members that were converted or moved, or whose shared storage was replaced."""
        if (now := self._metadata()) == self._planned:
            return []
        rows = zip(
            self.members, zip(*self._planned, strict=True), zip(*now, strict=True), strict=True
        )
        return [member for member, before, after in rows if before != after]

    def _metadata(self) -> list[list[Any]]:
        """The metadata of the members that must not change, a list for each property."""
        # Without objects for devices and shapes, which cost as much as everything else here.
        properties: list[Callable[[Tensor], Any]] = [_dtype_of, Tensor.get_device]
        if self._storage is not None:
            properties += [Tensor.data_ptr, Tensor.numel, Tensor.stride]
        return [[*map(each, self.members)] for each in properties]

    def _notify_autograd(self) -> None:
        """Increment the version counters of members that are views, which do not do so themselves.

        A backward pass that needs their old values would silently use the new ones.
        """
        if self._storage is not None:
            torch.autograd.graph.increment_version(self.members)

    def _as_own(self, flat: Flat) -> Flat:
        """The flat vector on the tensors' device, in their dtype."""
        if flat.data.device != self.device:
            copied = self.on_device.new(flat.data.dtype)
            # From pinned memory, whose next use waits for this copy: see `Exchange.start`.
            copied.data.copy_(flat.data, non_blocking=True)
            flat = copied
        if flat.data.dtype == self.dtype:
            return flat
        return self.on_device.view(flat.data.to(self.dtype))

    def _tensors(self) -> tuple[Tensor, ...]:
        """The members as real tensors, viewed again each time: their storage may be replaced."""
        if self._storage is not None:
            return self._storage.views
        if self.is_sharded or self.members[0].is_complex():
            return tuple(map(as_real, self.members))
        return self.members


def _part_of(storage: Tensor, view: Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    """Shape, strides and start, in elements, of a view of a storage."""
    # A tensor without elements has no address.
    start = (view.data_ptr() - storage.data_ptr()) // view.itemsize if view.numel() else 0
    return view.shape, view.stride(), start


def changed_since(stamps: Sequence[int], bucket: Bucket, sent: Flat | None = None) -> list[Tensor]:
    """The members that were changed after the bucket had these stamps.

    Args:
        stamps: the stamps before.
        bucket: the bucket.
        sent: the values before. With them, a member with the same values in another storage, as
            after `flatten_parameters()` of an RNN, has not changed.
    """
    if (now := bucket.stamps) == stamps:
        return []
    differs = [before != after for before, after in zip(stamps, now, strict=True)]
    count = len(bucket.counted)
    values = {} if sent is None else dict(zip(bucket.members, bucket.parts(sent), strict=True))
    return [
        member
        for member, changed, moved in zip(bucket.counted, differs, differs[count:], strict=False)
        if changed or (moved and not (member in values and is_equal(member, values[member])))
    ]


def is_equal(member: Tensor, values: Tensor) -> bool:
    """Return whether a member has these values, which may be on another device and wider."""
    return bool((as_real(member) == values.to(member.device)).all())


def is_finite(data: Tensor) -> bool:
    """Return whether all elements are finite: one pass, and a second one if the sum overflows."""
    data = data.detach()
    return math.isfinite(data.sum().item()) or bool(data.isfinite().all())


def all_finite(buckets: Sequence[Bucket]) -> list[bool]:
    """Return whether the tensors of each bucket are finite; read at once from a GPU."""
    found = [bucket.is_finite() for bucket in buckets]
    return torch.stack([each.to(found[0].device) for each in found]).cpu().tolist() if found else []


@torch.no_grad()
def norms_of(bucket: Bucket) -> Tensor:
    """The norms of the members, in float32 or wider; a GPU is not read."""
    members = [as_real(member) for member in bucket.members]
    return torch.stack(torch._foreach_norm(members, 2, wide(bucket.dtype)))


def members_of(buckets: Iterable[Bucket]) -> list[Tensor]:
    """The members of all buckets, in their order."""
    return [member for bucket in buckets for member in bucket.members]


def fill_copies(copies: Mapping[Tensor, Tensor], bucket: Bucket, flat: Flat) -> None:
    """Copy a flat vector into copies of a bucket's members, some of which may have none."""
    for member, part in zip(bucket.members, bucket.parts(flat), strict=True):
        if member in copies:
            as_real(copies[member]).copy_(part)


def as_real(tensor: Tensor) -> Tensor:
    """The local part of a tensor as reals; it shares the memory of the tensor."""
    tensor = local(tensor).detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
