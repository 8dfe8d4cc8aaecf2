"""A file that exists as a whole or not at all, and its SHA-256 digest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import torch


def part_of(path: Path) -> Path:
    """A new name for a file until it is complete: two jobs never write to the same file."""
    return path.with_name(f"{path.name}.{uuid4().hex[:8]}.part")


def parts_of(path: Path) -> list[Path]:
    """What was left of a file by processes that were killed."""
    return [*path.parent.glob(f"{path.name}*.part")]


def write(path: Path, fill: Callable[[BinaryIO], object], part: Path) -> str:
    """Write a file, which gets its name only when all of it is on the disk.

    Args:
        path: where to save; its folder is created if it does not exist.
        fill: function that writes the content.
        part: the name until then, which no other rank uses.

    Returns:
        The SHA-256 digest of the file, in hexadecimal.

    Raises:
        OSError: the disk is full, the folder cannot be written to, or the file differs from what
            was written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with part.open("w+b") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        digest = _digest(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    # A name is on the disk only if its folder is.
    for folder in (path.parent, path.parent.parent):
        # Where this user may not list a folder, such as /home, it was there before.
        with suppress(PermissionError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    # Older files are removed once this one is known to be whole.
    check(path, digest)
    return digest


def check(path: Path, digest: str) -> None:
    """Check the digest of a file.

    Raises:
        OSError: the file is missing, torn or altered, or cannot be read.
    """
    if _digest(path) != digest:
        raise OSError(
            f"checkpoint {path} cannot be used: its bytes are not those that were written; give "
            f"every run its own folder"
        )


def write_state(path: Path, state: Any) -> str:
    """Write a state that ``torch.load(..., weights_only=True)`` reads again; see `write`.

    Raises:
        TypeError: `state` contains objects that could not be loaded again.
        OSError: as in `write`.
    """
    return write(path, partial(_serialize, state), part_of(path))


def _serialize(state: Any, file: BinaryIO) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # torch's writer replaces the error of the disk by one about its own position.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    # Fail while saving, not later when the run depends on the file.
    file.seek(0)
    if foreign := torch.serialization.get_unsafe_globals_in_checkpoint(file):
        raise TypeError(
            f"a checkpoint expects what torch.load(..., weights_only=True) reads again: tensors, "
            f"numbers, strings and containers of these, got {', '.join(sorted(foreign))}; allow "
            f"other classes with torch.serialization.add_safe_globals()"
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
