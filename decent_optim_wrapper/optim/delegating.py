"""A torch optimizer that delegates to another one."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.optim import Optimizer


def _of_the_base(name: str, what: str) -> Any:
    """A property that is the base's attribute at every access.

    The base's load_state_dict replaces its groups and its state. A scheduler with an alias of the
    groups would change groups that are no longer stepped.
    """
    return property(
        lambda self: getattr(self._base, name),
        lambda self, value: setattr(self._base, name, value),
        doc=f"The base's {what}.",
    )


class DelegatingOptimizer(Optimizer):
    """Presents groups, state, defaults and state-dict hooks of a base optimizer as its own, live.

    Args:
        optimizer: the base.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # Not `_optimizer`: the proxies of Lightning and Fabric inherit from our class, and that is
        # their name for this object. What they inherit must find the base.
        self._base = optimizer
        # The tables only: Optimizer.__init__ would make parameter groups of its own.
        super().__setstate__({})
        # Hooks on state dicts belong to the base, whose state dict it is. A base that skips
        # Optimizer.__init__, as a delegating one does, has none.
        for name, table in vars(optimizer).items():
            if name.endswith(("state_dict_pre_hooks", "state_dict_post_hooks")):
                setattr(self, name, table)

    @property
    def optimizer(self) -> Optimizer:
        """The base optimizer."""
        return self._base

    param_groups: list[dict[str, Any]] = _of_the_base("param_groups", "parameter groups")
    state: Any = _of_the_base("state", "state")
    defaults: dict[str, Any] = _of_the_base("defaults", "defaults")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the base does."""
        self._base.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        """Forward public names, and private methods, such as Adafactor's for its schedule.

        The base's private flags for GradScaler must not leak.
        """
        if name != "_base" and not name.startswith("__"):
            value = getattr(self._base, name)
            if not name.startswith("_") or callable(value):
                return value
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a DecentOptimWrapper holds connections to other ranks and cannot be pickled or "
            "copied; save its state_dict() and load it into a new wrapper"
        )
