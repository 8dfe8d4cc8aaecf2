"""The interface of pacings, which say when a round is mixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar


class Pacing:
    """Says when a round is mixed; the same on all ranks.

    This class mixes a round at the start of the step after its launch. One round is in flight at a
    time: the next one is launched in the step that mixes it, or later.

    Attributes:
        synchronous: whether all ranks mix a round in the same step. Otherwise rounds are counted
            separately from steps, a thread waits for them, and ranks may make different numbers of
            steps.
        needs_snapshot: whether local updates may change the parameters between the launch of a
            round and its mixing. A copy of the parameters at the launch is then kept, and only the
            change by the mixing is added.
        mixes_early: whether a bucket is mixed between two steps, before a forward pass reads its
            parameters. A step then mixes only the buckets that no forward pass has read.
    """

    synchronous: ClassVar[bool] = True
    needs_snapshot: ClassVar[bool] = False
    mixes_early: ClassVar[bool] = False

    def mixes_in_step(self, round: int) -> bool:
        """Return whether the step that launches this round also mixes it, without overlap."""
        return False

    def is_due(self, age: int, has_arrived: Callable[[], bool]) -> bool:
        """Return whether the step that begins now mixes the round in flight.

        Args:
            age: number of steps since its launch, at least 1.
            has_arrived: function that returns whether the round has arrived as a whole. It is
                meaningful only if the pacing is not synchronous.
        """
        return True


@dataclass(frozen=True)
class Delayed(Pacing):
    """``x <- W x - u(x)``: a round is transferred during one forward and backward pass."""


@dataclass(frozen=True)
class WithinStep(Pacing):
    """``x <- W (x - u(x))``: a step waits for the round that it launches."""

    def mixes_in_step(self, round: int) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class BeforeForward(Pacing):
    """``x <- W (x - u(x))``: the forward pass waits for each bucket just before it reads it.

    A round is transferred during the rest of the backward pass and the forward pass, and gradients
    are computed at mixed parameters.
    """

    mixes_early: ClassVar[bool] = True


@dataclass(frozen=True)
class Late(Pacing):
    """``x <- x + (W s - s) - u(x)``, with s the parameters at the launch, some steps ago.

    Args:
        steps: number of steps from the launch of a round to its mixing, above 1.
    """

    needs_snapshot: ClassVar[bool] = True
    steps: int

    def is_due(self, age: int, has_arrived: Callable[[], bool]) -> bool:
        """Return whether `steps` steps were made."""
        return age >= self.steps


@dataclass(frozen=True)
class AsItArrives(Pacing):
    """Like `Late`, but mixes in the first step that finds the round arrived.

    Args:
        max_steps: number of steps after the launch at which a step waits for the round.
    """

    synchronous: ClassVar[bool] = False
    needs_snapshot: ClassVar[bool] = True
    max_steps: int

    def is_due(self, age: int, has_arrived: Callable[[], bool]) -> bool:
        """Return whether the round has arrived, or must not wait any longer."""
        return has_arrived() or age >= self.max_steps
