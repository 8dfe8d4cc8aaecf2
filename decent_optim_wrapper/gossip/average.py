"""The average over all ranks: put in place, kept, or reverted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from decent_optim_wrapper.codecs import wide
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.gossip.rounds import Rounds
from decent_optim_wrapper.gossip.session import Replica
from decent_optim_wrapper.optim.shards import on_cpu
from decent_optim_wrapper.wire.bucket import Bucket, all_finite, norms_of
from decent_optim_wrapper.wire.model_state import Averaged
from decent_optim_wrapper.wire.nonfinite import NonFinitePolicy, nonfinite_error
from decent_optim_wrapper.wire.storage import Flat


class WorldAverage:
    """Replaces tensors by their average over all ranks, and restores them.

    Args:
        rounds: has the buckets of the parameters, and connects the ranks.
        replica: the ranks of a replica, which is left out as a whole if one of them has values that
            are not finite.
        extra: collective function that returns further tensors to average.
    """

    def __init__(
        self, rounds: Rounds, replica: Replica, extra: Callable[[Transport], Averaged]
    ) -> None:
        self._rounds = rounds
        self._replica = replica
        self._extra = extra
        # The values before the average that is in place, if it can still be reverted.
        self.snapshot: list[tuple[Bucket, Flat]] | None = None
        # The same while a call may have to be repeated.
        self._own: list[tuple[Bucket, Flat]] | None = None
        # What is averaged besides the parameters; nothing if no average is in place.
        self._further = Averaged()
        # The norms of the averaged parameters, by bucket.
        self._norms: list[Tensor] = []

    def apply(self, may_revert: bool, may_repeat: bool = False) -> None:
        """Replace this rank's values by the average; collective.

        Args:
            may_revert: keep a snapshot of this rank's values; if an average is in place already, of
                the values before the first one.
            may_repeat: keep it until `keep`, for `undo`.
        """
        if not may_revert:
            self.keep()
        elif self.snapshot is not None:
            # Tensors may have been added since, and the snapshot must contain them, too.
            self.revert()
        self._replica.reshard()
        rounds, transport = self._rounds, self._rounds.session.transport
        params, nonfinite, where = rounds.buckets, rounds.policy.nonfinite, "global_avg()"
        finite = finite_shares(params, transport, nonfinite, where, "parameters", self._replica)
        self._further = self._extra(transport)
        rows = [*zip(params, finite, strict=True), *self._further.buckets]
        if may_revert or may_repeat:
            self._own = [(bucket, bucket.copy()) for bucket, _ in rows]
        self.snapshot = self._own if may_revert else None
        try:
            for bucket, shares in rows:
                if any(shares):
                    bucket.unpack_(average(bucket, transport, shares))
            self._norms = [norms_of(bucket) for bucket in rounds.buckets] if may_revert else []
        except BaseException:
            # Half an average must not remain.
            self.undo()
            raise
        self._watch_again()

    def undo(self) -> None:
        """Restore the values before the last `apply`, if there is a copy of them."""
        self.snapshot = self.snapshot or self._own
        if self.snapshot is not None:
            self.revert()

    def refuse(self, call: str) -> None:
        """Check that no average is in place, which `call` would mix with the round in flight.

        Raises:
            RuntimeError: an average is in place that may be reverted.
        """
        if self.snapshot is not None:
            raise RuntimeError(
                f"rank {self._rounds.session.transport.initial_rank}: {call} expects the rank's "
                f"own parameters, but an average is in place; call revert_global_avg() first, or "
                f"keep the average with global_avg(may_revert=False)"
            )

    def check(self) -> None:
        """Check that the parameters are still the average.

        Raises:
            RuntimeError: they are something else, which `revert` would silently replace.
        """
        pairs = zip(self.snapshot or (), self._norms, strict=False)
        # Another number of threads may sum in another order.
        away = [(norms_of(b) - norm).abs() > 1e-6 * norm for (b, _), norm in pairs]
        same = [each.any().logical_not() for each in away]
        if on_cpu(same).sum() < len(same):
            raise RuntimeError(
                f"rank {self._rounds.session.transport.initial_rank}: revert_global_avg() "
                f"expects the average in place, but weights were swapped or changed since; call it "
                f"before, or use `with optimizer.averaged():`, which restores in any case"
            )

    def revert(self) -> None:
        """Restore this rank's values and free the snapshot."""
        if self.snapshot is None:
            raise RuntimeError(
                f"rank {self._rounds.session.transport.initial_rank}: revert_global_avg() "
                f"expects an average in place: call global_avg() first, and revert before step()"
            )
        self._replica.reshard()
        self._further.put_back()
        for bucket, flat in self.snapshot:
            bucket.unpack_(flat)
        self.keep()
        self._watch_again()

    def _watch_again(self) -> None:
        """Tell the round in flight that what was just put in place is no change by others."""
        if round := self._rounds.in_flight:
            round.watch_again()

    @torch.no_grad()
    def distance(self) -> float:
        """||x_i - mean(x)||_2 over the parameters, for the average in place."""
        kept = [each for each in self.snapshot or [] if each[0] in self._rounds.buckets]
        pairs = ((b, b.copy().data, own.data) for b, own in kept)
        return math.sqrt(_square(pairs, self._replica).item())

    def consensus_distance(self) -> float:
        """Root mean square over the ranks of the distance to the average; collective.

        sqrt(1/n * sum over i of ||x_i - mean(x)||^2), summed in float64, with x_i a whole replica.

        Returns:
            The distance in the unit of the parameters, the same on every rank.
        """
        transport = self._rounds.session.transport
        owns = ((b, b.pack(b.wire.new(b.dtype))) for b in self._rounds.buckets)
        pairs = ((bucket, average(bucket, transport).data, own.data) for bucket, own in owns)
        return math.sqrt(transport.all_gather(_square(pairs, self._replica)).mean().item())

    def keep(self) -> None:
        """Accept the average as this rank's values and free the snapshot."""
        self.snapshot, self._own, self._further = None, None, Averaged()


def finite_shares(
    buckets: Sequence[Bucket],
    transport: Transport,
    nonfinite: NonFinitePolicy,
    where: str,
    what: str,
    replica: Replica,
) -> list[list[bool]]:
    """Return which ranks have finite values, and so count, for each bucket; collective.

    Args:
        buckets: the buckets to average, the same on every rank.
        transport: connects the ranks.
        nonfinite: what happens to values that are not finite.
        where: the name of the average in errors.
        what: the name of the values in errors.
        replica: the ranks of a replica, none of which counts unless the values of all are finite.

    Raises:
        NonFiniteError: on every rank, if a rank has values that are not finite and the policy does
            not allow it.
    """
    if not nonfinite.checks:
        return [[True] * transport.world_size for _ in buckets]
    finite = all_finite(buckets)
    if replica.transports:
        lacking = torch.tensor(finite.count(False), device="cpu")
        replica.sum_(lacking)
        finite = [not lacking.item()] * len(finite)
    if not buckets:
        return []
    own = torch.tensor(finite, dtype=torch.uint8, device="cpu")
    gathered = transport.all_gather(own).bool()
    places = (~gathered.all(dim=1)).nonzero().flatten().tolist()
    if places and nonfinite.on_nonfinite == "raise":
        bad = [transport.members[place] for place in places]
        raise nonfinite_error(bad, transport.initial_rank, where, what)
    return gathered.T.tolist()


def _square(pairs: Iterable[tuple[Bucket, Tensor, Tensor]], replica: Replica) -> Tensor:
    """The squared distance of two vectors, given bucket by bucket, over a whole replica."""
    square = on_cpu((a.double() - b).square().sum() / at.copies for at, a, b in pairs).sum()
    replica.sum_(square)
    return square


def average(bucket: Bucket, transport: Transport, shares: Sequence[bool] | None = None) -> Flat:
    """The bucket's average over the ranks, in a new flat vector; collective.

    Half precision is summed in float32.

    Args:
        bucket: the bucket; not changed.
        transport: connects the ranks.
        shares: which ranks' values count, at least one; None means all.
    """
    total = bucket.pack(bucket.wire.new(wide(bucket.dtype)))
    if shares is not None and not shares[transport.rank]:
        total.data.zero_()
    transport.sum_(total.data)
    total.data.div_(transport.world_size if shares is None else sum(shares))
    return total
