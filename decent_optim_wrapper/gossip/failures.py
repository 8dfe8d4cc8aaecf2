"""What happens when a rank fails: the others are told, or continue without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.errors import CallOrderError, NonFiniteError, PeerError
from decent_optim_wrapper.gossip.early_mixing import EarlyMixing
from decent_optim_wrapper.gossip.members import Members
from decent_optim_wrapper.gossip.replica import Replica

Result = TypeVar("Result")


class Failures:
    """Tells other ranks of errors here, and handles the loss of others.

    Args:
        early: restores the mixed buckets of a round that fails. The connections of its pipeline are
            closed if this rank fails.
        replica: the ranks of the replica, which also wait for each other.
        members: continues without lost ranks; None if their loss is an error.
    """

    def __init__(self, early: EarlyMixing, replica: Replica, members: Members | None) -> None:
        self._early = early
        self._pipeline = early.pipeline
        self._replica = replica
        self._members = members

    @property
    def transports(self) -> Sequence[Transport]:
        """The connections to the ranks with which this one gossips, and to its replica."""
        return [self._pipeline.session.transport, *self._replica.transports]

    def with_recovery(self, action: Callable[[], Result]) -> Result:
        """Run an action that waits for peers; if one is lost, run it again in a new session."""
        while True:
            try:
                return action()
            except PeerError as error:
                if self._members is None:
                    raise
                self._members.recover(error)

    @contextmanager
    def propagating(self, *shared: type[Exception]) -> Iterator[None]:
        """Tell the other ranks if the body fails here, since they would wait for this rank.

        Args:
            shared: further errors that all ranks raise together and that change nothing.
        """
        try:
            yield
        except BaseException as error:
            self.propagate(error, *shared)
            raise

    def propagate(self, error: BaseException, *shared: type[Exception]) -> None:
        """Close the connections, unless all ranks raise the error; see `propagating`."""
        if isinstance(error, (PeerError, CallOrderError)):
            self._early.undo()
            if self._replica.transports:
                # The ranks along the other dimensions wait for this one, too.
                for transport in self.transports:
                    transport.fail(error)
        elif not isinstance(error, (NonFiniteError, *shared)):
            self.close(error)

    def close(self, error: BaseException) -> None:
        """Close the connections for good, and tell the others why."""
        self._pipeline.in_flight.abandon()
        for transport in self.transports:
            transport.fail(error)
        if self._members:
            self._members.leave()
