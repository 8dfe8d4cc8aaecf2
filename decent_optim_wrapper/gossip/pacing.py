"""The interface of pacings, which say when a round is mixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from decent_optim_wrapper.checks import check_fields, whole

# The longest flight of a pacing that would wait for no round.
_LONGEST_FLIGHT = 1000


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

    @property
    def longest_flight(self) -> int:
        """Number of steps from the launch of a round to the one that waits for it at the latest."""
        ages = range(1, _LONGEST_FLIGHT)
        return next((age for age in ages if self.is_due(age, lambda: False)), _LONGEST_FLIGHT)


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

    A round may be transferred during `steps` forward and backward passes. With s_i the parameters
    of rank i at the launch and γ the mixing rate, ``x_i <- x_i + γ Σ_j W_ij (s_j - s_i)``, so the
    mean over the ranks does not move. It costs a copy of the parameters.

    Args:
        steps: number of steps from the launch of a round to its mixing, at least 2 and at most
            `gossip_every` of the schedule. With `global_avg_every`, at most the greatest common
            divisor of both.

    Raises:
        TypeError: `steps` is not a whole number.
        ValueError: `steps` is below 2. ``overlap=True`` mixes after one step.
    """

    needs_snapshot: ClassVar[bool] = True
    steps: Annotated[int, whole(2, "a number of steps", " steps")]

    def __post_init__(self) -> None:
        check_fields(self)

    def is_due(self, age: int, has_arrived: Callable[[], bool]) -> bool:
        """Return whether `steps` steps were made."""
        return age >= self.steps


@dataclass(frozen=True)
class AsItArrives(Pacing):
    """Like `Late`, but mixes in the first step that finds the round arrived.

    That step then launches the next round. No step waits for the network or for a slower rank
    before `max_steps` is reached. Rounds are counted separately from steps, so `gossip_every` of
    the schedule stays 1, and its `global_avg_every` counts rounds.

    Args:
        max_steps: number of steps after the launch at which a step waits for the round.

    Raises:
        TypeError: `max_steps` is not a whole number.
        ValueError: `max_steps` is below 1.
    """

    synchronous: ClassVar[bool] = False
    needs_snapshot: ClassVar[bool] = True
    max_steps: Annotated[int, whole(1, "a number of steps", " step")] = 16

    def __post_init__(self) -> None:
        check_fields(self)

    def is_due(self, age: int, has_arrived: Callable[[], bool]) -> bool:
        """Return whether the round has arrived, or must not wait any longer."""
        return has_arrived() or age >= self.max_steps
