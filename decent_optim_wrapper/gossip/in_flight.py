"""The round in flight between two steps, which is still to be mixed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decent_optim_wrapper.gossip.pacing import Pacing
from decent_optim_wrapper.gossip.round import Round
from decent_optim_wrapper.wire.bucket import fill_copies


class InFlight:
    """The round in flight, if there is one.

    Args:
        rate: the mixing rate of the first round.
    """

    def __init__(self, rate: float) -> None:
        self.round: Round | None = None
        # Steps since its launch.
        self.age = 0
        # The mixing rate with which the last round was launched.
        self.rate = rate
        # Whether the extensions were told of its arrival.
        self._is_announced = False

    def put(self, launched: Round, rate: float, age: int = 0) -> None:
        """Leave a round in flight, launched so many steps ago."""
        self.round, self.rate, self.age = launched, rate, age
        self._is_announced = False

    def take(self) -> Round | None:
        """Return and remove the round in flight."""
        taken, self.round = self.round, None
        return taken

    def announce(self) -> bool:
        """Return whether this is the first call since its launch."""
        announced, self._is_announced = self._is_announced, True
        return not announced

    def count_step(self) -> None:
        """Count a step since the launch."""
        self.age += 1

    def is_due(self, pacing: Pacing) -> bool:
        """Return whether the step that begins now mixes it."""
        return self.round is not None and pacing.is_due(self.age, self.round.has_arrived)

    def abandon(self) -> None:
        """Drop it without waiting for it."""
        if self.round:
            self.round.abandon()
        self.round = None

    def changed(self) -> Sequence[Tensor]:
        """Parameters that must not be changed by hand meanwhile, but have been."""
        return self.round.changed_in_flight() if self.round else ()

    @torch.no_grad()
    def values(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the parameters at its launch, or of the present ones without a round."""
        copies = {param: param.detach().clone() for param in params}
        if self.round:
            for bucket in self.round.unmixed:
                if launched := self.round.snapshot_of(bucket):
                    fill_copies(copies, bucket, launched)
        return [*copies.values()]
