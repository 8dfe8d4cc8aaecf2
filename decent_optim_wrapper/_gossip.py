"""One round of gossip: launch it, finish it or discard it.

This module owns the mutable state of the round in flight.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from loguru import logger

from decent_optim_wrapper._bucket import Bucket, Flat, summable
from decent_optim_wrapper._transport import Transport
from decent_optim_wrapper.topo import Group

_CLOSE_TIMEOUT = timedelta(seconds=5)


class _Exchange(NamedTuple):
    """A bucket whose parameters are on the wire, and how to mix in what arrives.

    x <- x + weight * (arriving / divisor - x)
    """

    bucket: Bucket
    works: list[dist.Work]
    arriving: Flat
    divisor: int
    weight: float

    def finish(self) -> None:
        """Wait for the wire and mix."""
        self.wait()
        if self.divisor > 1:
            self.arriving.data.div_(self.divisor)
        self.bucket.mix_(self.arriving, self.weight)

    def wait(self) -> None:
        """Wait for the wire, parameters untouched."""
        for work in self.works:
            work.wait()


class GossipState(NamedTuple):
    """What a checkpoint needs to know of the gossip: the counter, and whether a round flies."""

    round: int
    in_flight: bool


class Gossip:
    """Rounds over a growing set of buckets.

    Args:
        transport: the ranks and how to reach them.
        schedule: the groups of this rank, phase by phase.
    """

    def __init__(self, transport: Transport, schedule: Sequence[Group]) -> None:
        transport.connect(schedule)
        self._transport = transport
        self._schedule = tuple(schedule)
        self._buckets: list[Bucket] = []
        self._round = 0
        self._in_flight: list[_Exchange] = []
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
        if self._in_flight or self._owed:
            raise RuntimeError(
                f"rank {self._transport.rank}: round {self._round - 1} is still in flight; "
                f"finish or discard it before launching round {self._round}"
            )
        self._exchange_all(self._round)
        self._round += 1

    def finish(self) -> None:
        """Wait for the round in flight, if there is one, and mix it into the parameters."""
        if self._owed:
            self._exchange_all(self._round - 1)
            self._owed = False
        for exchange in self._in_flight:
            exchange.finish()
        self._in_flight.clear()

    def discard(self) -> None:
        """Drop the round in flight, if there is one: its bytes arrive and are not mixed."""
        for exchange in self._in_flight:
            exchange.wait()
        self._in_flight.clear()
        self._owed = False

    def _exchange_all(self, round: int) -> None:
        group = self._schedule[round % len(self._schedule)]
        logger.debug("rank {} round {}: mixing with {}", self._transport.rank, round, group.ranks)
        if group.size == 1:
            return
        exchange = self._exchange_pair if group.size == 2 else self._exchange_group
        for index, bucket in enumerate(self._buckets):
            if bucket.numel:
                self._in_flight.append(exchange(bucket, group, index))

    def _exchange_pair(self, bucket: Bucket, group: Group, index: int) -> _Exchange:
        peer = group.ranks[group.ranks[0] == self._transport.rank]
        outgoing = bucket.pack(bucket.outgoing)
        works = self._transport.exchange(outgoing.data, bucket.incoming.data, peer, tag=index)
        return _Exchange(bucket, works, bucket.incoming, 1, 1 - group.self_weight)

    def _exchange_group(self, bucket: Bucket, group: Group, index: int) -> _Exchange:
        """Sum over the group, to mix with its mean.

        w x_i + (1-w)/(m-1) * sum of the others  =  x_i + m(1-w)/(m-1) * (mean - x_i)
        """
        total = bucket.view(summable(bucket.pack(bucket.outgoing).data))
        works = self._transport.all_reduce(total.data, group.ranks)
        weight = group.size * (1 - group.self_weight) / (group.size - 1)
        return _Exchange(bucket, works, total, group.size, weight)


def _close(in_flight: list[_Exchange], transport: Transport) -> None:
    """Let go of a round that nobody will finish, and of the process group.

    The peers launched the same round, so its bytes arrive unless a peer is gone already.
    """
    try:
        for work in (work for exchange in in_flight for work in exchange.works):
            work.wait(_CLOSE_TIMEOUT)
    except RuntimeError as error:
        logger.debug("rank {}: the last round was dropped: {}", transport.rank, error)
    in_flight.clear()
    transport.close()
