"""The interface of a replica, which may be spread over several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from decent_optim_wrapper.comm.transport import Transport


class Replica(Protocol):
    """The ranks that together hold one copy of the model."""

    # Their connections along each dimension; empty if one rank holds the whole replica.
    transports: Sequence[Transport]
    # Whether `reshard` must be called.
    may_gather: bool

    def sum_(self, tensor: Tensor) -> None:
        """Sum a small tensor on the CPU in place over them; collective over them."""

    def names_of(self, params: Iterable[Tensor]) -> list[str]:
        """The names of the parameters in the model, the same however it is spread."""

    def reshard(self) -> None:
        """Make modules read the values that were written into their shards."""
