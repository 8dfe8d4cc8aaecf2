"""What happens beside the mixing: the outer optimizer, and the base's state at exact averages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loguru import logger
from torch import Tensor

from decent_optim_wrapper.gossip.bucket import Bucket
from decent_optim_wrapper.gossip.optimizer_state import StatePolicy
from decent_optim_wrapper.gossip.outer import Outer
from decent_optim_wrapper.gossip.schedule import Kind


class PostMixHooks:
    """Told of everything that replaces parameters by mixed ones.

    Args:
        policy: what becomes of the base's state at exact averages.
        outer: the outer optimizer; None if there is none.
        heals: whether parameters that are not finite get better by mixing.
    """

    def __init__(self, policy: StatePolicy, outer: Outer | None, heals: bool) -> None:
        self._policy = policy
        self._outer = outer
        self._heals = heals

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """A step begins, and nothing of it is done yet."""
        if self._outer:
            self._outer.anchor(_members(buckets))

    def arrive(self, kind: Kind, buckets: Sequence[Bucket]) -> None:
        """A round has arrived, and nothing of it is mixed yet; collective for exact averages."""
        if kind is Kind.AVERAGE:
            self._policy.apply(_members(buckets))

    def mix(self, kind: Kind, bucket: Bucket) -> None:
        """A bucket that was posted has been mixed; also where the rank was alone in the round."""
        if self._outer is None:
            return
        if self._heals and not bucket.is_finite():
            # Neither must they get into its state, where no mixing reaches them.
            self._outer.forget(bucket.members)
        else:
            self._outer.step(bucket.members, kind)

    def keep(self, buckets: Sequence[Bucket]) -> None:
        """The world average has become the ranks' own parameters; collective."""
        if self._outer:
            self._outer.rebase()
        self._policy.apply(_members(buckets))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to know."""
        return {"outer": self._outer.state_dict()} if self._outer else {}

    def read(self, state: dict[str, Any]) -> Outer | None:
        """The outer optimizer that continues from a state dict, which may be of a run without one.

        Raises:
            ValueError: it is that of other parameters.
        """
        outer = self._outer and self._outer.restarted()
        if outer is not None and "outer" in state:
            outer.load_state_dict(state["outer"])
        elif "outer" in state:
            logger.warning(
                "the state of an outer optimizer is dropped: pass Schedule(outer=...), as in the "
                "run that was saved, to go on with it"
            )
        return outer

    def restore(self, outer: Outer | None) -> None:
        """Continue with what `read` has returned."""
        self._outer = outer


def _members(buckets: Sequence[Bucket]) -> list[Tensor]:
    return [member for bucket in buckets for member in bucket.members]
