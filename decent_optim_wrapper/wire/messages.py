"""Puts the messages of a round on the wire, waits for them, and reads which values are finite."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch
from loguru import logger
from torch import Tensor

from decent_optim_wrapper.comm import streams, tags
from decent_optim_wrapper.comm.streams import Action, PostingThread
from decent_optim_wrapper.comm.waiting import Arrival, Expected, PendingMessage, Waitable, WireError
from decent_optim_wrapper.errors import CallOrderError, PeerError
from decent_optim_wrapper.topo import Topology
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.checked_on_gpu import CheckedOnGpu
from decent_optim_wrapper.wire.coded import CodedGroup, CodedPair
from decent_optim_wrapper.wire.exchange import Exchange, PlainGroup, PlainPair, RoundContext
from decent_optim_wrapper.wire.nonfinite import nonfinite_error


class Messages:
    """The messages of a round, started at once or one after the other on a thread.

    A connection that is closed already is noted, and raised when the round is received, where it
    can be handled. All other failures are errors of this rank.

    Args:
        round: what the buckets of the round have in common.
        topology: for errors.
    """

    def __init__(self, round: RoundContext, topology: Topology) -> None:
        self._round = round
        self._topology = topology
        # Arguments of the `WireError` of a round that cannot arrive, and the position of the bucket
        # that could not be sent.
        self.failure: tuple[str, bool] | None = None
        self.failed_bucket = 0
        # Posts exchanges whose values must first be coded, or copied to the CPU; None if everything
        # was posted at once.
        self.thread: PostingThread | None = None
        # By position, what is done once an exchange is posted.
        self._posted: dict[int, Future[None]] = {}

    def send(self, message: Tensor, tag: int, bucket: int) -> list[PendingMessage]:
        """Send a small message to the group.

        Args:
            message: a vector on the CPU, of the same length and dtype on all of its ranks.
            tag: the tag of the message.
            bucket: the position of the bucket that an error names.
        """
        try:
            if not self.failure and self._round.group.size > 1:
                return self._round.transport.send_control(message, self._round.group.ranks, tag)
        except WireError as error:
            self._note(error, bucket)
        return []

    def run(self, action: Action, exchange: Exchange, turn: Action | None = None) -> None:
        """Run an action of an exchange after the actions of all exchanges posted before it.

        Args:
            action: the action.
            exchange: the exchange.
            turn: what a thread waits for before it.
        """
        if exchange.on_thread and self.thread is None:
            self.thread = PostingThread()
            self._round.transport.collectives_wait_for(self.thread)
        if self.thread is not None:
            # Later ones, too: all-reduces must have the same order on all ranks. A GPU may still
            # pack what is sent, and copy what was received in the same memory before.
            turn = turn or (streams.mark(exchange.device).synchronize if exchange.via_cpu else None)
            run = partial(self._run, action, exchange.position)
            self._posted[exchange.position] = self.thread.add(run, turn)
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
        self.failed_bucket = bucket
        self.failure = str(error), error.silent

    def seal(self, last: Action | None = None) -> None:
        """Run an action once everything is posted; nothing is posted after it."""
        if self.thread is not None:
            self.thread.seal(last)
        elif last is not None:
            last()

    def wait_until_sent(self, exchanges: Iterable[Exchange] = ()) -> None:
        """Wait until these exchanges are on the wire; without any, until everything is.

        Raises:
            PeerError: something could not be sent; see `find_lost`.
            Exception: a failure on the thread that is an error of this rank.
        """
        try:
            if self.thread is not None:
                ended, posted = self.thread.future, self._posted
                awaited = [posted[e.position] for e in exchanges if e.position in posted]
                # Each within the timeout: they also wait for what the others send.
                for each in awaited or [*posted.values(), ended]:
                    if not each.done():
                        self._round.transport.wait_for_any(each, ended)
                if ended.done():
                    ended.result()
            if self.failure is not None:
                raise WireError(*self.failure)
        except WireError as error:
            raise self.find_lost(self.failed_bucket, self._round.peers, error.silent) from error

    def abandon(self) -> None:
        """Post nothing more."""
        if self.thread is not None:
            # The thread may still use memory that the next round uses.
            self.thread.abandon()

    def wait(
        self, works: list[Waitable], bucket: int, suspects: tuple[int, ...], on_gpu: bool = False
    ) -> None:
        """Wait for works, and clear the list of them, except on a GPU.

        The arguments are the fields of `Expected`.

        Raises:
            PeerError: a work has failed; see `find_lost`.
        """
        try:
            # Another stream may wait again for the works of a GPU.
            self._round.transport.wait(works[:] if on_gpu else works)
        except WireError as error:
            raise self.find_lost(bucket, suspects, error.silent) from error

    def wait_for(self, watch: Arrival, *others: Arrival) -> None:
        """Wait until `watch` or one of the others has arrived.

        Raises:
            PeerError: `watch` has failed; see `find_lost`.
        """
        try:
            self._round.transport.wait_until(watch.future, *(each.future for each in others))
        except WireError as error:
            lost = watch.lost() or Expected([], 0, self._round.peers)
            raise self.find_lost(lost.bucket, lost.suspects, error.silent) from error

    def find_lost(
        self, bucket: int, suspects: tuple[int, ...], silent: bool
    ) -> PeerError | CallOrderError:
        """Close the connections, find the lost rank, and return the error of the round.

        Args:
            bucket: the position of the bucket that did not arrive.
            suspects: the ranks one of which was lost, by position.
            silent: as in `WireError`.

        Returns:
            A `CallOrderError` if the lost rank has reported one, otherwise a `PeerError`.
        """
        transport, number = self._round.transport, self._round.number
        loss = transport.find_lost(suspects, silent)
        group = tuple(transport.members[rank] for rank in self._round.group.ranks)
        return loss.as_error(
            transport.initial_rank,
            f"lost {loss} in round {number}, bucket {bucket}, group {group} of "
            f"{self._topology!r}; {loss.advice}. The parameters are as they were before it: "
            f"restart from a checkpoint, or let the others go on with elastic=Elastic()",
            round=number,
            bucket=bucket,
        )


class Flags(NamedTuple):
    """The flags of some buckets.

    Args:
        positions: the positions of their buckets.
        pending: the flags of the other ranks, 1 for a bucket with finite values, otherwise 0.
        on_gpu: the flags of the buckets that a GPU checks. The GPU uses them at once, and the host
            reads them later.
    """

    positions: Sequence[int]
    pending: list[PendingMessage]
    on_gpu: CheckedOnGpu | None


class FiniteFlags:
    """The flags of one round, read before its buckets are mixed.

    Args:
        round: what the buckets of the round have in common.
    """

    def __init__(self, round: RoundContext) -> None:
        self._round = round
        # One message for all buckets, or one for each.
        self.messages: list[Flags] = []
        self._by_position: dict[int, Flags] = {}
        # By the position of a bucket, the positions of the ranks with values that are not finite.
        self.refused: dict[int, set[int]] = {}
        # Whether a GPU checks some of the buckets.
        self.on_gpu = False

    def send(self, exchanges: Collection[Exchange], messages: Messages) -> None:
        """Send the group the flags of some buckets in one message.

        Args:
            exchanges: all buckets of the round that need flags, in their order; or one of them.
            messages: the messages of the round.
        """
        round = self._round
        if not (exchanges and round.nonfinite.checks) or messages.failure or round.group.size == 1:
            return
        positions = [each.position for each in exchanges]
        tag = tags.FLAG + positions[0]
        on_gpu = [each for each in exchanges if each.on_gpu]
        checked = CheckedOnGpu.gather(self._round, on_gpu, tag) if on_gpu else None
        pending: list[PendingMessage] = []
        if len(on_gpu) < len(exchanges):
            own = [float(each.on_gpu or bool(each.finite)) for each in exchanges]
            if not all(own):
                self._refuse(self._round.transport.rank, positions, own)
            message = torch.tensor(own, dtype=torch.float64, device="cpu")
            pending = messages.send(message, tag, positions[-1])
        self.on_gpu |= bool(on_gpu)
        flags = Flags(positions=positions, pending=pending, on_gpu=checked)
        self._by_position.update(dict.fromkeys(positions, flags))
        self.messages.append(flags)

    def of(self, exchange: Exchange) -> Flags | None:
        """The flags of a bucket; None if there are none."""
        return self._by_position.get(exchange.position)

    def refuse(self, exchange: Exchange, ranks: set[int]) -> None:
        """Note the ranks, by position, with values that are not finite, as the messages say."""
        if exchange.position not in self.refused:
            self.refused[exchange.position] = ranks
            self._warn_of(self.nonfinite)

    def read(self, flags: Flags) -> None:
        """Read the flags of the others, once they have arrived."""
        for each in flags.pending:
            finite = each.message.tolist()
            if not all(finite):
                self._refuse(each.rank, flags.positions, finite)
        if flags.pending and not self.refused.keys().isdisjoint(flags.positions):
            self._warn_of(self.nonfinite)
        flags.pending.clear()

    def _refuse(self, rank: int, positions: Sequence[int], finite: Sequence[float]) -> None:
        for position, is_finite in zip(positions, finite, strict=True):
            if not is_finite:
                self.refused.setdefault(position, set()).add(rank)

    @property
    def nonfinite(self) -> list[int]:
        """The ranks with values that are not finite, as far as known, as numbered at the start."""
        members = self._round.transport.members
        return sorted({members[rank] for ranks in [*self.refused.values()] for rank in ranks})

    def check(self) -> None:
        """Check that what has arrived may be mixed.

        Raises:
            NonFiniteError: parameters are not finite, and the policy does not allow it;
                raised at every call.
        """
        self._raise_of(self.nonfinite)

    def check_on_gpu(self) -> None:
        """Check what a GPU has found, one step after the mixing.

        Raises:
            NonFiniteError: as in `check`; the GPU has not mixed the round.
        """
        members = self._round.transport.members
        checked = [flags.on_gpu for flags in self.messages if flags.on_gpu is not None]
        bad = sorted({members[place] for each in checked for place in each.nonfinite_ranks()})
        self._raise_of(bad)
        self._warn_of(bad)

    def abandon(self) -> None:
        """Stop waiting."""
        for flags in self.messages:
            flags.pending.clear()

    def _raise_of(self, bad: list[int]) -> None:
        if bad and self._round.nonfinite.on_nonfinite == "raise":
            rank = self._round.transport.initial_rank
            raise nonfinite_error(bad, rank, f"round {self._round.number}")

    def _warn_of(self, bad: list[int]) -> None:
        if bad and self._round.nonfinite.replaces:
            logger.warning(
                "rank {} round {}: the parameters of ranks {} are not finite and are left out",
                *(self._round.transport.initial_rank, self._round.number, bad),
            )


def exchange_of(round: RoundContext, bucket: Bucket, position: int) -> Exchange:
    """Create the exchange of a bucket; arguments are as in `Exchange`."""
    size = round.group.size
    codec = None if round.references is None or round.is_average else bucket.codec(size)
    if size == 1:
        return Exchange(round, bucket, position)
    if codec is not None:
        return (CodedPair if size == 2 else CodedGroup)(round, bucket, position, codec)
    return (PlainGroup if size > 2 or round.is_average else PlainPair)(round, bucket, position)
