"""The ranks that take part, and their connections; what the core knows of a replica."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.gossip.schedule import Intervals, RoundSchedule
from decent_optim_wrapper.topo import Topology
from decent_optim_wrapper.wire.references import References
from decent_optim_wrapper.wire.sum_order import SumOrder


@dataclass(frozen=True)
class Session:
    """The ranks that take part, from one round on until one of them is lost or comes back.

    Args:
        transport: the members and their communicators.
        topology: the topology of the members.
        schedule: the rounds of this rank.
        references: the references that this rank shares with each of its groups.
        sum_orders: the order of the all-reduces of each group.
    """

    transport: Transport
    topology: Topology
    schedule: RoundSchedule
    references: References
    sum_orders: dict[tuple[int, ...], SumOrder] = field(default_factory=dict)

    @classmethod
    def connect(
        cls, transport: Transport, topology: Topology, intervals: Intervals, first_round: int = 0
    ) -> Session:
        """Connect the groups in which this rank mixes; collective.

        Args:
            transport: the members.
            topology: a topology of that many ranks.
            intervals: as in `RoundSchedule`.
            first_round: as in `RoundSchedule`.
        """
        schedule = RoundSchedule(
            phases=topology.schedule(transport.rank),
            rank=transport.rank,
            world_size=transport.world_size,
            intervals=intervals,
            first_round=first_round,
        )
        transport.connect(schedule.groups)
        return cls(
            transport=transport,
            topology=topology,
            schedule=schedule,
            references=References(topology, transport.rank),
        )


class Replica(Protocol):
    """The ranks that share one copy of the model."""

    # Their connections along each dimension; empty if one rank has the whole replica.
    transports: Sequence[Transport]
    # Whether `reshard` must be called.
    may_gather: bool

    def sum_(self, tensor: Tensor) -> None:
        """Sum a small tensor on the CPU in place over them; collective over them."""

    def names_of(self, params: Iterable[Tensor]) -> list[str]:
        """The names of the parameters in the model, the same however it is spread."""

    def reshard(self) -> None:
        """Make modules read the values that were written into their shards."""
