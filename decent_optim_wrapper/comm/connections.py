"""The connections of a rank: how they are made, and how they end when a rank is lost or fails.

No rank waits for one that has failed: its neighbours see the closed connection, close theirs, and
so on through all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from decent_optim_wrapper.comm.failure_reports import FailureReports, PeerLoss
from decent_optim_wrapper.comm.process_groups import (
    CPU,
    abort,
    backend_of,
    close,
    exchange_device,
    is_nccl,
    is_registered,
    new_communicator,
    prefixed,
    serves,
)
from decent_optim_wrapper.comm.waiting import WaitLimits, WireError
from decent_optim_wrapper.errors import CallOrderError, PeerError, text_of
from decent_optim_wrapper.topo import Group


class Closure(NamedTuple):
    """Why the connections are closed.

    Args:
        reason: the reason, for errors.
        broken: whether this rank itself failed; otherwise a peer was lost.
    """

    reason: str
    broken: bool


class Connections:
    """A communicator of all ranks, which pairs share, and one of each larger group that mixes.

    Args:
        world: the communicator of all ranks; None for a world of one rank.
        rank: the position of this rank among the members.
        members: the ranks, as numbered at the start.
        limits: bound every wait.
        store: where the ranks meet to connect, and report losses; None if there is none.
        user_group: the same as `world` if that is the user's own, which is never closed here.
    """

    def __init__(
        self,
        world: Any | None,
        rank: int,
        members: tuple[int, ...],
        limits: WaitLimits,
        store: Any | None,
        user_group: Any | None,
    ) -> None:
        # What can be used now. Small messages travel on the CPU: a world without a backend for it
        # is replaced when it is first used.
        self.ready = world if world is not None and serves(world, CPU) else None
        self._world = world
        self._rank = rank
        self._members = members
        self._limits = limits
        self._store = store
        self.user_group = user_group
        self.registered = user_group is not None and is_registered(user_group)
        self._subgroups: dict[tuple[int, ...], Any] = {}
        # That exchange over NCCL.
        self._gpus: list[torch.device] = []
        # By type of device: a backend tells slowly.
        self._coalescing: dict[str, bool] = {}
        self._reports = FailureReports(store, members[rank])
        # A closed world is not one of a single rank: what needs the others raises.
        self.closure: Closure | None = None

    def connect(self, groups: Sequence[Group]) -> None:
        """Create what the groups of this rank need, in their order; waits for all members."""
        if self._world is self.user_group and self._wants_own_world():
            self._replace_world()
        for group in groups:
            if group.size == len(self._members):
                self._subgroups[group.ranks] = self._world
            elif group.size > 2 and group.ranks not in self._subgroups:
                self._subgroups[group.ranks] = self._new(group.ranks)

    def add_gpus(self, devices: Collection[torch.device]) -> list[torch.device]:
        """Remember the GPUs among the devices, and return those that are new."""
        if len(self._members) == 1:
            return []
        new = [d for d in dict.fromkeys(devices) if d not in self._gpus and self.coalesces(d)]
        self._gpus += new
        return new

    def world(self) -> Any:
        """The communicator of all ranks.

        Raises:
            PeerError: the connections were closed after a peer was lost.
            RuntimeError: the connections were closed because this rank failed.
        """
        if self.closure is not None:
            kind = RuntimeError if self.closure.broken else PeerError
            raise kind(
                f"rank {self._members[self._rank]}: expected connections to the other ranks, but "
                f"this rank has closed them: {self.closure.reason}; restart from the last "
                f"checkpoint"
            )
        if self.ready is None:
            # As of init_process_group("nccl").
            self._replace_world()
        return self.ready

    def of(self, ranks: tuple[int, ...]) -> Any:
        """The communicator of a connected group.

        Raises:
            PeerError: as `world`.
            RuntimeError: as `world`.
        """
        self.world()
        return self._subgroups[ranks]

    def coalesces(self, device: torch.device) -> bool:
        """Whether a send must be posted together with the receive behind it, as on NCCL."""
        if device.type not in self._coalescing:
            backend = backend_of(self._world, device)
            self._coalescing[device.type] = backend.supports_coalescing
        return self._coalescing[device.type]

    def wire_device(self, device: torch.device) -> torch.device:
        """The device on which tensors of `device` are exchanged: with gloo, the CPU."""
        if self._world is None or len(self._members) == 1:
            return device
        return CPU if backend_of(self._world, device).name() == "gloo" else device

    @property
    def exchange_device(self) -> torch.device:
        """The kind of device whose tensors are exchanged: the GPU if the group serves it."""
        return CPU if self._world is None else exchange_device(self._world)

    def abort(self, reason: str, broken: bool = False) -> None:
        """Close the connections made here; the peers notice this at once.

        Those of the user's process group stay open, but are not used any more either.

        Args:
            reason: the reason in later errors.
            broken: whether this rank itself has failed.
        """
        if self.closure is None:
            self.closure = Closure(reason=reason, broken=broken)
        made = self._release()
        if self._world is not self.user_group:
            self._world = None
        self.ready = None
        for group in made:
            abort(group)

    def close(self) -> None:
        """Close the communicators made here and release the user's process group."""
        if self.ready is not None:
            # Before the others see the connections closed.
            self._reports.note(())
        for group in self._release():
            close(group, self._gpus, self._limits.timeout.total_seconds())
        self.user_group = self._world = self.ready = None

    def lose(self, suspects: tuple[int, ...], silent: bool) -> PeerLoss:
        """Close the connections after a `WireError`, and find out which rank was lost.

        Args:
            suspects: the ranks of which one was lost, by their position among the members.
            silent: as in `WireError`.
        """
        names = [self._members[rank] for rank in suspects]
        if self._limits.should_stop is not None:
            # All members meet again in any case, and find out there.
            loss = self._reports.error() or PeerLoss(names)
            self.abort(f"{loss} was lost")
            return loss
        # The note first: the neighbours read it when they see the connection closed.
        self._reports.note(names)
        self.abort(f"{PeerLoss(names)} was lost")
        return self._reports.find(names, silent)

    def lose_in_collective(self, suspects: tuple[int, ...], error: WireError) -> RuntimeError:
        """As `lose`; the error of a collective of all ranks."""
        loss, here = self.lose(suspects, error.silent), self._members[self._rank]
        if loss.out_of_order:
            # That rank is in another method, and will not come.
            return CallOrderError(f"rank {here}: {loss.error}")
        return PeerError(
            f"rank {here}: expected all {len(self._members)} ranks to take part in a "
            f"collective within {self._limits.timeout}, but lost {loss} ({error}); "
            f"{loss.advice}, and call the same methods in the same order everywhere",
            rank=loss.ranks[0] if len(loss.ranks) == 1 else None,
        )

    def fail(self, error: BaseException) -> None:
        """Close the connections because this rank cannot continue, and report why."""
        reason = f"this rank failed with {type(error).__name__}: {error}"
        self._close_for(error, reason, broken=True)

    def disagree(self, error: CallOrderError) -> None:
        """Close the connections because the ranks called different methods, and report it."""
        self._close_for(error, "the ranks called different methods")

    def pass_on(self, error: Exception) -> None:
        """Close the connections because of a loss elsewhere, and report it."""
        self._close_for(error, f"this rank ended with {type(error).__name__}: {error}")

    def _close_for(self, error: BaseException, reason: str, broken: bool = False) -> None:
        """Report an error and close the connections, unless they are closed for another reason."""
        if self.closure is None:
            self._reports.note_error(error)
            self.abort(reason, broken)

    def _release(self) -> list[Any]:
        """Forget the groups, and return the communicators made here, each once."""
        known = {id(group): group for group in (*self._subgroups.values(), self._world)}
        self._subgroups.clear()
        users = (None, self.user_group)
        return [group for group in known.values() if all(group is not each for each in users)]

    def _wants_own_world(self) -> bool:
        """Whether to exchange over a communicator that is created here.

        With gloo, a wait that times out would close the connections of the user's process group.
        With NCCL, the rounds would queue behind the user's own collectives.
        """
        if len(self._members) == 1 or self._store is None:
            return False
        kind = backend_of(self._world, self.exchange_device).name()
        return kind == "gloo" or is_nccl(kind)

    def _replace_world(self) -> None:
        self._world = self.ready = self._new(tuple(range(len(self._members))))

    def _new(self, ranks: tuple[int, ...]) -> Any:
        if self._store is None:
            raise ValueError(
                f"rank {self._rank}: ranks {ranks} need a communicator of their own, and this "
                f"{type(self._world).__name__} has no store to build it on; wrap it in a "
                f"torch.distributed.ProcessGroup, or use a topology of pairs and no timeout"
            )
        store, place = prefixed("-".join(map(str, ranks)), self._store), ranks.index(self._rank)
        timeout = self._limits.timeout
        try:
            return new_communicator(self._world, store, place, len(ranks), timeout)
        except (RuntimeError, TimeoutError) as error:
            members = [self._members[rank] for rank in ranks]
            raise PeerError(
                f"rank {self._members[self._rank]}: ranks {members} could not connect within "
                f"{timeout} ({text_of(error)}); look there for the first error"
            ) from error
