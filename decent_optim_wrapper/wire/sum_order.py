"""The order in which groups of more than two ranks sum the buckets of a backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from decent_optim_wrapper.comm.waiting import Waitable

Item = TypeVar("Item")

# More than there are buckets.
_ALL = 1 << 30


class SumOrder:
    """The order in which a group sums buckets: first as in backward, then as in forward passes.

    All-reduces must have the same order on all ranks of a group. In the order of the backward pass,
    the next forward pass would wait for all of them before its first module. So the buckets that do
    not fit into the backward pass follow in the order of the forward pass. Each rank counts the
    all-reduces that were done at the end of its backward pass, and sends the number in the header
    of the next round of the group. The round after that begins with the lowest number of all ranks.

    Attributes:
        first: number of buckets that the next round sums in the given order.
        summed: the number that this rank sends to the others in its header.
    """

    def __init__(self) -> None:
        self.first = self.summed = _ALL

    def apply(self, buckets: Sequence[Item]) -> list[Item]:
        """The first buckets in the given order, and the others in reverse."""
        return [*buckets[: self.first], *reversed(buckets[self.first :])]

    def count(self, works: Iterable[Sequence[Waitable]]) -> None:
        """Count the all-reduces that are done at the end of a backward pass, by their works."""
        # Exchanges that a thread still posts have no works.
        self.note(sum(bool(each) and all(work.is_completed() for work in each) for each in works))

    def note(self, summed: int) -> None:
        """Note the all-reduces of a round for which a backward pass of this rank gave time."""
        before = 0 if self.summed == _ALL else self.summed
        # One more, or the wire would be idle if the pass takes longer. A single slow round counts
        # for little: the group could add only one in each of the next rounds.
        self.summed = max(summed + 1, before - 1)

    def agree(self, summed: int) -> None:
        """Note the lowest number that a rank of the group has sent."""
        self.first = summed


# The order of groups that do not agree on another one.
GIVEN_ORDER = SumOrder()
