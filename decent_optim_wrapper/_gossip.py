"""Rounds of gossip, bucket by bucket: launch, finish, relay, discard.

This module owns the mutable state of the round in flight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from loguru import logger

from decent_optim_wrapper._bucket import Bucket, Flat
from decent_optim_wrapper._meter import Meter
from decent_optim_wrapper._transport import Transport
from decent_optim_wrapper.topo import Group

_CLOSE_TIMEOUT = timedelta(seconds=5)


class _Exchange(NamedTuple):
    """A bucket whose parameters are on the wire, and how to mix in what arrives.

    x <- x + weight * (arriving / divisor - base), with base = x, or what x was rounded to.
    """

    bucket: Bucket
    works: list[dist.Work]
    arriving: Flat
    weight: float
    divisor: int = 1
    rounded: Flat | None = None

    def wait(self) -> None:
        """Wait for the wire, parameters untouched; a second call returns at once."""
        while self.works:
            self.works.pop().wait()

    def mix(self) -> None:
        """Mix in what has arrived."""
        if self.divisor > 1:
            self.arriving.data.div_(self.divisor)
        if self.rounded is None:
            self.bucket.mix_(self.arriving, self.weight)
        else:
            self.bucket.shift_(self.arriving, self.rounded, self.weight)


class GossipState(NamedTuple):
    """What a checkpoint needs to know of the gossip: the counter, and whether a round flies."""

    round: int
    in_flight: bool


class Gossip:
    """Rounds over a growing set of buckets.

    Args:
        transport: the ranks and how to reach them.
        schedule: the groups of this rank, phase by phase.
        meter: told of every wait, every copy and all bytes.
    """

    def __init__(self, transport: Transport, schedule: Sequence[Group], meter: Meter) -> None:
        transport.connect(schedule)
        self._transport = transport
        self._schedule = tuple(schedule)
        self._meter = meter
        self._buckets: list[Bucket] = []
        self._round = 0
        self._in_flight: dict[int, _Exchange] = {}
        # A resumed run has a round in flight that this process has yet to launch: not at loading,
        # which must not communicate and may come before the parameters are loaded.
        self._owed = False
        # Runs when the wrapper is dropped or the interpreter exits, whichever comes first. A gloo
        # thread that still works for a round when Python is finalised aborts the process.
        weakref.finalize(self, _close, self._in_flight, transport)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets, in the order in which they are exchanged."""
        return self._buckets

    @property
    def state(self) -> GossipState:
        """Rounds launched so far, and whether the last of them is still to be mixed."""
        return GossipState(self._round, self._owed or bool(self._in_flight))

    def restore(self, state: GossipState) -> None:
        """Continue from `state`; a round in flight is dropped."""
        self.discard()
        self._round, self._owed = state

    def extend(self, buckets: Iterable[Bucket]) -> None:
        """Gossip these buckets, too, from the next launch on."""
        for bucket in buckets:
            logger.info("rank {} bucket {}: {!r}", self._transport.rank, len(self._buckets), bucket)
            self._buckets.append(bucket)

    def launch(self) -> None:
        """Start the next round with the parameters as they are now."""
        self.relay(lambda bucket: None)

    def relay(self, update: Callable[[Bucket], None]) -> None:
        """Finish, update and launch again, one bucket after the other.

        The wire is busy with the first buckets of the next round while the last ones of this round
        arrive, so it never idles during mixing and update.

        Args:
            update: the local update of one bucket.
        """
        self._pay()
        group = self._next_group()
        for index, bucket in enumerate(self._buckets):
            self._finish(index)
            update(bucket)
            self._launch(index, bucket, group)
        self._round += 1

    def finish(self) -> None:
        """Wait for the round in flight, if there is one, and mix it into the parameters."""
        self._pay()
        for index in list(self._in_flight):
            self._finish(index)

    def arrive(self) -> None:
        """Wait until the wire no longer needs the parameters themselves; nothing is mixed."""
        for exchange in self._in_flight.values():
            if exchange.bucket.sends_itself:
                exchange.wait()

    def discard(self) -> None:
        """Drop the round in flight, if there is one: its bytes arrive and are not mixed."""
        for exchange in self._in_flight.values():
            exchange.wait()
        self._in_flight.clear()
        self._owed = False

    def _pay(self) -> None:
        """Launch the round that was in flight when the state was saved."""
        if self._owed:
            self._owed = False
            self._round -= 1
            self.launch()

    def _next_group(self) -> Group:
        group = self._schedule[self._round % len(self._schedule)]
        logger.debug(
            "rank {} round {}: mixing with {}", self._transport.rank, self._round, group.ranks
        )
        return group

    def _finish(self, index: int) -> None:
        exchange = self._in_flight.get(index)
        if exchange is None:
            return
        with self._meter.wait:
            exchange.wait()
        with self._meter.mix:
            exchange.mix()
        del self._in_flight[index]

    def _launch(self, index: int, bucket: Bucket, group: Group) -> None:
        if group.size == 1 or bucket.numel == 0:
            return
        with self._meter.launch:
            launch = self._launch_pair if group.size == 2 else self._launch_group
            self._in_flight[index] = launch(bucket, group, index)

    def _launch_pair(self, bucket: Bucket, group: Group, index: int) -> _Exchange:
        peer = group.ranks[group.ranks[0] == self._transport.rank]
        outgoing, incoming = bucket.pack(bucket.outgoing), bucket.incoming
        works = self._transport.exchange(outgoing.data, incoming.data, peer, tag=index)
        self._meter.bytes_sent += outgoing.data.nbytes
        rounded = outgoing if bucket.quantised else None
        return _Exchange(bucket, works, incoming, 1 - group.self_weight, rounded=rounded)

    def _launch_group(self, bucket: Bucket, group: Group, index: int) -> _Exchange:
        """Sum over the group, to mix with its mean.

        w x_i + (1-w)/(m-1) * sum of the others  =  x_i + m(1-w)/(m-1) * (mean - x_i)
        """
        size = group.size
        total = bucket.pack(bucket.summing)
        works = self._transport.all_reduce(total.data, group.ranks)
        self._meter.bytes_sent += 2 * (size - 1) * total.data.nbytes // size
        weight = size * (1 - group.self_weight) / (size - 1)
        return _Exchange(bucket, works, total, weight, divisor=size)


def _close(in_flight: dict[int, _Exchange], transport: Transport) -> None:
    """Let go of a round that nobody will finish, and of the process group.

    The peers launched the same round, so its bytes arrive unless a peer is gone already.
    """
    try:
        for work in (work for exchange in in_flight.values() for work in exchange.works):
            work.wait(_CLOSE_TIMEOUT)
    except RuntimeError as error:
        logger.debug("rank {}: the last round was dropped: {}", transport.rank, error)
    in_flight.clear()
    transport.close()
