"""Wraps the optimizers of a framework."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from decent_optim_wrapper.gossip.extension import entered
from decent_optim_wrapper.optim.gradients import params_of
from decent_optim_wrapper.wrapper import DecentOptimWrapper


class Wrapping:
    """The wrappers of a framework's optimizers, and the models that these train.

    Args:
        gossip: arguments for every `DecentOptimWrapper`.
    """

    def __init__(self, gossip: Mapping[str, Any]) -> None:
        self._gossip = dict(gossip)
        self.models: list[nn.Module] = []
        self.wrappers: list[DecentOptimWrapper] = []

    def wrap(self, optimizer: Optimizer) -> DecentOptimWrapper:
        """Wrap an optimizer, unless it is wrapped already; collective.

        Args:
            optimizer: the optimizer, whose models are known and on their devices.
        """
        if not isinstance(optimizer, DecentOptimWrapper):
            models = self.models_of(optimizer)
            model = models[0] if len(models) == 1 else nn.ModuleList(models)
            optimizer = DecentOptimWrapper(optimizer, **{"model": model, **self._gossip})
        self.wrappers.append(optimizer)
        return optimizer

    def models_of(self, optimizer: Optimizer) -> list[nn.Module]:
        """The known models that have parameters of this optimizer."""
        params = {*params_of(optimizer)}
        return [model for model in self.models if not params.isdisjoint(model.parameters())]

    def mix_early(self) -> None:
        """Mix the rounds in flight that the next forward pass would mix."""
        for wrapper in self.wrappers:
            if wrapper.pacing.mixes_early:
                wrapper.synchronize()

    def gossip_added(self) -> None:
        """Gossip trainable parameters that only the base optimizers know; collective if any."""
        for wrapper in self.wrappers:
            gossiped = {id(param) for bucket in wrapper.buckets for param in bucket.members}
            if any(p.requires_grad and id(p) not in gossiped for p in params_of(wrapper)):
                wrapper.rebuild_buckets()

    def averaged(self) -> AbstractContextManager[None]:
        """Run the body on the average; collective."""
        return entered(wrapper.averaged() for wrapper in self.wrappers)

    def keep_average(self) -> None:
        """Replace the parameters by their average for good; collective."""
        for wrapper in self.wrappers:
            wrapper.global_avg(may_revert=False)

    def release(self) -> None:
        """Forget the wrappers and the models."""
        self.wrappers = []
        self.models = []
