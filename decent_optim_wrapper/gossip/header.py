"""The header of a round: what a rank is about to do, and how the others compare it."""

from __future__ import annotations

from enum import IntEnum, unique
from typing import NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.errors import CallOrderError


@unique
class CollectiveCall(IntEnum):
    """The collective methods."""

    STEP = 1
    GLOBAL_AVG = 2
    CONSENSUS_DISTANCE = 3
    REGROUP = 4
    KEEP_AVERAGE = 5
    SYNCHRONIZE = 6
    ALL_GATHER = 7
    DROP_EXTENSION = 8
    LOADED = 9

    def __str__(self) -> str:
        return _TEXTS.get(self, f"{self.name.lower()}()")


_TEXTS = {
    CollectiveCall.ALL_GATHER: "all_gather() or report()",
    CollectiveCall.REGROUP: "add_param_group() or rebuild_buckets()",
    CollectiveCall.DROP_EXTENSION: "drop_extension()",
    CollectiveCall.KEEP_AVERAGE: "step() after an average",
    CollectiveCall.LOADED: "step() after load_state_dict()",
}


def text_of_call(number: float) -> str:
    """The method with a number that a rank has sent; a text for any number."""
    return {float(call): str(call) for call in CollectiveCall}.get(number, "something unknown")


class RoundHeader(NamedTuple):
    """The header of a round, which says what a rank is about to do.

    All numbers are exact in float64, such as counts below 2**53. A received header may contain any.

    Args:
        call: the method that the rank is in.
        round: the number of the round that the method launches, or of the next one.
        mixing_rate: the rate of the round; if two ranks had different ones, their mean would drift.
        coded_rounds: the counter of the group's references; see `GroupReference`.
        sums_first: number of buckets that the group sums in the order of a backward pass.
        summed: the number that this rank proposes for a later round; see `SumOrder`.
    """

    call: CollectiveCall
    round: int
    mixing_rate: float
    coded_rounds: int = 0
    sums_first: int = 0
    summed: int = 0

    def encode(self) -> Tensor:
        """Return the message that `decode` reads."""
        return torch.tensor(self, dtype=torch.float64, device="cpu")

    @classmethod
    def decode(cls, message: Tensor) -> RoundHeader:
        """Return the header in a message."""
        return cls(*message.tolist())

    def check(self, other: RoundHeader, rank: int, own_rank: int, same_rate: bool) -> None:
        """Compare with the header of another rank.

        Args:
            other: the header of the other rank.
            rank: the other rank.
            own_rank: this rank.
            same_rate: whether the mixing rates must be the same. Ranks at different steps may have
                different rates; their group mixes with the lowest one.

        Raises:
            CallOrderError: the other rank is in another method or round, or has another rate or
                other references.
        """
        # Each rank may have loaded its own round.
        any_round = not same_rate and self.call is CollectiveCall.LOADED
        if other.call != self.call or (other.round != self.round and not any_round):
            expected = f"in {self.call} at round {self.round}"
            found = f"is in {text_of_call(other.call)} at round {other.round:.0f}"
            remedy = (
                "call the same methods in the same order on every rank, and step() equally often "
                "(torch.distributed.algorithms.Join for uneven data)"
            )
            if CollectiveCall.LOADED in (other.call, self.call):
                remedy = "load states of the same step on all ranks, or on none"
            remedy += ". Is one of the calls inside an `if rank == 0` branch?"
        elif (rate := other.mixing_rate) != self.mixing_rate and (same_rate or not 0 < rate <= 1):
            expected = f"to mix round {self.round} with mixing_rate={self.mixing_rate}"
            found = f"has {rate}"
            remedy = "set the same rate on every rank before the same step()"
        elif other.coded_rounds != self.coded_rounds:
            expected = f"to have counted {self.coded_rounds} rounds of its references"
            found = f"has counted {other.coded_rounds:.0f}, and would decode wrong values"
            remedy = "load checkpoints of the same step on all ranks, or on none"
        elif other.sums_first != self.sums_first or not 0 <= other.summed < 1 << 53:
            expected = f"to sum {self.sums_first} buckets first"
            first, summed = other.sums_first, other.summed
            found = f"sums {first:.0f}, proposes {summed:.0f}, and would add up other buckets"
            remedy = "restart all ranks from a checkpoint"
        else:
            return
        raise CallOrderError(
            f"rank {own_rank}: expected rank {rank} {expected}, as here, but it {found}; {remedy}"
        )


def check_calls(own: CollectiveCall, calls: dict[int, list[int]], transport: Transport) -> None:
    """Check that all ranks are in the same method.

    Args:
        own: the method of this rank.
        calls: the methods of the others, by position among the members.
        transport: connects the ranks.

    Raises:
        CallOrderError: on all ranks, if one is in another method.
    """
    others = {transport.members[rank]: call for rank, (call,) in calls.items() if call != own}
    if others:
        found = ", ".join(
            f"rank {rank} is in {text_of_call(call)}" for rank, call in others.items()
        )
        error = CallOrderError(
            f"rank {transport.initial_rank}: expected all ranks in {own}, as here, but {found}; "
            f"call the same methods in the same order and equally often on every rank, whatever "
            f"the numbers of their steps. Is one of the calls inside an `if rank == 0` branch?"
        )
        transport.report_and_close(error)
        raise error
