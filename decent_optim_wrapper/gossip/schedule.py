"""The rounds of a rank: phases of the topology, idle rounds and exact averages."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any, NamedTuple

import torch

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.gossip.references import References
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


class Cadence(NamedTuple):
    """When rounds are launched and mixed; the same on all ranks.

    Args:
        gossip_every: rounds from one phase to the next; the rank is idle in between.
        global_avg_every: rounds from one exact average to the next, each in place of what would
            be due; None for none.
        staleness: how many steps after its launch a round is mixed, or is mixed at the latest.
        auto: mix a round in the first step that finds it arrived, and launch the next one then.
            Rounds are counted apart from steps, of which each has one round otherwise.
    """

    gossip_every: int = 1
    global_avg_every: int | None = None
    staleness: int = 1
    auto: bool = False

    @property
    def freezes(self) -> bool:
        """Whether parameters may change between the launch of a round and its mixing."""
        return self.auto or self.staleness > 1


class RoundSchedule(NamedTuple):
    """The rounds of one rank. In idle rounds nothing is exchanged.

    Args:
        phases: the rank's groups, phase by phase.
        rank: this rank.
        world_size: number of ranks.
        cadence: when rounds are launched and mixed.
        first_round: rounds before it are idle: they belong to ranks that were ahead when another
            one was lost.
    """

    phases: tuple[Group, ...]
    rank: int
    world_size: int
    cadence: Cadence = Cadence()
    first_round: int = 0

    def kind(self, round: int) -> Kind:
        """The kind of a round, counted from 0."""
        count = round + 1
        average_every = self.cadence.global_avg_every
        if round < self.first_round:
            return Kind.IDLE
        if average_every is not None and count % average_every == 0:
            return Kind.AVERAGE
        return Kind.IDLE if count % self.cadence.gossip_every else Kind.GOSSIP

    def plan(self, round: int, mixing_rate: float) -> RoundPlan:
        """What this rank does in a round; the mixing rate of an exact average is 1."""
        match self.kind(round):
            case Kind.IDLE:
                return self.idle()
            case Kind.AVERAGE:
                return RoundPlan(Kind.AVERAGE, self._everyone, 1.0)
            case Kind.GOSSIP:
                phase = round // self.cadence.gossip_every % len(self.phases)
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
        if self.cadence.global_avg_every is None:
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
        cadence: Cadence,
        first_round: int = 0,
        devices: Collection[torch.device] = (),
    ) -> Session:
        """Connect the groups in which this rank mixes; collective.

        Args:
            transport: the members.
            topology: of as many ranks.
            cadence: as in `RoundSchedule`.
            first_round: as in `RoundSchedule`.
            devices: those of the tensors to exchange.
        """
        schedule = RoundSchedule(
            phases=topology.schedule(transport.rank),
            rank=transport.rank,
            world_size=transport.world_size,
            cadence=cadence,
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
