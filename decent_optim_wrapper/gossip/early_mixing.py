"""Mixes a round between two steps, bucket by bucket, when a forward pass needs them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from weakref import WeakKeyDictionary

from torch import Tensor

from decent_optim_wrapper.errors import NonFiniteError
from decent_optim_wrapper.gossip.local_update import LocalUpdate
from decent_optim_wrapper.gossip.round import Round, RoundState
from decent_optim_wrapper.gossip.rounds import Rounds
from decent_optim_wrapper.gossip.schedule import RoundKind
from decent_optim_wrapper.wire.bucket import Bucket, fill_copies, members_of
from decent_optim_wrapper.wire.storage import Flat


class EarlyMixing:
    """Mixes buckets before their whole round has arrived, and restores them if it does not arrive.

    Args:
        rounds: the rounds. This class has no effect if their pacing mixes in steps only.
        local_update: checks the parameters.
    """

    def __init__(self, rounds: Rounds, local_update: LocalUpdate) -> None:
        self._rounds, self._local_update = rounds, local_update
        self.is_on = rounds.policy.pacing.mixes_early
        # The values of buckets before they were mixed, until their whole round is mixed.
        self._before: dict[Bucket, Flat] = {}
        # Memory for these values, if the sent copy cannot be used.
        self._copies: WeakKeyDictionary[Bucket, Flat] = WeakKeyDictionary()

    def mix_wanted(self, round: Round, wanted: Sequence[Bucket]) -> None:
        """Mix some buckets of the round in flight.

        Once a bucket of the round is mixed, it looks for parameters that were changed in flight.
        Before, the caller looks for them. The next step checks the rest.

        Args:
            round: the round in flight.
            wanted: a result of `wanted`.

        Raises:
            RuntimeError: a parameter was changed by hand while it was being sent.
            PeerError: a bucket did not arrive.
            CallOrderError: a peer is in another method or round.
            NonFiniteError: the round must not be mixed. It is dropped, and its mixed buckets are
                restored.
        """
        rounds = self._rounds
        if round.state is RoundState.MIXING and round.is_outdated:
            self._local_update.check(rounds)
        # Neither the state of extensions nor what they attach to a bucket can be restored.
        whole = any(each.name or each.sends for each in rounds.extensions.all)
        if whole or len(wanted) == len(round.unmixed) or round.plan.kind is RoundKind.AVERAGE:
            self._finish(round, whole)
            return
        rounds.check_on_gpu()
        for bucket in wanted:
            round.receive(bucket)
            if round.flags.refused:
                self._finish(round, whole)
                return
            rounds.notify_arrived(round)
            self._mix_reversibly(round, bucket, round.mix)

    def wanted(self, round: Round, params: Iterable[Tensor] | None) -> Sequence[Bucket]:
        """The buckets of these parameters, or all, that are still to be mixed, in sending order."""
        if params is None:
            return [*round.unmixed]
        asked = {*map(self._rounds.bucket_of.get, map(id, params))}
        return [*filter(asked.__contains__, round.unmixed)]

    def _mix_reversibly(self, round: Round, bucket: Bucket, mix: Callable[[Bucket], None]) -> None:
        if (before := round.packed_of(bucket)) is None:
            if bucket not in self._copies:
                self._copies[bucket] = bucket.on_device.new(bucket.dtype)
            before = bucket.pack(self._copies[bucket])
        self._before[bucket] = before
        mix(bucket)

    def _finish(self, round: Round, whole: bool) -> None:
        """Receive and mix the rest of the round.

        Args:
            round: the round in flight.
            whole: whether no rank mixes a part of it first.
        """
        try:
            self._rounds.finish()
        except NonFiniteError:
            # Other ranks may have mixed these buckets before, and must keep the same references.
            for bucket in [b for b in round.unmixed if not (whole or round.refuses(b))]:
                self._mix_reversibly(round, bucket, round.mix_tensors)
            self.roll_back()
            raise
        self.commit()

    def commit(self) -> None:
        """Keep the mixed buckets: the round is complete, or its parameters are replaced."""
        self._before.clear()

    def restored(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, or copies with their old values of those that `roll_back` would restore."""
        copies = {member: member.detach().clone() for member in members_of(self._before)}
        for bucket, flat in self._before.items():
            fill_copies(copies, bucket, flat)
        return [copies.get(tensor, tensor) for tensor in tensors]

    def roll_back(self, buckets: Collection[Bucket] | None = None) -> None:
        """Restore the buckets that were mixed of a round that has not arrived as a whole.

        Args:
            buckets: the buckets to restore; None for all.
        """
        for bucket in [*self._before]:
            if buckets is None or bucket in buckets:
                bucket.unpack_(self._before.pop(bucket))
