"""Exchange between ranks: the one place that calls torch.distributed to move bytes.

Pairs talk point to point on one communicator of all ranks and need none of their own; larger
groups get one each, created by their members alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined]

from decent_optim_wrapper._backend import (
    backend_of,
    exchange_device,
    is_closed,
    new_backend,
    prefixed,
    serves,
    store_of,
    timeout_of,
)
from decent_optim_wrapper.errors import PeerError
from decent_optim_wrapper.topo import Group

# Tags below are left to the user's own point-to-point traffic on the same process group.
_FIRST_TAG = 1 << 20
# A message to every other rank of a larger group would cost more than a collective.
_MOST_TOLD_ONE_BY_ONE = 16
_POINT_TO_POINT = (OpType.SEND, OpType.RECV)
# Between two looks at the alarm.
_WATCH = timedelta(seconds=0.1)
# How long the ranks of a failed group wait for each other's signs of life.
_ROLL_CALL_SECONDS = 2.0


class Heard(NamedTuple):
    """A small message on its way from another rank.

    Args:
        rank: who says it.
        works: to wait for before reading.
        message: where it arrives.
        suspects: the ranks of which one is lost if it does not arrive.
    """

    rank: int
    works: list[dist.Work]
    message: Tensor
    suspects: tuple[int, ...]


class Transport:
    """The ranks of one process group, and the communicators of the groups that mix in it.

    Args:
        process_group: registered or raw; None is a world of one rank that exchanges nothing.
        timeout: bound of every wait; None takes the process group's.
    """

    def __init__(self, process_group: Any | None, timeout: timedelta | None = None) -> None:
        self._user_group = process_group
        self._world = process_group
        self._subgroups: dict[tuple[int, ...], Any] = {}
        self._store: Any | None = None
        self._timeout = timeout or timedelta(0)
        # Tells whether waiting has become pointless; None where nobody would know.
        self.alarm: Callable[[], bool] | None = None
        self.rank = 0
        self.world_size = 1
        self.members: tuple[int, ...] = (0,)
        if process_group is not None:
            self.rank, self.world_size = process_group.rank(), process_group.size()
            self.members = tuple(range(self.world_size))
            self._store = self._own_store(store_of(process_group))
            self._timeout = timeout or timeout_of(process_group)

    @property
    def name(self) -> int:
        """What this rank is called: its number at the start."""
        return self.members[self.rank]

    def reform(self, world: Any | None, members: tuple[int, ...], name: int, store: Any) -> None:
        """Go on with other ranks.

        Args:
            world: their communicator; None for a rank that is alone.
            members: what they are called; they are numbered anew in this order.
            name: which of them is this rank.
            store: theirs, empty.
        """
        self._world = world
        self._store = store
        self.members = members
        self.rank, self.world_size = members.index(name), len(members)

    def connect(self, schedule: Sequence[Group]) -> None:
        """Create the communicators that `schedule` (this rank's groups, phase by phase) needs.

        Every rank walks the phases in the same order and the groups of a phase are disjoint, so
        creation, which waits for all members, cannot deadlock. A collective that a peer left alone
        holds its communicator until that one's own timeout, also when the process exits: where
        ours is shorter, all exchange goes over a communicator that has it.
        """
        if self.world_size > 1 and self._is_more_patient(self._world):
            self._world = self._new_communicator(tuple(range(self.world_size)))
        for group in schedule:
            if group.size == self.world_size:
                self._subgroups[group.ranks] = self._world
            elif group.size > 2 and group.ranks not in self._subgroups:
                self._subgroups[group.ranks] = self._new_communicator(group.ranks)

    def check_open(self) -> None:
        """Make sure that the user's process group is still there.

        Raises:
            RuntimeError: it has been destroyed.
        """
        if self._user_group is not None and is_closed(self._user_group):
            raise RuntimeError(
                f"rank {self.rank}: expected the process group to be open, but it was destroyed; "
                f"call destroy_process_group() after the last step() and average"
            )

    def wait(self, works: list[dist.Work]) -> None:
        """Wait for works within the timeout, each once; a second call returns at once.

        Raises:
            RuntimeError: a peer has gone, or the time is over.
        """
        while works:
            work = works.pop()
            # A work of gloo between two ranks ends with the connection, and must not be waited for
            # twice. A collective that misses a rank ends with the timeout only.
            kind = work._get_op_type()  # type: ignore[attr-defined]
            if self.alarm is None or kind in _POINT_TO_POINT:
                work.wait(self._timeout)
            else:
                self._wait_watchfully(work, self.alarm)

    def _wait_watchfully(self, work: dist.Work, alarm: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout.total_seconds()
        while True:
            try:
                work.wait(_WATCH)
                return
            except RuntimeError:
                if work.is_completed() or time.monotonic() > deadline:
                    raise
            if alarm():
                raise RuntimeError("another rank has lost a peer")

    def hang_up(self) -> None:
        """Close the connections made here, which the ranks at their other ends notice at once.

        Not those of the user's process group: these end with the process.
        """
        own = [group for group in self._subgroups.values() if group is not self._user_group]
        self._subgroups.clear()
        if self._world is not self._user_group:
            self._world = None
        # A collective that hangs holds its communicator until the timeout.
        threading.Thread(target=own.clear, daemon=True).start()

    def close(self) -> None:
        """Drop the communicators made here and let go of the user's process group."""
        self._subgroups.clear()
        self._user_group = self._world = None

    def wire_device(self, device: torch.device) -> torch.device:
        """The device that tensors of `device` are exchanged on: gloo's exchange is on the CPU."""
        if self._world is None or backend_of(self._world, device).name() != "gloo":
            return device
        return torch.device("cpu")

    def exchange(self, outgoing: Tensor, incoming: Tensor, peer: int, tag: int) -> list[dist.Work]:
        """Start sending `outgoing` to `peer` and receiving `incoming` from it.

        Args:
            outgoing: must not change until the returned work is done.
            incoming: same size and dtype as the peer's `outgoing`.
            peer: rank in the process group.
            tag: tells concurrent exchanges between two ranks apart; from 0.

        Returns:
            The work to wait for.
        """
        group = self._communicator()
        if backend_of(group, outgoing.device).supports_coalescing:
            # On such a backend (NCCL) a send alone would wait for a receive that comes behind it.
            return _exchange_coalesced(group, outgoing, incoming, peer)
        tag += _FIRST_TAG
        # The receive first: its notice lets the peer's data start.
        receive = group.recv([incoming], peer, tag)
        return [group.send([outgoing], peer, tag), receive]

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> list[dist.Work]:
        """Start summing `tensor` in place over the ranks of a connected group."""
        return [self._subgroups[ranks].allreduce([tensor])]

    @property
    def tells(self) -> bool:
        """Whether small messages can travel without making a GPU wait: there is a CPU backend."""
        return self.control_device.type == "cpu"

    def tell(self, message: Tensor, ranks: tuple[int, ...], tag: int) -> list[Heard]:
        """Start sending a small message to the other ranks of a group, and hearing theirs.

        From rank to rank, which shows who does not answer; in a large group by a collective.

        Args:
            message: on the CPU, of the same shape on all of them.
            ranks: a pair, or a group that is connected.
            tag: as in `exchange`.
        """
        peers = tuple(rank for rank in ranks if rank != self.rank)
        if len(peers) > _MOST_TOLD_ONE_BY_ONE:
            rows = {rank: torch.empty_like(message) for rank in ranks}
            works = [self._subgroups[ranks].allgather([list(rows.values())], [message])]
            return [Heard(rank, works, rows[rank], peers) for rank in peers]
        heard = []
        for rank in peers:
            row = torch.empty_like(message)
            heard.append(Heard(rank, self.exchange(message, row, rank, tag), row, (rank,)))
        return heard

    def sum_(self, tensor: Tensor) -> None:
        """Sum `tensor` in place over all ranks; collective."""
        if self._world is not None:
            self._finish(self._world.allreduce([tensor]))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite `tensor` with the one of rank `source`, bytes of any dtype; collective."""
        if self._world is None or tensor.numel() == 0:
            return
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._finish(self._world.broadcast([tensor.view(torch.uint8)], options))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack the `tensor` of every rank, of the same shape and dtype on all; collective.

        Returns:
            shape (world_size, *tensor.shape), on the CPU.
        """
        if self._world is None:
            return tensor.unsqueeze(0)
        tensor = tensor.to(self.control_device)
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._finish(self._world.allgather([gathered], [tensor]))
        return torch.stack(gathered).cpu()

    def missing(self, suspects: tuple[int, ...], round: int) -> list[int]:
        """After a failure: those of the suspects that give no sign of life, if there are several.

        Every rank that notices leaves a mark in the store.
        """
        absent = list(suspects)
        if len(absent) == 1 or self._store is None or self.alarm is not None:
            return absent
        key = f"failed/{round}"
        self._store.set(f"{key}/{self.rank}", "here")
        deadline = time.monotonic() + _ROLL_CALL_SECONDS
        while len(absent) > 1 and time.monotonic() < deadline:
            absent = [rank for rank in absent if not self._store.check([f"{key}/{rank}"])]
            time.sleep(0.01)
        return absent

    @property
    def control_device(self) -> torch.device:
        """The device on which small control messages travel."""
        cpu = torch.device("cpu")
        if self._world is None or serves(self._world, cpu):
            return cpu
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def exchange_device(self) -> torch.device:
        """The kind of device whose tensors are exchanged: the GPU where the group serves it."""
        return torch.device("cpu") if self._world is None else exchange_device(self._world)

    def _communicator(self) -> Any:
        if self._world is None:
            raise RuntimeError("this rank has no connections: it is alone, or has hung up")
        return self._world

    def _finish(self, work: dist.Work) -> None:
        """Wait for something in which all ranks take part."""
        try:
            self.wait([work])
        except RuntimeError as error:
            raise PeerError(
                f"rank {self.rank}: expected all {self.world_size} ranks to take part in a "
                f"collective within {self._timeout}, but one is gone or elsewhere ({error}); look "
                f"at the other ranks for the first error, and call the same methods in the same "
                f"order everywhere"
            ) from error

    def _own_store(self, store: Any | None) -> Any | None:
        """A part of the store for this wrapper alone: ranks build wrappers in the same order."""
        if store is None:
            return None
        store = prefixed("decent_optim_wrapper", store)
        return prefixed(str(store.add(f"made by {self.rank}", 1)), store)

    def _is_more_patient(self, group: Any) -> bool:
        # NCCL's watchdog ends what hangs; a second communicator would cost memory on the GPU.
        gloo = backend_of(group, self.exchange_device).name() == "gloo"
        return gloo and timeout_of(group) > self._timeout

    def _new_communicator(self, ranks: tuple[int, ...]) -> Any:
        if self._store is None:
            raise ValueError(
                f"rank {self.rank}: ranks {ranks} need a communicator of their own, and this "
                f"{type(self._world).__name__} has no store to build it on; wrap it in a "
                f"torch.distributed.ProcessGroup, or use a topology of pairs and no timeout"
            )
        store = prefixed("-".join(map(str, ranks)), self._store)
        like = backend_of(self._world, self.exchange_device)
        try:
            return new_backend(like, store, ranks.index(self.rank), len(ranks), self._timeout)
        except RuntimeError as error:
            raise PeerError(
                f"rank {self.name}: ranks {[self.members[rank] for rank in ranks]} could not "
                f"connect within {self._timeout} ({error}); look there for the first error"
            ) from error


def _exchange_coalesced(
    group: Any, outgoing: Tensor, incoming: Tensor, peer: int
) -> list[dist.Work]:
    pair = [
        dist.P2POp(op, tensor, group=group, group_peer=peer)
        for op, tensor in ((dist.isend, outgoing), (dist.irecv, incoming))
    ]
    return dist.batch_isend_irecv(pair)
