"""Which rank uses which samples in which step: a pure function of the seed and of all changes.

Each epoch is a permutation of all samples, the pool. At every step each member takes its share from
the front of the pool, in the order of the ranks. When the members change, each rank keeps the
batches that it has fetched or finished, and all other samples of the pool are dealt again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Self

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
        if self.total_batch is None:
            return dict.fromkeys(members, self.batch_size or 1)
        cuts = [self.total_batch * i // len(members) for i in range(len(members) + 1)]
        return {rank: cuts[i + 1] - cuts[i] for i, rank in enumerate(members)}


class Change(NamedTuple):
    """The members have changed.

    Args:
        starts: for each member, the first step that is dealt again; a rank that stays keeps the
            batches of all steps before it.
        done: for each rank that is gone, the number of steps that it had finished.
    """

    starts: dict[int, int]
    done: dict[int, int]

    def pack(self) -> list[list[list[int]]]:
        """As lists, for JSON and checkpoints."""
        return [[[*each] for each in part.items()] for part in self]

    @classmethod
    def unpack(cls, packed: Any) -> Self:
        """From what `pack` has returned."""
        starts, done = packed
        return cls(dict(starts), dict(done))


@dataclass(frozen=True)
class Deal:
    """A pool of samples, dealt to the members from their first steps to one last step.

    Args:
        rules: batch sizes and the like.
        epoch: the epoch of these samples.
        before: the epoch of the pass that ends when this one opens.
        opens: the step at which the pass over these samples begins.
        starts: the first step of each member, by rank in ascending order. A rank that comes back
            may help out before `opens`.
        length: number of samples.
        borrowed: number of samples of the next epoch that this epoch has used so far.
    """

    rules: Rules
    epoch: int
    before: int
    opens: int
    starts: Mapping[int, int]
    length: int
    borrowed: int = 0

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

    def place(self, step: int, rank: int) -> slice:
        """The slice of the pool that is the batch of a rank."""
        end, uneven, dealt = self._ending
        earlier = [each for each, start in self.starts.items() if each < rank and start <= step]
        if step < uneven:
            first = self._in_full_steps(step) + sum(self.shares[each] for each in earlier)
            return slice(first, first + self.shares[rank])
        first, skipped = self._in_full_steps(uneven), self._batches(uneven)
        count, index = self._batches(end) - skipped, self._batches(step) - skipped + len(earlier)
        cut = [first + (dealt - first) * i // count for i in (index, index + 1)]
        return slice(*cut)

    def is_left(self, kept: Mapping[int, int]) -> NDArray[np.bool_]:
        """Which samples are in none of the batches that the ranks keep."""
        left = np.ones(self.length + self.borrows, dtype=bool)
        low = min(*kept.values(), self.end - 1)
        # Before that step all samples are taken, however many steps there are.
        ranks = [rank for rank, start in self.starts.items() if start <= low]
        left[: self.place(low, ranks[0]).start if ranks else 0] = False
        for rank, step in kept.items():
            for each in range(max(self.starts[rank], low), step):
                left[self.place(each, rank)] = False
        return left


class _Source(NamedTuple):
    """Where the pool of a deal comes from, if not from a permutation alone.

    Args:
        previous: index of the deal before.
        kept: for each rank, the step before which it keeps its batches of that deal.
        lost: deal index, step and rank of earlier batches that were not finished.
    """

    previous: int
    kept: dict[int, int]
    lost: list[tuple[int, int, int]]


class Dealing:
    """All deals so far.

    Args:
        rules: batch sizes and the like.
        first: the members of the first deal.
        changes: the changes since then.
    """

    def __init__(self, rules: Rules, first: Sequence[int], changes: Sequence[Change] = ()) -> None:
        self.rules = rules
        self.first = tuple(first)
        self.changes: list[Change] = []
        self._deals = [Deal(rules, 0, 0, 0, dict.fromkeys(self.first, 0), rules.length)]
        self._sources: list[_Source | None] = [None]
        # For each member, the number of changes when it came, and its first step then.
        self._came = dict.fromkeys(self.first, (0, 0))
        self._pool = lru_cache(3)(self._make_pool)
        self._permutation = lru_cache(3)(self._permute)
        for change in changes:
            self.apply(change)

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the last deal."""
        return tuple(self._deals[-1].starts)

    def begins(self, rank: int) -> int:
        """The first step for which a member was dealt samples since it came.

        Before that step, a rank that comes back in the same process uses what it has fetched.
        """
        return self._came[rank][1]

    def samples(self, step: int, rank: int) -> list[int]:
        """The batch of a rank in a step; before its first step that of the first."""
        step = max(step, self.begins(rank))
        self.open_pass(step)
        index = self._find(step, rank)
        found: list[int] = self._pool(index)[self._deals[index].place(step, rank)].tolist()
        return found

    def open_pass(self, step: int) -> None:
        """Deal out further epochs until there is a batch for this step."""
        while self._deals[-1].end <= step:
            self._deal_next_epoch()

    def ends(self, step: int, rank: int, begun: int) -> bool:
        """Whether the pass that began at step `begun` ends before `step`."""
        deal = self._deal(step, rank)
        return step >= deal.end or (step == deal.opens and step > begun)

    def end(self, step: int, rank: int) -> int:
        """The step after the last step of the pass that contains `step`."""
        deal = self._deal(step, rank)
        return deal.end if step >= deal.opens else deal.opens

    def epoch(self, step: int, rank: int) -> int:
        """The epoch of a step."""
        deal = self._deal(step, rank)
        if step >= deal.end:
            return deal.epoch + 1
        return deal.epoch if step >= deal.opens else deal.before

    def finished(self, rank: int, told: tuple[int, int]) -> int:
        """The number of dealt steps that a member has certainly finished.

        Args:
            rank: the member.
            told: the number of changes and of steps in its last count.
        """
        version, done = told
        came, first = self._came[rank]
        if version < came:
            # The count of an earlier process.
            return first
        if version > len(self.changes):
            # The count of a dealing that no other rank has.
            done = min(done, self._deals[-1].starts[rank])
        return max(first, done)

    def apply(self, change: Change) -> None:
        """Deal again, to other members."""
        starts, done = dict(sorted(change.starts.items())), change.done
        stay = {r: s for r, s in starts.items() if r in self.members and r not in done}
        furthest = max((stay or starts).values())
        while self._deals[-1].end < max(furthest, *done.values(), 0):
            self._deal_next_epoch()
        index, deal = len(self._deals) - 1, self._deals[-1]
        # A rank that has fetched all of a pass may have ended it: then all ranks end it there.
        closes = furthest == deal.end
        unknown = dict.fromkeys(deal.starts, deal.end) if closes else stay
        kept = {
            rank: max(start, min(deal.end, done.get(rank, unknown.get(rank, 0))))
            for rank, start in deal.starts.items()
        }
        lost = [
            (self._find(step, rank), step, rank)
            for rank, first in done.items()
            for step in range(first, deal.starts[rank])
        ]
        lost_samples = sum(self._size(*each) for each in lost)
        for rank in stay:
            starts[rank] = kept[rank]
        self._sources.append(_Source(index, kept, lost))
        self._deals.append(
            replace(
                deal,
                before=deal.epoch if closes else deal.before,
                opens=deal.end if closes else deal.opens,
                starts=starts,
                length=int(deal.is_left(kept).sum()) + lost_samples,
                borrowed=deal.borrowed + deal.borrows,
            )
        )
        self.changes.append(change)
        for rank in starts.keys() - stay.keys():
            self._came[rank] = len(self.changes), starts[rank]

    def at_most(self, steps: range, rank: int) -> int:
        """Upper bound of the number of samples of a rank in some steps."""
        total = 0
        for step in steps:
            index = self._find(step, rank)
            deal = self._deals[index]
            # The steps of an epoch that only that rank has begun are not known here.
            known = step < deal.end
            total += self._size(index, step, rank) if known else max(deal.shares.values()) + 1
        return total

    def _size(self, index: int, step: int, rank: int) -> int:
        place = self._deals[index].place(step, rank)
        return int(place.stop - place.start)

    def _deal_next_epoch(self) -> None:
        last = self._deals[-1]
        skipped = last.borrowed + last.borrows
        self._sources.append(None)
        self._deals.append(
            Deal(
                rules=self.rules,
                epoch=last.epoch + 1,
                before=last.epoch,
                opens=last.end,
                starts=dict.fromkeys(last.starts, last.end),
                length=max(0, self.rules.length - skipped),
            )
        )

    def _deal(self, step: int, rank: int) -> Deal:
        """The deal of a member in a step."""
        step = max(step, self.begins(rank))
        # After an agreement, only what was dealt until the last change is dealt out.
        self.open_pass(step)
        return self._deals[self._find(step, rank)]

    def _find(self, step: int, rank: int) -> int:
        """The index of the last deal in which a rank takes part from this step or before."""
        for index in reversed(range(len(self._deals))):
            if self._deals[index].starts.get(rank, step + 1) <= step:
                return index
        raise LookupError(f"no samples were dealt to rank {rank} in step {step}")

    def _make_pool(self, index: int) -> Samples:
        deal, source = self._deals[index], self._sources[index]
        if source is None:
            parts = [self._permutation(deal.epoch)[self.rules.length - deal.length :]]
        else:
            pool, previous = self._pool(source.previous), self._deals[source.previous]
            parts = [self._pool(i)[self._deals[i].place(*at)] for i, *at in source.lost]
            parts.append(pool[previous.is_left(source.kept)])
        if deal.borrows:
            following = self._permutation(deal.epoch + 1)
            parts.append(following[deal.borrowed : deal.borrowed + deal.borrows])
        return np.concatenate(parts)

    def _permute(self, epoch: int) -> Samples:
        if not self.rules.shuffle:
            return np.arange(self.rules.length)
        generator = np.random.default_rng([self.rules.seed, epoch])
        return generator.permutation(self.rules.length)
