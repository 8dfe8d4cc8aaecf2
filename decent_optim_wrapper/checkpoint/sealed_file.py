"""A file that exists as a whole or not at all, and in which any damage is detected.

A seal follows the bytes of `torch.save`; `torch.load` ignores it. It consists of a stamp, which the
files of one set share, and the SHA-256 digest of the bytes, the stamp and the file's name.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import torch

_SEAL = struct.Struct("<q32s")
_CHUNK = 1 << 20


class DamagedFileError(OSError):
    """A file does not contain the bytes that were written under its name."""


def partial(path: Path) -> Path:
    """The name of a file until it is complete."""
    return path.with_name(path.name + ".part")


def write(path: Path, state: Any, stamp: int) -> None:
    """Save `state` to `path`, which appears only when the whole file is on the disk.

    Args:
        path: where to save; its folder is created if it does not exist.
        state: anything that ``torch.load(..., weights_only=True)`` can read.
        stamp: any number of 63 bits.

    Raises:
        TypeError: `state` contains objects that could not be loaded again.
        OSError: the disk is full, the folder cannot be written to, or the file differs from what
            was written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial(path).open("w+b") as file:
            _serialize(state, file)
            size = file.tell()
            _check_loadable(file)
            file.write(_SEAL.pack(stamp, _digest(file, size, path, stamp)))
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial(path).unlink(missing_ok=True)
        raise
    partial(path).replace(path)
    # A name is on the disk only if its folder is.
    for folder in (path.parent, path.parent.parent):
        _sync_folder(folder)
    # Older files are removed once this one is known to be whole.
    if read_stamp(path) != stamp:
        raise DamagedFileError(
            f"{path} has been written by another process at the same time; give every run its own "
            f"folder"
        )


def read_stamp(path: Path) -> int:
    """Check the whole file and return its stamp.

    Raises:
        DamagedFileError: the file is torn, altered or renamed, or not a regular file.
        OSError: the file cannot be read.
    """
    if path.exists() and not path.is_file():
        # Opening a FIFO would wait for a writer.
        raise DamagedFileError("it is not a regular file")
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END) - _SEAL.size
        if size < 0:
            raise DamagedFileError("it ends before its seal")
        file.seek(size)
        stamp, digest = _SEAL.unpack(file.read())
        if _digest(file, size, path, stamp) != digest:
            raise DamagedFileError("its bytes do not match its seal")
    return int(stamp)


def _digest(file: BinaryIO, size: int, path: Path, stamp: int) -> bytes:
    """Digest of the first `size` bytes, the stamp and the name; leaves `file` after these bytes."""
    digest = hashlib.sha256(f"{path.parent.name}/{path.name} {stamp}\n".encode())
    file.seek(0)
    while size > 0 and (chunk := file.read(min(size, _CHUNK))):
        digest.update(chunk)
        size -= len(chunk)
    return digest.digest()


def _serialize(state: Any, file: BinaryIO) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # torch's writer replaces the error of the disk by one about its own position.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _check_loadable(file: BinaryIO) -> None:
    """Fail while saving, not later when the run depends on the file."""
    file.seek(0)
    foreign = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if foreign:
        raise TypeError(
            f"a checkpoint expects tensors, numbers, strings and containers of these, which "
            f"torch.load(..., weights_only=True) reads again, got {', '.join(sorted(foreign))}; "
            f"save state_dict()s and plain values, or allow the classes with "
            f"torch.serialization.add_safe_globals()"
        )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
