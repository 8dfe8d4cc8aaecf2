"""Complete checkpoint sets: the names of their files, and the marker with their digests."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from decent_optim_wrapper.checkpoint import whole_file

# No more digits than fit in an int64, as which ranks compare these numbers.
_FOLDER = re.compile(r"step_(\d{1,18})")
_MARKER = re.compile(r"step_(\d{1,18})/set_of_(\d{1,18})(?:_with_(\d+)_shards)?\.sha256")
# How many folders deep to look for sets that are not where they are expected.
_DEEPEST = 4
_FILE = re.compile(r"rank_(\d+)_of_(\d+)(?:_shard_(\d+)_of_(\d+))?\.pt")


class FileName(NamedTuple):
    """Which part of a set a file contains.

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

    @property
    def saver(self) -> str:
        """The rank that saved it, for messages."""
        return f"rank {self.rank}" + (f", shard {self.shard}" if self.shards > 1 else "")

    @property
    def marker(self) -> str:
        """The name of the marker of its set."""
        part = f"_with_{self.shards}_shards" if self.shards > 1 else ""
        return f"set_of_{self.world_size}{part}.sha256"


def folder_of(root: Path, step: int) -> Path:
    """The folder of a set."""
    return root / f"step_{step:08d}"


def saved_steps(root: Path) -> list[int]:
    """The steps of all sets in the folder of a run, complete or not."""
    found = (_FOLDER.fullmatch(path.name) for path in root.glob("step_*"))
    return sorted(int(match[1]) for match in found if match)


def marked_sets(root: Path, shards: int) -> list[tuple[int, int]]:
    """Step and number of ranks of the sets with a marker in the folder of a run.

    Args:
        root: the folder.
        shards: number of parts of a replica in these sets.
    """
    found = (_MARKER.fullmatch(path) for path in _listed(root, "step_*/set_of_*"))
    return [(int(m[1]), int(m[2])) for m in found if m and int(m[3] or 1) == shards]


def _listed(root: Path, pattern: str) -> list[str]:
    # Path.glob would raise if another rank removes an old set meanwhile.
    return glob.glob(pattern, root_dir=root)  # noqa: PTH207


def sets_elsewhere(root: Path) -> str:
    """Describe what a folder without sets contains, for messages; empty if nothing of a set."""
    if root.exists() and not (root.is_dir() and os.access(root, os.R_OK | os.X_OK)):
        return f"{root} is not a folder that this process can read"
    patterns = ("*/" * depth + "rank_*_of_*.pt" for depth in range(_DEEPEST))
    found = sorted({(root / path).parent for each in patterns for path in _listed(root, each)})
    if not found:
        return ""
    return (
        f"{root} has no set, and the files of sets in {', '.join(map(str, found[:3]))} are not "
        f"loaded: pass the folder of one run, which has its sets in folders such as "
        f"{folder_of(Path(), 120)}, and give a copied set such a name"
    )


class SavedSet(NamedTuple):
    """A set whose files all ranks have written.

    Its marker lists the files, as ``sha256sum`` does in the folder of the run.

    Args:
        step: the step of the set.
        folder: its folder.
        digests: the SHA-256 digest of each file, in hexadecimal.
    """

    step: int
    folder: Path
    digests: dict[FileName, str]

    def __str__(self) -> str:
        return "".join(f"{d}  {self.folder.name}/{name}\n" for name, d in self.digests.items())

    @property
    def world_size(self) -> int:
        """The number of ranks that saved it."""
        return next(iter(self.digests)).world_size

    @property
    def checksum(self) -> int:
        """56 bits that are the same for the same files."""
        return int.from_bytes(hashlib.sha256(str(self).encode()).digest()[:7])

    def check(self, names: Iterable[FileName]) -> None:
        """Check files of this set.

        Raises:
            OSError: a file is missing, damaged or cannot be read.
        """
        for name in names:
            whole_file.check(self.folder / str(name), self.digests[name])

    @property
    def is_replaced(self) -> bool:
        """True if another set has replaced its marker."""
        marker = self.folder / next(iter(self.digests)).marker
        return marker.is_file() and marker.read_bytes() != str(self).encode()

    def mark(self, own: FileName) -> str:
        """Write the marker, as all ranks do, through the temporary name of this rank's file.

        Returns:
            Its digest.

        Raises:
            OSError: it could not be written.
        """
        part = whole_file.part_of(self.folder / str(own))
        text = str(self).encode()
        return whole_file.write(self.folder / own.marker, lambda file: file.write(text), part)


def read_set(root: Path, step: int, like: FileName) -> SavedSet:
    """Read the marker of a set.

    Args:
        root: the folder of the run.
        step: the step of the set.
        like: the name of one of its files.

    Raises:
        OSError: the marker is missing, torn or altered, or cannot be read.
    """
    folder, digests = folder_of(root, step), {}
    marker = folder / like.marker
    text = marker.read_text(encoding="utf-8", errors="replace") if marker.is_file() else ""
    for line in text.splitlines():
        digest, _, name = line.partition(f"  {folder.name}/")
        if match := _FILE.fullmatch(name):
            rank, world_size, shard, shards = (int(number or 0) for number in match.groups())
            digests[FileName(rank, world_size, shard, shards or 1)] = digest
    found = SavedSet(step=step, folder=folder, digests=digests)
    # A torn one lists fewer.
    complete = len(digests) == like.world_size * like.shards
    if str(found) != text or not complete or {name.marker for name in digests} != {like.marker}:
        raise OSError(
            f"checkpoint {marker} cannot be used: it is missing, or has no line with the digest of "
            f"each file; sets of another number of ranks must be where every rank sees them"
        )
    return found
