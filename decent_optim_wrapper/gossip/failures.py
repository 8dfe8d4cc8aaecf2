"""What happens where a rank fails: the others are told, or go on without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.errors import CallOrderError, NonFiniteError, PeerError
from decent_optim_wrapper.gossip.members import Members
from decent_optim_wrapper.gossip.pipeline import Pipeline
from decent_optim_wrapper.gossip.replica import Replica

Result = TypeVar("Result")


class Failures:
    """Tells other ranks of errors here, and handles the loss of others.

    Args:
        pipeline: its connections are closed where this rank fails.
        replica: the ranks of a replica wait for each other, too.
        members: goes on without lost ranks; None if their loss is an error.
    """

    def __init__(self, pipeline: Pipeline, replica: Replica, members: Members | None) -> None:
        self._pipeline = pipeline
        self._replica = replica
        self._members = members

    @property
    def transports(self) -> Sequence[Transport]:
        """What connects this rank: to those it gossips with, and to those of its replica."""
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
            shared: further errors, which all ranks raise together and which change nothing.
        """
        try:
            yield
        except BaseException as error:
            self.propagate(error, *shared)
            raise

    def propagate(self, error: BaseException, *shared: type[Exception]) -> None:
        """Close the connections, unless all ranks raise the error; see `propagating`."""
        if isinstance(error, (PeerError, CallOrderError)):
            if self._replica.transports:
                # Those of the other dimensions wait for this rank, too.
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
