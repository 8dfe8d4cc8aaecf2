"""Tells who watches a module that one of its parameters is read by its name."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn


class Watcher(NamedTuple):
    """What is called for a watched module.

    Args:
        read: called with a parameter that is about to be read by its name.
        listed: called with a parameter that an iteration has come to.
        copied: called before the parameters are copied or written to a file.
    """

    read: Callable[[nn.Parameter], None]
    listed: Callable[[nn.Parameter], None]
    copied: Callable[[], None]


class WatchedParameters(dict[str, nn.Parameter | None]):
    """The parameters of a module, in place of the dict in which `module.weight` looks them up.

    Whatever code computes with `module.weight` comes by here: the module's own forward pass, that
    of another module, a method of the model; and so does `parameters()`, which iterates.

    Args:
        parameters: the parameters by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter | None]) -> None:
        super().__init__(parameters)
        self.watchers: list[Watcher] = []

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        if param is not None and not torch.compiler.is_compiling():
            for watcher in self.watchers:
                watcher.read(param)
        return param

    def items(self) -> Iterator[tuple[str, nn.Parameter | None]]:  # type: ignore[override]
        """The parameters by name, each of which is announced when the iteration comes to it."""
        for name, param in super().items():
            if param is not None and not torch.compiler.is_compiling():
                for watcher in self.watchers:
                    watcher.listed(param)
            yield name, param

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        return copy.deepcopy(self._copied(), memo)

    def __reduce__(self) -> tuple[type, tuple[dict[str, nn.Parameter | None]]]:
        # A copy, or what is loaded from a file, tells nobody.
        return dict, (self._copied(),)

    def _copied(self) -> dict[str, nn.Parameter | None]:
        for watcher in self.watchers:
            watcher.copied()
        return dict(self)


class Watch:
    """Watches a module until it is removed, as torch's handles of hooks do.

    Args:
        module: the module.
        watcher: what is called.
    """

    def __init__(self, module: nn.Module, watcher: Watcher) -> None:
        self._module = weakref.ref(module)
        self._watcher = watcher
        found = vars(module)["_parameters"]
        if not isinstance(found, WatchedParameters):
            found = vars(module)["_parameters"] = WatchedParameters(found)
        found.watchers.append(watcher)

    def remove(self) -> None:
        """Stop watching; without watchers the module has a plain dict again."""
        module = self._module()
        found = None if module is None else vars(module)["_parameters"]
        # Someone else may have put another dict there.
        if module is None or not isinstance(found, WatchedParameters):
            return
        if self._watcher in found.watchers:
            found.watchers.remove(self._watcher)
        if not found.watchers:
            vars(module)["_parameters"] = dict(found)
