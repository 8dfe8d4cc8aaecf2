"""Checkpoint sets: one file per rank; the files of a set are used together or not at all."""

from __future__ import annotations

import operator
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.checkpoint import sealed_file
from decent_optim_wrapper.comm.state_transfer import difference
from decent_optim_wrapper.errors import PeerError
from decent_optim_wrapper.mesh.replica import Replica
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wire.parameters import named_parameters
from decent_optim_wrapper.wrapper import DecentOptimWrapper

__all__ = ["Checkpoint", "Checkpoints"]

_MISSING = -1
_STEP = re.compile(r"step_(\d+)")
# In the file of a shard, beside the user's state: what the shard is.
_PART = "decent_optim_wrapper.part"


class Checkpoint(NamedTuple):
    """This rank's part of a set: the number of steps done, and the state saved then."""

    step: int
    state: dict[str, Any]


class _Held(NamedTuple):
    """A whole file of this rank: its step, and the random number of its set."""

    step: int
    stamp: int


_NOTHING = _Held(_MISSING, 0)


class Checkpoints:
    """Saves and loads sets of files ``<folder>/step_00000120/rank_3_of_4.pt``, one for every rank.

    Where a replica is spread over several ranks of a mesh, each of them has a file of its own:
    ``rank_3_of_4_shard_1_of_2.pt``. The ranks of the whole mesh save and load together, and a file
    says which part of the parameters it has.

    A file gets its name when all of it is on the disk, and contains a digest. A set is *complete*
    when every rank finds its file whole and one `save()` wrote them all. If a process is killed at
    any moment, the previous set remains usable.

    If ranks are lost and come back, there are sets of different numbers of ranks. They are counted
    separately: the sets of fewer ranks never displace those that a full restart needs.

    Args:
        folder: the folder of this run; give every run its own. It may be on a disk that all ranks
            share or on a disk of each node: a rank reads its own files only.
        optimizer: the wrapper whose ranks save together.
        keep: number of complete sets to keep, for each number of ranks; older files are removed
            once there are so many.

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
        # Steps of the newest sets that are known to be whole on all ranks, by number of ranks.
        self._complete: dict[int, list[int]] = {}

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write this rank's file and wait for the other ranks' files; collective.

        Args:
            step: number of steps done, the same on every rank, above the last set's.
            state: ``state_dict()``s, tensors, numbers, strings and containers of these.

        Raises:
            ValueError: on every rank, if `step` is not above the last one or differs between ranks.
            TypeError: `step` is not a whole number, or `state` could not be loaded again with
                ``weights_only=True``.
            OSError: this rank could not write; rank 0 warns of it, and the old sets stay.
            PeerError: a rank is lost; the old sets stay. No rank saves alone.
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
                f"new run takes the newest that is whole on all ranks. torch.save() writes an "
                f"emergency copy of this rank's state"
            ) from error

    def load(self, map_location: torch.device | str | None = None) -> Checkpoint | None:
        """Read this rank's file of the newest complete set; collective.

        If a file is damaged or missing, a warning names it, and the set before is used.

        Args:
            map_location: as in `torch.load`, which is called with ``weights_only=True``.

        Returns:
            The step and this rank's state, or None if no set of this world size is complete: start
            at step 0.

        Raises:
            ValueError: on every rank, if a replica is spread otherwise than when the set was saved.
            PeerError: a rank is lost.
        """
        step = self._agree()
        self._complete = {}
        if step == _MISSING:
            self._warn_of_no_set()
            return None
        self._complete[self._optimizer.world_size] = [step]
        state = torch.load(self._path(step), map_location=map_location, weights_only=True)
        self._check_part(step, state.pop(_PART, None))
        return Checkpoint(step, state)

    def _check_part(self, step: int, saved: list[str] | None) -> None:
        """Make sure that every rank holds the part of the replica that is in its file."""
        here = self._part()
        if not here:
            return
        # A set of an earlier version does not say.
        same = self._gather(int(saved in (None, here)))[:, 0] == 1
        if same.all():
            return
        what = f"rank {self._optimizer.rank}, shard {self._replica.shard}"
        where = f"{self._path(step).parent} was saved with the model in another layout"
        remedy = (
            "pass the mesh and spread the model as in the run that saved it; or save with "
            "torch.distributed.checkpoint, which loads in another layout"
        )
        if saved in (None, here):
            others = [divmod(row, self._replica.size) for row in (~same).nonzero().flatten()]
            names = ", ".join(f"rank {int(rank)}, shard {int(shard)}" for rank, shard in others)
            raise ValueError(f"{what}: {where}, which {names} found; {remedy}")
        differing = difference("\n".join(saved or ()), "\n".join(here), "this run")
        raise ValueError(f"{what}: {where}: it has {differing}; {remedy}")

    def _with_part(self, state: dict[str, Any]) -> dict[str, Any]:
        part = self._part()
        return {**state, _PART: part} if part else state

    def _part(self) -> list[str]:
        """What this rank holds of its replica, in lines; nothing without a mesh."""
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
            sealed_file.write(self._path(step), self._with_part(state), stamp)
        except Exception:
            # This rank's own error comes first, also where the others are lost.
            with suppress(PeerError):
                self._gather(0)
            raise
        written = self._gather(1)[:, 0] == 1
        if not written.all():
            self._warn(step, "is not complete: could not write", ~written)
        return bool(written.all())

    def _agree_to_save(self, step: int) -> int:
        """Check the step on all ranks, and return a random number for the set, drawn by rank 0."""
        newest = max((steps[-1] for steps in self._complete.values()), default=_MISSING)
        # Not torch's generator: a run that writes the set once more has the same seed, and files of
        # the two must not pass for one set.
        everywhere = self._gather(step, newest, secrets.randbits(62))
        steps = everywhere[:, 0].tolist()
        # A rank that was cut off from the last save() does not know that its set is complete on
        # the others, and must not write over its file.
        newest = int(everywhere[:, 1].max())
        if len(set(steps)) > 1 or step <= newest:
            raise ValueError(
                f"rank {self._optimizer.rank}: save() expects one step on every rank, above "
                f"{newest}, that of the last set, got {steps} by rank (the shards of a "
                f"replica one after the other); call it at the same place everywhere, and once for "
                f"each step"
            )
        return int(everywhere[0, 2])

    def _agree(self) -> int:
        """The newest step for which all ranks have a whole file of the same set."""
        held = self._newest(None)
        while True:
            everywhere = self._gather(*held)
            if (everywhere == everywhere[0]).all():
                return held.step
            steps, stamps = everywhere.unbind(1)
            lowest, highest = int(steps.min()), int(steps.max())
            if lowest < highest:
                self._warn(highest, "is passed over: no whole", steps < highest)
                limit = lowest
            else:
                self._warn(highest, "is passed over: of another set is", stamps != stamps[0])
                limit = lowest - 1
            if held.step > limit:
                held = self._newest(limit)

    def _newest(self, limit: int | None) -> _Held:
        """This rank's newest whole file of a step up to `limit`."""
        for step in sorted(self._files(self._own_name()), reverse=True):
            if limit is not None and step > limit:
                continue
            try:
                return _Held(step, sealed_file.read_stamp(self._path(step)))
            except OSError as error:
                warn(
                    f"rank {self._optimizer.rank}: checkpoint {self._path(step)} cannot be used: "
                    f"{error}; looking for an older one"
                )
        return _NOTHING

    def _files(self, pattern: str) -> dict[int, Path]:
        """The files of that name in the folders of the sets, by step."""
        found = ((_STEP.fullmatch(p.parent.name), p) for p in self._folder.glob(f"*/{pattern}"))
        return {int(match[1]): path for match, path in found if match}

    def _warn(self, step: int, problem: str, bad: Tensor) -> None:
        """Warn once for all ranks of the files of the `bad` rows of `_gather`."""
        if self._warns:
            rows = bad.nonzero().flatten().tolist()
            names = ", ".join(self._name(*divmod(row, self._replica.size)) for row in rows)
            warn(f"checkpoint {self._path(step).parent} {problem} {names}")

    def _warn_of_no_set(self) -> None:
        shards = self._replica.size
        size = f"{self._optimizer.world_size} ranks" + (
            f" of {shards} shards" if shards > 1 else ""
        )
        if self._warns and self._files("rank_*.pt"):
            warn(f"{self._folder} has checkpoints, but no complete set of {size}")

    def _prune(self) -> None:
        """Remove this rank's files of incomplete sets and of those older than the sets to keep."""
        complete = self._steps()
        if len(complete) < self._keep:
            return
        own = self._own_name()
        for pattern in (own, sealed_file.partial(Path(own)).name):
            for step, path in self._files(pattern).items():
                # Other ranks may be at work on a newer one.
                if step < complete[-1] and step not in complete:
                    # The last rank to come removes the folder. What cannot go only takes room.
                    with suppress(OSError):
                        path.unlink()
                        path.parent.rmdir()

    def _steps(self) -> list[int]:
        """Steps of the newest complete sets of the present number of ranks."""
        return self._complete.get(self._optimizer.world_size, [])

    @property
    def _replica(self) -> Replica:
        return self._optimizer.replica

    @property
    def _warns(self) -> bool:
        """Whether this rank warns for all of them."""
        return self._optimizer.rank == self._replica.shard == 0

    def _own_name(self) -> str:
        return self._name(self._optimizer.rank, self._replica.shard)

    def _name(self, rank: int, shard: int) -> str:
        of = self._replica.size
        part = f"_shard_{shard}_of_{of}" if of > 1 else ""
        return f"rank_{rank}_of_{self._optimizer.world_size}{part}.pt"

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step:08d}" / self._own_name()

    def _gather(self, *numbers: int) -> Tensor:
        """The numbers of every file's rank, shape (files of a set, len(numbers)).

        The shards of a replica follow each other.

        Raises:
            PeerError: not every rank answers.
        """
        optimizer = self._optimizer
        answers = optimizer.all_gather(torch.tensor(numbers, device="cpu"))
        if len(answers) != optimizer.world_size * self._replica.size:
            raise PeerError(
                f"rank {optimizer.rank}: expected all {optimizer.world_size} ranks to take part in "
                f"a checkpoint, but {len(answers)} answered: a rank was lost before; look at the "
                f"other ranks for the first error"
            )
        return answers


def _whole(name: str, number: Any) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name} expects a whole number, got {number!r}") from None
