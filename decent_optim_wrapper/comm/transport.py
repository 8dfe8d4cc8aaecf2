"""Exchange between ranks: the one place that calls torch.distributed to move bytes.

Pairs exchange point to point on one communicator of all ranks. Each larger group gets its own
communicator, created by its members only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from decent_optim_wrapper.comm import nccl, tags
from decent_optim_wrapper.comm.connections import Connections
from decent_optim_wrapper.comm.process_groups import store_of, timeout_of
from decent_optim_wrapper.comm.store import own_part
from decent_optim_wrapper.comm.streams import PostingThread
from decent_optim_wrapper.comm.waiting import (
    Arrival,
    Collective,
    Expected,
    PendingMessage,
    Waitable,
    WireError,
    never,
    raise_if_closed,
    wait_for_any,
    within,
)
from decent_optim_wrapper.errors import text_of
from decent_optim_wrapper.topo import Group

# How much later than at its timeout gloo may end a wait.
_SLACK_SECONDS = 1.0


class Transport(Connections):
    """The ranks that exchange with each other, over their connections.

    Collectives of all ranks are in the same class as exchanges of two: both use the waits and the
    search for a lost rank, and on GPUs the first exchange of a group is made as a collective.
    """

    # A thread that still posts: collectives of one communicator must come in the same order on all
    # ranks.
    _posting: PostingThread | None = None

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
        rank, members = process_group.rank(), members or tuple(range(process_group.size()))
        store = own_part(store_of(process_group), rank, timeout)
        return cls(process_group, rank, members, timeout, store, user_group=process_group)

    @property
    def is_closed(self) -> bool:
        """True if the connections were aborted."""
        return self._closure is not None

    def limit_waits(self, timeout: timedelta) -> None:
        """Wait no longer than `timeout` from now on, and never meet the members again."""
        self.timeout = min(timeout, self.timeout)
        self.should_stop = never

    def begin_on(self, sizes: Mapping[torch.device, int]) -> None:
        """Make the first exchange of every group on GPUs that have made none; collective.

        NCCL connects ranks in their first exchange, and perhaps again in a large one. Among running
        kernels, some of which wait for other ranks, that may never end (NVIDIA/nccl#195, #239). A
        first exchange between some ranks of a communicator only is undefined.

        Args:
            sizes: the bytes of a bucket, by device.
        """
        for device, nbytes in sizes.items():
            if self.world_size > 1 and device not in self.gpus and self.coalesces(device):
                self.gpus.append(device)
                zeros = torch.zeros(max(1, nbytes // 4), device=device)
                self.sum_(zeros)
                for group in self._groups:
                    self._begin_in(group, zeros)

    def _begin_in(self, group: Group, zeros: Tensor) -> None:
        """Make the first exchange of a group; all its ranks make theirs in the same order."""
        others = [rank for rank in group.ranks if rank != self.rank]
        if len(others) == 1:
            room = torch.empty_like(zeros)
            self._collective(zeros, lambda _: self.exchange(zeros, room, others[0], 0)[0])
        elif 1 < len(others) < self.world_size - 1:
            self._collective(zeros, lambda _: self.all_reduce(zeros, group.ranks)[0])

    def check_open(self) -> None:
        """Check that this rank has not failed; after the loss of a peer the next exchange raises.

        Raises:
            RuntimeError: this rank has failed, or a CUDA graph is being captured.
        """
        is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if is_used and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"rank {self.initial_rank}: step() and collective methods cannot be captured in a "
                f"CUDA graph, which would repeat one round for ever; "
                f"call synchronize() before the capture, and step() after it and after each replay"
            )
        if self._closure is not None and self._closure.broken:
            self._open_world()

    def wait(self, works: list[Waitable]) -> None:
        """Wait for each work once, within the timeout; a second call returns at once.

        Raises:
            WireError: a peer is gone, or a wait timed out.
        """
        if self._closure is not None:
            self.check_open()
        pending = works[:]
        works.clear()
        timeout, start = self.timeout, time.monotonic()
        try:
            if self.should_stop is never:
                for work in pending:
                    work.wait(timeout)
            else:
                # On another thread: gloo closes all connections when a wait times out, so short
                # waits are no way to check here. If the check ends the wait, closing the
                # connections ends the wait of the thread.
                seconds = len(pending) * timeout.total_seconds() + _SLACK_SECONDS
                stop = self.should_stop
                within(seconds, lambda: [work.wait(timeout) for work in pending], stop)
        except BaseException as error:
            self._give_up(error, silent=time.monotonic() - start >= timeout.total_seconds())
            raise

    def wait_for_any(self, *futures: Future[None]) -> None:
        """Wait until one is done, without asking whether it has failed.

        Raises:
            WireError: the wait timed out.
        """
        if self._closure is not None:
            self.check_open()
        try:
            wait_for_any(futures, self.timeout.total_seconds(), self.should_stop)
        except BaseException as error:
            self._give_up(error)
            raise

    def wait_until(self, awaited: Future[None], *others: Future[None]) -> None:
        """Wait until `awaited` has succeeded, or something else is done.

        Raises:
            WireError: a peer is gone, or the wait timed out.
        """
        self.wait_for_any(awaited, *others)
        error = awaited.exception() if awaited.done() else None
        if error is not None:
            # If it were raised itself, its traceback would hold the frames that wait, and these the
            # future that holds it: the connections would stay open until the garbage is collected.
            self._give_up(error)
            raise error

    def _give_up(self, error: BaseException, silent: bool = False) -> None:
        """Turn an error of the wire into a `WireError`; after any other, close the connections.

        The caller raises that other error again.

        Raises:
            WireError: the error is a timeout or a failed connection.
        """
        if isinstance(error, TimeoutError):
            if self.should_stop():
                raise WireError("another rank is dead, has lost a peer, or comes back") from error
            raise WireError(f"no answer within {self.timeout}", silent=True) from error
        if isinstance(error, RuntimeError) and not (self._closure and self._closure.broken):
            raise WireError(text_of(error), silent) from error
        # The works can no longer be waited for, and their data must not be mixed. A thread that
        # continued to wait for them would delay the end of the process.
        self.report_and_close(error)

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
        if outgoing.device.type != "cpu" and self.coalesces(outgoing.device):
            pair = outgoing, incoming
            return [
                nccl.exchange(self._ready or self._open_world(), *pair, peer, self.report_and_close)
            ]
        # Every step comes here, so it makes as few calls as possible.
        world = self._ready or self._open_world()
        try:
            # The receive first: the peer sends its data when the notice arrives. It is also waited
            # for first: gloo may forget a send whose connection closes, but no receive.
            received = world.recv([incoming], peer, tag + tags.FIRST)
            return [received, world.send([outgoing], peer, tag + tags.FIRST)]
        except RuntimeError as error:
            # The error holds this frame: to drop the last reference may take long, see `abort`.
            del world
            raise_if_closed(error)
            raise

    def _post(self, operation: str, tensor: Tensor, peer: int, tag: int) -> Waitable:
        post = getattr(self._ready or self._open_world(), operation)
        try:
            return post([tensor], peer, tag + tags.FIRST)  # type: ignore[no-any-return]
        except RuntimeError as error:
            # As in `exchange`.
            del post
            raise_if_closed(error)
            raise

    def send(self, tensor: Tensor, peer: int, tag: int) -> Waitable:
        """Start sending a tensor, as in `exchange`; on any thread."""
        return self._post("send", tensor, peer, tag)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Waitable:
        """Start receiving a tensor, as in `exchange`."""
        return self._post("recv", tensor, peer, tag)

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> list[Waitable]:
        """Start summing `tensor` in place over the ranks of a connected group."""
        return [self._started(self._of(ranks).allreduce([tensor]), tensor)]

    def gather(self, tensor: Tensor, group: Group, tag: int) -> tuple[Tensor, list[Waitable]]:
        """Start gathering the tensors of all ranks of a pair or of a connected group, on a GPU.

        Args:
            tensor: a vector of the same shape and dtype on all of them.
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
        work = self._of(group.ranks).allgather([list(rows)], [tensor])
        return rows, [self._started(work, tensor)]

    def send_control(self, message: Tensor, ranks: Iterable[int], tag: int) -> list[PendingMessage]:
        """Start exchanging small messages with other ranks.

        Messages are point to point, which shows the rank that does not answer.

        Args:
            message: a tensor on the CPU, of the same shape on all of them.
            ranks: the ranks; this one may be among them.
            tag: as in `exchange`.
        """
        sent = []
        for rank in ranks:
            if rank != self.rank:
                row = torch.empty_like(message)
                sent.append(PendingMessage(rank, self.exchange(message, row, rank, tag), row))
        return sent

    def announce(self, message: Tensor) -> tuple[Arrival, list[PendingMessage]]:
        """Start exchanging small messages with all ranks, each of which sends when it is ready.

        Args:
            message: as in `send_control`.

        Returns:
            What waits for the messages of the others, and the messages, for `read_all`.

        Raises:
            PeerError: a rank was lost.
        """
        try:
            # In pairs: a collective would have to come in the same order on all ranks.
            messages = self.send_control(message, self.others, tags.ANNOUNCEMENT)
        except WireError as error:
            raise self.lost_in_collective(self.others, error) from error
        return Arrival([Expected(m.works, 0, (m.rank,)) for m in messages]), messages

    def read_all(self, arrival: Arrival, messages: list[PendingMessage]) -> dict[int, list[int]]:
        """Wait for the messages of the others, as `announce` returns them, by rank.

        Raises:
            PeerError: a rank was lost.
        """
        try:
            self.wait_until(arrival.future)
        except WireError as error:
            lost = arrival.lost()
            raise self.lost_in_collective(lost.suspects if lost else self.others, error) from error
        return {each.rank: each.message.tolist() for each in messages}

    def collectives_wait_for(self, posting: PostingThread) -> None:
        """Make collectives wait for a thread that still packs, codes and posts."""
        self._posting = posting

    def sum_(self, tensor: Tensor) -> None:
        """Sum `tensor` in place over all ranks; collective."""
        if self.world_size > 1:
            self._collective(tensor, lambda world: world.allreduce([tensor]))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite `tensor`, of any dtype, with the tensor of rank `source`; collective."""
        if self.world_size > 1 and tensor.numel():
            data = tensor.view(torch.uint8)
            self._collective(tensor, lambda world: world.broadcast(data, source))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack the tensors of all ranks, of the same shape and dtype; collective.

        Returns:
            Tensor of shape (world_size, *tensor.shape), on the CPU.
        """
        tensor = tensor.detach().cpu()
        rows = tensor.new_empty(self.world_size, *tensor.shape)
        rows[self.rank] = tensor
        if self.world_size > 1:
            # As bytes: gloo knows few dtypes.
            parts = [row.view(-1).view(torch.uint8) for row in rows]
            own = parts[self.rank].clone()
            self._collective(own, lambda world: world.allgather([parts], [own]))
        return rows

    def _collective(self, tensor: Tensor, start: Callable[[Any], Waitable]) -> None:
        """Make a collective of all ranks."""
        try:
            if self._posting is not None:
                # The round raises its error if it has failed.
                self.wait_for_any(self._posting.future)
                self._posting = None
            self.wait([self._started(start(self._open_world()), tensor)])
        except WireError as error:
            raise self.lost_in_collective(self.others, error) from error

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks but this one, by position among the members."""
        return tuple(rank for rank in range(self.world_size) if rank != self.rank)

    def _started(self, work: Waitable, tensor: Tensor) -> Waitable:
        """A collective that has begun."""
        lost = self._reports.is_lost
        return nccl.OnStream(work) if self.coalesces(tensor.device) else Collective(work, lost)
