"""From one round to the next: what has arrived is mixed and what was updated leaves, by buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from decent_optim_wrapper.gossip.bucket import Bucket
from decent_optim_wrapper.gossip.round import Round


class Relay:
    """A round that has arrived and the one that is being launched.

    Buckets may be mixed and posted in any order; on the wire they are in the plan's order on every
    rank, or the sums of larger groups would add up different buckets.

    Args:
        buckets: all that are to leave, in the order of the plan.
        mix: mixes in what has arrived for a bucket, if anything has.
        launched: the round to post to.
        take_off: told of `launched` once everything was posted.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        mix: Callable[[Bucket], None],
        launched: Round,
        take_off: Callable[[Round], None],
    ) -> None:
        self._waiting = list(buckets)
        self._ready: set[Bucket] = set()
        self.mix = mix
        self._launched = launched
        self._take_off = take_off

    def post(self, bucket: Bucket) -> None:
        """Let the bucket leave, as soon as those before it have left."""
        self._ready.add(bucket)
        while self._waiting and self._waiting[0] in self._ready:
            self._launched.post(self._waiting.pop(0))

    def close(self) -> None:
        """End the launch, once all buckets are posted."""
        self._launched.seal()
        self._take_off(self._launched)
