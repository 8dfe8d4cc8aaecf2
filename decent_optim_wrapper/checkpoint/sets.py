"""Checkpoint sets: one file per rank; the files of a set are used together or not at all."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from loguru import logger
from torch.distributed.tensor import DTensor

from decent_optim_wrapper.checkpoint import sealed_file
from decent_optim_wrapper.checkpoint.averaging import averaged, map_file, moved
from decent_optim_wrapper.checkpoint.files import described, folder_of, named
from decent_optim_wrapper.checkpoint.saving_ranks import SavingRanks
from decent_optim_wrapper.checkpoint.search import NO_SET, HeldSet, SetSearch
from decent_optim_wrapper.comm.state_transfer import difference
from decent_optim_wrapper.errors import PeerError
from decent_optim_wrapper.mesh.replica import Replica
from decent_optim_wrapper.wire.parameters import named_parameters
from decent_optim_wrapper.wrapper import DecentOptimWrapper

__all__ = ["Checkpoint", "Checkpoints"]

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

    A file contains a digest, and gets its name when all of it is on the disk. A set is *complete*
    if the file of every rank is complete and one `save()` wrote them all. If a process is killed at
    any moment, the previous set remains usable.

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
        if not isinstance(optimizer, DecentOptimWrapper):
            raise TypeError(
                f"optimizer expects the DecentOptimWrapper whose ranks save together, got "
                f"{type(optimizer).__name__}; pass the wrapper, not the optimizer inside it "
                f"(of a DecentralizedDataParallel its .optimizer)"
            )
        self._keep = _whole("keep", keep)
        if self._keep < 1:
            raise ValueError(f"keep must be 1 or more sets, got {keep}")
        self._folder = Path(folder)
        self._optimizer = optimizer
        self._ranks = SavingRanks(optimizer)
        self._search = SetSearch(self._folder, self._ranks)
        # Steps of the newest sets that are known to be complete on all ranks, by number of ranks.
        self._complete: dict[int, list[int]] = {}

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write this rank's file and wait for the other ranks' files; collective.

        Args:
            step: number of steps done, the same on all ranks, above that of the last set.
            state: ``state_dict()``s, tensors, numbers, strings and containers of these.

        Raises:
            ValueError: `step` is not above the last one or differs between ranks; raised on all
                ranks.
            TypeError: `step` is not a whole number, or `state` cannot be loaded with
                ``weights_only=True``.
            OSError: this rank could not write. Rank 0 warns of it, and the old sets remain.
            PeerError: a rank was lost. The old sets remain, and no rank saves alone.
        """
        step = _whole("step", step)
        try:
            if self._save_together(step, state):
                steps = [*self._steps(), step][-self._keep :]
                self._complete[self._optimizer.world_size] = steps
                self._prune()
        except PeerError as error:
            last = f"of step {self._steps()[-1]}" if self._steps() else "that was there before"
            raise PeerError(
                f"{error}. No rank saves step {step} alone: the set {last} stays, and load() of a "
                f"new run takes the newest complete set. torch.save() writes an emergency copy of "
                f"this rank's state"
            ) from error

    def load(
        self, map_location: torch.device | str | None = None, same_world: bool = False
    ) -> Checkpoint | None:
        """Read the newest complete set; collective.

        If this number of ranks saved it, each rank continues from its own file. Otherwise all ranks
        start from the average of the saved models, which does not move the mean over the ranks; the
        guide to checkpoints says what else is averaged. A rank then reads the files of all ranks,
        and needs memory for one state and a piece of a tensor.

        If a file is damaged or missing, a warning names it, and the previous set is used.

        Args:
            map_location: as in `torch.load`, which is called with ``weights_only=True``; None
                leaves averages on the CPU.
            same_world: use only sets of this number of ranks.

        Returns:
            The step and the state for this rank, or None if no set is complete: start at step 0.

        Raises:
            ValueError: a replica is spread in another way than when the set was saved, or a set of
                another number of replicas holds shards of tensors; raised on all ranks.
            NonFiniteError: the set must be averaged, and a file has NaN or infinity where others
                have finite values; raised on all ranks.
            PeerError: a rank was lost.
        """
        held = self._search.agree(same_world)
        self._complete = {}
        if held == NO_SET:
            return None
        self._complete[held.world_size] = [held.step]
        self._check_whole(held)
        state = self._read(held, map_location)
        self._check_part(held.step, state.pop(_PART, None))
        return Checkpoint(step=held.step, state=state, world_size=held.world_size)

    def _check_whole(self, held: HeldSet) -> None:
        """Make sure that no set of another number of replicas holds shards of tensors.

        Their files name the ranks of a mesh that no longer exists.
        """
        if held.is_own or not self._replica.dimensions:
            return
        groups = self._optimizer.param_groups
        sharded = any(isinstance(param, DTensor) for group in groups for param in group["params"])
        if self._ranks.gather(int(sharded)).any():
            raise ValueError(
                f"rank {self._optimizer.rank}, shard {self._replica.shard}: "
                f"{described(self._folder, held.step, held.world_size)} holds shards of tensors "
                f"(FSDP2, tensor parallelism), which load with {held.world_size} replicas only; "
                f"start so many, or save with torch.distributed.checkpoint and load the average of "
                f"the replicas as in the guide to checkpoints, or pass same_world=True"
            )

    def _read(self, held: HeldSet, map_location: torch.device | str | None) -> dict[str, Any]:
        rank = self._optimizer.rank
        state: dict[str, Any]
        if held.is_own:
            path = held.paths[rank]
            state = torch.load(path, map_location=map_location, weights_only=True)
            return state
        if self._ranks.warns:
            logger.info(
                "step {} was saved by {} ranks; all {} ranks start from the average",
                *(held.step, held.world_size, self._optimizer.world_size),
            )
        # The state of an extension that belongs to a rank is not valid for other members.
        kept = [each.name for each in self._optimizer.extensions if not each.belongs_to_rank]
        files = {each: map_file(path) for each, path in held.paths.items()}
        state = averaged(files, rank, kept, held.paths)
        return state if map_location is None else moved(state, map_location)

    def _check_part(self, step: int, saved: list[str] | None) -> None:
        """Make sure that every rank holds the part of the replica that is in its file."""
        here = self._part()
        if not here:
            return
        # A set of an earlier version has no such entry.
        same = self._ranks.gather(int(saved in (None, here)))[:, 0] == 1
        if same.all():
            return
        what = f"rank {self._optimizer.rank}, shard {self._replica.shard}"
        where = f"{self._path(step).parent} was saved with the model in another layout"
        remedy = (
            "pass the mesh and spread the model as in the run that saved it; or save with "
            "torch.distributed.checkpoint, which loads in another layout"
        )
        if saved in (None, here):
            others = self._ranks.rows(~same)
            names = ", ".join(f"rank {rank}, shard {shard}" for rank, shard in others)
            raise ValueError(f"{what}: {where}, which {names} found; {remedy}")
        differing = difference("\n".join(saved or ()), "\n".join(here), "this run")
        raise ValueError(f"{what}: {where}: it has {differing}; {remedy}")

    def _with_part(self, state: dict[str, Any]) -> dict[str, Any]:
        part = self._part()
        return {**state, _PART: part} if part else state

    def _part(self) -> list[str]:
        """The part of the replica on this rank, as lines; empty without a mesh."""
        if not self._replica.dimensions:
            return []
        named = named_parameters(self._optimizer.param_groups)
        names: Sequence[str] = [each.name for each in named]
        # Stages may hold tensors of the same shapes; only the model's names are the same wherever
        # a parameter is. It may be unknown, or lack some.
        with suppress(ValueError):
            names = self._replica.names_of(each.tensor for each in named)
        return [f"{name}: {each.part}" for name, each in zip(names, named, strict=True)]

    def _save_together(self, step: int, state: dict[str, Any]) -> bool:
        """Write this rank's file; return whether every rank has written its own."""
        stamp = self._agree_to_save(step)
        try:
            content, path = self._with_part(state), self._path(step)
            self._ranks.in_touch(lambda: sealed_file.write(path, content, stamp))
        except Exception:
            # This rank's own error comes first, even if the others are lost.
            with suppress(PeerError):
                self._ranks.gather(0)
            raise
        written = self._ranks.gather(1)[:, 0] == 1
        if not written.all():
            self._ranks.warn(path.parent, "is not complete: could not write", ~written)
        return bool(written.all())

    def _agree_to_save(self, step: int) -> int:
        """Check the step on all ranks, and return a random number for the set, drawn by rank 0."""
        newest = max((steps[-1] for steps in self._complete.values()), default=NO_SET.step)
        # Not torch's generator: a run that writes the set again has the same seed, and files of
        # both must not count as one set.
        everywhere = self._ranks.gather(step, newest, secrets.randbits(62))
        steps = everywhere[:, 0].tolist()
        # A rank that was cut off from the last save() does not know that this set is complete on
        # the others, and must not overwrite its file.
        newest = int(everywhere[:, 1].max())
        if len(set(steps)) > 1 or step <= newest:
            raise ValueError(
                f"rank {self._optimizer.rank}: save() expects one step on every rank, above "
                f"{newest}, that of the last set, got {steps} by rank (the shards of a "
                f"replica one after the other); call it at the same place everywhere, and once for "
                f"each step"
            )
        return int(everywhere[0, 2])

    def _prune(self) -> None:
        """Remove this rank's files of incomplete sets and of those older than the sets to keep."""
        complete = self._steps()
        if len(complete) < self._keep:
            return
        own = str(self._ranks.own_name())
        for pattern in (own, sealed_file.partial(Path(own)).name):
            for step, path in named(self._folder, pattern):
                # Other ranks may be writing a newer one.
                if step < complete[-1] and step not in complete:
                    # The last rank removes the folder. Files that remain only take space.
                    with suppress(OSError):
                        path.unlink()
                        path.parent.rmdir()

    def _steps(self) -> list[int]:
        """Steps of the newest complete sets of the present number of ranks."""
        return self._complete.get(self._optimizer.world_size, [])

    @property
    def _replica(self) -> Replica:
        return self._optimizer.replica

    def _path(self, step: int) -> Path:
        return folder_of(self._folder, step) / str(self._ranks.own_name())


def _whole(name: str, number: Any) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name} expects a whole number, got {number!r}") from None
