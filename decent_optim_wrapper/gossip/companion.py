"""What travels in a round together with the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from decent_optim_wrapper.gossip.bucket import Bucket


class Companion(Protocol):
    """Tensors that belong to the parameters of each bucket, and are exchanged right behind it."""

    def plan(self, buckets: Sequence[Bucket]) -> None:
        """Take note of the buckets of the parameters, in which members may have moved."""

    def begin_step(self, in_flight: bool) -> None:
        """Run when a step has received its round.

        Args:
            in_flight: whether a round is in flight that this step does not mix.
        """

    def launch(self, bucket: Bucket) -> Sequence[Bucket]:
        """The buckets to send behind a bucket of parameters, with their present values."""

    def reset(self) -> None:
        """Start again, as all ranks do when their number has changed."""
