"""A sampler that follows the members and deals out again what a lost rank has not used."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sized
from itertools import islice
from typing import Any

import torch
from loguru import logger
from torch.utils.data import Sampler

from decent_optim_wrapper.data.agreement import Count, Told, agree
from decent_optim_wrapper.data.dealing import Change, Dealing, Rules
from decent_optim_wrapper.start.pace import longest_flight
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wrapper import DecentOptimWrapper


class ElasticSampler(Sampler[list[int]]):
    """Deals the samples of each epoch to the ranks, and again when ranks are lost or come back.

    It is a batch sampler: ``DataLoader(data, batch_sampler=ElasticSampler(data, optimizer, 32))``.
    Each batch belongs to one `step()` of the optimizer and counts as used when that step ends.
    Batches that workers have fetched ahead do not count. Every sample is used exactly once per
    epoch, except for the steps that a lost rank made after its last heartbeat, and for the batches
    that it has fetched if it comes back in the same process: their samples are used twice, and a
    warning gives an upper bound of their number.

    If there are not enough samples left for a batch on every rank, as when a rank comes back at the
    very end of an epoch, samples of the next epoch are used, and the next epoch has fewer.

    Args:
        data: the data set, or its length.
        optimizer: the wrapper whose steps count and whose `members` take part. Build the sampler at
            the same place on all ranks, also on a rank that comes back.
        batch_size: number of samples per rank and step.
        total_batch: number of samples of all ranks together per step, however many ranks there are;
            pass it instead of `batch_size`. If it is not divisible, batches differ by one.
        seed: seed of the permutations; the same on all ranks.
        shuffle: permute the samples in each epoch.
        drop_last: leave out the samples at the end of an epoch that do not fill a step. Otherwise
            the last batches of an epoch are smaller, or larger by one, and differ by at most one.

    Raises:
        ValueError: there are not enough samples, not exactly one of the two sizes was passed, or
            the arguments of another rank differ.
    """

    def __init__(
        self,
        data: Sized | int,
        optimizer: DecentOptimWrapper,
        batch_size: int | None = None,
        *,
        total_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        length = data if isinstance(data, int) else len(data)
        rules = Rules(length, batch_size, total_batch, seed, shuffle, drop_last)
        self._rank = optimizer.rank
        _check(rules, optimizer)
        self._rules = rules
        self._optimizer = optimizer
        self._dealing = Dealing(rules, optimizer.members)
        # Number of steps made, and of steps whose batches the iterator has returned.
        self._done = self._fetched = 0
        # The batches that the iterator has returned and no step has used.
        self._waiting: deque[list[int]] = deque()
        # Upper bound of the number of samples that were used twice.
        self._repeated = 0
        # With "auto", ranks may have made different numbers of steps.
        self._in_step = optimizer.pacing.synchronous
        # The number of steps by which a rank can be ahead: then it waits for a round.
        every = optimizer.schedule.intervals.gossip_every
        self._lead = every + longest_flight(optimizer.pacing) - 1
        optimizer.after_step(self._count_step)
        self._recovery = optimizer.recovery
        if self._recovery is not None:
            self._recovery.attach(self)
            self._say()

    @property
    def epoch(self) -> int:
        """The epoch of the next step; ``while sampler.epoch < epochs`` ends after all of them."""
        return self._dealing.epoch(self._done, self._rank)

    @property
    def repeated(self) -> int:
        """Upper bound of the number of samples used twice because ranks were lost or came back.

        It is the same on all ranks after the members have changed.
        """
        return self._repeated

    def __len__(self) -> int:
        """The number of batches left in the present pass over the data."""
        self._dealing.open_pass(self._done)
        return self._dealing.end(self._done, self._rank) - self._done

    def __iter__(self) -> Iterator[list[int]]:
        """The batches from the next step on until the epoch ends.

        If a rank is lost after others have fetched the end of the epoch, the samples that it has
        not used form another pass of the same epoch.
        """
        # Batches that were fetched and not used are fetched again.
        begun = self._fetched = self._done
        kept = deque(self._kept())
        self._waiting.clear()
        self._dealing.open_pass(begun)
        while self._fetched == begun or not self._dealing.ends(self._fetched, self._rank, begun):
            if self._fetched < self._dealing.begins(self._rank) and kept:
                samples = kept.popleft()
            else:
                samples = self._dealing.samples(self._fetched, self._rank)
            self._fetched += 1
            self._waiting.append(samples)
            yield samples

    def _kept(self) -> list[list[int]]:
        """The batches that this rank, which came back with them, uses before its first own step."""
        count = self._dealing.begins(self._rank) - self._done
        return [*islice(self._waiting, max(0, count))]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; batches that are fetched but not used do not count."""
        members = self._dealing.members
        # A column for each member: 1 and its number of steps, or zeros if only that member knows
        # it. The average over the ranks, from which another number of ranks starts, has all of
        # them: their ratio is the number of steps.
        steps = torch.zeros(2, len(members), dtype=torch.float64)
        for place, rank in enumerate(members):
            if self._in_step or rank == self._rank:
                steps[:, place] = torch.tensor([1, self._done])
        return {
            "rules": [*self._rules],
            "first": [*self._dealing.first],
            "changes": [change.pack() for change in self._dealing.changes],
            "steps": steps,
            "kept": self._kept(),
            "repeated": self._repeated,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict()`, on all ranks.

        If the members differ from those that saved it, they share what is left of the epoch. With
        ``gossip_every="auto"`` ranks may have made different numbers of steps, so other members
        need the states of all ranks: load them with `Checkpoints`.

        Args:
            state: the result of `state_dict()`, or the average over the ranks that `Checkpoints`
                loads for another number of ranks.

        Raises:
            ValueError: the state belongs to other data, sizes or seed, or does not have the steps
                of all ranks that are needed. Nothing was loaded.
        """
        rules = Rules(*state["rules"])
        if rules != self._rules:
            raise ValueError(
                f"rank {self._rank}: load_state_dict expects the state of a sampler with "
                f"{self._rules}, as here, got {rules}; pass the same data, seed and sizes"
            )
        dealing = Dealing(rules, state["first"], [*map(Change.unpack, state["changes"])])
        members = self._optimizer.members
        kept: list[list[int]] = []
        if dealing.members == members:
            kept = state["kept"]
            done = self._saved_steps(state, dealing, [self._rank])[self._rank]
        else:
            steps = self._saved_steps(state, dealing, dealing.members)
            version, done = len(dealing.changes), max(steps.values())
            finished = {r: dealing.finished(r, (version, count)) for r, count in steps.items()}
            dealing.apply(Change(starts=dict.fromkeys(members, done), done=finished))
        self._dealing = dealing
        self._done = self._fetched = done
        self._waiting = deque(kept)
        self._repeated = state["repeated"]
        self._say()

    def _saved_steps(
        self, state: dict[str, Any], dealing: Dealing, needed: Collection[int]
    ) -> dict[int, int]:
        """The number of steps that some ranks had made when the state was saved.

        Raises:
            ValueError: a rank is missing.
        """
        columns = zip(dealing.members, *state["steps"].tolist(), strict=True)
        steps = {rank: round(count / known) for rank, known, count in columns if known}
        if missing := sorted({*needed} - steps.keys()):
            raise ValueError(
                f"rank {self._rank}: load_state_dict expects the steps of the ranks "
                f"{[*needed]}, got a state that lacks those of {missing}: with "
                f'gossip_every="auto" the state of a rank has only its own; load the states with '
                f"decent_optim_wrapper.checkpoint.Checkpoints, which reads those of all ranks, or "
                f"continue with the ranks {[*dealing.members]}, each with its own state"
            )
        return {rank: steps[rank] for rank in needed}

    def tell(self, heard: Mapping[int, str]) -> Any:
        """Return what the other ranks must know of this one; see `Follower`."""
        return Told(
            rules=self._rules,
            first=self._dealing.first,
            changes=[change.pack() for change in self._dealing.changes],
            done=self._done,
            fetched=self._fetched,
            waiting=sum(map(len, self._waiting)),
            repeated=self._repeated,
            heard={rank: Count.read(text) for rank, text in heard.items()},
        ).pack()

    def follow(self, told: Mapping[int, Any], newcomers: Collection[int]) -> None:
        """Deal the remaining samples to the present members; see `Follower`.

        Raises:
            ValueError: the sampler of another rank has other arguments.
        """
        read = {rank: each and Told.unpack(each) for rank, each in told.items()}
        for rank, each in read.items():
            if each is not None and each.rules != self._rules:
                raise ValueError(
                    f"rank {self._rank}: expected rank {rank} to have {self._rules}, as here, "
                    f"but it has {each.rules}; build the same sampler on every rank"
                )
        agreement = agree(read, newcomers, self._lead)
        if agreement is None:
            return
        self._dealing = agreement.dealing
        if self._rank in agreement.came:
            self._done, self._fetched = agreement.arrival, agreement.starts[self._rank]
        self._repeated = agreement.repeated
        self._say()
        logger.info("rank {}: samples are dealt again to {}", self._rank, self._dealing.members)
        if agreement.again and self._rank == self._dealing.members[0]:
            warn(
                f"rank {self._rank}: at most {agreement.again} samples are used twice, because a "
                f"rank used them after its last heartbeat before it was lost, or comes back with "
                f"batches that it had fetched"
            )

    def _count_step(self) -> None:
        self._done += 1
        if self._waiting:
            self._waiting.popleft()
        if self._recovery is not None:
            self._say()

    def _say(self) -> None:
        """Tell the other ranks how far this one is."""
        if self._recovery is not None:
            self._recovery.say(str(Count(len(self._dealing.changes), self._done)))


def _check(rules: Rules, optimizer: DecentOptimWrapper) -> None:
    given = [size for size in (rules.batch_size, rules.total_batch) if size is not None]
    if len(given) != 1 or given[0] < 1:
        raise ValueError(
            f"rank {optimizer.rank}: expected either batch_size or total_batch, 1 or more, got "
            f"batch_size={rules.batch_size} and total_batch={rules.total_batch}"
        )
    ranks = optimizer.world_size
    least = max(ranks, rules.total_batch or ranks * given[0]) if rules.drop_last else ranks
    if rules.length < least or (rules.total_batch or ranks) < ranks:
        raise ValueError(
            f"rank {optimizer.rank}: expected a sample for each of {ranks} ranks in every step, "
            f"got {rules.length} samples for {given[0]} in a step"
        )
