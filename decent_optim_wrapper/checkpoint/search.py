"""Finds the newest checkpoint set that all ranks can load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.checkpoint import sealed_file
from decent_optim_wrapper.checkpoint.files import (
    FileName,
    described,
    folder_of,
    found,
    read_set,
)
from decent_optim_wrapper.checkpoint.saving_ranks import SavingRanks
from decent_optim_wrapper.warn import warn


class HeldSet(NamedTuple):
    """A set that this rank can load.

    Args:
        step: the step of the set.
        is_own: whether this number of ranks saved it, so that a rank needs its own file only.
        world_size: number of ranks that saved it.
        stamp: the random number of the set.
        paths: the files that this rank needs, by rank; all of them are complete.
    """

    step: int
    is_own: bool
    world_size: int
    stamp: int
    paths: Mapping[int, Path]

    @property
    def key(self) -> tuple[int, ...]:
        """Orders sets by step; of one step, a set of this number of ranks is the highest."""
        return self[:3]


NO_SET = HeldSet(step=-1, is_own=False, world_size=0, stamp=0, paths={})


class SetSearch:
    """Searches the folder of a run.

    Args:
        folder: the folder.
        ranks: the ranks that load together.
    """

    def __init__(self, folder: Path, ranks: SavingRanks) -> None:
        self._folder = folder
        self._ranks = ranks

    def agree(self, same_world: bool) -> HeldSet:
        """The newest set that all ranks can load; collective.

        Args:
            same_world: use only sets of this number of ranks.

        Returns:
            The set; `NO_SET`, with a warning if there are any files, if no set is complete.
        """
        held = self._find(same_world)
        while True:
            everywhere = self._ranks.gather(*held[:4])
            if (everywhere == everywhere[0]).all():
                if held == NO_SET:
                    self._warn_of_no_set(same_world)
                return held
            keys = [tuple(row[:3]) for row in everywhere.tolist()]
            stamps = everywhere[:, 3]
            lowest, highest = min(keys), max(keys)
            if lowest < highest:
                behind = torch.tensor([key < highest for key in keys])
                self._warn_of(highest, "is passed over: no whole", behind)
                # The lowest itself is below this limit.
                limit = (*lowest, 1)
            else:
                self._warn_of(highest, "is passed over: of another set is", stamps != stamps[0])
                limit = lowest
            held = self._find(same_world, limit, held)

    def _find(
        self, same_world: bool, limit: tuple[int, ...] | None = None, held: HeldSet | None = None
    ) -> HeldSet:
        """`held` if it is below the limit, or the newest complete set that is; collective."""
        damaged: list[str] = []
        if held is not None and (limit is None or held.key < limit):
            return self._ranks.in_touch(lambda: held)
        newest = self._ranks.in_touch(lambda: self._newest(same_world, limit, damaged))
        for text in damaged:
            warn(text)
        return newest

    def _newest(
        self, same_world: bool, limit: tuple[int, ...] | None, damaged: list[str]
    ) -> HeldSet:
        """The newest set below a limit whose files are complete; describes damaged ones."""
        sets = self._sets(same_world)
        for key in sorted(sets, reverse=True):
            if limit is not None and key >= limit:
                continue
            step, is_own, world_size = key
            own = folder_of(self._folder, step) / str(self._ranks.own_name())
            try:
                if is_own:
                    stamp, paths = sealed_file.read_stamp(own), {self._ranks.rank: own}
                else:
                    stamp, paths = read_set(self._folder, step, sets[key])
                return HeldSet(step, bool(is_own), world_size, stamp, paths)
            except OSError as error:
                if is_own or self._ranks.warns:
                    what = own if is_own else described(self._folder, step, world_size)
                    damaged.append(
                        f"rank {self._ranks.rank}: checkpoint {what} cannot be used: {error}; "
                        f"looking for an older one"
                    )
        return NO_SET

    def _sets(self, same_world: bool) -> dict[tuple[int, int, int], FileName]:
        """The keys of all sets with a file that this rank sees and needs, and the file's name."""
        own, sets = self._ranks.own_name(), {}
        for step, name, _ in found(self._folder):
            if name == own:
                sets[step, 1, name.world_size] = own
            elif not same_world and (name.shard, name.shards) == (own.shard, own.shards):
                # Possibly a set of the same number of ranks, but of other members.
                sets[step, 0, name.world_size] = name
        return sets

    def _warn_of(self, key: tuple[int, ...], problem: str, bad: Tensor) -> None:
        """Warn once for all ranks of a set that some of them cannot load."""
        step, is_own, world_size = key
        if is_own:
            self._ranks.warn(folder_of(self._folder, step), problem, bad)
        elif self._ranks.warns:
            ranks = ", ".join(str(rank) for rank, _ in self._ranks.rows(bad))
            warn(
                f"checkpoint {described(self._folder, step, world_size)} is passed over: rank "
                f"{ranks} does not find all of its files, or finds others; put them into a folder "
                f"that every rank sees"
            )

    def _warn_of_no_set(self, same_world: bool) -> None:
        shards = {name.shards for _, name, _ in found(self._folder)}
        if not self._ranks.warns or not shards:
            return
        of, size = self._ranks.replica.size, f"{self._ranks.world_size} ranks"
        size += f" of {of} shards" if of > 1 else ""
        more = "" if same_world else ", nor one of another number of ranks"
        if of not in shards:
            more += (
                "; replicas that were spread over another number of ranks are loaded with "
                "torch.distributed.checkpoint, if they were saved with it"
            )
        warn(f"{self._folder} has checkpoints, but no complete set of {size}{more}")
