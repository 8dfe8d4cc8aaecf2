"""Warns of a base optimizer that overwrites mixed parameters with its own copy of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from decent_optim_wrapper.gossip.extension import Extension, ExtensionContext
from decent_optim_wrapper.gossip.schedule import RoundKind
from decent_optim_wrapper.optim.shards import local
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wire.bucket import Bucket, members_of

# The number of rounds that are watched, and of lost ones among them that cause a warning.
_ROUNDS, _LOST = 30, 3
# The fewest elements of the watched parameter: even fewer may agree by chance.
_ELEMENTS = 8


class OwnCopyCheck(Extension):
    """Watches one small parameter in the updates of the first rounds, and then detaches itself.

    The mixing is lost if a copy in the base differs from the parameter before an update, and the
    update brings both close to the old value of the copy.
    """

    def attach(self, context: ExtensionContext) -> None:
        """Watch a parameter of this base."""
        self._context = context
        self._param: Tensor | None = None
        self._rounds = self._lost = 0

    def plan(self, buckets: Sequence[Bucket]) -> None:
        """Choose a small parameter."""
        members = [member for member in members_of(buckets) if local(member).numel() >= _ELEMENTS]
        self._param = min(members, key=Tensor.numel, default=None)

    def end_round(self, kind: RoundKind) -> None:
        """Count the rounds."""
        self._rounds += 1

    @contextmanager
    def updating(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Compare the parameter and its copies before and after the update."""
        param = self._param
        if param is None or not any(each is param for each in params):
            yield
            return
        mixed, before = local(param).detach().clone(), self._copies(param)
        yield
        updated, after = local(param).detach(), self._copies(param)
        closer = (updated - mixed).norm() / 2
        # Only the first updates make entries of the state, which change the places of others.
        self._lost += any(
            (updated - old).norm() < closer and torch.equal(new, updated)
            for old, new in zip(before, after, strict=False)
        )
        if self._lost == _LOST:
            warn(
                f"rank {self._context.rank}: {type(self._context.optimizer).__name__} keeps its "
                f"own copy of the weights and overwrites with it what was mixed, so that the ranks "
                f"train apart; if the copy is an entry of its state, mix it, too, with "
                f'extensions=[StateGossip(name)]; otherwise pass overlap="forward" or False'
            )
        if self._lost == _LOST or self._rounds >= _ROUNDS:
            self._context.detach()

    def _copies(self, param: Tensor) -> list[Tensor]:
        """Values in the base, or in an optimizer inside it, of the shape of a parameter."""
        own, leaves = local(param).detach(), tree_leaves(vars(self._context.optimizer))
        inner = [each.param_groups for each in leaves if isinstance(each, Optimizer)]
        return [
            local(each).detach().to(own, copy=True)
            for each in [*leaves, *tree_leaves(inner)]
            if isinstance(each, Tensor)
            and each is not param
            and (local(each).shape, each.is_complex()) == (own.shape, own.is_complex())
        ]
