"""The interface of a replica, which may be spread over several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from decent_optim_wrapper.comm.transport import Transport


class Replica(Protocol):
    """The ranks that hold one copy of the model together."""

    # What connects them, along each dimension; empty for a whole replica on one rank.
    transports: Sequence[Transport]
    # Whether `reshard` has to be called.
    may_gather: bool

    def sum_(self, tensor: Tensor) -> None:
        """Sum a small tensor on the CPU in place over them; collective over them."""

    def names_of(self, params: Iterable[Tensor]) -> list[str]:
        """What the model calls its parameters, which is the same however it is spread."""

    def reshard(self) -> None:
        """Let what is written into shards be seen."""
