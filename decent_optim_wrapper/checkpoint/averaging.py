"""The average of what several ranks have saved, for another number of ranks or for export.

- Floating-point and complex tensors are averaged over the ranks that have a tensor of the same
  shape and dtype at the same place: models, buffers, momenta, second moments, anchors.
- Counters of optimizers (`COUNTERS`), integers, flags, numbers and strings are taken from the
  nearest rank: step counts, learning rates, schedulers, states of random generators.
- If the base keeps lists or dicts for a parameter (LBFGS, Shampoo), its whole state is taken from
  the nearest rank, because averages of the parts would not fit together.
- The highest round is kept, and the state of extensions that do not belong to a rank. References
  and the round in flight are dropped: mixing does not move the mean.
- NaN and infinity are kept if all ranks have them, as in a mask. If only some ranks do, it is an
  error: the average would spread them to all.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decent_optim_wrapper.errors import NonFiniteError
from decent_optim_wrapper.optim.counters import COUNTERS

# Number of elements of a tensor that are summed in float64 at a time.
PIECE = 1 << 20
_NUMBERS = (bool, int, float, str, type(None))
# A dict with these keys is the state of a gossip, wherever it is.
_GOSSIP = {"round", "in_flight", "mixing_rate"}
# Its entries that are valid only for the ranks that have saved them.
_OF_MEMBERS = {"age", "launch_snapshot", "references", "saved_by"}


def map_file(path: Path) -> Any:
    """Load a state whose tensors are read from the file only when they are used."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def nearest(rank: int, saved: Iterable[int]) -> int:
    """The saved rank that is nearest to this one; of two, the lower one."""
    return min(saved, key=lambda each: (abs(each - rank), each))


class _OverflowError(Exception):
    """A tensor has NaN or infinity where others have finite values.

    Args:
        tensor: the tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor


@torch.no_grad()
def averaged(
    states: Mapping[int, Any],
    rank: int,
    extensions: Collection[str] = (),
    files: Mapping[int, Path] | None = None,
) -> Any:
    """The average of nested states, in new memory.

    It needs memory for the result, and for `PIECE` elements in float64.

    Args:
        states: the states by the rank that saved them; their tensors may be in mapped files.
        rank: values that cannot be averaged are taken from the saved rank nearest to this one.
        extensions: the names of the extensions whose state is kept.
        files: the files of the states by rank, for errors.

    Raises:
        NonFiniteError: a state has NaN or infinity where others have finite values.
    """
    own = states[nearest(rank, states)]
    try:
        return _Averager(frozenset(extensions))(own, [states[each] for each in sorted(states)])
    except _OverflowError as error:
        raise _nonfinite_error(error.tensor, states, files or {}) from None


def _nonfinite_error(
    tensor: Tensor, states: Mapping[int, Any], files: Mapping[int, Path]
) -> NonFiniteError:
    """Name the tensor and its file."""
    saved_by, name = next(
        (rank, name)
        for rank, state in states.items()
        for name, each in _tensors(state)
        if each is tensor
    )
    return NonFiniteError(
        f"expected finite values to average, but {name} in "
        f"{files.get(saved_by, 'the state')} of rank {saved_by} has NaN or infinity where other "
        f"ranks have finite values; remove that set to use an older one, or resume with as many "
        f'ranks as have saved it and on_nonfinite="skip"',
        ranks=[saved_by],
    )


def _tensors(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a nested state, with the keys on the way to each."""
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, (dict, list, tuple)):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        for key, value in items:
            yield from _tensors(value, f"{name}/{key}" if name else str(key))


def moved(state: Any, device: torch.device | str) -> Any:
    """A nested state with its tensors on a device."""
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, dict):
        result = copy.copy(state)
        result.update({key: moved(value, device) for key, value in state.items()})
        return result
    if isinstance(state, (list, tuple)):
        return type(state)(moved(value, device) for value in state)
    return state


class _Averager:
    """Averages nested values; values that share memory still share it afterwards.

    Args:
        extensions: as in `averaged`.
        counters: names of values that are not averaged.
    """

    def __init__(
        self, extensions: Collection[str] = (), counters: Collection[str] = frozenset()
    ) -> None:
        self._extensions = extensions
        self._counters = counters
        self._done: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, own: Any, everywhere: Sequence[Any]) -> Any:
        """The average of a value.

        Args:
            own: the value of the nearest rank.
            everywhere: the values of all ranks that have one, always in the same order for the same
                `own`.
        """
        if isinstance(own, Tensor):
            return self._tensor(own, everywhere)
        if isinstance(own, (list, tuple)):
            alike = [each for each in everywhere if _is_alike(each, own)]
            rows = [self(value, [each[i] for each in alike]) for i, value in enumerate(own)]
            return rows if isinstance(own, list) else tuple(rows)
        if not isinstance(own, dict):
            return own
        if own.keys() >= _GOSSIP:
            return self._gossip(own, everywhere)
        # Keeps the attributes of a module's state dict.
        merged = copy.copy(own)
        for key, value in own.items():
            if key == "state" and "param_groups" in own:
                merged[key] = _optimizer_state(value, _at(key, everywhere))
            else:
                rows = [value] if key in self._counters else _at(key, everywhere)
                merged[key] = self(value, rows)
        return merged

    def _gossip(self, own: dict[str, Any], everywhere: Sequence[Any]) -> dict[str, Any]:
        merged = {key: value for key, value in own.items() if key not in _OF_MEMBERS}
        merged |= {"in_flight": False, "round": max(_at("round", everywhere))}
        states, average = _at("extensions", everywhere), _Averager(counters=COUNTERS)
        if "extensions" in own:
            # A name without a state remains for the others, so that loading can warn of them.
            merged["extensions"] = {
                name: average(state, _at(name, states)) if name in self._extensions else None
                for name, state in own["extensions"].items()
            }
        return merged

    def _tensor(self, own: Tensor, everywhere: Sequence[Any]) -> Tensor:
        if own.layout != torch.strided:
            return own.detach().clone()
        place = own.untyped_storage().data_ptr(), own.storage_offset()
        key = (*place, own.shape, own.stride(), own.dtype)
        if key not in self._done:
            alike = [each for each in everywhere if _is_alike(each, own)]
            self._done[key] = mean(alike) if _has_fractions(own) else own.detach().clone()
        return self._done[key]


def _optimizer_state(own: dict[Any, Any], everywhere: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
    """The states by parameter; a rank may have none for a parameter without gradients."""
    merged = {}
    for param in dict.fromkeys(param for state in everywhere for param in state):
        rows = _at(param, everywhere)
        row = own.get(param, rows[0])
        parts = row.values() if isinstance(row, dict) else [row]
        if not all(isinstance(part, (Tensor, *_NUMBERS)) for part in parts):
            rows = [row]
        merged[param] = _Averager(counters=COUNTERS)(row, rows)
    return merged


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean of tensors of the same shape and dtype, summed in float64 and rounded once.

    Raises:
        _OverflowError: a tensor has NaN or infinity where others have finite values.
    """
    result = torch.empty_like(tensors[0], device="cpu")
    wide = torch.complex128 if result.is_complex() else torch.float64
    flat, parts = _flat(result, result), [_flat(each, result) for each in tensors]
    for start in range(0, len(flat), PIECE):
        piece = slice(start, start + PIECE)
        # A copy even of float64, so that the state does not change.
        total = parts[0][piece].to(wide, copy=True)
        for part in parts[1:]:
            total += part[piece].to(wide)
        if not total.isfinite().all():
            finite = torch.stack([part[piece].isfinite() for part in parts])
            # Where some are finite and some are not.
            for tensor, has in zip(tensors, finite, strict=True):
                if (finite.any(0) & ~has).any():
                    raise _OverflowError(tensor)
        flat[piece] = total / len(parts)
    return result


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    """The elements in the memory order of `like`, which is dense."""
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like).copy_(tensor)
    # No copy of a tensor that is dense but not contiguous, as in channels_last.
    return tensor.as_strided((tensor.numel(),), (1,))


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_alike(one: Any, other: Any) -> bool:
    """Whether two values hold the same number of things of the same kind."""
    if isinstance(other, Tensor):
        same_kind = isinstance(one, Tensor) and one.dtype == other.dtype
        return same_kind and one.shape == other.shape
    return type(one) is type(other) and len(one) == len(other)


def _at(key: Any, everywhere: Iterable[Any]) -> list[Any]:
    """The values under a key, where there is one."""
    return [each[key] for each in everywhere if isinstance(each, dict) and key in each]
