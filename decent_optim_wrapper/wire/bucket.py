"""Buckets: tensors of one device and dtype that travel together as one flat vector.

Layout, packing and mixing; no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from decent_optim_wrapper.codecs import Codec, wide
from decent_optim_wrapper.optim.shards import largest_shard_bytes, local
from decent_optim_wrapper.wire.storage import Arena, Flat, move_together, new_vector

MIB = 1024 * 1024
# Elements that are mixed at once where a temporary copy is needed.
_SLICE = 1 << 18
HALF_DTYPES = (torch.float16, torch.bfloat16)


class Layout(NamedTuple):
    """How tensors are put into buckets.

    Args:
        cap_mb: upper bound of a bucket in MiB; a larger tensor gets a bucket of its own.
        wire_device: maps a tensor's device to the device that the transport exchanges on.
        codec: how values travel where that takes fewer bytes; None sends them as they are.
        as_view: make the tensors views of the bucket's own storage.
        order: the tensors that go first into buckets, in this order.
        copies: how many ranks of a replica hold the same values of a tensor.
        uses_reference: whether codes may be those of differences to a reference, at the cost of a
            copy for each group; without, they are those of the values.
    """

    cap_mb: float
    wire_device: Callable[[torch.device], torch.device] = lambda device: device
    codec: Codec | None = None
    as_view: bool = False
    order: tuple[Tensor, ...] = ()
    copies: Callable[[Tensor], int] = lambda tensor: 1
    uses_reference: bool = True

    @property
    def plain(self) -> Layout:
        """The layout for tensors that are exchanged as they are, outside the gossip."""
        return Layout(self.cap_mb, self.wire_device, copies=self.copies)

    def places(self, tensors: Iterable[Tensor]) -> list[int]:
        """The position of each tensor in the order; the others come last."""
        places = {id(tensor): place for place, tensor in enumerate(self.order)}
        return [places.get(id(tensor), len(places)) for tensor in tensors]


class _Kind(NamedTuple):
    """What the members of a bucket have in common.

    Kernels take the DTensors of one mesh only. What several ranks of a replica hold is summed in
    the same buckets on all of them, and so rounds in the same way.
    """

    device: torch.device
    dtype: torch.dtype
    mesh: Any = None
    copies: int = 1

    @classmethod
    def of(cls, tensor: Tensor, layout: Layout) -> _Kind:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        return cls(tensor.device, tensor.dtype, mesh, layout.copies(tensor))


class _Place(NamedTuple):
    """The address and layout of a tensor in memory."""

    address: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> _Place:
        return cls(tensor.data_ptr(), tensor.shape, tensor.stride())


class Pair(NamedTuple):
    """The wire buffers of an exchange with one peer."""

    outgoing: Flat
    incoming: Flat


class _Memory:
    """Memory for the flat vectors of a bucket, and the views of them that were made."""

    def __init__(self, device: torch.device, pinned: bool) -> None:
        self._arena = Arena(device, pinned)
        # Made once: a round costs calls per bucket, not per parameter.
        self._flats: dict[tuple[int, torch.dtype], tuple[Flat, ...]] = {}

    def vectors(self, count: int, numel: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """As `Arena.vectors`."""
        if not self._arena.fits(count, numel, dtype):
            self._flats.clear()
        return self._arena.vectors(count, numel, dtype)

    def flats(self, bucket: Bucket, count: int, dtype: torch.dtype) -> tuple[Flat, ...]:
        """View the memory as `count` vectors of a bucket; its old contents are lost."""
        found = self._flats.get((count, dtype))
        if found is None:
            vectors = self.vectors(count, bucket.flat_numel, dtype)
            found = self._flats[count, dtype] = tuple(bucket.view(vector) for vector in vectors)
        return found


class Bucket:
    """Tensors of one device and dtype, and the wire buffers through which they are exchanged.

    Complex tensors travel as pairs of reals. The order on the wire is the logical order of the
    elements, so ranks need not agree on memory layouts; with `as_view` it is the memory order.

    Args:
        tensors: the members, of one device and dtype.
        layout: the device and dtype in which they are exchanged.
        rate: how far a round mixes them: x <- x + rate * (W x - x).
    """

    def __init__(self, tensors: Sequence[Tensor], layout: Layout, rate: float = 1.0) -> None:
        self._members = tuple(tensors)
        self._kind = _Kind.of(self._members[0], layout)
        # How many ranks of a replica hold the same values.
        self.copies = self._kind.copies
        self.rate = rate
        self._sharded = self._kind.mesh is not None
        first = as_real(self._members[0])
        self.device, self.dtype = first.device, first.dtype
        self.wire_device = layout.wire_device(self.device)
        # Larger groups would sum half precision in float32.
        self.pair_codec = saving(layout.codec, self.dtype)
        self.group_codec = saving(layout.codec, wide(self.dtype))
        self.may_use_reference = layout.uses_reference
        self._shapes = [as_real(member).shape for member in self._members]
        self._sizes = [shape.numel() for shape in self._shapes]
        self.numel = sum(self._sizes)
        self.nbytes = self.numel * self.dtype.itemsize
        self._storage: Flat | None = None
        if layout.as_view:
            data = move_together(self._members)
            self._storage = Flat(data, (data,))
        self._places = [_Place.of(member) for member in self._members] if layout.as_view else []
        self._wire = _Memory(self.wire_device, pinned=self.via_cpu)
        # Where values are packed that are coded next, and changes gathered that are mixed in.
        self._near = _Memory(self.device, pinned=False)

    def __repr__(self) -> str:
        count = len(self._members)
        return (
            f"{count} parameter{'s' * (count > 1)}, {self._members[0].dtype} on {self.device}, "
            f"{self.nbytes / MIB:.3f} MiB"
        )

    def codec(self, size: int) -> Codec | None:
        """The codec with which it travels in a group of this size; None for none."""
        return self.pair_codec if size == 2 else self.group_codec

    @property
    def members(self) -> tuple[Tensor, ...]:
        """The tensors themselves."""
        return self._members

    @property
    def via_cpu(self) -> bool:
        """Whether the values travel between a GPU and the CPU on their way to the wire."""
        return self.wire_device.type != self.device.type

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU exchanges it."""
        return self.wire_device.type == "cuda"

    def pair(self, needs_snapshot: bool = False) -> Pair:
        """The wire buffers for one peer; `pair` and `summing` share their memory.

        If possible, the tensors' own storage is sent: it must not change in flight.

        Args:
            needs_snapshot: whether the tensors may change in flight.
        """
        near = self.wire_device == self.device
        if self._storage is not None and near and not needs_snapshot:
            return Pair(self._storage, *self._wire.flats(self, 1, self.dtype))
        return Pair(*self._wire.flats(self, 2, self.dtype))

    def summing(self, count: int = 1) -> tuple[Flat, ...]:
        """Wire buffers of which one is summed over a group.

        Half precision is summed in float32: rounding would otherwise change values that are the
        same on all ranks.
        """
        return self._wire.flats(self, count, wide(self.dtype))

    def values(
        self,
        others: Mapping[Tensor, Tensor],
        needs_snapshot: bool,
        dtype: torch.dtype | None = None,
    ) -> Flat:
        """The tensors as one vector where they are: if possible their own storage, else packed.

        Args:
            others: as in `pack`.
            needs_snapshot: whether the vector must stay as it is while the tensors change.
            dtype: that of a packed vector; None means the tensors' own.
        """
        if self._storage is not None and not others and not needs_snapshot:
            return self._storage
        return self.pack(self.spare(dtype or self.dtype), others)

    def spare(self, dtype: torch.dtype) -> Flat:
        """A flat vector on the tensors' device; what it held before is lost."""
        return self._near.flats(self, 1, dtype)[0]

    def messages(self, nbytes: int) -> tuple[Tensor, ...]:
        """Two wire buffers for codes; what they held before is lost."""
        return self._wire.vectors(2, nbytes, torch.uint8)

    def new_flat(
        self, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Flat:
        """Make an uninitialised flat vector with the bucket's layout."""
        device = device or self.device
        # Pinned memory, or the copies between GPU and wire go through one more buffer.
        pinned = device == self.wire_device and self.via_cpu
        return self.view(new_vector(self.flat_numel, dtype or self.dtype, device, pinned))

    def view(self, data: Tensor) -> Flat:
        """View a flat vector as the bucket's tensors."""
        if self._storage is not None:
            return Flat(data, (data,))
        parts = zip(torch.split(data, self._sizes), self._shapes, strict=True)
        return Flat(data, tuple(part.view(shape) for part, shape in parts))

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
            # In one copy, not in one for each tensor.
            packed = self.values(others or {}, needs_snapshot=False, dtype=flat.data.dtype)
            flat.data.copy_(packed.data, non_blocking=not waits)
            return flat
        if flat is not self._storage:
            torch._foreach_copy_(flat.views, self._tensors())
        if others:
            for member, part in zip(self._members, self.parts(flat), strict=True):
                part.copy_(as_real(others.get(member, member)))
        return flat

    def parts(self, flat: Flat) -> Sequence[Tensor]:
        """View `flat` as the members, complex ones as pairs of reals."""
        if self._storage is None:
            return flat.views
        start, first = self._storage.data.data_ptr(), flat.data.storage_offset()
        reals = [as_real(member) for member in self._members]
        # A tensor without elements has no address.
        offsets = [
            (real.data_ptr() - start) // real.itemsize if real.numel() else 0 for real in reals
        ]
        return [
            flat.data.as_strided(real.shape, real.stride(), first + offset)
            for real, offset in zip(reals, offsets, strict=True)
        ]

    @torch.no_grad()
    def unpack_(self, flat: Flat) -> None:
        """Copy `flat` into the tensors."""
        torch._foreach_copy_(self._tensors(), self._nearby(flat).views)
        self._notify_autograd()

    @torch.no_grad()
    def mix_(self, flat: Flat, weight: float) -> None:
        """In place, x <- x + weight * (flat - x); equal values stay the same bit for bit."""
        torch._foreach_lerp_(self._tensors(), self._as_own(flat).views, weight)
        self._notify_autograd()

    @torch.no_grad()
    def shift_(self, theirs: Flat, ours: Flat, weight: float) -> None:
        """In place, x <- x + weight * (theirs - ours), with ours what x was when it was sent.

        The peer adds the exact opposite, so the mean of the two does not move.
        """
        # In parts with views, and on the CPU, which adds tensor by tensor in any case: the
        # difference would take another copy of the bucket for a while.
        if self._storage is None and (self.via_cpu or self.on_gpu):
            whole = self.view(self.difference(theirs.data, ours.data))
            torch._foreach_add_(self._tensors(), whole.views, alpha=weight)
            return
        if self._storage is None:
            for tensor, *pair in zip(self._tensors(), theirs.views, ours.views, strict=True):
                tensor.add_(self.difference(*pair), alpha=weight)
            return
        for start in range(0, self.flat_numel, _SLICE):
            part = slice(start, start + _SLICE)
            away = self.difference(theirs.data[part], ours.data[part])
            self._storage.data[part].add_(away, alpha=weight)
        self._notify_autograd()

    @torch.no_grad()
    def absorb_(self, parts: Iterable[tuple[slice, Tensor]], weight: float | None) -> None:
        """In place, x <- x + weight * part, or x <- part if the weight is None.

        Args:
            parts: slices of a flat vector, and the values there, which the next part overwrites.
            weight: the same for all.
        """
        if self._storage is None:
            whole = self.spare(self.dtype)
            for place, part in parts:
                whole.data[place].copy_(part)
            if weight is None:
                torch._foreach_copy_(self._tensors(), whole.views)
            else:
                torch._foreach_add_(self._tensors(), whole.views, alpha=weight)
            return
        for place, part in parts:
            if weight is None:
                self._storage.data[place].copy_(part)
            else:
                self._storage.data[place].add_(part, alpha=weight)
        self._notify_autograd()

    @torch.no_grad()
    def add_(self, flat: Flat, factor: float) -> None:
        """In place, x <- x + factor * flat."""
        torch._foreach_add_(self._tensors(), flat.views, alpha=factor)
        self._notify_autograd()

    @torch.no_grad()
    def is_finite(self) -> Tensor:
        """Whether the tensors contain neither NaN nor infinity.

        Returns:
            bool of shape () on their device, which the host has not read.
        """
        held = [tensor for tensor in self._tensors() if tensor.numel()]
        if not held:
            return torch.ones((), dtype=torch.bool, device=self.device)
        return (torch.stack(torch._foreach_norm(held, torch.inf)) < torch.inf).all()

    def versions(self) -> list[tuple[Tensor, int]]:
        """The members in the bucket's storage, with their version counters.

        Changes through `.data` are not counted, and an inference tensor has no counter.
        """
        if self._storage is None:
            return []
        return [(member, member._version) for member in self._members if not member.is_inference()]

    def relocated(self) -> list[Tensor]:
        """The members that were converted or moved, and views whose storage was replaced."""
        device, dtype, *_ = self._kind
        moved = [m for m in self._members if m.dtype is not dtype or m.device != device]
        if self._storage is not None and not moved:
            pairs = zip(self._members, self._places, strict=True)
            moved = [member for member, place in pairs if _Place.of(member) != place]
        return moved

    def _notify_autograd(self) -> None:
        """Increment the version counters of members that are views, which do not do so themselves.

        A backward pass that needs their old values would silently use the new ones.
        """
        if self._storage is not None:
            torch.autograd.graph.increment_version(self._members)

    @property
    def flat_numel(self) -> int:
        """Number of elements of a flat vector; a storage has gaps that align its tensors."""
        return self.numel if self._storage is None else self._storage.data.numel()

    def difference(self, theirs: Tensor, ours: Tensor) -> Tensor:
        """The difference of two vectors, on the tensors' device and in their dtype."""
        theirs, ours = (each.to(self.device, non_blocking=True) for each in (theirs, ours))
        return theirs.sub(ours).to(self.dtype)

    def _as_own(self, flat: Flat) -> Flat:
        """The flat vector on the tensors' device, in their dtype."""
        near = self._nearby(flat)
        return near if near.data.dtype == self.dtype else self.view(near.data.to(self.dtype))

    def _nearby(self, flat: Flat) -> Flat:
        """The flat vector on the tensors' device."""
        if flat.data.device == self.device:
            return flat
        near = self.spare(flat.data.dtype)
        # From pinned memory, whose next use waits for this copy: see `Exchange.post`.
        near.data.copy_(flat.data, non_blocking=True)
        return near

    def _tensors(self) -> tuple[Tensor, ...]:
        """The members as real tensors, viewed again each time: their storage may be replaced."""
        if self._storage is not None:
            return self._storage.views
        if self._sharded or self._members[0].is_complex():
            return tuple(map(as_real, self._members))
        return self._members


def saving(codec: Codec | None, dtype: torch.dtype) -> Codec | None:
    """The codec, if its messages take fewer bytes than values of this dtype."""
    if codec is None or codec.nbytes(codec.block) >= codec.block * dtype.itemsize:
        return None
    return codec


def is_finite(data: Tensor) -> bool:
    """Whether all elements are finite: one pass, and a second one if the sum overflows."""
    data = data.detach()
    return bool(data.sum().isfinite()) or bool(data.isfinite().all())


def all_finite(buckets: Sequence[Bucket]) -> list[bool]:
    """Whether the tensors of each bucket are finite; what is on a GPU is read once."""
    found = [bucket.is_finite() for bucket in buckets]
    places = dict.fromkeys(each.device for each in found)
    for device in places:
        own = [index for index, each in enumerate(found) if each.device == device]
        read = torch.stack([found[index] for index in own]).cpu()
        for index, value in zip(own, read, strict=True):
            found[index] = value
    return [bool(each) for each in found]


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
    return (*buckets, *plan_buckets((t for t in live if id(t) not in known), layout))


def plan_buckets(tensors: Iterable[Tensor], layout: Layout) -> tuple[Bucket, ...]:
    """Fill buckets in the layout's order, one open bucket for each device and dtype.

    Args:
        tensors: any tensors, in an order that is the same on every rank.
        layout: cap and form of the buckets.

    Returns:
        The buckets, ordered by their first tensor.
    """
    cap_bytes = layout.cap_mb * MIB
    filled: list[list[Tensor]] = []
    open_buckets: dict[_Kind, tuple[list[Tensor], int]] = {}
    listed = list(tensors)
    placed = sorted(zip(layout.places(listed), listed, strict=True), key=itemgetter(0))
    for _, tensor in placed:
        kind = _Kind.of(tensor, layout)
        # This rank's own shard may be smaller, and would lead to other buckets than its replica's.
        nbytes = largest_shard_bytes(tensor)
        members, used_bytes = open_buckets.get(kind, ([], 0))
        if not members or used_bytes + nbytes > cap_bytes:
            members, used_bytes = [], 0
            filled.append(members)
        members.append(tensor)
        open_buckets[kind] = (members, used_bytes + nbytes)
    return tuple(Bucket(members, layout) for members in filled)


def members_of(buckets: Iterable[Bucket]) -> list[Tensor]:
    """The members of all buckets, in their order."""
    return [member for bucket in buckets for member in bucket.members]


def as_real(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, as reals; it shares the tensor's memory."""
    tensor = local(tensor).detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
