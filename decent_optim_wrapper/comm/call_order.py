"""What ranks tell each other before they exchange anything: their method and their round."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.errors import CallOrderError


class Call(IntEnum):
    """The methods in which ranks meet."""

    STEP = 1
    GLOBAL_AVG = 2
    CONSENSUS_DISTANCE = 3
    REGROUP = 4
    KEEP_AVERAGE = 5

    def __str__(self) -> str:
        if self is Call.REGROUP:
            return "add_param_group() or rebuild_buckets()"
        if self is Call.KEEP_AVERAGE:
            return "step() after an average"
        return f"{self.name.lower()}()"


class Header(NamedTuple):
    """What a rank is about to do.

    Args:
        call: the method that it is in.
        round: the number of the next round, or of the one that is launched by the method.
        mixing_rate: of that round; where it differs between two ranks their mean would drift.
    """

    call: Call
    round: int
    mixing_rate: float

    def encode(self) -> Tensor:
        """As a message: int64 of shape (3,), the rate by its bits."""
        numbers = [self.call, self.round, _bits(self.mixing_rate)]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def check(self, message: list[int], rank: int, own_rank: int) -> None:
        """Compare with the message of another rank.

        Raises:
            CallOrderError: the rank is in another method or round, or has another rate.
        """
        call, round, rate = message
        if (call, round) != (self.call, self.round):
            known = {int(call): str(call) for call in Call}
            theirs = f"{known.get(call, 'something unknown')} at round {round}"
            raise CallOrderError(
                f"rank {own_rank}: expected rank {rank} in {self.call} at round {self.round}, as "
                f"here, but it is in {theirs}; call the same methods in the same order on every "
                f"rank, and step() equally often (torch.distributed.algorithms.Join for uneven "
                f"data)"
            )
        if rate != _bits(self.mixing_rate):
            raise CallOrderError(
                f"rank {own_rank}: expected rank {rank} to mix round {self.round} with "
                f"mixing_rate={self.mixing_rate}, as here, but it has {_float(rate)}; set the same "
                f"rate on every rank before the same step()"
            )


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
