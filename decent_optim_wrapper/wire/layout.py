"""How tensors are put into buckets: what a bucket may contain, and in which form it is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from decent_optim_wrapper.codecs import Codec

MIB = 1024 * 1024
# A bucket costs a few tenths of a millisecond, and a pass waits for whole buckets: few buckets for
# small models, and many small ones only where their number does not count.
_BUCKETS = 16
_LARGEST_MB = 25


class Layout(NamedTuple):
    """How tensors are put into buckets.

    Args:
        cap_mb: upper bound of a bucket in MiB; a larger tensor gets its own bucket. None chooses it
            from the size of all tensors.
        wire_device: maps a tensor's device to the device that the transport exchanges on.
        codec: how values are coded if that takes fewer bytes; None sends them unchanged.
        as_view: make the tensors views of the bucket's own storage.
        order: function that returns the tensors that go first into buckets, in their order now. A
            model may have grown since: a new wrapper, for a resumed run, plans with its order then.
        copies: function that returns how many ranks of a replica have the same values of a tensor.
        uses_reference: whether differences to a reference may be coded, at the cost of a copy for
            each group; otherwise the values are coded.
    """

    cap_mb: float | None
    wire_device: Callable[[torch.device], torch.device] = lambda device: device
    codec: Codec | None = None
    as_view: bool = False
    order: Callable[[], Iterable[Tensor]] = tuple
    copies: Callable[[Tensor], int] = lambda tensor: 1
    uses_reference: bool = True

    @property
    def plain(self) -> Layout:
        """The layout for tensors that are exchanged without a codec, outside the gossip."""
        return Layout(self.cap_mb, self.wire_device, copies=self.copies)

    def cap_bytes(self, total: int) -> float:
        """The upper bound of a bucket in bytes, if all tensors together have `total` bytes."""
        if self.cap_mb is not None:
            return self.cap_mb * MIB
        return min(max(total / _BUCKETS, MIB), _LARGEST_MB * MIB)

    def places(self) -> Callable[[Tensor], int]:
        """The function that returns the place of a tensor in the order; others come last."""
        places = {id(tensor): place for place, tensor in enumerate(self.order())}
        return lambda tensor: places.get(id(tensor), len(places))


def kind_of(tensor: Tensor, layout: Layout) -> tuple[torch.device, torch.dtype, Any, int]:
    """What the members of a bucket have in common: device, dtype, mesh and number of copies.

    Kernels take DTensors of one mesh only. Tensors that several ranks of a replica have are summed
    in the same buckets on all of them, and so are rounded in the same way.
    """
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
    return tensor.device, tensor.dtype, mesh, layout.copies(tensor)


def saving(codec: Codec | None, dtype: torch.dtype) -> Codec | None:
    """The codec, if its messages take fewer bytes than values of this dtype."""
    return codec if codec and codec.block_bytes < codec.block * dtype.itemsize else None
