"""Rounds of gossip, bucket by bucket: launch, finish, relay, discard.

This module owns the mutable state of the round in flight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch.distributed as dist
from loguru import logger

from decent_optim_wrapper._bucket import Bucket
from decent_optim_wrapper._flat import Flat
from decent_optim_wrapper._meter import Meter
from decent_optim_wrapper._transport import Transport
from decent_optim_wrapper.topo import Group


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
        self._in_flight: dict[Bucket, _Exchange] = {}
        # A resumed run has a round in flight that this process has yet to launch: not at loading,
        # which must not communicate and may come before the parameters are loaded.
        self._owed = False
        # Runs when the wrapper is dropped or the interpreter exits, whichever comes first. A rank
        # that left with a round in flight would break it for a slower peer, and a gloo thread that
        # works on while Python is finalised can abort the process.
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

    def replan(self, buckets: Iterable[Bucket]) -> None:
        """Gossip these buckets from the next launch on; the round in flight keeps its own."""
        self._buckets = list(buckets)
        for index, bucket in enumerate(self._buckets):
            logger.info("rank {} bucket {}: {!r}", self._transport.rank, index, bucket)

    def launch(self) -> None:
        """Start the next round with the parameters as they are now."""
        self.relay(lambda bucket: None)

    def relay(self, update: Callable[[Bucket], None]) -> None:
        """Wait for the round in flight; then mix, update and launch bucket after bucket.

        Nothing is mixed before everything has arrived: a round that fails leaves all parameters
        as they were. And no bucket leaves before that: two rounds on the wire would slow down the
        older one, for which all ranks are waiting. The first bucket is on the wire again while
        the others are mixed and updated.

        Args:
            update: the local update of one bucket.
        """
        self._pay()
        arrived = self._receive()
        group = self._next_group()
        for index, bucket in enumerate(self._buckets):
            self._mix(arrived.pop(bucket, None))
            update(bucket)
            if group.size > 1 and bucket.numel:
                self._post(index, bucket, group)
        # Of buckets that a new plan has replaced.
        for exchange in arrived.values():
            self._mix(exchange)
        self._round += 1

    def finish(self) -> None:
        """Wait for the round in flight, if there is one, and mix it into the parameters."""
        self._pay()
        for exchange in self._receive().values():
            self._mix(exchange)

    def arrive(self) -> None:
        """Wait until the wire no longer needs the parameters themselves; nothing is mixed."""
        for exchange in self._in_flight.values():
            if exchange.bucket.sends_itself:
                exchange.wait()

    def discard(self) -> None:
        """Drop the round in flight, if there is one: its bytes arrive and are not mixed."""
        self._owed = False
        while self._in_flight:
            self._in_flight.popitem()[1].wait()

    def _pay(self) -> None:
        """Launch the round that was in flight when the state was saved."""
        if self._owed:
            self._owed = False
            self._round -= 1
            self.launch()

    def _next_group(self) -> Group:
        group = self._schedule[self._round % len(self._schedule)]
        logger.debug("rank {} round {}: group {}", self._transport.rank, self._round, group.ranks)
        return group

    def _receive(self) -> dict[Bucket, _Exchange]:
        """Wait until everything in flight has arrived; nothing is mixed."""
        with self._meter.wait:
            for exchange in self._in_flight.values():
                exchange.wait()
        arrived = dict(self._in_flight)
        self._in_flight.clear()
        return arrived

    def _mix(self, exchange: _Exchange | None) -> None:
        if exchange is not None:
            with self._meter.mix:
                exchange.mix()

    def _post(self, index: int, bucket: Bucket, group: Group) -> None:
        with self._meter.launch:
            post = self._post_pair if group.size == 2 else self._post_group
            self._in_flight[bucket] = post(index, bucket, group)

    def _post_pair(self, index: int, bucket: Bucket, group: Group) -> _Exchange:
        outgoing, incoming = bucket.pair()
        bucket.pack(outgoing)
        peer = next(rank for rank in group.ranks if rank != self._transport.rank)
        works = self._transport.exchange(outgoing.data, incoming.data, peer, tag=index)
        self._meter.bytes_sent += outgoing.data.nbytes
        rounded = outgoing if bucket.quantised else None
        return _Exchange(bucket, works, incoming, 1 - group.self_weight, rounded=rounded)

    def _post_group(self, _: int, bucket: Bucket, group: Group) -> _Exchange:
        """Sum over the group, to mix with its mean.

        w x_i + (1-w)/(m-1) * sum of the others  =  x_i + m(1-w)/(m-1) * (mean - x_i)
        """
        size = group.size
        flat = bucket.pack(bucket.summing())
        works = self._transport.all_reduce(flat.data, group.ranks)
        self._meter.bytes_sent += 2 * (size - 1) * flat.data.nbytes // size
        weight = size * (1 - group.self_weight) / (size - 1)
        return _Exchange(bucket, works, flat, weight, divisor=size)


def _close(in_flight: dict[Bucket, _Exchange], transport: Transport) -> None:
    """See a round that nobody will mix off the wire, and let go of the process group.

    The peers launch the same round sooner or later, unless they are gone, which raises.
    """
    try:
        for exchange in in_flight.values():
            exchange.wait()
    except RuntimeError as error:
        logger.debug("rank {}: the last round was dropped: {}", transport.rank, error)
    in_flight.clear()
    transport.close()
