"""Which rank uses which samples in which step: a pure function of the seed and of all changes.

Each epoch is a permutation of all samples, the pool. At every step each member takes its share from
the front of the pool, in the order of the ranks. When the members change, all ranks keep what was
dealt for the steps before one that nobody has fetched yet. From that step on, the rest of the pool
and what a lost rank has not finished are dealt again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.int64]


class Rules(NamedTuple):
    """The arguments of a sampler; the same on all ranks.

    Args:
        length: number of samples.
        batch_size: number of samples per rank and step; None if `total_batch` is given.
        total_batch: number of samples of all ranks together per step.
        seed: seed of the permutations.
        shuffle: whether samples are permuted.
        drop_last: leave out the samples at the end of an epoch that do not fill a step.
    """

    length: int
    batch_size: int | None
    total_batch: int | None
    seed: int
    shuffle: bool
    drop_last: bool

    def shares(self, members: Sequence[int]) -> dict[int, int]:
        """The number of samples of each member in a step."""
        total = self.total_batch or (self.batch_size or 1) * len(members)
        cuts = [total * i // len(members) for i in range(len(members) + 1)]
        return {rank: cuts[i + 1] - cuts[i] for i, rank in enumerate(members)}

    def permutation(self, epoch: int) -> Samples:
        """All samples in the order of an epoch."""
        if not self.shuffle:
            return np.arange(self.length)
        return np.random.default_rng([self.seed, epoch]).permutation(self.length)


class Change(NamedTuple):
    """The members have changed.

    Args:
        start: the first step that is dealt again. All ranks keep their batches of earlier steps.
        came: pairs of each new member and the first step that is dealt to it.
        done: pairs of each rank that is gone and the number of steps that it had finished.
    """

    start: int
    came: Sequence[tuple[int, int]]
    done: Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Deal:
    """A pool of samples, dealt to the members from one step to another.

    Args:
        rules: batch sizes and the like.
        epoch: the epoch of these samples.
        start: the first step that is dealt to all members that were there before.
        starts: the first step of each member, by rank in ascending order. A rank that comes may
            begin before `start`, or after it if it first uses what it has fetched.
        length: number of samples.
        borrowed: number of samples of the next epoch that this epoch has used before.
        opens: whether a pass over the data begins here.
        lost: batches in the pool, by the index of their deal and their place there. The rest of the
            deal before follows them. None for a new epoch.
    """

    rules: Rules
    epoch: int
    start: int
    starts: Mapping[int, int]
    length: int
    borrowed: int = 0
    opens: bool = True
    lost: Sequence[tuple[int, slice]] | None = None

    @cached_property
    def shares(self) -> dict[int, int]:
        """The number of samples of each member in a full step."""
        return self.rules.shares([*self.starts])

    @cached_property
    def _ending(self) -> tuple[int, int, int]:
        """The step after the last, the first that is not full, and how many samples are dealt."""
        begin, members = max(self.starts.values()), len(self.starts)
        rest = self.length - self._in_full_steps(begin)
        if rest <= 0:
            # Members start at different steps, and all must end at the same one.
            return begin, min(self.starts.values()), max(self.length, self._batches(begin))
        full, left = divmod(rest, sum(self.shares.values()))
        end = begin + full
        if left == 0 or self.rules.drop_last:
            return end, end, self.length - left
        if full and left < members:
            # Too few samples for another step: they are added to the last one.
            return end, end - 1, self.length
        return end + 1, end, self.length + max(0, members - left)

    @property
    def end(self) -> int:
        """The step after the last."""
        return self._ending[0]

    @property
    def borrows(self) -> int:
        """The number of samples of the next epoch that are used, so that no batch is empty."""
        return max(0, self._ending[2] - self.length)

    def _in_full_steps(self, step: int) -> int:
        """The number of samples before a step, if all steps before it are full."""
        return sum(n * max(0, step - self.starts[rank]) for rank, n in self.shares.items())

    def _batches(self, step: int) -> int:
        """The number of batches before a step."""
        return sum(max(0, step - start) for start in self.starts.values())

    def dealt(self, step: int, ranks: Sequence[int] = ()) -> int:
        """The number of samples in all batches before a step, and in its batches so far."""
        end, uneven, total = self._ending
        if step < uneven or uneven == end:
            return self._in_full_steps(step) + sum(self.shares[rank] for rank in ranks)
        first, skipped = self._in_full_steps(uneven), self._batches(uneven)
        index = self._batches(step) + len(ranks) - skipped
        return first + (total - first) * index // (self._batches(end) - skipped)

    def place(self, step: int, rank: int) -> slice:
        """The slice of the pool that is the batch of a rank."""
        ranks = [each for each, start in self.starts.items() if each <= rank and start <= step]
        return slice(self.dealt(step, ranks[:-1]), self.dealt(step, ranks))


class Dealing:
    """All deals so far.

    Args:
        rules: the fields of `Rules`.
        first: the members of the first deal.
        changes: the fields of each `Change` since then.
    """

    def __init__(
        self, rules: Sequence[Any], first: Sequence[int], changes: Sequence[Sequence[Any]] = ()
    ) -> None:
        self.rules = Rules(*rules)
        self._first = first
        self.changes: list[Change] = []
        starts = dict.fromkeys(first, 0)
        length = self.rules.length
        self._deals = [Deal(rules=self.rules, epoch=0, start=0, starts=starts, length=length)]
        # For each member, the number of changes and of deals when it came, and its first step.
        self._came = dict.fromkeys(first, (0, 0, 0))
        self._pool = lru_cache(3)(self._make_pool)
        self._permutation = lru_cache(3)(self.rules.permutation)
        for change in changes:
            self.apply(Change(*change))

    @property
    def packed(self) -> list[Any]:
        """The arguments that make the same dealing, as lists, for JSON and checkpoints."""
        return [[*self.rules], [*self._first], [[*change] for change in self.changes]]

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the last deal."""
        return tuple(self._deals[-1].starts)

    @property
    def start(self) -> int:
        """The first step that was dealt again by the last change."""
        return self.changes[-1].start if self.changes else 0

    def begins(self, rank: int) -> int:
        """The first step for which a member was dealt samples since it came.

        Before that step, a rank that comes back in the same process uses what it has fetched.
        """
        return self._came[rank][2]

    def samples(self, step: int, rank: int) -> list[int]:
        """The batch of a rank in a step; before its first step the batch of the first."""
        index, place = self._place(max(step, self.begins(rank)), rank)
        found: list[int] = self._pool(index)[place].tolist()
        return found

    def passes(self, step: int) -> tuple[int, int]:
        """The first step of the pass that contains a step, and the step after its last."""
        index = self._index(step)
        begun = next(deal.start for deal in reversed(self._deals[: index + 1]) if deal.opens)
        later = (deal.start for deal in self._deals[index + 1 :] if deal.opens)
        return begun, next(later, self._deals[-1].end)

    def epoch(self, step: int) -> int:
        """The epoch of a step."""
        return self._deals[self._index(step)].epoch

    def finished(self, rank: int, version: int, done: int) -> int:
        """The number of dealt steps that a member has certainly finished.

        Args:
            rank: the member.
            version: the number of changes that it knew of at its last heartbeat.
            done: the number of steps that it had finished then.
        """
        came, _, first = self._came[rank]
        if version < came:
            # The count of an earlier process.
            return first
        # Others do not know from where on a change that only that rank has finished deals again.
        return max(first, done if version <= len(self.changes) else min(done, self.start))

    def apply(self, change: Change) -> None:
        """Deal again, to other members."""
        start, came, done = change.start, dict(change.came), dict(change.done)
        self._open(start)
        deal = self._deals[-1]
        lost = [self._place(step, rank) for rank in done for step in range(done[rank], start)]
        stay = {rank: max(start, first) for rank, first in deal.starts.items() if rank not in done}
        rest = deal.length + deal.borrows - deal.dealt(start)
        self.changes.append(change)
        for rank, first in came.items():
            self._came[rank] = len(self.changes), len(self._deals), first
        changed = replace(
            deal,
            start=start,
            starts=dict(sorted({**stay, **came}.items())),
            length=rest + sum(place.stop - place.start for _, place in lost),
            borrowed=deal.borrowed + deal.borrows,
            # A rank that has fetched all of a pass may have ended it: then all ranks end it there.
            opens=start == deal.end or (start == deal.start and deal.opens),
            lost=lost,
        )
        self._deals.append(changed)

    def at_most(self, steps: range, rank: int) -> int:
        """Upper bound of the number of samples of a rank in some steps."""
        last = self._deals[-1]
        # The steps of an epoch that only that rank has begun are not known here.
        places = [self._place(step, rank)[1] for step in steps if step < last.end]
        known = sum(int(place.stop - place.start) for place in places)
        return known + (len(steps) - len(places)) * (max(last.shares.values()) + 1)

    def _open(self, step: int) -> None:
        """Deal out further epochs until all steps before this one have batches."""
        while (last := self._deals[-1]).end < step:
            self._deals.append(
                Deal(
                    rules=self.rules,
                    epoch=last.epoch + 1,
                    start=last.end,
                    starts=dict.fromkeys(last.starts, last.end),
                    length=max(0, self.rules.length - last.borrowed - last.borrows),
                )
            )

    def _index(self, step: int) -> int:
        """The index of the last deal that has begun at a step."""
        # After an agreement, only what was dealt until the last change is dealt out.
        self._open(step + 1)
        return next(i for i in reversed(range(len(self._deals))) if self._deals[i].start <= step)

    def _place(self, step: int, rank: int) -> tuple[int, slice]:
        """The index of the deal that has the batch of a rank, and its place there."""
        # A member that has come may begin before the start of its deal.
        index = max(self._index(step), self._came[rank][1])
        return index, self._deals[index].place(step, rank)

    def _make_pool(self, index: int) -> Samples:
        deal = self._deals[index]
        if deal.lost is None:
            parts = [self._permutation(deal.epoch)[self.rules.length - deal.length :]]
        else:
            rest = self._pool(index - 1)[self._deals[index - 1].dealt(deal.start) :]
            parts = [*(self._pool(i)[place] for i, place in deal.lost), rest]
        if deal.borrows:
            following = self._permutation(deal.epoch + 1)
            parts.append(following[deal.borrowed : deal.borrowed + deal.borrows])
        return np.concatenate(parts)
