"""Which rounds there are: of which kind, and with whom this rank mixes in each."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from decent_optim_wrapper.topo import Group


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
        first_round: rounds before it are idle: they belong to ranks that were ahead when another
            one was lost.
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
        match self.kind(round):
            case RoundKind.IDLE:
                return self.idle()
            case RoundKind.AVERAGE:
                return RoundPlan(RoundKind.AVERAGE, self._everyone, 1.0)
            case RoundKind.GOSSIP:
                phase = round // self.intervals.gossip_every % len(self.phases)
                return RoundPlan(RoundKind.GOSSIP, self.phases[phase], mixing_rate)

    def next_plan(self, round: int, mixing_rate: float) -> RoundPlan:
        """What this rank does in a round, or in the next one that is not idle."""
        while self.kind(round) is RoundKind.IDLE:
            round += 1
        return self.plan(round, mixing_rate)

    def idle(self) -> RoundPlan:
        """A round in which this rank mixes with no other."""
        return RoundPlan(RoundKind.IDLE, Group([self.rank]), 1.0)

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
