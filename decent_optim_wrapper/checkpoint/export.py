"""The averaged model of a checkpoint set, without a process group."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.checkpoint.averaging import averaged, map_file
from decent_optim_wrapper.checkpoint.files import FileName, IncompleteSetError, found, read_set
from decent_optim_wrapper.checkpoint.sealed_file import partial
from decent_optim_wrapper.warn import warn


class Exported(NamedTuple):
    """What was exported.

    Args:
        step: the step of the set.
        world_size: number of ranks that saved it.
    """

    step: int
    world_size: int


def export_average(folder: Path, out: Path, part: str = "model") -> Exported:
    """Write the average over the ranks of the newest complete set to a file.

    Args:
        folder: the folder of the run.
        out: the file to write. The suffix ``.safetensors`` selects safetensors, any other suffix
            `torch.save`.
        part: the key in the saved state, such as ``"model"``, or a path such as ``"model/module"``.

    Returns:
        The step and the number of ranks of the set.

    Raises:
        ValueError: there is no complete set, or it has no such part.
        NonFiniteError: a file has NaN or infinity where others have finite values.
        ModuleNotFoundError: safetensors is not installed.
    """
    step, paths = _newest(folder)
    states = {rank: _part(map_file(path), part, path) for rank, path in paths.items()}
    average = averaged(states, min(states), files=paths)
    out.parent.mkdir(parents=True, exist_ok=True)
    # The name must never stand for half a file.
    if out.suffix == ".safetensors":
        _save_safetensors(average, partial(out))
    else:
        torch.save(average, partial(out))
    partial(out).replace(out)
    return Exported(step=step, world_size=len(paths))


def _newest(folder: Path) -> tuple[int, dict[int, Path]]:
    """The step of the newest complete set, and its files by rank."""
    sets = {(step, name.world_size): name for step, name, _ in found(folder) if name.shards == 1}
    for step, world_size in sorted(sets, reverse=True):
        try:
            return step, read_set(folder, step, sets[step, world_size])[1]
        except IncompleteSetError as error:
            warn(f"{folder}: step {step} of {world_size} ranks is passed over: {error}")
    if any(name.shards > 1 for _, name, _ in found(folder)):
        raise ValueError(
            f"{folder} has sets of replicas that are spread over a mesh, whose files hold parts of "
            f"the model; save the average with torch.distributed.checkpoint inside averaged()"
        )
    example = FileName(rank=0, world_size=4)
    raise ValueError(
        f"expected a folder with a complete checkpoint set, such as step_00000120/{example} and "
        f"the files of the other ranks, but {folder} has none"
    )


def _part(state: Any, part: str, path: Path) -> Any:
    for key in part.split("/"):
        if not isinstance(state, Mapping) or key not in state:
            keys = sorted(map(str, state)) if isinstance(state, Mapping) else []
            raise ValueError(f"{path} has no part {part!r} in {keys}; pass --part")
        state = state[key]
    return state


def _save_safetensors(state: Any, path: Path) -> None:
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a file .safetensors expects the package safetensors; install it, or write a .pt"
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError("safetensors holds tensors by name only; choose another part or a .pt")
    # safetensors refuses tensors that share memory, such as tied weights.
    save_file({name: tensor.clone() for name, tensor in state.items()}, path)
