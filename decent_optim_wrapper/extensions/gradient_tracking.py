"""Gradient tracking: every rank corrects its gradients towards the mean of all ranks.

With m a running mean of the gradients g of this rank, and W the mixing of a round, a rank keeps a
correction c and sends y:

    y = m + c,    c <- c + 0.3 (W y - y),    c = 0 at first.

The base reads g + c. The corrections of all ranks always sum to zero, so the mean gradient does not
change. c stops changing when y = m + c is the same on all ranks. Optimizers of the Adam family read
y in place of their own momentum.

This is DSGT (Pu and Nedic 2018) of a momentum (Momentum Tracking, Takezawa et al. 2022) with damped
mixing. Without the mean or without the damping it diverges at the learning rates that are best for
all-reduced gradients, since W of a sparse topology needs many rounds to spread a change.

y is sent in the same round as the parameters. Between two rounds c does not change (K-GT, Liu et
al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Adamax, AdamW, Optimizer, RAdam

from decent_optim_wrapper.gossip.extension import Extension, ExtensionContext
from decent_optim_wrapper.optim.closures import evaluates_inside_step
from decent_optim_wrapper.optim.gradients import params_of
from decent_optim_wrapper.optim.shards import local, local_grad
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wire.bucket import HALF_DTYPES, Bucket, members_of

# How far a round mixes y, and the weight of a new gradient in the mean.
_DAMPING, _NEW = 0.3, 0.1
# Optimizers whose first moment, a mean of gradients, is replaced by y. Exact types only.
_WITH_MOMENTS: tuple[type[Optimizer], ...] = (Adam, AdamW, Adamax, RAdam)


@dataclass(eq=False)
class Estimate:
    """What is tracked of one parameter.

    Args:
        y: the estimate y, of the shape of the parameter; while it is open, the correction c.
        mean: the running mean m, of the same shape.
        steps: number of gradients in the mean.
        is_open: between the mixing of a round and the next launch.
    """

    y: Tensor
    mean: Tensor
    steps: int = 0
    is_open: bool = False

    @classmethod
    def of(cls, param: Tensor) -> Estimate:
        """Start from zeros."""
        # The corrections are small differences, which half precision would not hold.
        dtype = torch.float32 if param.dtype in HALF_DTYPES else param.dtype
        y, mean = (torch.zeros_like(param, dtype=dtype, requires_grad=False) for _ in range(2))
        return cls(y=y, mean=mean)

    def row(self) -> dict[str, Any]:
        """A copy to save."""
        copies = {"y": self.y.detach().clone(), "mean": self.mean.detach().clone()}
        return {**vars(self), **copies}

    def load(self, row: dict[str, Any]) -> None:
        """Continue with what was saved."""
        self.y.copy_(row["y"])
        self.mean.copy_(row["mean"])
        self.steps, self.is_open = index(row["steps"]), row["is_open"]

    def switch(self) -> None:
        """Note that y was opened or closed."""
        self.is_open = not self.is_open

    def weigh(self, starts_full: bool) -> float:
        """Count a gradient, and return its weight in the mean."""
        self.steps += 1
        return max(_NEW, starts_full / self.steps)


def _parts(estimates: Iterable[Estimate]) -> tuple[list[Tensor], list[Tensor]]:
    """The local y and means."""
    chosen = list(estimates)
    return [local(each.y) for each in chosen], [local(each.mean) for each in chosen]


@torch.no_grad()
def _switch(estimates: Iterable[Estimate], opens: bool) -> None:
    """Compute the corrections from y, or y from the corrections, where that is not done yet."""
    others = [each for each in estimates if each.is_open is not opens]
    if others:
        torch._foreach_add_(*_parts(others), alpha=-1 if opens else 1)
    for each in others:
        each.switch()


def _collect(
    means: Sequence[Tensor], grads: Sequence[Tensor | None], weights: Sequence[float]
) -> None:
    """Move means towards gradients by these weights; None counts as zero."""
    rows = [*zip(means, grads, weights, strict=True)]
    for mean, grad, weight in rows:
        if grad is None:
            mean.mul_(1 - weight)
    if moved := [(mean, grad.to(mean.dtype), by) for mean, grad, by in rows if grad is not None]:
        torch._foreach_lerp_(*zip(*moved, strict=True))


class GradientTracking(Extension):
    """Corrects the gradients towards the mean of all ranks, for shards that differ between ranks.

    With m a running mean of the rank's gradients g, ``y = m + c``, ``c <- c + 0.3 (W_t y - y)``,
    and the base reads g + c (after DSGT, Pu and Nedic 2018, and Momentum Tracking, Takezawa et al.
    2022). Adam, AdamW, Adamax and RAdam use y as their first moment. Tracking doubles the bytes
    sent, and costs two copies of the parameters and the buffers for y. Clip before `step()`.
    """

    name = "gradient_tracking"
    corrects_gradients = True
    belongs_to_rank = True

    def attach(self, context: ExtensionContext) -> None:
        """Track the gradients of the base.

        Raises:
            ValueError: the base does not work with tracking, or ``on_nonfinite`` is "skip".
        """
        optimizer = context.optimizer
        if context.nonfinite.replaces:
            raise ValueError(
                'GradientTracking() expects on_nonfinite="raise" or "ignore": with "skip" the '
                "sum of the estimates would differ from that of the gradients for good"
            )
        if reason := evaluates_inside_step(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} {reason}, which does not work with "
                f"GradientTracking(): the gradient is corrected before the step; leave it out"
            )
        if context.intervals.gossip_every != 1 or not context.pacing.synchronous:
            warn(
                "GradientTracking() gains less if rounds take several steps, since the estimates "
                "are older; mix in every step, and send fewer bytes with comm_dtype"
            )
        # By the id of a parameter.
        self._estimates: dict[int, Estimate] = {}
        # The bucket of y that is sent after each bucket of parameters.
        self._buckets: dict[Bucket, Bucket] = {}
        # Whether a round is in flight during the updates.
        self._in_flight = False
        self._optimizer: Any = optimizer
        # Rounding errors of y get into the corrections, and so into the next y.
        self._layout = context.layout._replace(uses_reference=False)
        # Whether the base uses y as its momentum.
        self._replaces = type(optimizer) in _WITH_MOMENTS

    def plan(self, buckets: Sequence[Bucket]) -> None:
        """Track the members of these buckets; existing estimates are kept."""
        _switch(self._estimates.values(), opens=False)
        self._estimates = {id(member): self._of(member) for member in members_of(buckets)}
        self._buckets = {
            bucket: self._buckets[bucket]
            if bucket in self._buckets
            else Bucket([self._of(each).y for each in bucket.members], self._layout, rate=_DAMPING)
            for bucket in buckets
        }

    def _of(self, param: Tensor) -> Estimate:
        """The estimate of a parameter; a new one if there is none yet."""
        return self._estimates.get(id(param)) or Estimate.of(param)

    def received(self, in_flight: bool) -> None:
        """Note whether y is in flight during the updates of a step."""
        self._in_flight = in_flight

    def launch(self, bucket: Bucket) -> list[Bucket]:
        """The bucket of the estimates that belongs to a bucket of parameters."""
        _switch(map(self._of, bucket.members), opens=False)
        return [self._buckets[bucket]]

    @torch.no_grad()
    def restart(self) -> None:
        """Start again, on all ranks together."""
        for each in self._estimates.values():
            each.load(vars(Estimate.of(each.y)))

    def state_dict(self) -> dict[str, Any]:
        """Copies of the estimates of all parameters."""
        return {"params": [self._of(param).row() for param in params_of(self._optimizer)]}

    def prepare_load(self, state: dict[str, Any] | None) -> Callable[[], None]:
        """Check a state, and return the function that loads it.

        Raises:
            ValueError: the state does not fit the parameters.
        """
        for param, row in (
            zip(params_of(self._optimizer), state["params"], strict=True) if state else ()
        ):
            found = (
                row["y"].shape,
                row["mean"].shape,
                type(row["is_open"]),
                index(row["steps"]) >= 0,
            )
            if found != (param.shape, param.shape, bool, True):
                raise ValueError(f"expected estimates of shape {param.shape}, got {row}")
        return super().prepare_load(state)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue with what was saved."""
        self.restart()
        for param, row in (
            zip(params_of(self._optimizer), state["params"], strict=True) if state else ()
        ):
            self._of(param).load(row)

    @contextmanager
    def updating(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Correct the gradients for the update that the body makes.

        Args:
            params: the parameters to update: all members of some buckets, or of no bucket.
        """
        lent = self._correct([param for param in params if id(param) in self._estimates])
        try:
            with self._without_momentum():
                yield
        finally:
            for param in lent:
                param.grad = None

    @torch.no_grad()
    def _correct(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Correct the gradients, and return the parameters that had none."""
        if not params:
            return []
        estimates = [*map(self._of, params)]
        grads = [None if p.grad is None else local_grad(p) for p in params]
        y, means = _parts(estimates)
        if self._in_flight:
            # y must not change until it is mixed.
            read = list(torch._foreach_sub(y, means))
        else:
            _switch(estimates, opens=True)
            # Adam makes a step of the same length if the mean is small, so its mean starts full.
            weights = [each.weigh(starts_full=self._replaces) for each in estimates]
            _collect(means, grads, weights)
            read = y
        if self._replaces:
            read = list(torch._foreach_add(means, read))
        lent = [param for param in params if param.grad is None and param.requires_grad]
        for param in lent:
            param.grad = torch.zeros_like(param)
        put = torch._foreach_copy_ if self._replaces else torch._foreach_add_
        found = [
            (local_grad(p), row) for p, row in zip(params, read, strict=True) if p.grad is not None
        ]
        if found:
            put([grad for grad, _ in found], [row for _, row in found])
        return lent

    @contextmanager
    def _without_momentum(self) -> Iterator[None]:
        """Let Adam use the gradient that it reads as its momentum."""
        groups = self._optimizer.param_groups if self._replaces else []
        before = [group["betas"] for group in groups]
        for group in groups:
            group["betas"] = (0.0, group["betas"][1])
        try:
            yield
        finally:
            for group, betas in zip(groups, before, strict=True):
                group["betas"] = betas
