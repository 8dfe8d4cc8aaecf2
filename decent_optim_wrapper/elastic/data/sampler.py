"""A sampler that follows the members and deals out again what a lost rank has not used."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sized
from typing import Any

import torch
from loguru import logger
from torch.utils.data import Sampler

from decent_optim_wrapper.elastic.data.dealing import Change, Dealing, Sampling, Summary, agree
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
        sampling = Sampling(length, batch_size, total_batch, seed, shuffle, drop_last)
        self._rank = optimizer.rank
        _check(sampling, optimizer)
        self._optimizer = optimizer
        self._dealing = Dealing(sampling, optimizer.members)
        # Number of steps made, and of steps whose batches the iterator has returned.
        self._done = self._fetched = 0
        # By their steps, the batches with which this rank came back, and which it uses first.
        self._kept: dict[int, list[int]] = {}
        # Not the method itself: a cycle would keep the connections alive.
        count = weakref.WeakMethod(self._count_step)
        optimizer.after_step(lambda: (alive := count()) and alive())
        if optimizer.recovery is not None:
            optimizer.recovery.attach(self)
        self._say()

    @property
    def epoch(self) -> int:
        """The epoch of the next step; ``while sampler.epoch < epochs`` ends after all of them.

        Call a collective method, such as ``optimizer.averaged()``, on all ranks before you read it
        at the end of a pass: a rank that is lost in the last step leaves samples for another pass.
        """
        return self._dealing.at(self._done).epoch

    @property
    def repeated(self) -> int:
        """Upper bound of the number of samples used twice because ranks were lost or came back.

        It is the same on all ranks after the members have changed.
        """
        return sum(change.again for change in self._dealing.changes)

    def __len__(self) -> int:
        """The number of batches left in the present pass over the data."""
        return self._dealing.pass_end(self._done) - self._done

    def __iter__(self) -> Iterator[list[int]]:
        """The batches from the next step on until the epoch ends.

        If a rank is lost after others have fetched the end of the epoch, the samples that it has
        not used form another pass of the same epoch.
        """
        # Batches that were fetched and not used are fetched again.
        begun = self._fetched = self._done
        while self._fetched < self._dealing.pass_end(begun):
            self._fetched += 1
            yield self._batch(self._fetched - 1)

    def _batch(self, step: int) -> list[int]:
        """The batch of a step, which stays the same once it has been fetched."""
        return self._kept.get(step) or self._dealing.samples(step, self._rank)

    def _waiting(self) -> list[list[int]]:
        """The batches that the iterator has returned and no step has used."""
        return [self._batch(step) for step in range(self._done, self._fetched)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; batches that are fetched but not used do not count."""
        in_step, members = self._optimizer.pacing.synchronous, self._dealing.members
        # A column for each member: 1 and its number of steps, or zeros if only that member knows
        # it, as with `AsItArrives`. The average over the ranks, from which another number of ranks
        # starts, has all of them: their ratio is the number of steps.
        known = [float(in_step or rank == self._rank) for rank in members]
        steps = torch.tensor([known, [each * self._done for each in known]], dtype=torch.float64)
        return {"dealing": self._dealing.packed, "steps": steps, "kept": [*self._kept.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict()`, on all ranks.

        If the members differ from those that saved it, they share what is left of the epoch. With
        `AsItArrives` ranks may have made different numbers of steps, so other members need the
        states of all ranks: load them with `Checkpoints`.

        Args:
            state: the result of `state_dict()`, or the average over the ranks that `Checkpoints`
                loads for another number of ranks.

        Raises:
            ValueError: the state belongs to other data, sizes or seed, or does not have the steps
                of all ranks that are needed. Nothing was loaded.
        """
        self._check_dealing(state["dealing"], "the state")
        dealing, members = Dealing(*state["dealing"]), self._optimizer.members
        same = dealing.members == members
        columns = zip(dealing.members, *state["steps"].tolist(), strict=True)
        steps = {rank: round(count / known) for rank, known, count in columns if known}
        needed = [self._rank] if same else dealing.members
        if missing := sorted({*needed} - steps.keys()):
            raise ValueError(
                f"rank {self._rank}: load_state_dict expects the steps of the ranks {[*needed]}, "
                f"got a state without the steps of {missing}: with AsItArrives the state of a rank "
                f"has only its own; load with decent_optim_wrapper.checkpoint.Checkpoints, which "
                f"reads the states of all ranks, or load each on its own rank of {dealing.members}"
            )
        done = steps[self._rank] if same else max(steps.values())
        if not same:
            came, version = [(rank, done) for rank in members], len(dealing.changes)
            gone = [(r, dealing.finished(r, version, count)) for r, count in steps.items()]
            dealing.apply(Change(max(done, dealing.start), done, came, gone, again=0))
        self._dealing = dealing
        self._done = self._fetched = done
        self._kept = dict(enumerate(state["kept"], done)) if same else {}
        self._say()

    def _check_dealing(self, packed: Any, whose: str) -> None:
        sampling, own = Sampling(*packed[0]), self._dealing.sampling
        if sampling != own:
            raise ValueError(
                f"rank {self._rank}: expected {whose} to have {own}, as the sampler here, got "
                f"{sampling}; pass the same data, seed and sizes on every rank"
            )

    def summary(self, heard: Mapping[int, str]) -> Any:
        """Return what the other ranks must know of this one."""
        return Summary(
            dealing=self._dealing.packed,
            done=self._done,
            fetched=self._fetched,
            waiting=sum(map(len, self._waiting())),
            heard=[[rank, *map(int, text.split())] for rank, text in heard.items()],
        )

    def follow(self, summaries: Mapping[int, Any], newcomers: Collection[int]) -> None:
        """Deal the remaining samples to the present members.

        Raises:
            ValueError: the sampler of another rank has other arguments.
        """
        known = {rank: Summary(*each) for rank, each in summaries.items() if each is not None}
        if not known:
            return
        for rank, each in known.items():
            self._check_dealing(each.dealing, f"the sampler of rank {rank}")
        # The number of steps by which a rank can be ahead: then it waits for a round.
        every = self._optimizer.schedule.intervals.gossip_every
        lead = every + self._optimizer.pacing.longest_flight - 1
        dealing, change = agree(known, summaries, newcomers, lead)
        if change is not None and self._rank in dict(change.came):
            self._kept = dict(enumerate(self._waiting(), change.arrival))
            self._done, self._fetched = change.arrival, dict(change.came)[self._rank]
        self._dealing = dealing
        self._say()
        logger.info("rank {}: samples are dealt again to {}", self._rank, self._dealing.members)
        if change is not None and change.again and self._rank == self._dealing.members[0]:
            warn(
                f"rank {self._rank}: at most {change.again} samples are used twice, because a "
                f"lost rank used them after its last heartbeat, or comes back with fetched batches"
            )

    def _count_step(self) -> None:
        self._kept.pop(self._done, None)
        self._done += 1
        self._say()

    def _say(self) -> None:
        """Send how far this rank is with its heartbeats; see `Summary.heard`."""
        if (recovery := self._optimizer.recovery) is not None:
            recovery.say(f"{len(self._dealing.changes)} {self._done}")


def _check(sampling: Sampling, optimizer: DecentOptimWrapper) -> None:
    ranks, sizes = optimizer.world_size, (sampling.batch_size, sampling.total_batch)
    least = sampling.total(ranks) if sampling.drop_last else ranks
    if sizes.count(None) != 1 or sampling.total(ranks) < ranks or sampling.length < least:
        raise ValueError(
            f"rank {optimizer.rank}: expected either batch_size or total_batch, and a sample for "
            f"each of {ranks} ranks in every step, got {sampling}"
        )
