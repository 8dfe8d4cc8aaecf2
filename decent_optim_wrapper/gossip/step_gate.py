"""Refuses steps of a base optimizer that do not come from its wrapper."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer

from decent_optim_wrapper.errors import CallOrderError

_HOOKS = "_optimizer_step_pre_hooks"


class StepGate:
    """A hook before the steps of a base, and of optimizers inside it, as SAM has one.

    It is shared by all wrappers of the base, and refuses nothing once they are gone. Nor does it
    refuse a step at learning rate 0, with which torch.distributed.checkpoint creates the state.

    Args:
        rank: this rank, for errors.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._users = WeakSet[Any]()
        self._is_open = False

    @classmethod
    def of(cls, optimizer: Optimizer, user: Any, rank: int) -> StepGate:
        """The gate of a base, which is in force as long as `user` exists."""
        held = (optimizer, *vars(optimizer).values())
        # A base that skips Optimizer.__init__ has no hook tables.
        hooked = [each for each in held if isinstance(each, Optimizer) and _HOOKS in vars(each)]
        found = (hook for each in hooked for hook in vars(each)[_HOOKS].values())
        gate = next((hook for hook in found if isinstance(hook, cls)), None)
        if gate is None:
            gate = cls(rank)
            for each in hooked:
                each.register_step_pre_hook(gate)
        gate._users.add(user)
        return gate

    def __enter__(self) -> None:
        """Let the wrapper step."""
        self._is_open = True

    def __exit__(self, *error: object) -> None:
        self._is_open = False

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Check a step.

        Raises:
            CallOrderError: it comes from somewhere else.
        """
        if self._is_open or not self._users:
            return
        if any(group.get("lr", 1) != 0 for group in optimizer.param_groups):
            raise CallOrderError(
                f"rank {self._rank}: expected steps through the wrapper, but step() of the "
                f"{type(optimizer).__name__} in it was called, which makes no round; call step() "
                f"of the wrapper. If the base makes a step in parts, as SAM does with first_step() "
                f"and second_step(), pass a closure to step(). To step without gossip, drop the "
                f"wrapper"
            )
