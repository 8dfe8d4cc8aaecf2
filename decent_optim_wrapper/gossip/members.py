"""The interface of a membership that may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from decent_optim_wrapper.gossip.header import CollectiveCall

Result = TypeVar("Result")


class Members(Protocol):
    """A membership that survives the loss of a rank."""

    def begin_step(self) -> None:
        """Admit ranks that come back, and join the recovery of ranks that have lost a peer."""

    def end_step(self) -> None:
        """Mark the step of this rank as complete."""

    def recover(self, reason: object) -> None:
        """Agree on the remaining ranks, drop the round in flight, and open a new session."""

    def meet(self, call: CollectiveCall, action: Callable[[], Result]) -> Result:
        """Make a call with all ranks; if one is lost, repeat it with the remaining ones."""

    def leave(self) -> None:
        """Leave the members for good."""

    def notify_change(self) -> None:
        """Call back if the members have changed."""
