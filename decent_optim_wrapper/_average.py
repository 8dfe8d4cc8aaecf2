"""The world average, in place and back: average, snapshot, restore."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from decent_optim_wrapper._bucket import Bucket
from decent_optim_wrapper._flat import Flat
from decent_optim_wrapper._gossip import Gossip
from decent_optim_wrapper._transport import Transport


class WorldAverage:
    """Replaces tensors by their average over all ranks, and restores them.

    Args:
        transport: the ranks and how to reach them.
        gossip: owner of the parameters' buckets, which may grow.
        extra: buckets of further tensors to average.
    """

    def __init__(self, transport: Transport, gossip: Gossip, extra: Iterable[Bucket]) -> None:
        self._transport = transport
        self._gossip = gossip
        self._extra = tuple(extra)
        self._snapshot: list[tuple[Bucket, Flat]] | None = None

    @property
    def revertible(self) -> bool:
        """Whether an average is in place that can still be reverted."""
        return self._snapshot is not None

    def apply(self, may_revert: bool) -> None:
        """Put the average in place of the own values; collective.

        Args:
            may_revert: keep a snapshot of the own values. A snapshot that is there already stays:
                it holds the values from before the first average.
        """
        self._gossip.arrive()
        if not may_revert:
            self.keep()
        elif self._snapshot is None:
            self._snapshot = [(bucket, bucket.pack(bucket.new_flat())) for bucket in self._buckets]
        try:
            for bucket in self._buckets:
                bucket.unpack_(average(bucket, self._transport))
        except BaseException:
            # Half an average is neither the one thing nor the other.
            if self._snapshot is not None:
                self.revert()
            raise

    @property
    def _buckets(self) -> tuple[Bucket, ...]:
        return (*self._gossip.buckets, *self._extra)

    def revert(self) -> None:
        """Restore the own values and free the snapshot."""
        if self._snapshot is None:
            raise RuntimeError(
                f"rank {self._transport.rank}: revert_global_avg() expects an average in place "
                f"that may be reverted; call global_avg(may_revert=True) first, and revert it "
                f"before the next step()"
            )
        for bucket, flat in self._snapshot:
            bucket.unpack_(flat)
        self._snapshot = None

    def keep(self) -> None:
        """Accept the average as the own values and free the snapshot."""
        self._snapshot = None


def average(bucket: Bucket, transport: Transport) -> Flat:
    """The bucket's average over all ranks, in a new flat vector; collective.

    Half precision is summed in float32.
    """
    dtype = torch.promote_types(bucket.dtype, torch.float32)
    total = bucket.pack(bucket.new_flat(bucket.wire_device, dtype))
    for work in transport.all_reduce(total.data):
        work.wait()
    total.data.div_(transport.world_size)
    return total
