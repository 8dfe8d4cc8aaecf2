"""When a round is mixed: the seam between rounds and steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar


class Pacing:
    """Mixes a round at the start of the step after the one that launched it; the same on all ranks.

    One round is in flight at a time: the next one is launched in the step that mixes it, or later.

    Attributes:
        synchronous: whether all ranks mix a round in the same step. Otherwise rounds are counted
            apart from steps, a thread waits for them, and ranks may make different numbers of
            steps.
        needs_snapshot: whether local updates may change the parameters between the launch of a
            round and its mixing. The values of the launch are then kept, in one copy of the
            parameters, and what is mixed is their change.
    """

    synchronous: ClassVar[bool] = True
    needs_snapshot: ClassVar[bool] = False

    def mixes_in_step(self, round: int) -> bool:
        """Whether the step that launches this round also mixes it; nothing then overlaps."""
        return False

    def is_due(self, age: int, has_arrived: Callable[[], bool]) -> bool:
        """Whether the step that begins now mixes the round in flight.

        Args:
            age: steps since it was launched, at least 1.
            has_arrived: returns whether nothing is left to wait for; only known to a pacing that is
                not synchronous.
        """
        return True


@dataclass(frozen=True)
class Delayed(Pacing):
    """``x <- W x - u(x)``: a round travels under one forward and backward pass."""


@dataclass(frozen=True)
class WithinStep(Pacing):
    """``x <- W (x - u(x))``: a step waits for the round that it has launched."""

    def mixes_in_step(self, round: int) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class Late(Pacing):
    """``x <- x + (W s - s) - u(x)``, with s the parameters some steps ago.

    Args:
        steps: from the launch of a round to its mixing, above 1.
    """

    needs_snapshot: ClassVar[bool] = True
    steps: int

    def is_due(self, age: int, has_arrived: Callable[[], bool]) -> bool:
        """Whether so many steps were made."""
        return age >= self.steps


@dataclass(frozen=True)
class AsItArrives(Pacing):
    """As `Late`, in the first step that finds the round arrived; no step waits before the last.

    Args:
        max_steps: the step after the launch that waits for the round.
    """

    synchronous: ClassVar[bool] = False
    needs_snapshot: ClassVar[bool] = True
    max_steps: int

    def is_due(self, age: int, has_arrived: Callable[[], bool]) -> bool:
        """Whether the round has arrived, or is too old."""
        return has_arrived() or age >= self.max_steps
