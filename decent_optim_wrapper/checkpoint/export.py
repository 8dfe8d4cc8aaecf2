"""The averaged model of a checkpoint set, without a process group."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decent_optim_wrapper.checkpoint.averaging import Averaging, map_file
from decent_optim_wrapper.checkpoint.saved_set import FileName, SavedSet, marked_sets, read_set
from decent_optim_wrapper.checkpoint.whole_file import write_state
from decent_optim_wrapper.warn import warn


def export_average(folder: Path, out: Path, part: str = "model") -> tuple[int, int]:
    """Write the average over the ranks of the newest complete set to a file.

    Args:
        folder: the folder of the run.
        out: the file to write, for `torch.load`.
        part: the key in the saved state, such as ``"model"``, or a path such as ``"model/module"``.

    Returns:
        The step of the set, and the number of ranks that saved it.

    Raises:
        ValueError: there is no complete set, it has no such part, or `out` is a folder or names
            another format.
        NonFiniteError: a file has NaN or infinity where others have finite values.
    """
    if out.suffix == ".safetensors" or out.is_dir():
        raise ValueError(f"expected a file for torch.load, such as model.pt, got {out}")
    saved = _newest(folder)
    paths = {name.rank: saved.folder / str(name) for name in saved.digests}
    states = {rank: _part(map_file(path), part, path) for rank, path in paths.items()}
    average = Averaging(files=paths).of(states, min(states))
    write_state(out, average)
    return saved.step, len(paths)


def _newest(folder: Path) -> SavedSet:
    """The newest complete set."""
    for step, world_size in sorted(marked_sets(folder, shards=1), reverse=True):
        try:
            saved = read_set(folder, step, FileName(rank=0, world_size=world_size))
            saved.check(saved.digests)
        except OSError as error:
            warn(f"{error}; looking for an older set")
        else:
            return saved
    raise ValueError(
        f"expected a folder with a complete checkpoint set, such as "
        f"step_00000120/{FileName(rank=0, world_size=4).marker} and the files that it lists, but "
        f"{folder} has none. Of replicas that are spread over a mesh, save the average with "
        f"torch.distributed.checkpoint inside averaged()"
    )


def _part(state: Any, part: str, path: Path) -> Any:
    for key in part.split("/"):
        if not isinstance(state, Mapping) or key not in state:
            keys = sorted(map(str, state)) if isinstance(state, Mapping) else []
            raise ValueError(f"{path} has no part {part!r} in {keys}; pass --part")
        state = state[key]
    return state
