"""The order in which groups of more than two ranks sum the buckets of a backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from decent_optim_wrapper.comm.waiting import Waitable

Item = TypeVar("Item")
Ranks = tuple[int, ...]

# More than there are buckets.
_ALL = 1 << 30


class SumOrder:
    """The order in which each group sums buckets: first as in backward, then as in forward passes.

    All-reduces must have the same order on all ranks of a group. In the order of the backward pass,
    the next forward pass would wait for all of them before its first module. So the buckets that do
    not fit into the backward pass follow in the order of the forward pass. Each rank counts the
    all-reduces that were done at the end of its backward pass, and sends the number in the header
    of the next round of the group. The round after that begins with the lowest number of all ranks.
    """

    def __init__(self) -> None:
        # By group: how many buckets the next round sums in the given order, and the number to send.
        self._first: dict[Ranks, int] = {}
        self._summed: dict[Ranks, int] = {}

    def of(self, group: Ranks) -> RoundOrder:
        """The order of the next round of a group."""
        first, summed = self._first.get(group, _ALL), self._summed.get(group, _ALL)
        return RoundOrder(noted_in=self, group=group, first=first, summed=summed)

    def note(self, group: Ranks, summed: int) -> None:
        """Note the all-reduces of a round for which a backward pass of this rank gave time."""
        # One more, or the wire would be idle if the pass takes longer. A single slow round counts
        # for little: the group could add only one in each of the next rounds.
        self._summed[group] = max(summed + 1, self._summed.get(group, 0) - 1)

    def agree(self, group: Ranks, summed: int) -> None:
        """Note the lowest number that a rank of the group has sent."""
        self._first[group] = summed


class RoundOrder(NamedTuple):
    """The order of the all-reduces of one round.

    Args:
        noted_in: where the orders of later rounds are noted.
        group: the ranks.
        first: how many buckets are summed in the given order.
        summed: the number that this rank sends to the others.
    """

    noted_in: SumOrder
    group: Ranks
    first: int
    summed: int

    def apply(self, buckets: Sequence[Item]) -> list[Item]:
        """The first buckets in the given order, and the others in reverse."""
        return [*buckets[: self.first], *reversed(buckets[self.first :])]

    def note(self, works: Iterable[Sequence[Waitable]]) -> None:
        """Count the all-reduces that are done at the end of a backward pass, by their works."""
        # Exchanges that a thread still posts have no works.
        done = sum(bool(each) and all(work.is_completed() for work in each) for each in works)
        self.noted_in.note(self.group, done)

    def agree(self, others: Iterable[float]) -> None:
        """Note the numbers that the other ranks have sent."""
        self.noted_in.agree(self.group, int(min(self.summed, *others)))


GIVEN_ORDER = SumOrder().of(())
