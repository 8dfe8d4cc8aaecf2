"""What the core knows of ranks that may be lost and come back: who implements it is not known here.

Without an `Elasticity` the ranks are fixed, there is no `Membership`, and a lost rank is an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.gossip.coordinator import Coordinator, Members
from decent_optim_wrapper.gossip.schedule import Intervals
from decent_optim_wrapper.gossip.session import Session
from decent_optim_wrapper.topo import Topology
from decent_optim_wrapper.wire.layout import Layout
from decent_optim_wrapper.wire.model_state import ModelState

# The part of a store in which the ranks meet for their first wrapper; it has "epoch" after that.
FIRST_MEETING = "decent_optim_wrapper/rendezvous 0"


class StoreWorld(NamedTuple):
    """The ranks that gossip, and the store in which they can meet.

    Args:
        store: a connection to it; None if the ranks have none.
        rank: this rank.
        world_size: number of ranks.
        timeout: bound of every wait.
        launched_as: the number that the launcher gave to each rank; empty if it is the same.
    """

    store: Any
    rank: int
    world_size: int
    timeout: timedelta = default_pg_timeout
    launched_as: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """All that a rank that comes back receives.

    Args:
        optimizer: the base.
        state: further tensors of the model, if all ranks have them.
        parts: further objects with a `state_dict`, such as a scheduler.
        layout: how tensors are put into buckets.
    """

    optimizer: Optimizer
    state: ModelState
    parts: Sequence[Any]
    layout: Layout


class Follower(Protocol):
    """Is notified when the members change, on all of them."""

    def summary(self, heard: Mapping[int, str]) -> Any:
        """Return what the other ranks must know of this one, as JSON values.

        Args:
            heard: the last texts of the other ranks; see `Membership.say`.
        """

    def follow(self, summaries: Mapping[int, Any], newcomers: Collection[int]) -> None:
        """Called when the members have changed, with the same arguments on all of them.

        It may be called again before all members have reached it, with newer arguments.

        Args:
            summaries: for each member the result of `summary`; None if it has no follower.
            newcomers: the members that have received the state of another one.
        """


class Membership(Members, Protocol):
    """The ranks that take part, which have met in a store."""

    @property
    def transport(self) -> Transport:
        """Connects the members."""

    @property
    def joins(self) -> bool:
        """True if this rank joins others that are training already."""

    @property
    def takeovers(self) -> int:
        """How often this rank has received its state from others."""

    def agree(self, text: str) -> None:
        """Publish a description; a rank that joins compares it with that of the members.

        Raises:
            ValueError: this rank joins them with another description.
        """

    def open_session(self) -> Session:
        """Connect the groups of the members; collective."""

    def begin(self, coordinator: Coordinator, trained: Trained) -> None:
        """Manage the members of the gossip from now on; a rank that joins receives its state.

        The caller keeps both objects as long as it uses this one.
        """

    def attach(self, follower: Follower) -> None:
        """Notify a follower whenever the members change, as long as it exists."""

    def say(self, text: str) -> None:
        """Send a text to the followers of the other ranks from now on."""


class Elasticity(ABC):
    """How ranks that are lost and come back are managed: what `elastic=` expects."""

    # Where the ranks meet; None takes the store of the process group, else the launcher's.
    store: Any

    @abstractmethod
    def describe(self) -> str:
        """Return a line of text that must be the same on all ranks."""

    @staticmethod
    @abstractmethod
    def find_launched(environ: Mapping[str, str], timeout: timedelta | None) -> StoreWorld | None:
        """Connect to the store that the launcher of this process names; None if it names none.

        Args:
            environ: the environment variables.
            timeout: the bound of every wait.
        """

    @abstractmethod
    def meet(self, world: StoreWorld, topology: Topology, intervals: Intervals) -> Membership:
        """Meet the other ranks in a store; collective.

        Args:
            world: the ranks, and the store.
            topology: the topology of all ranks.
            intervals: how often rounds are launched.
        """

    @abstractmethod
    def tell_failure(self, world: StoreWorld, error: Exception) -> None:
        """Send the ranks that start with this one the reason why it does not come.

        Raises:
            DistError, TimeoutError: the store is gone, or does not answer.
        """
