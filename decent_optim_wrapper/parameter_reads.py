"""Calls observers when a parameter is accessed through its module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, ItemsView, Iterable, Mapping

import torch
from torch import nn


class WatchedParameters(dict[str, nn.Parameter | None]):
    """The parameters of a module, in place of the dict in which `module.weight` looks them up.

    All code that computes with `module.weight` goes through this class: the forward pass of the
    module or of another one, a method of the model. So does `parameters()`, which iterates.

    Args:
        parameters: the parameters by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter | None]) -> None:
        super().__init__(parameters)
        self.watches: list[Watch] = []

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        if param is not None:
            for watch in self.watches:
                watch.read(param)
        return param

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        """The parameters by name, which are announced: an iteration has come to this module."""
        if not torch.compiler.is_compiling():
            for watch in self.watches:
                watch.listed(param for param in self.values() if param is not None)
        return super().items()

    def __reduce__(self) -> tuple[type, tuple[dict[str, nn.Parameter | None]]]:
        for watch in self.watches:
            watch.copied()
        # A copy, or what is loaded from a file, tells nobody.
        return dict, (dict(self),)


class Watch:
    """Watches a module until it is removed, as torch's handles of hooks do.

    Args:
        module: the module.
        read: called with a parameter that is about to be read by its name.
        listed: called with all its parameters when an iteration comes to the module.
        copied: called before the parameters are copied or written to a file.
    """

    def __init__(
        self,
        module: nn.Module,
        read: Callable[[nn.Parameter], None],
        listed: Callable[[Iterable[nn.Parameter]], None],
        copied: Callable[[], None],
    ) -> None:
        self.read, self.listed, self.copied = read, listed, copied
        self._module = weakref.ref(module)
        found = vars(module)["_parameters"]
        if not isinstance(found, WatchedParameters):
            found = vars(module)["_parameters"] = WatchedParameters(found)
        found.watches.append(self)

    def remove(self) -> None:
        """Stop watching; without watches the module has a plain dict again."""
        module = self._module()
        found = None if module is None else vars(module)["_parameters"]
        # Someone else may have put another dict there.
        if module is not None and isinstance(found, WatchedParameters):
            found.watches.remove(self)
            if not found.watches:
                vars(module)["_parameters"] = dict(found)
