"""Which rank uses which samples in which step: a pure function of the seed and of all changes.

Each epoch is a permutation of all samples, the pool. At every step each member takes its share from
the front of the pool, in the order of the ranks. When the members change, all ranks keep what was
dealt for the steps before one that nobody has fetched yet. From that step on, the rest of the pool
and what a lost rank has not finished are dealt again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.int64]


class Sampling(NamedTuple):
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

    def total(self, members: int) -> int:
        """The number of samples of all members together in a full step."""
        return self.total_batch or (self.batch_size or 0) * members

    def permutation(self, epoch: int) -> Samples:
        """All samples in the order of an epoch."""
        if not self.shuffle:
            return np.arange(self.length)
        return np.random.default_rng([self.seed, epoch]).permutation(self.length)


class Change(NamedTuple):
    """The members have changed.

    Args:
        start: the first step that is dealt again. All ranks keep their batches of earlier steps.
        arrival: the number of steps at which new members begin.
        came: pairs of each new member and the first step that is dealt to it. It is above `arrival`
            for a rank that comes back in the same process: it first uses what it has fetched.
        done: pairs of each rank that is gone and the number of steps that it had finished.
        again: upper bound of the number of samples that are used twice, because ranks had used or
            fetched them of which the others did not know.
    """

    start: int
    arrival: int
    came: Sequence[tuple[int, int]]
    done: Sequence[tuple[int, int]]
    again: int


@dataclass(frozen=True, kw_only=True)
class Deal:
    """A pool of samples, dealt to the members from one step to another.

    Args:
        sampling: batch sizes and the like.
        epoch: the epoch of these samples.
        start: the first step that is dealt to all members that were there before.
        starts: the first step of each member, by rank in ascending order. A rank that comes may
            begin before `start`, or after it if it first uses what it has fetched.
        length: number of samples in the pool, before this deal takes some of the next epoch.
        borrowed: number of samples of the next epoch that the deals before have taken.
        lost: batches in the pool, by the index of their deal and their place there. The rest of the
            deal before follows them. None for a new epoch.
    """

    sampling: Sampling
    epoch: int
    start: int
    starts: Mapping[int, int]
    length: int
    borrowed: int = 0
    lost: Sequence[tuple[int, slice]] | None = None

    @cached_property
    def _full(self) -> int:
        """The first step for which all members have a batch."""
        return max(self.starts.values())

    def _early(self, step: int) -> int:
        """The number of batches before a step, up to the first for which all members have one."""
        return sum(max(0, step - start) for start in self.starts.values())

    @cached_property
    def _share(self) -> int:
        """The number of samples in each of these early batches."""
        members = len(self.starts)
        # Early batches leave enough of a small pool for a step of all members.
        most = self.length // (self._early(self._full) + members)
        return max(1, min(most, self.sampling.total(members) // members))

    @cached_property
    def size(self) -> int:
        """The number of samples in the pool, with some of the next epoch if it has too few."""
        # No batch may be empty.
        least = self._early(self._full)
        if self.length > least and not self.sampling.drop_last:
            least += len(self.starts)
        return max(self.length, least)

    @property
    def taken(self) -> int:
        """The number of samples of the next epoch that have been taken so far."""
        return self.borrowed + self.size - self.length

    @cached_property
    def end(self) -> int:
        """The step after the last."""
        rest = self.size - self.dealt(self._full)
        steps, left = divmod(rest, self.sampling.total(len(self.starts)))
        # Too few samples for another step are added to the last one.
        if left and not self.sampling.drop_last and (left >= len(self.starts) or steps == 0):
            steps += 1
        return self._full + steps

    def dealt(self, step: int) -> int:
        """The number of samples in all batches before a step."""
        early = self._share * self._early(min(step, self._full))
        if step <= self._full:
            return early
        if step == self.end and not self.sampling.drop_last:
            return self.size
        return early + (step - self._full) * self.sampling.total(len(self.starts))

    def place(self, step: int, rank: int) -> slice:
        """The slice of the pool that is the batch of a rank."""
        ranks = [each for each, start in self.starts.items() if start <= step]
        first, index = self.dealt(step), ranks.index(rank)
        size = self.dealt(step + 1) - first
        return slice(first + size * index // len(ranks), first + size * (index + 1) // len(ranks))


class Dealing:
    """All deals so far.

    Args:
        sampling: the fields of `Sampling`.
        first: the members of the first deal.
        changes: the fields of each `Change` since then.
    """

    def __init__(
        self, sampling: Sequence[Any], first: Sequence[int], changes: Sequence[Sequence[Any]] = ()
    ) -> None:
        self.sampling = Sampling(*sampling)
        self._first = first
        self.changes: list[Change] = []
        # The first step that was dealt again by the last change.
        self.start = 0
        starts, length = dict.fromkeys(first, 0), self.sampling.length
        self._deals = [Deal(sampling=self.sampling, epoch=0, start=0, starts=starts, length=length)]
        # For each member, the number of changes when it came, and its first step.
        self._came = dict.fromkeys(first, (0, 0))
        self._pool = lru_cache(3)(self._make_pool)
        for change in changes:
            self.apply(Change(*change))

    @property
    def packed(self) -> list[Any]:
        """The arguments that make the same dealing, as lists, for JSON and checkpoints."""
        return [[*self.sampling], [*self._first], [[*change] for change in self.changes]]

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the last deal."""
        return tuple(self._deals[-1].starts)

    def samples(self, step: int, rank: int) -> list[int]:
        """The batch of a rank in a step that was dealt to it."""
        index, place = self._place(step, rank)
        found: list[int] = self._pool(index)[place].tolist()
        return found

    def at(self, step: int) -> Deal:
        """The last deal that has begun at a step."""
        # After an agreement, only what was dealt until the last change is dealt out.
        self._open(step + 1)
        return next(deal for deal in reversed(self._deals) if deal.start <= step)

    def pass_end(self, step: int) -> int:
        """The step after the last of the pass over the data that contains a step."""
        end = self.at(step).end
        for deal in self._deals:
            # A rank that has fetched all of a pass may have ended it: what is dealt from its end on
            # is another pass.
            if step < deal.start < end:
                end = deal.end
        return end

    def finished(self, rank: int, version: int, done: int) -> int:
        """The number of dealt steps that a member has certainly finished.

        Args:
            rank: the member.
            version: the number of changes that it knew of at its last heartbeat.
            done: the number of steps that it had finished then.
        """
        came, first = self._came[rank]
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
        rest = deal.size - deal.dealt(start)
        self.start = start
        self.changes.append(change)
        self._came |= {rank: (len(self.changes), first) for rank, first in came.items()}
        self._deals.append(
            replace(
                deal,
                start=start,
                starts=dict(sorted({**stay, **came}.items())),
                length=rest + sum(place.stop - place.start for _, place in lost),
                borrowed=deal.taken,
                lost=lost,
            )
        )

    def _open(self, step: int) -> None:
        """Deal out further epochs until all steps before this one have batches."""
        while (last := self._deals[-1]).end < step:
            self._deals.append(
                Deal(
                    sampling=self.sampling,
                    epoch=last.epoch + 1,
                    start=last.end,
                    starts=dict.fromkeys(last.starts, last.end),
                    length=max(0, self.sampling.length - last.taken),
                )
            )

    def _place(self, step: int, rank: int) -> tuple[int, slice]:
        """The index of the deal that has the batch of a rank, and its place there."""
        self._open(step + 1)
        # A member that has come may begin before the start of its deal.
        begun = [i for i, each in enumerate(self._deals) if each.starts.get(rank, step + 1) <= step]
        return begun[-1], self._deals[begun[-1]].place(step, rank)

    def _make_pool(self, index: int) -> Samples:
        deal = self._deals[index]
        if deal.lost is None:
            parts = [self.sampling.permutation(deal.epoch)[self.sampling.length - deal.length :]]
        else:
            rest = self._pool(index - 1)[self._deals[index - 1].dealt(deal.start) :]
            parts = [*(self._pool(i)[place] for i, place in deal.lost), rest]
        if deal.taken > deal.borrowed:
            parts.append(self.sampling.permutation(deal.epoch + 1)[deal.borrowed : deal.taken])
        return np.concatenate(parts)


class Summary(NamedTuple):
    """What a rank says when the members change, in values that JSON keeps.

    Args:
        dealing: its `Dealing.packed`.
        done: the number of steps that it has finished.
        fetched: the number of steps whose batches have left its sampler.
        waiting: the number of samples in batches that it has fetched and not used.
        heard: each rank of which it has heard, with the number of changes and of finished steps
            that came with that rank's last heartbeat.
    """

    dealing: list[Any]
    done: int
    fetched: int
    waiting: int
    heard: list[list[int]]


def agree(
    known: Mapping[int, Summary], members: Collection[int], newcomers: Collection[int], lead: int
) -> tuple[Dealing, Change | None]:
    """Deal again to the ranks that have met; the result is the same on all of them.

    Args:
        known: what each rank has said that has a sampler; at least one has.
        members: the ranks that have met.
        newcomers: ranks that take the state of another rank, for example after a restart.
        lead: the number of steps by which a rank may be ahead of the others.

    Returns:
        All deals so far, and the change that was made now; None if the members are the same.
    """
    # Some may not have finished the last agreement, but all took part in it. A rank that was
    # dropped may have finished one that the others have not.
    latest = max(known, key=lambda rank: (len(known[rank].dealing[2]), rank not in newcomers))
    # To look at the batches of later steps deals out their epochs, which the change must not find.
    dealing, before = Dealing(*known[latest].dealing), Dealing(*known[latest].dealing)
    stay = {r: known[r] for r in dealing.members if r in known and r not in newcomers}
    gone = [rank for rank in dealing.members if rank not in stay]
    arrival = max((each.done for each in stay.values()), default=known[latest].done)
    # A rank that comes back in the same process first uses what it has fetched.
    came = {
        rank: arrival + (known[rank].fetched - known[rank].done if rank in known else 0)
        for rank in sorted(members)
        if rank not in stay
    }
    if not gone and not came:
        return dealing, None
    heard = sorted(tuple(count) for each in known.values() for count in each.heard)
    counts = {rank: count for rank, *count in heard}
    done = {rank: dealing.finished(rank, *counts.get(rank, (0, 0))) for rank in gone}
    again = 0
    for rank in {*gone, *known} - stay.keys():
        if rank not in dealing.members:
            # It was dropped, so what it has fetched was dealt again, and its loader cannot take
            # back what workers have read. The steps that it has made count since its loss.
            again += known[rank].waiting
        else:
            # At most up to the step in which it would have waited for the others.
            end = known[rank].fetched if rank in known else arrival + lead
            again += sum(len(before.samples(step, rank)) for step in range(done[rank], end))
    start = max(dealing.start, *(each.fetched for each in stay.values()), *done.values())
    change = Change(start, arrival, [*came.items()], [*done.items()], again)
    dealing.apply(change)
    return dealing, change
