"""Puts a round on the wire: small messages, and buckets in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from decent_optim_wrapper.comm.streams import PostingThread
from decent_optim_wrapper.comm.waiting import PendingMessage, WireError
from decent_optim_wrapper.wire.exchange import Exchange, Wire


class Sender:
    """Starts the exchanges of a round, at once or one after the other on a thread.

    A connection that is closed already is noted, and raised when the round is received, where it
    can be handled. Everything else that fails here is an error of this rank.

    Args:
        wire: what the buckets of the round have in common.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        # Why the round cannot arrive, and the position of the bucket that could not leave.
        self.failure: WireError | None = None
        self.failed_bucket = 0
        # Whether a thread codes all buckets but the first.
        self.defers = False
        self._deferred: list[Exchange] = []
        # Posts what has to reach the CPU, or to be coded there, before.
        # None if everything was posted at once.
        self.thread: PostingThread | None = None

    def defer_encoding(self) -> None:
        """Let a thread code all buckets but the first, once the round is sealed.

        For buckets that are posted one right after the other.
        """
        self.defers = True

    def send(self, numbers: Sequence[float], tag: int, bucket: int) -> list[PendingMessage]:
        """Send a small message to the group.

        Args:
            numbers: exact in float64, as counts below 2**53 are.
            tag: that of the message.
            bucket: the position of the bucket that an error names.
        """
        if self.failure or self._wire.group.size == 1:
            return []
        message = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        try:
            return self._wire.transport.send_control(message, self._wire.group.ranks, tag)
        except WireError as error:
            self.failure, self.failed_bucket = error, bucket
            return []

    def post(self, exchange: Exchange) -> None:
        """Start an exchange, behind those that were posted before."""
        if exchange.via_cpu and self.thread is None:
            self._start_thread()
        if self.thread is not None:
            # What comes behind, too: sums must have the same order on all ranks.
            device = exchange.device if exchange.via_cpu else None
            self.thread.add(partial(self._start, exchange), device)
        elif self.defers and exchange.codes_late and exchange.position > 0:
            self._deferred.append(exchange)
        else:
            self._start(exchange)

    def seal(self, last: Callable[[], None]) -> None:
        """Post what was deferred, and run an action behind it."""
        if self._deferred:
            thread = self._start_thread()
            for exchange in self._deferred:
                thread.add(partial(self._start, exchange))
            self._deferred = []
        if self.thread is None:
            last()
        else:
            self.thread.end(last)

    def wait(self) -> None:
        """Wait until everything is on the wire.

        Raises:
            WireError: that took too long, or a peer was lost.
            Exception: what has failed on the thread, unless that was the wire: an error of this
                rank, as if it had posted here.
        """
        if self.thread is not None and not self.thread.ended_well:
            self._wire.transport.wait_for_any(self.thread.future)
            self.thread.future.result()

    def drop(self) -> None:
        """Post nothing more."""
        self._deferred = []
        if self.thread is not None:
            # What a thread still codes lies in memory that the next round uses.
            self.thread.drop()

    def _start_thread(self) -> PostingThread:
        thread = self.thread = PostingThread()
        self._wire.transport.collectives_wait_for(thread)
        return thread

    def _start(self, exchange: Exchange) -> None:
        if self.failure:
            return
        try:
            exchange.post()
        except WireError as error:
            self.failure, self.failed_bucket = error, exchange.position
