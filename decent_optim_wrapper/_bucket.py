"""Buckets: tensors of one device and dtype that travel together as one flat vector.

Layout, packing and mixing; no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

MIB = 1024 * 1024


class Flat(NamedTuple):
    """A flat vector with its own storage, and the views of it that a bucket's tensors map to."""

    data: Tensor
    views: tuple[Tensor, ...]


class Bucket:
    """Tensors of one device and dtype, and the wire buffers through which they are exchanged.

    Complex tensors travel as pairs of reals. The order on the wire is the logical order of the
    elements, so ranks need not agree on memory layouts.

    Args:
        tensors: the members, of one device and dtype.
        wire_device: where the transport wants the bytes (a CPU-only transport of GPU tensors).
    """

    def __init__(self, tensors: Iterable[Tensor], wire_device: torch.device) -> None:
        self._members = tuple(tensors)
        first = self._real(self._members[0])
        self.device, self.dtype = first.device, first.dtype
        self.wire_device = wire_device
        self._shapes = [self._real(member).shape for member in self._members]
        self._sizes = [shape.numel() for shape in self._shapes]
        self.numel = sum(self._sizes)
        self.nbytes = self.numel * self.dtype.itemsize

    def __repr__(self) -> str:
        count = len(self._members)
        return (
            f"{count} parameter{'s' * (count > 1)}, {self._members[0].dtype} on {self.device}, "
            f"{self.nbytes / MIB:.3f} MiB"
        )

    @property
    def members(self) -> tuple[Tensor, ...]:
        """The tensors themselves."""
        return self._members

    @cached_property
    def outgoing(self) -> Flat:
        """The wire buffer that is sent or reduced; allocated at first use."""
        return self.new_flat(self.wire_device)

    @cached_property
    def incoming(self) -> Flat:
        """The wire buffer that a peer's parameters arrive in; allocated at first use."""
        return self.new_flat(self.wire_device)

    def new_flat(self, device: torch.device | None = None) -> Flat:
        """Allocate a flat vector of the bucket's layout, uninitialised."""
        device = device or self.device
        # Pinned memory, or the copies between GPU and wire go through one more buffer.
        pinned = device.type == "cpu" and self.device.type == "cuda"
        return self.view(
            torch.empty(self.numel, dtype=self.dtype, device=device, pin_memory=pinned)
        )

    def view(self, data: Tensor) -> Flat:
        """Look at a flat vector of `numel` elements as the bucket's tensors."""
        parts = zip(torch.split(data, self._sizes), self._shapes, strict=True)
        return Flat(data, tuple(part.view(shape) for part, shape in parts))

    @torch.no_grad()
    def pack(self, flat: Flat) -> Flat:
        """Copy the tensors into `flat`."""
        torch._foreach_copy_(flat.views, self._tensors())
        return flat

    @torch.no_grad()
    def unpack_(self, flat: Flat) -> None:
        """Copy `flat` into the tensors."""
        torch._foreach_copy_(self._tensors(), flat.views)

    @torch.no_grad()
    def mix_(self, flat: Flat, weight: float) -> None:
        """In place, x <- x + weight * (flat - x); what already agrees stays bit for bit."""
        near = flat
        if flat.data.device != self.device or flat.data.dtype != self.dtype:
            near = self.view(flat.data.to(self.device, self.dtype))
        torch._foreach_lerp_(self._tensors(), near.views, weight)

    def _tensors(self) -> tuple[Tensor, ...]:
        """The members as real tensors, looked at afresh: a member's storage may be replaced."""
        if self._members[0].is_complex():
            return tuple(map(self._real, self._members))
        return self._members

    @staticmethod
    def _real(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def plan_buckets(
    tensors: Iterable[Tensor],
    cap_mb: float,
    wire_device: Callable[[torch.device], torch.device] = lambda device: device,
) -> tuple[Bucket, ...]:
    """Fill buckets in the order given, one open bucket for each device and dtype.

    Args:
        tensors: any tensors, in an order that is the same on every rank.
        cap_mb: upper bound of a bucket in MiB; a larger tensor is a bucket of its own.
        wire_device: maps a tensor's device to the device that the transport exchanges on.

    Returns:
        The buckets, ordered by their first tensor.
    """
    cap_bytes = cap_mb * MIB
    filled: list[list[Tensor]] = []
    open_buckets: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        kind = (tensor.device, tensor.dtype)
        members, used_bytes = open_buckets.get(kind, ([], 0))
        if not members or used_bytes + tensor.nbytes > cap_bytes:
            members, used_bytes = [], 0
            filled.append(members)
        members.append(tensor)
        open_buckets[kind] = (members, used_bytes + tensor.nbytes)
    return tuple(Bucket(members, wire_device(members[0].device)) for members in filled)


def summable(data: Tensor) -> Tensor:
    """The data in a dtype whose sums do not round away what agreeing ranks agree on."""
    return data.float() if data.dtype in (torch.float16, torch.bfloat16) else data
