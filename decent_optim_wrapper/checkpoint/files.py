"""The files of checkpoint sets: their names, and which of them make up a complete set."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

from decent_optim_wrapper.checkpoint import sealed_file

_FOLDER = re.compile(r"step_(\d+)")
_FILE = re.compile(r"rank_(\d+)_of_(\d+)(?:_shard_(\d+)_of_(\d+))?\.pt")


class FileName(NamedTuple):
    """Which part of a set a file holds.

    Args:
        rank: the rank that saved it, as numbered at the start of the run.
        world_size: number of ranks that took part.
        shard: the part of a replica that is spread over a mesh.
        shards: number of parts.
    """

    rank: int
    world_size: int
    shard: int = 0
    shards: int = 1

    def __str__(self) -> str:
        part = f"_shard_{self.shard}_of_{self.shards}" if self.shards > 1 else ""
        return f"rank_{self.rank}_of_{self.world_size}{part}.pt"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Read a name that `str` has made; None for any other name."""
        match = _FILE.fullmatch(name)
        if match is None:
            return None
        rank, world_size, shard, shards = (int(number or 0) for number in match.groups())
        return cls(rank, world_size, shard, shards or 1)


class IncompleteSetError(OSError):
    """Files of a set are missing or damaged."""


def folder_of(folder: Path, step: int) -> Path:
    """The folder of a set."""
    return folder / f"step_{step:08d}"


def described(folder: Path, step: int, world_size: int) -> str:
    """A set, for messages."""
    return f"{folder_of(folder, step)} of {world_size} ranks"


def named(folder: Path, pattern: str) -> Iterator[tuple[int, Path]]:
    """The files that match a pattern in the folders of the sets, with their steps."""
    for path in sorted(folder.glob(f"step_*/{pattern}")):
        if step := _FOLDER.fullmatch(path.parent.name):
            yield int(step[1]), path


def found(folder: Path) -> Iterator[tuple[int, FileName, Path]]:
    """All files of sets in the folder of a run; none of them is read."""
    for step, path in named(folder, "rank_*.pt"):
        if name := FileName.parse(path.name):
            yield step, name, path


def read_set(folder: Path, step: int, like: FileName) -> tuple[int, dict[int, Path]]:
    """Check the files of all ranks for one shard.

    Args:
        folder: the folder of the run.
        step: the step of the set.
        like: the name of any file of the set.

    Returns:
        The random number that the files share, and the file of each rank.

    Raises:
        IncompleteSetError: files are missing or damaged.
    """
    by_stamp: dict[int, dict[int, Path]] = {}
    damaged = []
    for each, name, path in found(folder):
        if each == step and name == like._replace(rank=name.rank):
            try:
                by_stamp.setdefault(sealed_file.read_stamp(path), {})[name.rank] = path
            except OSError as error:
                damaged.append(f"{path.name} cannot be used: {error}")
    # Ranks that were lost and came back may have saved the step again, with other members.
    for stamp, paths in by_stamp.items():
        if len(paths) == like.world_size:
            return stamp, dict(sorted(paths.items()))
    most = max(by_stamp.values(), key=len, default={})
    there = ", ".join(str(like._replace(rank=rank)) for rank in most) or "none"
    raise IncompleteSetError(
        f"expected {like.world_size} whole files of one set, got {there}"
        + "".join(f"; {each}" for each in damaged)
    )
