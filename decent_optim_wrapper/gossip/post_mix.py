"""What follows the mixing: the outer optimizer's step, and the average of the base's state."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.gossip.bucket import Bucket
from decent_optim_wrapper.gossip.optimizer_state import StateAverage
from decent_optim_wrapper.gossip.outer import Outer
from decent_optim_wrapper.gossip.schedule import Kind
from decent_optim_wrapper.gossip.storage import Flat


class PostMix:
    """Runs whenever parameters are replaced by mixed ones.

    Args:
        outer: the outer optimizer, if there is one.
        state_average: averages the base's state at exact averages; None keeps the state.
        heals: whether mixing replaces parameters that are not finite.
    """

    def __init__(
        self, outer: Outer | None, state_average: StateAverage | None, heals: bool
    ) -> None:
        self.outer = outer
        self._state_average = state_average
        self._heals = heals

    @property
    def collective(self) -> bool:
        """Whether keeping an average takes all ranks."""
        return self._state_average is not None

    def steps(self, kind: Kind) -> bool:
        """Whether there is an outer step after a round of this kind."""
        return self.outer is not None and self.outer.kind is kind

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """Run at the beginning of a step."""
        if self.outer:
            self.outer.anchor(_members(buckets))

    def arrive(self, kind: Kind, buckets: Sequence[Bucket], transport: Transport) -> None:
        """Run when a round has arrived, before the mixing; collective for exact averages."""
        if kind is Kind.AVERAGE and self._state_average:
            self._state_average.apply(_members(buckets), transport)

    def mix(self, kind: Kind, bucket: Bucket, drift: Flat | None = None) -> None:
        """Run when a posted bucket has been mixed, also in a group of one rank.

        Args:
            kind: of the round.
            bucket: its members are changed in place.
            drift: how far they had moved since the round was launched; None if not at all. The
                outer step leaves it out.
        """
        if self.outer is None:
            return
        if self._heals and not bucket.is_finite():
            # They must not get into its state either, where no mixing replaces them.
            self.outer.forget(bucket.members)
        else:
            if drift is not None:
                bucket.add_(drift, -1.0)
            self.outer.step(bucket.members, kind)
            if drift is not None:
                bucket.add_(drift, 1.0)

    def keep(self, buckets: Sequence[Bucket], transport: Transport) -> None:
        """Run when the world average has become the ranks' own parameters; collective."""
        if self.outer:
            self.outer.rebase()
        if self._state_average:
            self._state_average.apply(_members(buckets), transport)


def _members(buckets: Sequence[Bucket]) -> list[Tensor]:
    return [member for bucket in buckets for member in bucket.members]
