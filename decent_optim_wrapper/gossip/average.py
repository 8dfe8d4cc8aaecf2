"""The world average, in place and back: average, snapshot, restore."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.gossip.bucket import Bucket
from decent_optim_wrapper.gossip.round import Rules, nonfinite_error
from decent_optim_wrapper.gossip.storage import Flat


class WorldAverage:
    """Replaces tensors by their average over all ranks, and restores them.

    Args:
        rank: of errors.
        rules: what happens to values that are not finite.
        extra: buckets of further tensors to average.
    """

    def __init__(self, rank: int, rules: Rules, extra: Iterable[Bucket]) -> None:
        self._rank = rank
        self._rules = rules
        self._extra = tuple(extra)
        # What was before the average that is in place, if it can still be reverted.
        self.snapshot: list[tuple[Bucket, Flat]] | None = None

    def apply(self, parameters: Sequence[Bucket], transport: Transport, may_revert: bool) -> None:
        """Put the average in place of the own values; collective.

        Args:
            parameters: their buckets.
            transport: the ranks and how to reach them.
            may_revert: keep a snapshot of the own values: those from before the first average
                where one is in place already.
        """
        if not may_revert:
            self.keep()
        elif self.snapshot is not None:
            # Tensors may have come since, and the snapshot must hold theirs, too.
            self.revert()
        buckets = [*parameters, *self._extra]
        finite = finite_shares(buckets, transport, self._rules, "global_avg()", "parameters")
        if may_revert:
            self.snapshot = [(bucket, bucket.pack(bucket.new_flat())) for bucket in buckets]
        try:
            for bucket, shares in zip(buckets, finite, strict=True):
                if any(shares):
                    bucket.unpack_(average(bucket, transport, shares))
        except BaseException:
            # Half an average is neither the one thing nor the other.
            if self.snapshot is not None:
                self.revert()
            raise

    def revert(self) -> None:
        """Restore the own values and free the snapshot."""
        if self.snapshot is None:
            raise RuntimeError(
                f"rank {self._rank}: revert_global_avg() expects an average in place "
                f"that may be reverted; call global_avg(may_revert=True) first, and revert it "
                f"before the next step()"
            )
        for bucket, flat in self.snapshot:
            bucket.unpack_(flat)
        self.snapshot = None

    @torch.no_grad()
    def distance(self, parameters: Sequence[Bucket]) -> float:
        """||x_i - mean(x)||_2 over the parameters, of the own values to the average in place."""
        square = torch.zeros((), dtype=torch.float64, device="cpu")
        for bucket, own in self.snapshot or []:
            if bucket in parameters:
                away = bucket.pack(bucket.new_flat()).data.double() - own.data.double()
                square += away.square().sum().cpu()
        return math.sqrt(square.item())

    def keep(self) -> None:
        """Accept the average as the own values and free the snapshot."""
        self.snapshot = None


def finite_shares(
    buckets: Sequence[Bucket], transport: Transport, rules: Rules, where: str, what: str
) -> list[list[bool]]:
    """Bucket by bucket, the ranks whose values are finite and count; collective.

    Args:
        buckets: what is to be averaged, the same on every rank.
        transport: the ranks and how to reach them.
        rules: what happens to values that are not finite.
        where: what an error calls the average.
        what: what an error calls the values.

    Raises:
        NonFiniteError: on every rank; there are others, and the rules say so.
    """
    if not rules.checks or not buckets:
        return [[True] * transport.world_size for _ in buckets]
    finite = [bucket.is_finite() for bucket in buckets]
    own = torch.tensor(finite, dtype=torch.uint8, device="cpu")
    told = transport.all_gather(own).bool()
    places = (~told.all(dim=1)).nonzero().flatten().tolist()
    if places and rules.on_nonfinite == "raise":
        bad = [transport.members[place] for place in places]
        raise nonfinite_error(bad, transport.name, where, what)
    return told.T.tolist()


def average(bucket: Bucket, transport: Transport, shares: Sequence[bool] | None = None) -> Flat:
    """The bucket's average over the ranks, in a new flat vector; collective.

    Half precision is summed in float32.

    Args:
        bucket: untouched by the call.
        transport: the ranks and how to reach them.
        shares: which ranks' values count, one at least; None means all.
    """
    dtype = torch.promote_types(bucket.dtype, torch.float32)
    total = bucket.pack(bucket.new_flat(bucket.wire_device, dtype))
    if shares is not None and not shares[transport.rank]:
        total.data.zero_()
    transport.sum_(total.data)
    total.data.div_(transport.world_size if shares is None else sum(shares))
    return total


def consensus_distance(buckets: Iterable[Bucket], transport: Transport) -> float:
    """Root mean square over the ranks of the distance to the average; collective.

    sqrt(1/n * sum over i of ||x_i - mean(x)||^2), summed in float64.

    Args:
        buckets: the parameters, untouched by the call.
        transport: the ranks and how to reach them.

    Returns:
        The distance in the parameters' own unit, the same on every rank.
    """
    square = torch.zeros((), dtype=torch.float64, device="cpu")
    for bucket in buckets:
        own = bucket.pack(bucket.new_flat(bucket.wire_device)).data
        away = average(bucket, transport).data.double() - own.double()
        square += away.square().sum().cpu()
    return math.sqrt(transport.all_gather(square).mean().item())
