"""When rounds are launched, of which kind and with whom, and when they are mixed (the pacing)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.topo import Group, Topology
from decent_optim_wrapper.wire.references import References


class Kind(Enum):
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

    kind: Kind
    group: Group
    mixing_rate: float


class Intervals(NamedTuple):
    """How often rounds are launched; the same on all ranks.

    Args:
        gossip_every: rounds from one phase to the next; the rank is idle in between.
        global_avg_every: rounds from one exact average to the next, each in place of what would
            be due; None for none.
    """

    gossip_every: int = 1
    global_avg_every: int | None = None


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


class RoundSchedule(NamedTuple):
    """The rounds of one rank. In idle rounds nothing is exchanged.

    Args:
        phases: the rank's groups, phase by phase.
        rank: this rank.
        world_size: number of ranks.
        intervals: how often rounds are launched.
        first_round: rounds before it are idle: they belong to ranks that were ahead when another
            one was lost.
    """

    phases: tuple[Group, ...]
    rank: int
    world_size: int
    intervals: Intervals = Intervals()
    first_round: int = 0

    def kind(self, round: int) -> Kind:
        """The kind of a round, counted from 0."""
        count = round + 1
        average_every = self.intervals.global_avg_every
        if round < self.first_round:
            return Kind.IDLE
        if average_every is not None and count % average_every == 0:
            return Kind.AVERAGE
        return Kind.IDLE if count % self.intervals.gossip_every else Kind.GOSSIP

    def plan(self, round: int, mixing_rate: float) -> RoundPlan:
        """What this rank does in a round; the mixing rate of an exact average is 1."""
        match self.kind(round):
            case Kind.IDLE:
                return self.idle()
            case Kind.AVERAGE:
                return RoundPlan(Kind.AVERAGE, self._everyone, 1.0)
            case Kind.GOSSIP:
                phase = round // self.intervals.gossip_every % len(self.phases)
                return RoundPlan(Kind.GOSSIP, self.phases[phase], mixing_rate)

    def next_plan(self, round: int, mixing_rate: float) -> RoundPlan:
        """What this rank does in a round, or in the next one that is not idle."""
        while self.kind(round) is Kind.IDLE:
            round += 1
        return self.plan(round, mixing_rate)

    def idle(self) -> RoundPlan:
        """A round in which this rank mixes with no other."""
        return RoundPlan(Kind.IDLE, Group([self.rank]), 1.0)

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups in which this rank ever mixes."""
        if self.intervals.global_avg_every is None:
            return self.phases
        return (*self.phases, self._everyone)

    def plan_each_group(self, mixing_rate: float) -> list[RoundPlan]:
        """A round with each group in which this rank ever mixes with others."""
        distinct = {group.ranks: group for group in self.groups if group.size > 1}
        return [RoundPlan(Kind.GOSSIP, group, mixing_rate) for group in distinct.values()]

    @property
    def _everyone(self) -> Group:
        return Group(range(self.world_size))


@dataclass(frozen=True)
class Session:
    """The ranks that take part, from one round on until one of them is lost or comes back.

    Args:
        transport: the members and their communicators.
        topology: of the members.
        schedule: the rounds of this rank.
        references: what this rank shares with each of its groups.
    """

    transport: Transport
    topology: Topology
    schedule: RoundSchedule
    references: References

    @classmethod
    def connect(
        cls,
        transport: Transport,
        topology: Topology,
        intervals: Intervals,
        first_round: int = 0,
        devices: Collection[torch.device] = (),
    ) -> Session:
        """Connect the groups in which this rank mixes; collective.

        Args:
            transport: the members.
            topology: of as many ranks.
            intervals: as in `RoundSchedule`.
            first_round: as in `RoundSchedule`.
            devices: those of the tensors to exchange.
        """
        schedule = RoundSchedule(
            phases=topology.schedule(transport.rank),
            rank=transport.rank,
            world_size=transport.world_size,
            intervals=intervals,
            first_round=first_round,
        )
        transport.connect(schedule.groups, devices)
        return cls(
            transport=transport,
            topology=topology,
            schedule=schedule,
            references=References.of(topology, transport.rank),
        )


def check_mixing_rate(rate: Any) -> float:
    """Return the rate as a float, if it lies in (0, 1].

    Raises:
        TypeError: not a number.
        ValueError: out of range.
    """
    if not isinstance(rate, Real) or isinstance(rate, bool):
        raise TypeError(f"mixing_rate expects a number, got {rate!r}")
    number = float(rate)
    if not 0 < number <= 1:
        raise ValueError(f"mixing_rate must be above 0 and at most 1, got {rate}")
    return number
