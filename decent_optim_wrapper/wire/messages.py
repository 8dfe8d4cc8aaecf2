"""Puts the messages of a round on the wire, and waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch

from decent_optim_wrapper.comm.streams import Action, PostingThread
from decent_optim_wrapper.comm.waiting import Arrival, Expected, PendingMessage, Waitable, WireError
from decent_optim_wrapper.errors import CallOrderError, PeerError
from decent_optim_wrapper.topo import Topology
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.exchange import Exchange, Wire
from decent_optim_wrapper.wire.pack import receiving_ahead


class Sender:
    """Starts the exchanges of a round, at once or one after the other on a thread.

    A connection that is closed already is noted, and raised when the round is received, where it
    can be handled. All other failures are errors of this rank.

    Args:
        wire: what the buckets of the round have in common.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        # Why the round cannot arrive, and the position of the bucket that could not be sent.
        self.failure: WireError | None = None
        self.failed_bucket = 0
        # Whether all exchanges on a GPU start when the round is sealed.
        self._collects = False
        # For each exchange that a thread posts, a future that is done when it is posted.
        self._posted: dict[Exchange, Future[None]] = {}
        # Posts exchanges whose values must first be copied to the CPU; None if everything was
        # posted at once.
        self.thread: PostingThread | None = None

    def launch_together(self) -> None:
        """Start all exchanges on a GPU as one kernel, once the round is sealed."""
        self._collects = True
        self._wire.transport.batches.collect()

    def send(self, numbers: Sequence[float], tag: int, bucket: int) -> list[PendingMessage]:
        """Send a small message to the group.

        Args:
            numbers: numbers that are exact in float64, such as counts below 2**53.
            tag: the tag of the message.
            bucket: the position of the bucket that an error names.
        """
        if self.failure or self._wire.group.size == 1:
            return []
        message = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        try:
            return self._wire.transport.send_control(message, self._wire.group.ranks, tag)
        except WireError as error:
            self._note(error, bucket)
            return []

    def receive_ahead(self, bucket: Bucket, position: int) -> None:
        """Start receiving a bucket that is posted later."""
        action = partial(self._receive, receiving_ahead(self._wire, bucket, position), position)
        if bucket.via_cpu:
            # A GPU may still copy what was received in this memory before.
            thread = self.thread or self._start_thread()
            thread.add(action, bucket.device)
        else:
            action()

    def _receive(self, start: Action, position: int) -> None:
        try:
            start()
        except WireError as error:
            self._note(error, position)

    def start(self, exchange: Exchange, then: Action | None = None) -> None:
        """Start an exchange after those that were posted before, and then run an action."""
        if exchange.via_cpu and self.thread is None:
            self._start_thread()
        if self.thread is not None:
            # Later ones, too: all-reduces must have the same order on all ranks.
            device = exchange.device if exchange.via_cpu else None
            self._posted[exchange] = Future()
            self.thread.add(partial(self._start, exchange, then), device)
        else:
            self._start(exchange, then)

    def _note(self, error: WireError, bucket: int) -> None:
        # Not the error itself, whose traceback holds frames that hold this object: the connections
        # would stay open until the garbage is collected.
        self.failure = WireError(str(error), error.silent)
        self.failed_bucket = bucket

    def seal(self, last: Action | None = None) -> None:
        """Run an action once everything is posted; nothing is posted after it."""
        if self._collects and self._wire.group.size > 2:
            # Before the flags, which are a collective: these have the same order on all ranks.
            self._launch()
        if self.thread is not None:
            self.thread.end(last)
        elif last is not None:
            last()
        if self._collects:
            self._launch()

    def _launch(self) -> None:
        try:
            self._wire.transport.start_batches()
        except WireError as error:
            self._note(error, 0)

    def wait(self) -> None:
        """Wait until everything is on the wire.

        Raises:
            WireError: it took too long, or a peer was lost.
            Exception: any other failure on the thread, which is an error of this rank.
        """
        if self.thread is not None and not self.thread.ended_well:
            self._wire.transport.wait_for_any(self.thread.future)
            self.thread.future.result()

    def wait_for(self, exchange: Exchange) -> None:
        """Wait until an exchange is on the wire; raises as `wait` does."""
        posted = self._posted.get(exchange)
        if self.thread is not None and posted is not None:
            self._wire.transport.wait_for_any(posted, self.thread.future)
            if not posted.done():
                self.thread.future.result()

    def drop(self) -> None:
        """Post nothing more."""
        if self._collects:
            self._wire.transport.batches.drop()
        if self.thread is not None:
            # The thread may still use memory that the next round uses.
            self.thread.drop()

    def _start_thread(self) -> PostingThread:
        thread = self.thread = PostingThread()
        self._wire.transport.collectives_wait_for(thread)
        return thread

    def _start(self, exchange: Exchange, then: Action | None) -> None:
        try:
            if not self.failure:
                exchange.start()
        except WireError as error:
            self._note(error, exchange.position)
        if then is not None:
            then()
        if posted := self._posted.get(exchange):
            posted.set_result(None)


class Waits(NamedTuple):
    """Waits within the timeout; every method raises as `lost` returns.

    Args:
        wire: what the buckets of the round have in common.
        topology: for errors.
    """

    wire: Wire
    topology: Topology

    def wait(
        self,
        works: list[Waitable],
        bucket: int,
        suspects: tuple[int, ...],
        on_gpu: bool = False,
    ) -> None:
        """Wait for works, of which there are none left then; see `Expected`."""
        try:
            # Another stream may wait again for the works of a GPU.
            self.wire.transport.wait(works[:] if on_gpu else works)
        except WireError as error:
            raise self.lost(bucket, suspects, error.silent) from error

    def wait_for_sender(self, sender: Sender, exchange: Exchange | None = None) -> None:
        """Wait until an exchange is on the wire; None waits for all."""
        try:
            if exchange is None:
                sender.wait()
            else:
                sender.wait_for(exchange)
        except WireError as error:
            raise self.lost(0, self.wire.peers, error.silent) from error

    def check_sent(self, sender: Sender) -> None:
        """Check that everything could be sent."""
        if failure := sender.failure:
            raise self.lost(sender.failed_bucket, self.wire.peers, failure.silent) from failure

    def wait_for(self, watch: Arrival, *others: Arrival) -> None:
        """Wait until one of them has arrived, or `watch` has failed."""
        try:
            self.wire.transport.finish(watch.future, *(each.future for each in others))
        except WireError as error:
            lost = watch.lost() or Expected([], 0, self.wire.peers)
            raise self.lost(lost.bucket, lost.suspects, error.silent) from error

    def lost(
        self, bucket: int, suspects: tuple[int, ...], silent: bool
    ) -> PeerError | CallOrderError:
        """The error of a round whose bucket did not arrive."""
        transport, number = self.wire.transport, self.wire.round
        loss = transport.lose(suspects, silent)
        group = tuple(transport.members[rank] for rank in self.wire.group.ranks)
        return loss.as_error(
            transport.initial_rank,
            f"lost {loss} in round {number}, bucket {bucket}, group {group} of "
            f"{self.topology!r}; {loss.advice}. The parameters are as they were before this round "
            f"was mixed: restart from a checkpoint, or let the others go on with "
            f"elastic=Elastic()",
            round=number,
            bucket=bucket,
        )
