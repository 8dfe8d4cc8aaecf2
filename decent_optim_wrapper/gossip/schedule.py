"""The rounds of a rank: phases of the topology, idle rounds and exact averages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any, NamedTuple

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.topo import Group, Topology


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


class RoundSchedule(NamedTuple):
    """The rounds of one rank: one for every step. In idle rounds nothing is exchanged.

    Args:
        phases: the rank's groups, phase by phase.
        rank: this rank.
        world_size: number of ranks.
        gossip_every: steps from one phase to the next; the rank is idle in between.
        global_avg_every: steps from one exact average to the next, each in place of what would
            be due; None for none.
        first_round: rounds before it are idle: they belong to ranks that were ahead when another
            one was lost.
    """

    phases: tuple[Group, ...]
    rank: int
    world_size: int
    gossip_every: int = 1
    global_avg_every: int | None = None
    first_round: int = 0

    def kind(self, round: int) -> Kind:
        """What is due at the end of step `round`, counted from 0."""
        steps = round + 1
        if round < self.first_round:
            return Kind.IDLE
        if self.global_avg_every is not None and steps % self.global_avg_every == 0:
            return Kind.AVERAGE
        return Kind.IDLE if steps % self.gossip_every else Kind.GOSSIP

    def plan(self, round: int, mixing_rate: float) -> RoundPlan:
        """What is due at the end of step `round`; the mixing rate of an exact average is 1."""
        match self.kind(round):
            case Kind.IDLE:
                return self.idle()
            case Kind.AVERAGE:
                return RoundPlan(Kind.AVERAGE, self._everyone, 1.0)
            case Kind.GOSSIP:
                phase = round // self.gossip_every % len(self.phases)
                return RoundPlan(Kind.GOSSIP, self.phases[phase], mixing_rate)

    def next_plan(self, round: int, mixing_rate: float) -> RoundPlan:
        """What is due at the end of step `round`, or of the next step that is not idle."""
        while self.kind(round) is Kind.IDLE:
            round += 1
        return self.plan(round, mixing_rate)

    def idle(self) -> RoundPlan:
        """A round in which this rank mixes with no other."""
        return RoundPlan(Kind.IDLE, Group([self.rank]), 1.0)

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups in which this rank ever mixes."""
        if self.global_avg_every is None:
            return self.phases
        return (*self.phases, self._everyone)

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
    """

    transport: Transport
    topology: Topology
    schedule: RoundSchedule

    @classmethod
    def connect(
        cls,
        transport: Transport,
        topology: Topology,
        gossip_every: int = 1,
        global_avg_every: int | None = None,
        first_round: int = 0,
    ) -> Session:
        """Connect the groups in which this rank mixes; collective.

        Args:
            transport: the members.
            topology: of as many ranks.
            gossip_every: as in `RoundSchedule`.
            global_avg_every: as in `RoundSchedule`.
            first_round: as in `RoundSchedule`.
        """
        schedule = RoundSchedule(
            phases=topology.schedule(transport.rank),
            rank=transport.rank,
            world_size=transport.world_size,
            gossip_every=gossip_every,
            global_avg_every=global_avg_every,
            first_round=first_round,
        )
        transport.connect(schedule.groups)
        return cls(transport=transport, topology=topology, schedule=schedule)


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
