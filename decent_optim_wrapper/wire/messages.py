"""Puts the messages of a round on the wire, and waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from decent_optim_wrapper.comm.streams import Action, PostingThread
from decent_optim_wrapper.comm.waiting import Arrival, Expected, PendingMessage, Waitable, WireError
from decent_optim_wrapper.errors import CallOrderError, PeerError
from decent_optim_wrapper.topo import Topology
from decent_optim_wrapper.wire.exchange import Exchange, Wire


class Messages:
    """The messages of a round, started at once or one after the other on a thread.

    A connection that is closed already is noted, and raised when the round is received, where it
    can be handled. All other failures are errors of this rank.

    Args:
        wire: what the buckets of the round have in common.
        topology: for errors.
    """

    def __init__(self, wire: Wire, topology: Topology) -> None:
        self._wire = wire
        self._topology = topology
        # Arguments of the `WireError` of a round that cannot arrive, and the position of the bucket
        # that could not be sent.
        self.failure: tuple[str, bool] | None = None
        self.failed_bucket = 0
        # Whether all exchanges on a GPU start when the round is sealed.
        self._collects = False
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

    def run(self, action: Action, exchange: Exchange) -> None:
        """Run an action of an exchange after those of exchanges that were posted before."""
        if exchange.via_cpu and self.thread is None:
            self.thread = PostingThread()
            self._wire.transport.collectives_wait_for(self.thread)
        if self.thread is not None:
            # Later ones, too: all-reduces must have the same order on all ranks. A GPU may still
            # pack what is sent, and copy what was received in the same memory before.
            device = exchange.device if exchange.via_cpu else None
            self.thread.add(partial(self._run, action, exchange.position), device)
        else:
            self._run(action, exchange.position)

    def _run(self, action: Action, bucket: int) -> None:
        try:
            if not self.failure:
                action()
        except WireError as error:
            self._note(error, bucket)

    def _note(self, error: WireError, bucket: int) -> None:
        # Not the error itself, whose traceback holds frames that hold this object: the connections
        # would stay open until the garbage is collected.
        self.failure = str(error), error.silent
        self.failed_bucket = bucket

    def seal(self, last: Action | None = None) -> None:
        """Run an action once everything is posted; nothing is posted after it."""
        if self._collects and self._wire.group.size > 2:
            # Before the flags, which are a collective: these have the same order on all ranks.
            self._run(self._wire.transport.start_batches, 0)
        if self.thread is not None:
            self.thread.end(last)
        elif last is not None:
            last()
        if self._collects:
            self._run(self._wire.transport.start_batches, 0)

    def wait_until_sent(self) -> None:
        """Wait until everything is on the wire; raises as `lost` returns.

        Raises:
            Exception: a failure on the thread that is an error of this rank.
        """
        try:
            if self.thread is not None and not self.thread.ended_well:
                self._wire.transport.wait_for_any(self.thread.future)
                self.thread.future.result()
            if self.failure is not None:
                raise WireError(*self.failure)
        except WireError as error:
            raise self.lost(self.failed_bucket, self._wire.peers, error.silent) from error

    def drop(self) -> None:
        """Post nothing more."""
        if self._collects:
            self._wire.transport.batches.drop()
        if self.thread is not None:
            # The thread may still use memory that the next round uses.
            self.thread.drop()

    def wait(
        self, works: list[Waitable], bucket: int, suspects: tuple[int, ...], on_gpu: bool = False
    ) -> None:
        """Wait for works, of which there are none left then; raises as `lost` returns.

        Arguments are those of `Expected`.
        """
        try:
            # Another stream may wait again for the works of a GPU.
            self._wire.transport.wait(works[:] if on_gpu else works)
        except WireError as error:
            raise self.lost(bucket, suspects, error.silent) from error

    def wait_for(self, watch: Arrival, *others: Arrival) -> None:
        """Wait until one of them has arrived, or `watch` has failed; raises as `lost` returns."""
        try:
            self._wire.transport.finish(watch.future, *(each.future for each in others))
        except WireError as error:
            lost = watch.lost() or Expected([], 0, self._wire.peers)
            raise self.lost(lost.bucket, lost.suspects, error.silent) from error

    def lost(
        self, bucket: int, suspects: tuple[int, ...], silent: bool
    ) -> PeerError | CallOrderError:
        """The error of a round whose bucket did not arrive."""
        transport, number = self._wire.transport, self._wire.round
        loss = transport.lose(suspects, silent)
        group = tuple(transport.members[rank] for rank in self._wire.group.ranks)
        return loss.as_error(
            transport.initial_rank,
            f"lost {loss} in round {number}, bucket {bucket}, group {group} of "
            f"{self._topology!r}; {loss.advice}. The parameters are as they were before this round "
            f"was mixed: restart from a checkpoint, or let the others go on with "
            f"elastic=Elastic()",
            round=number,
            bucket=bucket,
        )
