"""The average of what several ranks have saved, for another number of ranks or for export.

- Floating-point and complex tensors are averaged over the ranks that have a tensor of the same
  shape and dtype at the same place: models, buffers, momenta, second moments, anchors.
- Counters of optimizers (`COUNTERS`), integers, flags, numbers and strings are taken from the
  nearest rank: step counts, learning rates, schedulers, states of random generators.
- If the base keeps lists or dicts for a parameter (LBFGS, Shampoo), its whole state is taken from
  the nearest rank, because averages of the parts would not fit together.
- The highest round is kept. References and the round in flight are dropped: mixing does not move
  the mean.
- Vectors of length 1 on all ranks, as of spectral norms, are taken from the nearest rank.
- NaN and infinity are kept if all ranks have them, as in a mask. If only some ranks do, it is an
  error: the average would spread them to all.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decent_optim_wrapper.errors import NonFiniteError
from decent_optim_wrapper.gossip.saved_state import renumbered
from decent_optim_wrapper.optim.counters import COUNTERS
from decent_optim_wrapper.wire.model_state import is_direction

_NUMBERS = (bool, int, float, str, type(None))
# A dict with these keys is the state of a gossip, wherever it is.
_GOSSIP = {"round", "in_flight", "mixing_rate"}
# Its entries that are valid only for the ranks that have saved them.
_OF_MEMBERS = {"age", "launch_snapshot", "references", "saved_by"}


def map_file(path: Path) -> Any:
    """Load a state whose tensors are read from the file only when they are used."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


@dataclass(frozen=True)
class Averaging:
    """Averages nested states; values that share memory still share it afterwards.

    It needs memory for the result, and for two copies of the largest tensor in float64.

    Args:
        files: the files of the states by rank, for errors.
        device: of the result.
    """

    files: Mapping[int, Path] = field(default_factory=dict)
    device: torch.device | str = "cpu"
    # The averages of tensors, by their place in memory.
    _done: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def of(self, states: Mapping[int, Any], rank: int) -> Any:
        """The average of states, in new memory.

        Args:
            states: the states by the rank that saved them; their tensors may be in mapped files.
            rank: values that cannot be averaged are taken from the saved rank nearest to this one;
                of two, from the lower one.

        Raises:
            NonFiniteError: a state has NaN or infinity where others have finite values.
        """
        nearest = min(states, key=lambda each: (abs(each - rank), each))
        return self._value(states[nearest], dict(sorted(states.items())))

    def _value(
        self, own: Any, by_rank: Mapping[int, Any], name: str = "", counters: Collection[str] = ()
    ) -> Any:
        """The average of a value.

        Args:
            own: the value of the nearest rank.
            by_rank: the values of all ranks that have one, by rank, always the same ones for the
                same `own`; empty for a copy of `own`.
            name: the keys on the way to the value, for errors.
            counters: the keys of values that are not averaged.
        """
        if isinstance(own, Tensor):
            return self._tensor(own, by_rank, name)
        if not isinstance(own, (dict, list, tuple)):
            return own
        # Keeps the attributes of a module's state dict.
        merged = copy.copy(own) if isinstance(own, dict) else dict(enumerate(own))
        if merged.keys() >= _GOSSIP:
            return self._gossip(merged, by_rank, name)
        if "state" in merged and "param_groups" in merged:
            groups = merged["param_groups"]
            by_rank = {rank: renumbered(each, groups) for rank, each in by_rank.items()}
        for key, value in merged.items():
            rows, path = {} if key in counters else _at(key, by_rank), f"{name}/{key}".strip("/")
            is_state = key == "state" and "param_groups" in merged
            average = self._optimizer if is_state else self._value
            merged[key] = average(value, rows, path, counters)
        return merged if isinstance(own, dict) else type(own)(merged.values())

    def _gossip(self, own: Any, by_rank: Mapping[int, Any], name: str) -> Any:
        merged = {key: value for key, value in own.items() if key not in _OF_MEMBERS}
        merged |= {"in_flight": False, "round": max(_at("round", by_rank).values())}
        if "extensions" in own:
            # Loading resets those that belong to a rank: the entry `saved_by` is missing.
            states = own["extensions"], _at("extensions", by_rank)
            merged["extensions"] = self._value(*states, f"{name}/extensions", COUNTERS)
        return merged

    def _optimizer(self, own: Any, by_rank: Mapping[int, Any], name: str, _: object) -> Any:
        """The states by parameter; a rank may have none for a parameter without gradients."""
        merged = {}
        for param in dict.fromkeys(param for state in by_rank.values() for param in state):
            rows = _at(param, by_rank)
            row = own.get(param, next(iter(rows.values())))
            parts = row.values() if isinstance(row, dict) else [row]
            if not all(isinstance(part, (Tensor, *_NUMBERS)) for part in parts):
                rows = {}
            merged[param] = self._value(row, rows, f"{name}/{param}", COUNTERS)
        return merged

    def _tensor(self, own: Tensor, by_rank: Mapping[int, Any], name: str) -> Tensor:
        if own.layout != torch.strided:
            return own.detach().to(self.device, copy=True)
        key = (own.data_ptr(), own.shape, own.stride(), own.dtype)
        if key not in self._done:
            kind = own.shape, own.dtype
            tensors = {rank: each for rank, each in by_rank.items() if isinstance(each, Tensor)}
            alike = {rank: t for rank, t in tensors.items() if (t.shape, t.dtype) == kind}
            is_inexact = own.is_floating_point() or own.is_complex()
            has_mean = is_inexact and not all(map(is_direction, alike.values()))
            mean = self._mean(alike, name) if has_mean else own.detach().clone()
            self._done[key] = mean.to(self.device)
        return self._done[key]

    def _mean(self, tensors: Mapping[int, Tensor], name: str) -> Tensor:
        """The mean of tensors of the same shape and dtype, summed in float64 and rounded once."""
        first, *others = tensors.values()
        # A copy even of float64, so that the state does not change.
        total = first.to(torch.complex128 if first.is_complex() else torch.float64, copy=True)
        for other in others:
            total += other.to(total.dtype)
        if not total.isfinite().all():
            finite = torch.stack([each.isfinite().flatten() for each in tensors.values()])
            # Where some are finite and some are not.
            bad = (finite.any(0) & ~finite).any(1)
            if bad.any():
                rank = [*tensors][int(bad.int().argmax())]
                raise NonFiniteError(
                    f"expected finite values to average, but {name} in "
                    f"{self.files.get(rank, 'the state')} of rank {rank} has NaN or infinity where "
                    f"other ranks have finite values; remove that set to use an older one, or "
                    f'resume with as many ranks as have saved it and on_nonfinite="skip"',
                    ranks=[rank],
                )
        return (total / len(tensors)).to(first.dtype)


def _at(key: Any, by_rank: Mapping[int, Any]) -> dict[int, Any]:
    """The values under a key or at a position, by rank, where there is one."""
    found = {}
    for rank, each in by_rank.items():
        if isinstance(each, (dict, list, tuple)):
            with suppress(LookupError):
                found[rank] = each[key]
    return found
