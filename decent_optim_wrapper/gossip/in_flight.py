"""What is in flight between two steps: a round that is still to be mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.gossip.pacing import Pacing
from decent_optim_wrapper.gossip.round import Round
from decent_optim_wrapper.wire.bucket import as_real


class GossipState(NamedTuple):
    """The state of the rounds that a checkpoint needs.

    Args:
        round: number of the next round.
        in_flight: whether the last round is still to be mixed.
        mixing_rate: that of the next round.
        last_rate: that of the last round.
        age: steps since the last round was launched.
    """

    round: int
    in_flight: bool
    mixing_rate: float = 1.0
    last_rate: float = 1.0
    age: int = 1


class InFlight:
    """The round in flight, if there is one, or one that a resumed run still has to launch.

    Loading a state cannot launch it: it must not communicate, and may come before the parameters
    are loaded.

    Args:
        rate: the mixing rate of the first round.
    """

    def __init__(self, rate: float) -> None:
        self.round: Round | None = None
        # Steps since its launch.
        self.age = 0
        # The mixing rate with which the last round was launched.
        self.rate = rate
        # Whether a resumed run still has to launch it.
        self.is_pending = False
        # The parameters with which it was launched before, if they have changed since.
        self.snapshot: dict[Tensor, Tensor] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to be mixed."""
        return self.round is None and not self.is_pending

    def put(self, launched: Round, rate: float, age: int = 0) -> None:
        """Leave a round in flight, launched so many steps ago."""
        self.round, self.rate, self.age = launched, rate, age

    def take(self) -> Round | None:
        """What is in flight here, which then is not any more."""
        taken, self.round = self.round, None
        return taken

    def count_step(self) -> None:
        """Count a step since the launch."""
        self.age += 1

    def is_due(self, pacing: Pacing) -> bool:
        """Whether the step that begins now mixes it."""
        return self.round is not None and pacing.is_due(self.age, self.round.has_arrived)

    def clear_pending(self) -> None:
        """There is nothing to launch again, or it was."""
        self.is_pending = False
        self.snapshot = {}

    def abandon(self) -> None:
        """Drop it without waiting for it."""
        self.is_pending = False
        if self.round:
            self.round.abandon()
        self.round = None

    def restore(self, state: GossipState, snapshot: Mapping[Tensor, Tensor] | None) -> None:
        """Launch the round again that was in flight when a state was saved.

        Args:
            state: the state.
            snapshot: the parameters with which it was launched; None where nothing may change in
                flight, and what is sent is what is mixed into.
        """
        self.is_pending, self.rate = state.in_flight, state.last_rate
        self.age = 1 if snapshot is None else state.age
        self.snapshot = dict(snapshot or {})

    def changed(self) -> Sequence[Tensor]:
        """Parameters that are being sent from their own memory and have changed since."""
        return self.round.changed_in_flight() if self.round else ()

    @torch.no_grad()
    def values(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the parameters as it was launched with them, or as they are without one."""
        copies = {param: self.snapshot.get(param, param).detach().clone() for param in params}
        if self.round is None or self.snapshot:
            return [*copies.values()]
        for bucket in self.round.unmixed:
            if launched := self.round.snapshot_of(bucket):
                for member, part in zip(bucket.members, bucket.parts(launched), strict=True):
                    # A member may have left the optimizer.
                    if member in copies:
                        as_real(copies[member]).copy_(part)
        return [*copies.values()]
