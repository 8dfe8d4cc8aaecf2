"""Warns of a base optimizer that overwrites mixed parameters with its own copy of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from decent_optim_wrapper.gossip.extension import Extension, ExtensionContext, ReceivedBucket
from decent_optim_wrapper.optim.shards import local
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wire.bucket import Bucket, members_of

# Mixed rounds that are looked at, and how many of them must be lost.
_ROUNDS, _LOST = 30, 3
# Elements of the parameter that is looked at: very few may agree by chance.
_ELEMENTS = 8


class OwnCopyCheck(Extension):
    """Looks at one small parameter in the first rounds, and leaves.

    The mixing is lost if a copy in the base has the value from before the mixing, the update
    returns close to that value, and the parameter equals the copy afterwards.
    """

    def __init__(self) -> None:
        self._param: Tensor | None = None
        # Its value before the last mixing.
        self._unmixed: Tensor | None = None
        self._rounds = self._lost = 0

    def attach(self, context: ExtensionContext) -> None:
        """Look at the parameters of this base."""
        self._context = context

    def plan(self, buckets: Sequence[Bucket]) -> None:
        """Choose a small parameter."""
        members = [member for member in members_of(buckets) if local(member).numel() >= _ELEMENTS]
        self._param = min(members, key=Tensor.numel, default=None)

    @contextmanager
    def mixing(self, received: ReceivedBucket) -> Iterator[None]:
        """Remember the value before the mixing."""
        param = self._param
        if param is not None and any(each is param for each in received.bucket.members):
            self._unmixed = _copy(param)
        yield

    @contextmanager
    def updating(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Compare what the update makes of the mixed value."""
        param, unmixed = self._param, self._unmixed
        if param is None or unmixed is None or not any(each is param for each in params):
            yield
            return
        self._unmixed, mixed = None, _copy(param)
        stale = set() if torch.equal(mixed, unmixed) else self._copies(param, unmixed)
        yield
        updated = _copy(param)
        returns = (updated - unmixed).norm() <= (updated - mixed).norm() / 2
        names = stale & self._copies(param, updated) if stale and returns else set()
        self._rounds, self._lost = self._rounds + 1, self._lost + bool(names)
        if self._lost == _LOST:
            self._warn(max(names))
        if self._lost == _LOST or self._rounds == _ROUNDS:
            self._context.detach()

    def _copies(self, param: Tensor, value: Tensor) -> set[str]:
        """The names of the copies of a value in the base; empty names outside of the state."""
        base = self._context.optimizer
        found = [*base.state.get(param, {}).items(), *(("", each) for each in _leaves_of(base))]
        tensors = [(n, each) for n, each in found if isinstance(each, Tensor) and each is not param]
        return {str(name) for name, each in tensors if _equals(each, value)}

    def _warn(self, name: str) -> None:
        remedy = 'pass overlap="forward" or False, or take an optimizer without such a copy'
        if name:
            remedy = f'pass extensions=[StateGossip("{name}")], which mixes the copy, too'
        warn(
            f"rank {self._context.rank}: {type(self._context.optimizer).__name__} keeps its own "
            f"copy of the weights and overwrites with it what was mixed, so that the ranks train "
            f"apart; {remedy}"
        )


def _leaves_of(base: Optimizer) -> list[Any]:
    """What is in the containers of an optimizer, and in those of the optimizers in it."""
    leaves = tree_leaves(vars(base))
    inner = [each.param_groups for each in leaves if isinstance(each, Optimizer)]
    return [*leaves, *tree_leaves(inner)]


def _copy(param: Tensor) -> Tensor:
    return local(param).detach().clone()


def _equals(entry: Tensor, value: Tensor) -> bool:
    held = local(entry)
    if held.shape != value.shape or held.is_complex() != value.is_complex():
        return False
    return torch.equal(held.to(value), value)
