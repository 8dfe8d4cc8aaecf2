"""The algorithm: what every rank does in a step, whoever calls it.

With x the parameters of this rank, W the mixing of the round that has been in flight since the last
step, and u the local update from the gradient at x, a step is

    x <- W x - u(x),    and the next round leaves with the new x.

Without overlap the next round is finished within the same step: x <- W (x - u(x)).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

from decent_optim_wrapper.gossip.bucket import Bucket
from decent_optim_wrapper.gossip.round import Round
from decent_optim_wrapper.gossip.rounds import Gossip
from decent_optim_wrapper.gossip.timing import Meter

Result = TypeVar("Result")


class Step:
    """One step, as a context: enter, advance part by part, exit.

    Entered, it has received the round in flight, and the next one has begun. Nothing is mixed
    before everything has arrived: a round that fails leaves all parameters as they were. No bucket
    leaves before that either: two rounds on the wire would slow down the older one, for which all
    ranks are waiting.

    Args:
        gossip: the rounds, one of which may be in flight.
        meter: counts the seconds of the updates.
    """

    def __init__(self, gossip: Gossip, meter: Meter) -> None:
        self._gossip = gossip
        self._meter = meter
        self._arrived: Round | None = None
        self._launched: Round | None = None
        self._ready: set[Bucket] = set()
        self._waiting: list[Bucket] = []

    @property
    def buckets(self) -> Sequence[Bucket]:
        """All that is to be advanced, each bucket once and in any order."""
        return self._gossip.buckets

    def __enter__(self) -> Step:
        self._arrived = self._gossip.receive()
        if self._arrived:
            # Members of a replaced bucket are in a new one, which must not leave before the mixing.
            self._gossip.mix_replaced(self._arrived)
        self._launched = self._gossip.begin_round()
        self._waiting = list(self.buckets)
        return self

    def advance(self, buckets: Sequence[Bucket], update: Callable[[], Result]) -> Result:
        """Mix some buckets, update their parameters, and let them leave.

        Args:
            buckets: one of them, or several that are updated by one call.
            update: the local update of their parameters.

        Returns:
            What the update returned.
        """
        for bucket in buckets:
            if self._arrived:
                self._gossip.mix(self._arrived, bucket)
        with self._meter.update:
            result = update()
        self._ready.update(buckets)
        self._post()
        return result

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._launched is None:
            return
        if error is None:
            self._gossip.hand_over(self._launched)
        else:
            # The others notice: whoever makes the step closes its connections.
            self._launched.abandon()

    def _post(self) -> None:
        """Let those buckets leave whose turn it is.

        On the wire they are in the plan's order on every rank, in whatever order they are updated:
        the sums of larger groups would add up different buckets.
        """
        if self._launched is None:
            raise RuntimeError("advance() is for a step that has been entered")
        while self._waiting and self._waiting[0] in self._ready:
            self._launched.post(self._waiting.pop(0))
