"""The connections of a rank: how they are made, and how they end when a rank is lost or fails.

No rank waits for a rank that has failed: its neighbours see the closed connection and close theirs,
and so on through all ranks.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed.distributed_c10d import PrefixStore

from decent_optim_wrapper.comm import nccl
from decent_optim_wrapper.comm.failure_reports import FailureReports, PeerLoss
from decent_optim_wrapper.comm.process_groups import (
    CPU,
    abort,
    close,
    exchange_backend,
    new_communicator,
    serves,
)
from decent_optim_wrapper.comm.streams import SendWindow
from decent_optim_wrapper.comm.waiting import LONGEST_WAIT, WireError, never
from decent_optim_wrapper.errors import CallOrderError, PeerError, text_of
from decent_optim_wrapper.forks import after_fork, leave_to_parent
from decent_optim_wrapper.topo import Group


class Closure(NamedTuple):
    """Why the connections are closed.

    Args:
        reason: the reason, for errors.
        broken: whether this rank itself failed; otherwise a peer was lost.
    """

    reason: str
    broken: bool


@dataclass(eq=False, repr=False)
class Connections:
    """A communicator of all ranks, which pairs share, and one of each larger group that mixes.

    Args:
        world: the communicator of all ranks; None for a world of one rank.
        rank: the position of this rank among the members.
        members: the ranks, as numbered at the start.
        timeout: bound of every wait.
        store: where the ranks meet to connect, and report losses; None if there is none.
        place: which part of a store that is, for a signature of these reports.
        user_group: the same as `world` if that is the user's own, which is never closed here.
        should_stop: returns True to give up a wait for other ranks, because a member is dead, has
            lost a peer or comes back, so that all members meet again. `never` if they do not.
    """

    world: Any | None
    rank: int
    members: tuple[int, ...]
    timeout: timedelta
    store: Any | None = None
    place: str = ""
    user_group: Any | None = None
    should_stop: Callable[[], bool] = never

    def __post_init__(self) -> None:
        self.world_size = len(self.members)
        # The number of this rank at the start.
        self.initial_rank = self.members[self.rank]
        # The world that can be used now. Small messages are sent on the CPU: a world without a
        # backend for it is replaced on first use.
        world = self.world
        self._ready = world if world is not None and serves(world, CPU) else None
        self._subgroups: dict[tuple[int, ...], Any] = {}
        # The groups of this rank, in the order in which all their ranks meet: by phase.
        self._groups: tuple[Group, ...] = ()
        # How many buckets of each group are on the wire at once.
        self.windows = defaultdict[tuple[int, ...], SendWindow](SendWindow)
        # The GPUs that exchange over NCCL.
        self.gpus: list[torch.device] = []
        # The name of the backend that exchanges tensors; empty for a world of one rank.
        self._backend = "" if world is None else exchange_backend(world).name()
        self._reports = FailureReports(self.store, self.initial_rank, self.place)
        # A closed world is not a world of one rank: calls that need the others raise.
        self._closure: Closure | None = None
        after_fork(self._leave_to_parent)
        if world is not None:
            leave_to_parent(world)

    def connect(self, groups: Sequence[Group]) -> None:
        """Create the communicators of this rank's groups, in their order; waits for all members."""
        is_users = self.world is self.user_group and self.store is not None
        is_known = self._backend == "gloo" or nccl.is_nccl(self._backend)
        if is_users and is_known and self.world_size > 1:
            # With gloo, a wait that times out would close the connections of the user's process
            # group. With NCCL, the rounds would queue behind the user's own collectives.
            self._replace_world()
        self._groups = tuple({group.ranks: group for group in groups}.values())
        for group in groups:
            if group.size == self.world_size:
                self._subgroups[group.ranks] = self.world
            elif group.size > 2 and group.ranks not in self._subgroups:
                self._subgroups[group.ranks] = self._new(group.ranks)

    def extend_watchdog(self, steps: int) -> None:
        """Raise the timeout of NCCL's watchdog, so that it ends no round that a step may wait for.

        The watchdog counts from the launch of a round, and ends the process. A step begins to wait
        up to `steps` steps after the launch, and waits for `timeout`. Each of the steps before may
        take as long.

        Args:
            steps: the longest time from the launch of a round to its mixing.
        """
        timeout = (1 + steps) * min(self.timeout, LONGEST_WAIT)
        nccl.set_timeout(self._made, timeout)

    def _open_world(self) -> Any:
        """The communicator of all ranks.

        Raises:
            PeerError: the connections were closed after a peer was lost.
            RuntimeError: the connections were closed because this rank failed.
        """
        if self._closure is not None:
            kind = RuntimeError if self._closure.broken else PeerError
            raise kind(
                f"rank {self.initial_rank}: expected connections to the other ranks, but this rank "
                f"has closed them: {self._closure.reason}; restart from the last checkpoint"
            )
        if self._ready is None:
            # As of init_process_group("nccl").
            self._replace_world()
        return self._ready

    def _of(self, ranks: tuple[int, ...]) -> Any:
        """The communicator of a connected group.

        Raises:
            PeerError: as `_open_world`.
            RuntimeError: as `_open_world`.
        """
        self._open_world()
        return self._subgroups[ranks]

    def coalesces(self, device: torch.device) -> bool:
        """Return whether a send must be posted together with its receive, as on NCCL."""
        return nccl.is_nccl(self._backend) and device.type != "cpu"

    def wire_device(self, device: torch.device) -> torch.device:
        """The device on which tensors of `device` are exchanged: with gloo, the CPU."""
        return CPU if self._backend == "gloo" and self.world_size > 1 else device

    def close(self, reason: str, broken: bool = False) -> None:
        """Close the connections made here; the peers notice this at once.

        The connections of the user's process group stay open, but are no longer used.

        Args:
            reason: the reason in later errors.
            broken: whether this rank itself has failed.
        """
        if self._closure is None:
            self._closure = Closure(reason=reason, broken=broken)
        abort(self._release())

    def note_end(self) -> None:
        """Report how this rank has ended to ranks that lose it, unless it has told them before."""
        if self._ready is not None:
            # The interpreter keeps the error that ends it.
            error = getattr(sys, "last_value", None)
            self._reports.note(()) if error is None else self._reports.note_error(error)

    def release(self) -> None:
        """Close the communicators made here and release the user's process group."""
        close(self._release(), self.gpus, self.timeout.total_seconds())
        self.user_group = self.world = None

    def find_lost(self, suspects: tuple[int, ...], silent: bool) -> PeerLoss:
        """Close the connections after a `WireError`, and find out which rank was lost.

        Args:
            suspects: the ranks one of which was lost, by their position among the members.
            silent: as in `WireError`.
        """
        names = [self.members[rank] for rank in suspects]
        if self.should_stop is not never:
            # All members meet again in any case, and find out there.
            loss = self._reports.error() or PeerLoss(names)
            self.close(f"{loss} was lost")
            return loss
        # The note first: the neighbours read it when they see the connection closed.
        self._reports.note(names)
        self.close(f"{PeerLoss(names)} was lost")
        return self._reports.find(names, silent)

    def lost_in_collective(self, suspects: tuple[int, ...], error: WireError) -> RuntimeError:
        """Like `find_lost`; returns the error of a collective of all ranks."""
        loss = self.find_lost(suspects, error.silent)
        return loss.as_error(
            self.initial_rank,
            f"expected all {self.world_size} ranks to take part in a collective within "
            f"{self.timeout}, but lost {loss} ({error}); {loss.advice}, and call the same methods "
            f"in the same order everywhere",
        )

    def report_and_close(self, error: BaseException) -> None:
        """Close the connections because this rank cannot continue, and report why.

        It does nothing if they are closed already.
        """
        if self._closure is None:
            self._reports.note_error(error)
            broken = not isinstance(error, (PeerError, CallOrderError))
            self.close(f"this rank failed with {type(error).__name__}: {error}", broken)

    def _leave_to_parent(self) -> None:
        """Drop the connections of the parent in a forked process."""
        reason = "this process was forked and leaves them to its parent: call this in the parent"
        self._closure, self.should_stop = Closure(reason=reason, broken=True), never
        self._release()

    @property
    def _made(self) -> list[Any]:
        """The communicators made here, each once."""
        known = {id(group): group for group in (*self._subgroups.values(), self.world)}
        users = (None, self.user_group)
        return [group for group in known.values() if all(group is not each for each in users)]

    def _release(self) -> list[Any]:
        """Forget the communicators made here, and return the only references to them."""
        made = self._made
        self._subgroups.clear()
        self.world, self._ready = self.user_group, None
        return made

    def _replace_world(self) -> None:
        self.world = self._ready = self._new(tuple(range(self.world_size)))

    def _new(self, ranks: tuple[int, ...]) -> Any:
        if self.store is None:
            raise ValueError(
                f"rank {self.rank}: ranks {ranks} need a communicator of their own, and this "
                f"{type(self.world).__name__} has no store to build it on; wrap it in a "
                f"torch.distributed.ProcessGroup, or use a topology of pairs and no timeout"
            )
        store = PrefixStore("-".join(map(str, ranks)), self.store)
        place, timeout, stop = ranks.index(self.rank), self.timeout, self.should_stop
        try:
            return new_communicator(self.world, store, place, len(ranks), timeout, stop)
        except (RuntimeError, TimeoutError) as error:
            members = [self.members[rank] for rank in ranks]
            raise PeerError(
                f"rank {self.initial_rank}: expected ranks {members} to connect within {timeout}, "
                f"but {text_of(error)}; look there for the first error"
            ) from error
