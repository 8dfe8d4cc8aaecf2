"""Calls observers when a parameter is accessed through its module."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Mapping
from functools import partial
from typing import NamedTuple

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
        # A copy, or a module that is loaded from a file, announces nothing.
        return dict, (dict(self),)


class Watch(NamedTuple):
    """What is called when the parameters of a module are accessed.

    Args:
        read: called with a parameter that is about to be read by its name.
        listed: called with all of them when an iteration comes to the module.
        copied: called before they are copied or written to a file.
    """

    read: Callable[[nn.Parameter], None]
    listed: Callable[[Iterable[nn.Parameter]], None]
    copied: Callable[[], None]

    def begin(self, module: nn.Module) -> Callable[[], None]:
        """Watch the parameters of a module; returns the function that ends it."""
        found = vars(module)["_parameters"]
        if not isinstance(found, WatchedParameters):
            found = vars(module)["_parameters"] = WatchedParameters(found)
        found.watches.append(self)
        return partial(found.watches.remove, self)
