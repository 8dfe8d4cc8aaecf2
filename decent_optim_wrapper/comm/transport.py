"""Exchange between ranks: the one place that calls torch.distributed to move bytes.

Pairs exchange point to point on one communicator of all ranks and need none of their own. Each
larger group gets a communicator, created by its members only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError

from decent_optim_wrapper.comm.background import in_background, wait_for_any, within
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
    store_of,
    timeout_of,
)
from decent_optim_wrapper.comm.store import cloned
from decent_optim_wrapper.comm.streams import OnStream, PostingThread, Waitable
from decent_optim_wrapper.errors import CallOrderError, PeerError, text_of
from decent_optim_wrapper.topo import Group

Started = TypeVar("Started")

# Tags below are left to the user's own point-to-point traffic on the same process group.
_FIRST_TAG = 1 << 20
# The tag of messages to all ranks, which come at different times; the one below is for `abort`.
_ANNOUNCE_TAG = _FIRST_TAG - 2
# A message to every other rank of a larger group would cost more than a collective.
_MOST_SENT_ONE_BY_ONE = 16
# What torch's backends can wait for. Who waits for the thread has a timeout of its own.
LONGEST_WAIT = timedelta(seconds=2_000_000)
# Interval of the checks whether a GPU has finished its work.
_POLL_SECONDS = 0.001
# How much later than at its timeout gloo may end a wait.
_SLACK_SECONDS = 1.0


class WireError(RuntimeError):
    """An exchange failed: a peer is gone, has closed its connections, or does not answer.

    Args:
        text: the error of torch.
        silent: whether the wait timed out; otherwise a connection was closed.
    """

    def __init__(self, text: str, silent: bool = False) -> None:
        super().__init__(text)
        self.silent = silent


class _Closed(NamedTuple):
    """Why the connections are closed.

    Args:
        reason: the reason, for errors.
        broken: whether this rank itself failed; otherwise a peer was lost.
    """

    reason: str
    broken: bool


class PendingMessage(NamedTuple):
    """A small message on its way from another rank.

    Args:
        rank: the sender.
        works: the works to wait for before the message is read.
        message: the tensor in which it arrives.
        suspects: the ranks of which one is lost if the message does not arrive.
    """

    rank: int
    works: list[Waitable]
    message: Tensor
    suspects: tuple[int, ...]


class Awaited(NamedTuple):
    """A work to wait for.

    Args:
        work: the work.
        on_gpu: whether it tells whether it is done. A wait for it orders a stream, so that the
            thread that mixes must do so itself.
    """

    work: Waitable
    on_gpu: bool = False


class Ongoing(Protocol):
    """What goes on in the background."""

    future: Future[None]

    @property
    def is_over(self) -> bool:
        """Whether it is done, or has failed."""


class Arrival:
    """Waits for works on a thread of its own: those of gloo do not tell whether they are done.

    Args:
        works: the works; nobody else waits for those that are not on a GPU.
        further: finds further works, on the thread; None if there are none.
    """

    def __init__(
        self, works: Sequence[Awaited], further: Callable[[], Sequence[Awaited]] | None = None
    ) -> None:
        self._finished = [0]
        self.future: Future[None] = Future()
        if works or further:
            wait = partial(_wait_for_each, tuple(works), further, self._finished)
            self.future = in_background(wait)
        else:
            self.future.set_result(None)

    @property
    def is_over(self) -> bool:
        """Whether all works are done, or one has failed."""
        return self.future.done()

    @property
    def finished(self) -> int:
        """How many works are done."""
        return self._finished[0]


class Announcement(NamedTuple):
    """Small messages of all other ranks, each of which sends its own when it comes to it."""

    arrival: Arrival
    messages: list[PendingMessage]


class Transport:
    """The ranks that exchange with each other, and the communicators of the groups that mix.

    Args:
        world: the communicator of all ranks; None for a world of one rank.
        rank: the position of this rank among the members.
        members: the ranks, as numbered at the start.
        timeout: bound of every wait.
        store: where the ranks meet to connect, and leave notes of losses; None if there is none.
        user_group: the same as `world` if that is the user's own, which is never closed here.
        peer_lost: tells whether waiting has become pointless; None if this cannot be known.
    """

    def __init__(
        self,
        world: Any | None,
        rank: int,
        members: tuple[int, ...],
        timeout: timedelta,
        store: Any | None = None,
        *,
        user_group: Any | None = None,
        peer_lost: Callable[[], bool] | None = None,
    ) -> None:
        self._world = world
        self.rank = rank
        self.members = members
        self.world_size = len(members)
        self._timeout = timeout
        self._store = store
        self._user_group = user_group
        self._registered = user_group is not None and is_registered(user_group)
        self._peer_lost = peer_lost
        self._subgroups: dict[tuple[int, ...], Any] = {}
        # That exchange over NCCL.
        self._gpus: list[torch.device] = []
        # Small messages travel on the CPU. A world without a backend for it is replaced when it is
        # first used.
        self._connects_cpu = world is None or serves(world, CPU)
        # Posts what is still packed or coded. Collectives must wait for it: those of one
        # communicator come in the same order on all ranks.
        self.posting: PostingThread | None = None
        # By type of device: a backend tells slowly.
        self._coalescing: dict[str, bool] = {}
        # A closed transport is not a world of one rank: what needs the others raises.
        self._closed: _Closed | None = None
        self._reports = FailureReports(store, self.initial_rank)

    @classmethod
    def over(
        cls,
        process_group: Any | None,
        timeout: timedelta | None = None,
        members: tuple[int, ...] | None = None,
    ) -> Transport:
        """Connect the ranks of a process group.

        Args:
            process_group: registered or raw; None means a world of one rank.
            timeout: bound of every wait; None takes the process group's.
            members: their numbers; None counts from 0.
        """
        if process_group is None:
            return cls(None, 0, (0,), timeout or timedelta(0))
        timeout = timeout or timeout_of(process_group)
        rank = process_group.rank()
        return cls(
            process_group,
            rank,
            members or tuple(range(process_group.size())),
            timeout,
            _own_store(store_of(process_group), rank, timeout),
            user_group=process_group,
        )

    @property
    def initial_rank(self) -> int:
        """The number of this rank at the start."""
        return self.members[self.rank]

    def connect(self, schedule: Sequence[Group], devices: Collection[torch.device] = ()) -> None:
        """Create the communicators that `schedule` (this rank's groups, phase by phase) needs.

        Creation waits for all members. It cannot deadlock: every rank goes through the phases in
        the same order, and the groups of a phase are disjoint.

        Args:
            schedule: the groups.
            devices: those of the tensors to exchange.
        """
        if self.world_size > 1 and self._world is self._user_group and self._wants_own_world():
            self._world = self._new_communicator(tuple(range(self.world_size)))
        self.begin_on(devices)
        for group in schedule:
            if group.size == self.world_size:
                self._subgroups[group.ranks] = self._world
            elif group.size > 2 and group.ranks not in self._subgroups:
                self._subgroups[group.ranks] = self._new_communicator(group.ranks)

    def begin_on(self, devices: Collection[torch.device]) -> None:
        """Make the first exchange on each GPU that has made none; collective.

        A first exchange between some of the ranks only is undefined on NCCL.
        """
        for device in devices:
            new = self.world_size > 1 and device not in self._gpus
            if new and self._coalesces(self._world, device):
                self._gpus.append(device)
                self.sum_(torch.zeros(1, device=device))

    def check_open(self) -> None:
        """Check that this rank can still reach the others.

        Raises:
            RuntimeError: the user's process group has been destroyed, or this rank has failed.
        """
        if self._registered and self._user_group not in dist.distributed_c10d._world.pg_group_ranks:
            raise RuntimeError(
                f"rank {self.rank}: expected the process group to be open, but it was destroyed; "
                f"call destroy_process_group() after the last step() and average"
            )
        if self._closed is not None and self._closed.broken:
            self._raise_closed(self._closed)

    def wait(self, works: list[Waitable]) -> None:
        """Wait for each work once, within the timeout; a second call returns at once.

        Raises:
            WireError: a peer is gone, or a wait timed out.
        """
        pending = works[:]
        works.clear()
        start = time.monotonic()
        try:
            if self._peer_lost is None:
                self._wait_for_all(pending)
            else:
                self._wait_watchfully(pending, self._peer_lost)
        except WireError:
            raise
        except RuntimeError as error:
            silent = time.monotonic() - start >= self._timeout.total_seconds()
            raise WireError(text_of(error), silent) from error
        except BaseException as error:
            # Nobody can wait for the works any more, and what has not arrived must not be mixed.
            # A thread that goes on waiting for them would hold up the end of the process.
            self.fail(error)
            raise

    def finish(self, ongoing: Ongoing, other: Ongoing | None = None) -> None:
        """Wait within the timeout for what goes on, or until something else is over.

        Raises:
            WireError: a peer is gone, or the wait timed out.
        """
        self.wait_for_any(ongoing, other)
        try:
            if ongoing.is_over:
                ongoing.future.result()
        except RuntimeError as error:
            raise WireError(text_of(error)) from error
        except BaseException as error:
            self.fail(error)
            raise

    def wait_for_any(self, ongoing: Ongoing, other: Ongoing | None = None) -> None:
        """As `finish`, without asking whether it has failed."""
        futures = [each.future for each in (ongoing, other) if each is not None]
        try:
            wait_for_any(futures, self._timeout.total_seconds(), self._peer_lost)
        except TimeoutError as error:
            silent = self._peer_lost is None or not self._peer_lost()
            raise WireError(f"no answer within {self._timeout}", silent) from error
        except BaseException as error:
            self.fail(error)
            raise

    @property
    def is_closed(self) -> bool:
        """Whether the connections were closed."""
        return self._closed is not None

    def limit_waits(self, timeout: timedelta) -> None:
        """Wait no longer than `timeout` from now on, and no longer watch for lost peers."""
        self._timeout = min(timeout, self._timeout)
        self._peer_lost = None

    def lose(self, suspects: tuple[int, ...], silent: bool) -> PeerLoss:
        """Close the connections for good after a `WireError`, and find out which rank was lost.

        Args:
            suspects: the ranks of which one was lost, by their position among the members.
            silent: as in `WireError`.
        """
        names = [self.members[rank] for rank in suspects]
        if self._peer_lost is not None:
            # All members meet again in any case, and find out there.
            loss = self._reports.error() or PeerLoss(names)
            self.abort(f"{loss} was lost")
            return loss
        # The note first: the neighbours read it when they see the connection closed.
        self._reports.note(names)
        self.abort(f"{PeerLoss(names)} was lost")
        return self._reports.find(names, silent)

    def fail(self, error: BaseException) -> None:
        """Close the connections for good because this rank cannot continue, and note why."""
        if self._closed is None:
            self._reports.note_error(error)
        self.abort(f"this rank failed with {type(error).__name__}: {error}", broken=True)

    def disagree(self, error: CallOrderError) -> None:
        """Close the connections for good because the ranks called different methods; note it."""
        self._reports.note_error(error)
        self.abort("the ranks called different methods")

    def pass_on(self, error: Exception) -> None:
        """Close the connections for good because of a loss elsewhere, unless they are; note it."""
        if self._closed is None:
            self._reports.note_error(error)
            self.abort(f"this rank ended with {type(error).__name__}: {error}")

    def abort(self, reason: str, broken: bool = False) -> None:
        """Close the connections made here; the peers notice this at once.

        Those of the user's process group stay open, but are not used any more either.

        Args:
            reason: the reason in later errors.
            broken: whether this rank itself has failed.
        """
        if self._closed is None:
            self._closed = _Closed(reason=reason, broken=broken)
        made = self._release()
        if self._world is not self._user_group:
            self._world = None
        for group in made:
            abort(group)

    def close(self) -> None:
        """Close the communicators made here and release the user's process group."""
        if self._world is not None and self._closed is None:
            # Before the others see the connections closed.
            self._reports.note(())
        for group in self._release():
            close(group, self._gpus, self._timeout.total_seconds())
        self._user_group = self._world = None

    def _release(self) -> list[Any]:
        """Forget the groups, and return the communicators made here, each once."""
        known = {id(group): group for group in (*self._subgroups.values(), self._world)}
        self._subgroups.clear()
        users = (None, self._user_group)
        return [group for group in known.values() if all(group is not each for each in users)]

    def wire_device(self, device: torch.device) -> torch.device:
        """The device on which tensors of `device` are exchanged: with gloo, the CPU."""
        if self._world is None or self.world_size == 1:
            return device
        if backend_of(self._world, device).name() != "gloo":
            return device
        return CPU

    def exchange(self, outgoing: Tensor, incoming: Tensor, peer: int, tag: int) -> list[Waitable]:
        """Start sending `outgoing` to `peer` and receiving `incoming` from it.

        Args:
            outgoing: the tensor to send; it must not change until the returned works are done.
            incoming: the tensor to overwrite, of the size and dtype of the peer's `outgoing`.
            peer: the position of the peer among the members.
            tag: distinguishes concurrent exchanges between two ranks; from 0.

        Returns:
            The works to wait for.

        Raises:
            WireError: the connection is closed already.
        """
        group = self._communicator()
        if self._coalesces(group, outgoing.device):
            # On such a backend (NCCL) a send alone would wait for a receive behind it.
            work = _starting(lambda: _exchange_coalesced(group, outgoing, incoming, peer))
            return [OnStream(work)]
        # The receive first: its notice lets the peer's data start.
        receive = self.receive(incoming, peer, tag)
        return [self.send(outgoing, peer, tag), receive]

    def sends_alone(self, device: torch.device) -> bool:
        """Whether `send` and `receive` work for tensors on this device: not on NCCL."""
        return self._world is not None and not self._coalesces(self._world, device)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Waitable:
        """Start sending a tensor, as in `exchange`; on any thread."""
        group = self._communicator()
        work: Waitable = _starting(lambda: group.send([tensor], peer, tag + _FIRST_TAG))
        return work

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Waitable:
        """Start receiving a tensor, as in `exchange`."""
        group = self._communicator()
        work: Waitable = _starting(lambda: group.recv([tensor], peer, tag + _FIRST_TAG))
        return work

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> list[Waitable]:
        """Start summing `tensor` in place over the ranks of a connected group."""
        self._communicator()
        group = self._subgroups[ranks]
        return [self._waitable(group, tensor, group.allreduce([tensor]))]

    def gather(self, tensor: Tensor, group: Group, tag: int) -> tuple[Tensor, list[Waitable]]:
        """Start gathering the tensors of all ranks of a pair or of a connected group, on a GPU.

        Args:
            tensor: of one dimension, of the same shape and dtype on all of them.
            group: the ranks.
            tag: as in `exchange`.

        Returns:
            The rows in the order of the ranks, and the works to wait for before they are read.
        """
        rows = tensor.new_empty(group.size, len(tensor))
        own = group.ranks.index(self.rank)
        rows[own].copy_(tensor)
        if group.size == 2:
            return rows, self.exchange(tensor, rows[1 - own], group.ranks[1 - own], tag)
        self._communicator()
        communicator = self._subgroups[group.ranks]
        work = communicator.allgather([list(rows)], [tensor])
        return rows, [self._waitable(communicator, tensor, work)]

    def send_control(
        self, message: Tensor, ranks: tuple[int, ...], tag: int
    ) -> list[PendingMessage]:
        """Start exchanging small messages with the other ranks of a group.

        Point to point, which shows who does not answer; in a large group by a collective.

        Args:
            message: a tensor on the CPU, of the same shape on all of them.
            ranks: a pair, or a group that is connected.
            tag: as in `exchange`.
        """
        peers = tuple(rank for rank in ranks if rank != self.rank)
        if len(peers) > _MOST_SENT_ONE_BY_ONE:
            rows = {rank: torch.empty_like(message) for rank in ranks}
            self._for_collective()
            works = [self._subgroups[ranks].allgather([list(rows.values())], [message])]
            return [PendingMessage(rank, works, rows[rank], peers) for rank in peers]
        pending = []
        for rank in peers:
            row = torch.empty_like(message)
            pending.append(
                PendingMessage(rank, self.exchange(message, row, rank, tag), row, (rank,))
            )
        return pending

    def send_to_all(self, message: Tensor) -> Announcement:
        """Exchange small messages with all ranks, whenever each of them comes to it.

        Args:
            message: a tensor on the CPU, of the same shape on all of them.

        Returns:
            The messages of the others, for `read`.

        Raises:
            PeerError: a rank was lost.
        """
        tag = _ANNOUNCE_TAG - _FIRST_TAG
        pending = []
        for rank in range(self.world_size):
            if rank != self.rank:
                row = torch.empty_like(message)
                try:
                    works = self.exchange(message, row, rank, tag)
                except WireError as error:
                    raise self._lost_in_collective((rank,), error) from error
                pending.append(PendingMessage(rank, works, row, (rank,)))
        awaited = [Awaited(work) for each in pending for work in each.works]
        return Announcement(arrival=Arrival(awaited), messages=pending)

    def read(self, announced: Announcement) -> dict[int, list[int]]:
        """The messages of the others, by rank.

        Raises:
            PeerError: a rank was lost.
        """
        try:
            self.finish(announced.arrival)
        except WireError as error:
            senders = [each.rank for each in announced.messages for _ in each.works]
            # The last work may have ended since the wait was given up.
            sender = senders[min(announced.arrival.finished, len(senders) - 1)]
            raise self._lost_in_collective((sender,), error) from error
        return {each.rank: each.message.tolist() for each in announced.messages}

    def sum_(self, tensor: Tensor) -> None:
        """Sum `tensor` in place over all ranks; collective."""
        if self.world_size > 1:
            world = self._for_collective()
            self._finish(self._waitable(world, tensor, world.allreduce([tensor])))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite `tensor`, of any dtype, with that of rank `source`; collective."""
        if self.world_size == 1 or tensor.numel() == 0:
            return
        options = dist.BroadcastOptions()
        options.rootRank = source
        world = self._for_collective()
        work = world.broadcast([tensor.view(torch.uint8)], options)
        self._finish(self._waitable(world, tensor, work))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack the tensors of all ranks, of the same shape and dtype; collective.

        Returns:
            Tensor of shape (world_size, *tensor.shape), on the CPU.
        """
        tensor = tensor.cpu()
        if self.world_size == 1:
            return tensor.unsqueeze(0)
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._finish(self._for_collective().allgather([gathered], [tensor]))
        return torch.stack(gathered)

    @property
    def exchange_device(self) -> torch.device:
        """The kind of device whose tensors are exchanged: the GPU if the group serves it."""
        return torch.device("cpu") if self._world is None else exchange_device(self._world)

    def _coalesces(self, group: Any, device: torch.device) -> bool:
        if device.type not in self._coalescing:
            backend = backend_of(group, device)
            self._coalescing[device.type] = backend.supports_coalescing
        return self._coalescing[device.type]

    def _waitable(self, group: Any, tensor: Tensor, work: Waitable) -> Waitable:
        return OnStream(work) if self._coalesces(group, tensor.device) else work

    def _communicator(self) -> Any:
        """The communicator of all ranks.

        Raises:
            PeerError: the connections were closed after a peer was lost.
            RuntimeError: the connections were closed because this rank failed.
        """
        if self._closed is not None:
            self._raise_closed(self._closed)
        if not self._connects_cpu:
            # As of init_process_group("nccl").
            self._world = self._new_communicator(tuple(range(self.world_size)))
            self._connects_cpu = True
        return self._world

    def _for_collective(self) -> Any:
        """The communicator of all ranks, once nothing else is being posted there."""
        posting = self.posting
        if posting is not None and not posting.runs_here:
            self.posting = None
            # Whether it has failed is told by the round.
            try:
                self.wait_for_any(posting)
            except WireError as error:
                raise self._lost_in_collective(self._others, error) from error
        return self._communicator()

    def _raise_closed(self, closed: _Closed) -> NoReturn:
        kind = RuntimeError if closed.broken else PeerError
        raise kind(
            f"rank {self.initial_rank}: expected connections to the other ranks, but this rank has "
            f"closed them: {closed.reason}; restart from the last checkpoint"
        )

    def _finish(self, work: Waitable) -> None:
        """Wait for a collective of all ranks."""
        try:
            self.wait([work])
        except WireError as error:
            raise self._lost_in_collective(self._others, error) from error

    @property
    def _others(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if rank != self.rank)

    def _lost_in_collective(
        self, suspects: tuple[int, ...], error: WireError
    ) -> PeerError | CallOrderError:
        loss = self.lose(suspects, error.silent)
        if loss.error.startswith(CallOrderError.__name__):
            # That rank is in another method, and will not come.
            return CallOrderError(f"rank {self.initial_rank}: {loss.error}")
        return PeerError(
            f"rank {self.initial_rank}: expected all {self.world_size} ranks to take part in a "
            f"collective within {self._timeout}, but lost {loss} ({error}); "
            f"{loss.advice}, and call the same methods in the same order everywhere",
            rank=loss.ranks[0] if len(loss.ranks) == 1 else None,
        )

    def _wait_for_all(self, works: Sequence[Waitable]) -> None:
        for work in works:
            work.wait(self._timeout)

    def _wait_watchfully(self, works: Sequence[Waitable], peer_lost: Callable[[], bool]) -> None:
        """Wait on another thread, and check here whether waiting has become pointless.

        Repeated short waits do not do: gloo closes all connections when a wait times out. If the
        check ends the wait here, `abort` ends that of the thread.
        """
        most = len(works) * self._timeout.total_seconds() + _SLACK_SECONDS
        try:
            within(most, lambda: self._wait_for_all(works), peer_lost)
        except TimeoutError as error:
            raise WireError("another rank has lost a peer, or comes back") from error

    def _wants_own_world(self) -> bool:
        """Whether to exchange over a communicator that is created here.

        With gloo, a wait that times out would close the connections of the user's process group.
        With NCCL, the rounds would queue behind the user's own collectives.
        """
        kind = backend_of(self._world, self.exchange_device).name()
        return (kind == "gloo" or is_nccl(kind)) and self._store is not None

    def _new_communicator(self, ranks: tuple[int, ...]) -> Any:
        if self._store is None:
            raise ValueError(
                f"rank {self.rank}: ranks {ranks} need a communicator of their own, and this "
                f"{type(self._world).__name__} has no store to build it on; wrap it in a "
                f"torch.distributed.ProcessGroup, or use a topology of pairs and no timeout"
            )
        store, place = prefixed("-".join(map(str, ranks)), self._store), ranks.index(self.rank)
        try:
            return new_communicator(self._world, store, place, len(ranks), self._timeout)
        except (RuntimeError, TimeoutError) as error:
            raise PeerError(
                f"rank {self.initial_rank}: ranks {[self.members[rank] for rank in ranks]} "
                f"could not connect within {self._timeout} ({text_of(error)}); look there for "
                f"the first error"
            ) from error


def _wait_for_each(
    works: Sequence[Awaited],
    further: Callable[[], Sequence[Awaited]] | None,
    finished: list[int],
) -> None:
    for work, on_gpu in chain(works, _found(further)):
        if on_gpu:
            while not work.is_completed():
                time.sleep(_POLL_SECONDS)
        else:
            work.wait(LONGEST_WAIT)
        finished[0] += 1


def _found(further: Callable[[], Sequence[Awaited]] | None) -> Iterator[Awaited]:
    if further is not None:
        yield from further()


def _starting(start: Callable[[], Started]) -> Started:
    """Start what raises a `WireError` if the connection is closed already."""
    try:
        return start()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise WireError(text_of(error)) from error


def _exchange_coalesced(group: Any, outgoing: Tensor, incoming: Tensor, peer: int) -> Waitable:
    # As dist.batch_isend_irecv, which takes registered groups only.
    group._start_coalescing(outgoing.device)
    try:
        group.send([outgoing], peer, 0)
        group.recv([incoming], peer, 0)
    finally:
        work: Waitable = group._end_coalescing(outgoing.device)
    return work


def _own_store(store: Any | None, rank: int, timeout: timedelta) -> Any | None:
    """A part of the store for this wrapper only: ranks build wrappers in the same order."""
    if store is None:
        return None

    def connect() -> Any:
        # What hangs on this connection holds up no call of the user.
        part = prefixed("decent_optim_wrapper", cloned(store))
        return prefixed(str(part.add(f"made by {rank}", 1)), part)

    try:
        return within(timeout.total_seconds(), connect)
    except (TimeoutError, DistError) as error:
        raise PeerError(
            f"rank {rank}: the process group's store does not answer ({text_of(error)}); look at "
            f"the process that holds it"
        ) from error
