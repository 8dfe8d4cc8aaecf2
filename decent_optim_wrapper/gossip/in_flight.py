"""The round in flight between two steps, which is still to be mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.gossip.pacing import Pacing
from decent_optim_wrapper.gossip.round import Round
from decent_optim_wrapper.wire.bucket import fill_copies


class GossipState(NamedTuple):
    """The state of the rounds that a checkpoint needs.

    Args:
        round: number of the next round.
        in_flight: whether the last round is still to be mixed.
        mixing_rate: the mixing rate of the next round.
        last_rate: the mixing rate of the last round.
        age: number of steps since the launch of the last round.
    """

    round: int
    in_flight: bool
    mixing_rate: float
    last_rate: float
    age: int


class InFlight:
    """The round in flight, if there is one, or a round that a resumed run must launch again.

    Loading a state cannot launch it, since it must not communicate and may come before the
    parameters are loaded.

    Args:
        rate: the mixing rate of the first round.
    """

    def __init__(self, rate: float) -> None:
        self.round: Round | None = None
        # Steps since its launch.
        self.age = 0
        # The mixing rate with which the last round was launched.
        self.rate = rate
        # Whether a resumed run must still launch it.
        self.is_pending = False
        # The parameters at its first launch, if they have changed since.
        self.snapshot: dict[Tensor, Tensor] = {}
        # Whether the extensions were told of its arrival.
        self._is_announced = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to be mixed."""
        return self.round is None and not self.is_pending

    def put(self, launched: Round, rate: float, age: int = 0) -> None:
        """Leave a round in flight, launched so many steps ago."""
        self.round, self.rate, self.age = launched, rate, age
        self._is_announced = False

    def take(self) -> Round | None:
        """Return and remove the round in flight."""
        taken, self.round = self.round, None
        return taken

    def announce(self) -> bool:
        """Whether this is the first call since its launch."""
        announced, self._is_announced = self._is_announced, True
        return not announced

    def count_step(self) -> None:
        """Count a step since the launch."""
        self.age += 1

    def is_due(self, pacing: Pacing) -> bool:
        """Whether the step that begins now mixes it."""
        return self.round is not None and pacing.is_due(self.age, self.round.has_arrived)

    def clear_pending(self) -> None:
        """Note that no round is to be launched again."""
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
            snapshot: the parameters at its launch; None if parameters do not change while a round
                is in flight.
        """
        self.is_pending, self.rate = state.in_flight, state.last_rate
        self.age = 1 if snapshot is None else state.age
        self.snapshot = dict(snapshot or {})

    def changed(self) -> Sequence[Tensor]:
        """Parameters that must not be changed by hand meanwhile, but have been."""
        return self.round.changed_in_flight() if self.round else ()

    @torch.no_grad()
    def values(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the parameters at its launch, or of the present ones without a round."""
        copies = {param: self.snapshot.get(param, param).detach().clone() for param in params}
        if self.round is None or self.snapshot:
            return [*copies.values()]
        for bucket in self.round.unmixed:
            if launched := self.round.snapshot_of(bucket):
                fill_copies(copies, bucket, launched)
        return [*copies.values()]
