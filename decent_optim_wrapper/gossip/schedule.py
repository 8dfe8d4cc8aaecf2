"""Which rounds there are, with whom this rank mixes in each, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Annotated, ClassVar, NamedTuple

from decent_optim_wrapper.checks import CheckedFields, whole
from decent_optim_wrapper.topo import Group

# The longest flight of a pacing that never waits for a round.
_LONGEST_FLIGHT = 1000


class RoundKind(Enum):
    """What a rank does in a round."""

    IDLE = "idle"
    GOSSIP = "gossip"
    AVERAGE = "average"


class RoundPlan(NamedTuple):
    """What one rank does in one round.

    Args:
        kind: idle, gossip, or an exact average.
        group: the ranks that mix, including this one.
        mixing_rate: how far this rank moves towards the mixed parameters, in (0, 1].
    """

    kind: RoundKind
    group: Group
    mixing_rate: float


class Intervals(NamedTuple):
    """How often rounds are launched; the same on all ranks.

    Args:
        gossip_every: rounds from one phase to the next; the rank is idle in between.
        global_avg_every: rounds from one exact average to the next, each in place of what would
            be due; None for none.
    """

    gossip_every: int
    global_avg_every: int | None


class RoundSchedule(NamedTuple):
    """The rounds of one rank. In idle rounds nothing is exchanged.

    Args:
        phases: the rank's groups, phase by phase.
        rank: this rank.
        world_size: number of ranks.
        intervals: how often rounds are launched.
        first_round: rounds before it are idle. After the loss of a rank, the others continue with
            the latest round that any of them has reached.
    """

    phases: tuple[Group, ...]
    rank: int
    world_size: int
    intervals: Intervals
    first_round: int

    def kind(self, round: int) -> RoundKind:
        """The kind of a round, counted from 0."""
        count = round + 1
        average_every = self.intervals.global_avg_every
        if round < self.first_round:
            return RoundKind.IDLE
        if average_every is not None and count % average_every == 0:
            return RoundKind.AVERAGE
        return RoundKind.IDLE if count % self.intervals.gossip_every else RoundKind.GOSSIP

    def plan(self, round: int, mixing_rate: float) -> RoundPlan:
        """What this rank does in a round; the mixing rate of an exact average is 1."""
        kind = self.kind(round)
        if kind is RoundKind.GOSSIP:
            phase = round // self.intervals.gossip_every % len(self.phases)
            return RoundPlan(kind, self.phases[phase], mixing_rate)
        group = self._everyone if kind is RoundKind.AVERAGE else Group([self.rank])
        return RoundPlan(kind, group, 1.0)

    def next_plan(self, round: int, mixing_rate: float) -> RoundPlan:
        """What this rank does in a round, or in the next one that is not idle.

        Before the first round it mixes with no other rank.
        """
        while self.kind(round) is RoundKind.IDLE and round >= self.first_round:
            round += 1
        return self.plan(round, mixing_rate)

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups in which this rank ever mixes."""
        if self.intervals.global_avg_every is None:
            return self.phases
        return (*self.phases, self._everyone)

    def plan_each_group(self, mixing_rate: float) -> list[RoundPlan]:
        """A round with each group in which this rank ever mixes with others."""
        distinct = {group.ranks: group for group in self.groups if group.size > 1}
        return [RoundPlan(RoundKind.GOSSIP, group, mixing_rate) for group in distinct.values()]

    @property
    def _everyone(self) -> Group:
        return Group(range(self.world_size))


class Pacing:
    """Says when a round is mixed; the same on all ranks.

    This class mixes a round at the start of the step after its launch. One round is in flight at a
    time: the next one is launched in the step that mixes it, or later.

    Attributes:
        synchronous: whether all ranks mix a round in the same step. Otherwise rounds are counted
            separately from steps, a thread waits for them, and ranks may make different numbers of
            steps.
        mixes_early: whether a bucket is mixed between two steps, before a forward pass reads its
            parameters. A step then mixes only the buckets that no forward pass has read.
    """

    synchronous: ClassVar[bool] = True
    mixes_early: ClassVar[bool] = False

    def mixes_in_step(self, round: int) -> bool:
        """Return whether the step that launches this round also mixes it, without overlap."""
        return False

    def is_due(self, age: int, has_arrived: Callable[[], bool]) -> bool:
        """Return whether the step that begins now mixes the round in flight.

        Args:
            age: number of steps since its launch, at least 1.
            has_arrived: function that returns whether the round has arrived as a whole. If the
                pacing is synchronous, it returns False.
        """
        return True

    @property
    def longest_flight(self) -> int:
        """Number of steps from the launch of a round to the one that waits for it at the latest."""
        ages = range(1, _LONGEST_FLIGHT)
        return next((age for age in ages if self.is_due(age, lambda: False)), _LONGEST_FLIGHT)

    @cached_property
    def needs_snapshot(self) -> bool:
        """True if local updates may change the parameters while a round is in flight.

        A copy of the parameters at the launch is then kept, and only the change by the mixing is
        added. Otherwise the mean over the ranks would move.
        """
        return not self.synchronous or self.longest_flight > 1


@dataclass(frozen=True)
class Delayed(Pacing):
    """``x <- W x - u(x)``: a round is transferred during one forward and backward pass."""


@dataclass(frozen=True)
class WithinStep(Pacing):
    """``x <- W (x - u(x))``: a step waits for the round that it launches."""

    def mixes_in_step(self, round: int) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True)
class BeforeForward(Pacing):
    """``x <- W (x - u(x))``: the forward pass waits for each bucket just before it reads it.

    A round is transferred during the rest of the backward pass and the forward pass, and gradients
    are computed at mixed parameters.
    """

    mixes_early: ClassVar[bool] = True


@dataclass(frozen=True)
class Late(CheckedFields, Pacing):
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

    steps: Annotated[int, whole(2, "a number of steps", " steps")]

    def is_due(self, age: int, has_arrived: Callable[[], bool]) -> bool:
        """Return whether `steps` steps were made."""
        return age >= self.steps


@dataclass(frozen=True)
class AsItArrives(CheckedFields, Pacing):
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
    max_steps: Annotated[int, whole(1, "a number of steps", " step")] = 16

    def is_due(self, age: int, has_arrived: Callable[[], bool]) -> bool:
        """Return whether the round has arrived, or must not wait any longer."""
        return has_arrived() or age >= self.max_steps
