"""A sampler that follows the members and deals out again what a lost rank has not used."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sized
from typing import Any

from loguru import logger
from torch.utils.data import Sampler

from decent_optim_wrapper.data.agreement import Count, Told, agree
from decent_optim_wrapper.data.dealing import Change, Dealing, Rules
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wrapper import DecentOptimWrapper


class ElasticSampler(Sampler[list[int]]):
    """Deals the samples of each epoch to the ranks, and again when ranks are lost or come back.

    It is a batch sampler: ``DataLoader(data, batch_sampler=ElasticSampler(data, optimizer, 32))``.
    Each batch belongs to one `step()` of the optimizer and counts as used when that step ends.
    Batches that workers have fetched ahead do not count. Every sample is used exactly once per
    epoch, except for the steps that a lost rank made after its last heartbeat: their samples are
    used twice, and a warning gives an upper bound of their number.

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
        # Upper bound of the number of samples that were used twice.
        self._repeated = 0
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
        """Upper bound of the number of samples used twice because ranks were lost."""
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
        self._dealing.open_pass(begun)
        while self._fetched == begun or not self._dealing.ends(self._fetched, self._rank, begun):
            samples = self._dealing.samples(self._fetched, self._rank)
            self._fetched += 1
            yield samples

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; batches that are fetched but not used do not count."""
        return {
            "rules": [*self._rules],
            "first": [*self._dealing.first],
            "changes": [change.pack() for change in self._dealing.changes],
            "done": self._done,
            "repeated": self._repeated,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict()`, on all ranks.

        If the members differ from those that saved it, they share what is left of the epoch. With
        ``gossip_every="auto"`` ranks may have made different numbers of steps; the steps in the
        loaded state then count.

        Args:
            state: the result of `state_dict()`.

        Raises:
            ValueError: the state belongs to other data, sizes or seed. Nothing was loaded.
        """
        rules = Rules(*state["rules"])
        if rules != self._rules:
            raise ValueError(
                f"rank {self._rank}: load_state_dict expects the state of a sampler with "
                f"{self._rules}, as here, got {rules}; pass the same data, seed and sizes"
            )
        dealing = Dealing(rules, state["first"], [*map(Change.unpack, state["changes"])])
        done, members = state["done"], self._optimizer.members
        if dealing.members != members:
            starts = dict.fromkeys(members, done)
            dealing.apply(Change(starts=starts, done=dict.fromkeys(dealing.members, done)))
        self._dealing = dealing
        self._done = self._fetched = done
        self._repeated = state["repeated"]
        self._say()

    def tell(self, heard: Mapping[int, str]) -> Any:
        """Return what the other ranks must know of this one; see `Follower`."""
        return Told(
            rules=self._rules,
            first=self._dealing.first,
            changes=[change.pack() for change in self._dealing.changes],
            done=self._done,
            fetched=self._fetched,
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
        agreement = agree(read, newcomers)
        if agreement is None:
            return
        self._dealing = agreement.dealing
        if self._rank in agreement.came:
            self._done, self._fetched = agreement.arrival, agreement.starts[self._rank]
        self._repeated += agreement.repeated
        self._say()
        logger.info("rank {}: samples are dealt again to {}", self._rank, self._dealing.members)
        if agreement.repeated and self._rank == self._dealing.members[0]:
            warn(
                f"rank {self._rank}: at most {agreement.repeated} samples are used twice, "
                f"because a lost rank used them after its last heartbeat"
            )

    def _count_step(self) -> None:
        self._done += 1
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
