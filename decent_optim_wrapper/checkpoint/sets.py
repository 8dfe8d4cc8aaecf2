"""Checkpoint sets: one file per rank; the files of a set are used together or not at all."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from loguru import logger

from decent_optim_wrapper.checkpoint.averaging import Averaging, map_file
from decent_optim_wrapper.checkpoint.saved_set import (
    SavedSet,
    folder_of,
    marked_sets,
    read_set,
    saved_steps,
    sets_elsewhere,
)
from decent_optim_wrapper.checkpoint.saving_ranks import SavingRanks
from decent_optim_wrapper.checkpoint.whole_file import parts_of, write_state
from decent_optim_wrapper.checks import instance_of, whole
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wire.parameters import named_parameters
from decent_optim_wrapper.wrapper import DecentOptimWrapper

# The key of the part of a replica in a file, next to the user's state.
_PART = "decent_optim_wrapper.part"


class Checkpoint(NamedTuple):
    """The state from which a rank continues.

    Args:
        step: number of steps done.
        state: this rank's state in the set; if another number of ranks saved it, their average.
        world_size: number of ranks that saved the set.
    """

    step: int
    state: dict[str, Any]
    world_size: int


class Checkpoints:
    """Saves and loads sets of files ``<folder>/step_00000120/rank_3_of_4.pt``, one for every rank.

    If a replica is spread over several ranks of a mesh, each of them has its own file:
    ``rank_3_of_4_shard_1_of_2.pt``. The ranks of the whole mesh save and load together, and a file
    says which part of the parameters it has.

    A file gets its name when all of it is on the disk. When every rank has written its file, each
    of them writes the same marker, ``set_of_4.sha256``, with the digests of all files: then the set
    is *complete*. If a process is killed at any moment, the previous set remains usable.

    If ranks are lost and come back, or a run continues with another number of ranks, there are sets
    of several sizes. They are counted separately, so sets of one size never displace others.

    Args:
        folder: the folder of this run; give every run its own. It may be on a disk that all ranks
            share or on a disk of each node: a rank reads its own files only, and the files of all
            ranks if another number of ranks saved the set.
        optimizer: the wrapper whose ranks save together.
        keep: number of complete sets to keep, for each number of ranks; older files are then
            removed.

    Raises:
        TypeError: `optimizer` is not the wrapper, or `keep` is not a whole number.
        ValueError: `keep` is below 1.
    """

    def __init__(self, folder: str | Path, optimizer: DecentOptimWrapper, keep: int = 2) -> None:
        expected = "a DecentOptimWrapper, such as `.optimizer` of a DecentralizedDataParallel"
        instance_of(expected, DecentOptimWrapper)("optimizer", optimizer)
        self._keep = whole(1, "a number of sets", " sets")("keep", keep)
        self._folder = Path(folder)
        self._optimizer = optimizer
        self._ranks = SavingRanks(optimizer)
        # Step and number of ranks of the sets that are known to be complete on all ranks.
        self._complete: list[tuple[int, int]] = []
        # The same of all that are known, and the set that was saved last, to notice another run.
        self._known: set[tuple[int, int]] = set()
        self._written: SavedSet | None = None

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write this rank's file and wait for the other ranks' files; collective.

        Args:
            step: number of steps done, the same on all ranks, above the step of the last set.
            state: state dicts, tensors, numbers, strings and containers of these.

        Raises:
            ValueError: `step` is not above the last one or differs between ranks; raised on all
                ranks.
            TypeError: `step` is not a whole number, or `state` cannot be loaded with
                ``weights_only=True``.
            OSError: this rank could not write. Rank 0 warns of it, and the old sets remain.
            PeerError: a rank was lost, or comes back with `elastic`. The old sets remain, and no
                rank saves alone: write an emergency copy of this rank's state with `torch.save`.
        """
        step = operator.index(step)
        self._check_step(step)
        own, folder = self._ranks.own, folder_of(self._folder, step)
        path = folder / str(own)
        digest = self._write(folder, lambda: write_state(path, {**state, **self._part()}))
        if digest is None:
            return
        digests = [bytes(row).hex() for row in self._ranks.gather(*bytes.fromhex(digest))]
        written = SavedSet(step, folder, dict(zip(self._ranks.names, digests, strict=True)))
        # Older sets stay until every rank has it.
        if self._write(folder, lambda: written.mark(own)):
            self._complete.append((step, own.world_size))
            self._written = written
            self._prune()

    def load(
        self, map_location: torch.device | str | None = None, same_world: bool = False
    ) -> Checkpoint | None:
        """Read the newest complete set; collective.

        If this number of ranks saved it, each rank continues from its own file. Otherwise all ranks
        start from the average of the saved models, which does not move the mean over the ranks; the
        guide to checkpoints says what else is averaged. A rank then reads the files of all ranks,
        and needs memory for one state and for its largest tensor in float64, twice.

        If a file is damaged or missing, a warning names it, and the previous set is used.

        Args:
            map_location: as in `torch.load`, which is called with ``weights_only=True``; None
                leaves averages on the CPU.
            same_world: use only sets of this number of ranks.

        Returns:
            The step and the state for this rank, or None if no set is complete (start at step 0).

        Raises:
            ValueError: a replica is spread in another way than when the set was saved, or a set of
                another number of replicas contains shards of tensors; raised on all ranks.
            NonFiniteError: the set must be averaged, and a file has NaN or infinity where others
                have finite values; raised on all ranks.
            PeerError: a rank was lost, or comes back with `elastic`.
        """
        saved = self._newest(same_world)
        self._complete = [] if saved is None else [(saved.step, saved.world_size)]
        if saved is None:
            return None
        state, failed = self._ranks.together(lambda: self._read(saved, map_location))
        if failed:
            raise ValueError(f"{saved.folder} could not be loaded on {failed}: see the error there")
        return Checkpoint(step=saved.step, state=state, world_size=saved.world_size)

    def _newest(self, same_world: bool) -> SavedSet | None:
        """The newest complete set whose files all ranks can read."""
        own = self._ranks.own
        # Of one step, the set of as many ranks is the highest.
        found = {
            (step, size == own.world_size, size)
            for step, size in marked_sets(self._folder, own.shards)
            if size == own.world_size or not same_world
        }
        none = (-1, 0, 0)
        while (newest := max(self._ranks.gather(*max(found, default=none)))) != none:
            step, _, world_size = newest
            saved, problem = self._ranks.together(partial(self._open, step, world_size))[0]
            sums = [total for (total,) in self._ranks.gather(saved.checksum if saved else 0)]
            bad = [total == 0 or total < max(sums) for total in sums]
            if not any(bad):
                return saved
            if problem:
                warn(f"{own.saver}: {problem}; looking for an older set")
            self._ranks.warn(
                f"checkpoint {folder_of(self._folder, step)} of {world_size} ranks is passed over: "
                f"it is missing, damaged, or of another run on {self._ranks.savers(bad)}"
            )
            found.discard(newest)
            self._known.add((step, world_size))
        if saved_steps(self._folder):
            self._ranks.warn(
                f"{self._folder} has checkpoints, but no complete set of {own.world_size} ranks, "
                f"with a marker {own.marker}, that can be used; the guide to checkpoints says how "
                f"to load sets of an earlier version, or of replicas spread in another way"
            )
        elif elsewhere := sets_elsewhere(self._folder):
            self._ranks.warn(elsewhere)
        return None

    def _open(self, step: int, world_size: int) -> tuple[SavedSet | None, str]:
        """Check the files of a set that this rank reads; return it, or what is wrong with it."""
        own = self._ranks.own
        try:
            saved = read_set(self._folder, step, own._replace(world_size=world_size))
            saved.check(self._ranks.files_of(saved))
        except OSError as error:
            return None, str(error)
        return saved, ""

    def _read(self, saved: SavedSet, map_location: torch.device | str | None) -> dict[str, Any]:
        own, names = self._ranks.own, self._ranks.files_of(saved)
        paths = {name.rank: saved.folder / str(name) for name in names}
        state: dict[str, Any]
        if names == [own]:
            state = torch.load(paths[own.rank], map_location=map_location, weights_only=True)
        elif any(dimension.has_shards for dimension in self._optimizer.replica.dimensions):
            # The files name the ranks of a mesh that no longer exists.
            raise ValueError(
                f"{own.saver}: {saved.folder} of {saved.world_size} ranks contains shards of "
                f"tensors (FSDP2, tensor parallelism), which load with {saved.world_size} "
                f"replicas only; start so many, load their average, or pass same_world=True"
            )
        else:
            logger.info("{}: {} of other ranks is averaged", own.saver, saved.folder)
            states = {rank: map_file(path) for rank, path in paths.items()}
            state = Averaging(paths, map_location or "cpu").of(states, own.rank)
        here = self._part().get(_PART, [])
        # A set of an earlier version has no such entry.
        if here != state.pop(_PART, here) and here:
            raise ValueError(
                f"{own.saver}: {saved.folder} was saved with the model in another layout; pass the "
                f"mesh and spread the model as in the run that saved it, or save with "
                f"torch.distributed.checkpoint, which loads in another layout"
            )
        return state

    def _part(self) -> dict[str, list[str]]:
        """The part of the replica on this rank, as lines to save; empty without a mesh."""
        if not self._optimizer.replica.dimensions:
            return {}
        named = named_parameters(self._optimizer.param_groups)
        names: Sequence[str] = [each.name for each in named]
        # Stages may have tensors of the same shapes; only the model's names are the same wherever
        # a parameter is. It may be unknown, or lack some.
        with suppress(ValueError):
            names = self._optimizer.replica.names_of(each.tensor for each in named)
        return {_PART: [f"{name}: {each.part}" for name, each in zip(names, named, strict=True)]}

    def _write(self, folder: Path, action: Callable[[], str]) -> str | None:
        """The digest of what this rank has written; None if another rank could not write."""
        digest, failed = self._ranks.together(action)
        if not failed:
            return digest
        self._ranks.warn(f"checkpoint {folder} is not complete: could not write on {failed}")
        return None

    def _check_step(self, step: int) -> None:
        newest, _ = self._complete[-1] if self._complete else (-1, 0)
        numbers = self._ranks.gather(step, newest, self._step_of_another_run(step))
        steps, last, others = zip(*numbers, strict=True)
        # A rank that was cut off from the last save() does not know that this set is complete on
        # the others, and must not overwrite its file.
        if len(set(steps)) > 1 or step <= max(last):
            raise ValueError(
                f"{self._ranks.own.saver}: save() expects one step on every rank, above "
                f"{max(last)}, the step of the last set, got {[*steps]} by rank and shard; call it "
                f"at the same place everywhere, and once for each step"
            )
        if max(others) >= 0:
            self._ranks.warn(
                f"checkpoint {folder_of(self._folder, max(others))} is of another run, which this "
                f"one, at step {step}, has not loaded; load() takes the newest set, whoever saved "
                f"it: give every run its own folder, or remove the sets of the other one"
            )

    def _step_of_another_run(self, step: int) -> int:
        """The step of a set of another run, above `step` or in place of the last one; or -1."""
        own = self._ranks.own
        marked = {*marked_sets(self._folder, own.shards)}
        others = [each for each, _ in marked - self._known if each > step]
        if self._written is not None and self._written.is_replaced:
            others.append(self._written.step)
        self._known |= {*marked, (step, own.world_size)}
        return max(others, default=-1)

    def _prune(self) -> None:
        """Remove this rank's files of incomplete sets and of sets older than the ones to keep."""
        own = self._ranks.own
        steps = [step for step, size in self._complete if size == own.world_size]
        complete = steps[-self._keep :]
        if len(complete) < self._keep:
            return
        for step in saved_steps(self._folder):
            # Other ranks may be writing a newer one.
            if step < complete[-1] and step not in complete:
                folder = folder_of(self._folder, step)
                file = folder / str(own)
                # The last rank removes the folder. Files that remain only take space.
                with suppress(OSError):
                    for path in (folder / own.marker, file, *parts_of(file)):
                        path.unlink(missing_ok=True)
                    folder.rmdir()
