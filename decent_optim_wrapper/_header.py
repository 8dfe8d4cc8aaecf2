"""What ranks tell each other before they exchange anything: their method and their round."""

from __future__ import annotations

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

    def __str__(self) -> str:
        if self is Call.REGROUP:
            return "add_param_group() or rebuild_buckets()"
        return f"{self.name.lower()}()"


class Header(NamedTuple):
    """A method and the number of the round that is the next, or is launched by it."""

    call: Call
    round: int

    def encode(self) -> Tensor:
        """As a message: int64 of shape (2,)."""
        return torch.tensor(self, dtype=torch.int64)

    def check(self, message: list[int], rank: int, own_rank: int) -> None:
        """Compare with the message of another rank.

        Raises:
            CallOrderError: the rank is in another method or another round.
        """
        if message == list(self):
            return
        known = {int(call): str(call) for call in Call}
        theirs = f"{known.get(message[0], 'something unknown')} at round {message[1]}"
        raise CallOrderError(
            f"rank {own_rank}: expected rank {rank} in {self.call} at round {self.round}, as here, "
            f"but it is in {theirs}; call the same methods in the same order on every rank, and "
            f"step() equally often (torch.distributed.algorithms.Join for uneven data)"
        )
