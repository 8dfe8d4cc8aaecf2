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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Adamax, AdamW, Optimizer, RAdam

from decent_optim_wrapper.gossip.extension import Extension, ExtensionContext
from decent_optim_wrapper.optim.closures import evaluates_inside_step
from decent_optim_wrapper.optim.shards import local, local_grad
from decent_optim_wrapper.wire.bucket import HALF_DTYPES, Bucket
from decent_optim_wrapper.wire.layout import Layout

# How far a round mixes y, and the weight of a new gradient in the mean.
_DAMPING, _NEW = 0.3, 0.1
# Optimizers whose first moment, a mean of gradients, is replaced by y. Exact types only.
_WITH_MOMENTS: tuple[type[Optimizer], ...] = (Adam, AdamW, Adamax, RAdam)


@dataclass(eq=False)
class Estimate:
    """What is tracked of one parameter.

    Args:
        y: the estimate y, of the shape of the parameter; between the mixing of a round and the next
            launch, the correction c.
        mean: the running mean m, of the same shape.
        steps: number of gradients in the mean.
    """

    y: Tensor
    mean: Tensor
    steps: int = 0

    @classmethod
    def of(cls, param: Tensor) -> Estimate:
        """Start from zeros."""
        # The corrections are small differences, which half precision would not hold.
        dtype = torch.float32 if param.dtype in HALF_DTYPES else param.dtype
        y, mean = (torch.zeros_like(param, dtype=dtype, requires_grad=False) for _ in range(2))
        return cls(y=y, mean=mean)

    def count_step(self) -> int:
        """Count a gradient, and return the number of gradients so far."""
        self.steps += 1
        return self.steps

    def forget_steps(self) -> None:
        """Start counting again."""
        self.steps = 0

    def load(self, row: dict[str, Any]) -> None:
        """Continue with what was saved."""
        self.y.copy_(row["y"])
        self.mean.copy_(row["mean"])
        self.steps = index(row["steps"])


class _Tracked:
    """What is tracked of the parameters of one bucket.

    Args:
        params: the members of the bucket.
        estimates: one for each parameter.
        layout: how y is exchanged.
    """

    def __init__(
        self, params: Sequence[Tensor], estimates: Sequence[Estimate], layout: Layout
    ) -> None:
        self.params = params
        self.estimates = estimates
        self.bucket = Bucket([each.y for each in estimates], layout, rate=_DAMPING)
        # Whether y holds the correction c now.
        self.is_open = False

    @property
    def y(self) -> list[Tensor]:
        return [local(each.y) for each in self.estimates]

    @property
    def means(self) -> list[Tensor]:
        return [local(each.mean) for each in self.estimates]

    @torch.no_grad()
    def corrections(self, in_flight: bool) -> list[Tensor]:
        """Return c, for the update that is made now.

        Args:
            in_flight: whether y is in flight, and must not change until it is mixed.
        """
        if in_flight:
            return list(torch._foreach_sub(self.y, self.means))
        if not self.is_open:
            torch._foreach_sub_(self.y, self.means)
            self.is_open = True
        return self.y

    @torch.no_grad()
    def collect(self, grads: Sequence[Tensor | None], starts_full: bool) -> None:
        """Move the running means towards these gradients; None counts as zero.

        Args:
            grads: the gradients of the members.
            starts_full: whether the first gradient is the first mean; otherwise it starts at zero.
        """
        means, towards, weights = [], [], []
        for estimate, grad in zip(self.estimates, grads, strict=True):
            weight = max(_NEW, starts_full / estimate.count_step())
            mean = local(estimate.mean)
            if grad is None:
                mean.mul_(1 - weight)
            else:
                means.append(mean)
                towards.append(grad.to(mean.dtype))
                weights.append(weight)
        if means:
            torch._foreach_lerp_(means, towards, weights)

    def restart(self) -> None:
        """Start again from zero."""
        torch._foreach_zero_([*self.y, *self.means])
        self.is_open = False
        for estimate in self.estimates:
            estimate.forget_steps()

    def mark_open(self, is_open: bool) -> None:
        """Set whether y holds the correction."""
        self.is_open = is_open

    @torch.no_grad()
    def close(self) -> None:
        """Compute y from the corrections, to send it."""
        if self.is_open:
            torch._foreach_add_(self.y, self.means)
            self.is_open = False


class GradientTracking(Extension):
    """Tracks the gradients of the base optimizer's parameters.

    It costs two copies of the parameters, and the buffers for y.
    """

    name = "gradient_tracking"
    sends = True
    corrects_gradients = True
    belongs_to_rank = True

    def __init__(self) -> None:
        self._tracked: dict[Bucket, _Tracked] = {}
        # By the id of a parameter: what is tracked of its bucket, and of itself.
        self._of: dict[int, tuple[_Tracked, Estimate]] = {}
        # Whether a round is in flight during the updates.
        self._in_flight = False

    def attach(self, context: ExtensionContext) -> None:
        """Track the gradients of the base.

        Raises:
            ValueError: the base does not work with tracking, or ``on_nonfinite`` is "skip".
        """
        optimizer = context.optimizer
        if context.nonfinite.replaces:
            raise ValueError(
                'gradient_tracking=True expects on_nonfinite="raise" or "ignore": with "skip" the '
                "sum of the estimates would differ from that of the gradients for good"
            )
        if reason := evaluates_inside_step(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} {reason}, which does not work with "
                f"gradient_tracking=True: the gradient is corrected before the step; pass "
                f"gradient_tracking=False"
            )
        self._optimizer: Any = optimizer
        # Rounding errors of y get into the corrections, and so into the next y.
        self._layout = context.layout._replace(uses_reference=False)
        # Whether the base uses y as its momentum.
        self._replaces = type(optimizer) in _WITH_MOMENTS

    def plan(self, buckets: Sequence[Bucket]) -> None:
        """Track the members of these buckets; existing estimates are kept."""
        for each in self._tracked.values():
            each.close()
        for bucket in buckets:
            if bucket not in self._tracked:
                estimates = [self._estimate_of(param) for param in bucket.members]
                self._tracked[bucket] = _Tracked(bucket.members, estimates, self._layout)
        self._tracked = {bucket: self._tracked[bucket] for bucket in buckets}
        self._of = {
            id(param): (each, estimate)
            for each in self._tracked.values()
            for param, estimate in zip(each.params, each.estimates, strict=True)
        }

    def _estimate_of(self, param: Tensor) -> Estimate:
        """The estimate of a parameter; a new one if there is none yet."""
        return self._of[id(param)][1] if id(param) in self._of else Estimate.of(param)

    def received(self, in_flight: bool) -> None:
        """Note whether y is in flight during the updates of a step."""
        self._in_flight = in_flight

    def launch(self, bucket: Bucket) -> list[Bucket]:
        """The bucket of the estimates that belongs to a bucket of parameters."""
        tracked = self._tracked[bucket]
        tracked.close()
        return [tracked.bucket]

    @torch.no_grad()
    def restart(self) -> None:
        """Start again, on all ranks together."""
        for each in self._tracked.values():
            each.restart()

    def state_dict(self) -> dict[str, Any]:
        """Copies of the estimates of all parameters."""
        return {"params": [self._row(param) for param in self._params]}

    @property
    def _params(self) -> list[Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def _row(self, param: Tensor) -> dict[str, Any]:
        estimate = self._estimate_of(param)
        return {
            "y": estimate.y.detach().clone(),
            "mean": estimate.mean.detach().clone(),
            "steps": estimate.steps,
            "is_open": id(param) in self._of and self._of[id(param)][0].is_open,
        }

    def prepare_load(self, state: dict[str, Any] | None) -> Callable[[], None]:
        """Check a state, and return the function that loads it.

        Raises:
            ValueError: the state does not fit the parameters.
        """
        for param, row in zip(self._params, state["params"], strict=True) if state else ():
            shapes = {row["y"].shape, row["mean"].shape}
            if shapes != {param.shape}:
                raise ValueError(f"expected estimates of shape {param.shape}, got {shapes}")
            if index(row["steps"]) < 0 or not isinstance(row["is_open"], bool):
                raise ValueError(f"expected a number of steps and a bool, got {row}")
        return super().prepare_load(state)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue with what was saved."""
        self.restart()
        for param, row in zip(self._params, state["params"], strict=True) if state else ():
            if id(param) in self._of:
                tracked, estimate = self._of[id(param)]
                estimate.load(row)
                tracked.mark_open(row["is_open"])

    @contextmanager
    def updating(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Correct the gradients for the update that the body makes.

        Args:
            params: the parameters to update: all members of some buckets, or of no bucket.
        """
        tracked = dict.fromkeys(self._of[id(p)][0] for p in params if id(p) in self._of)
        lent = [param for each in tracked for param in self._correct(each)]
        try:
            with self._without_momentum():
                yield
        finally:
            for param in lent:
                param.grad = None

    @torch.no_grad()
    def _correct(self, tracked: _Tracked) -> list[Tensor]:
        """Correct the gradients, and return the parameters that had none."""
        corrections = tracked.corrections(self._in_flight)
        grads = [None if p.grad is None else local_grad(p) for p in tracked.params]
        if not self._in_flight:
            # Adam makes a step of the same length if the mean is small, so its mean starts full.
            tracked.collect(grads, starts_full=self._replaces)
        read = corrections
        if self._replaces:
            read = list(torch._foreach_add(tracked.means, corrections))
        self._put(tracked.params, grads, read)
        return [p for p, grad in zip(tracked.params, grads, strict=True) if grad is None]

    def _put(
        self, params: Sequence[Tensor], grads: Sequence[Tensor | None], read: Sequence[Tensor]
    ) -> None:
        """Replace the gradients that the base reads, or add to them."""
        own = [grad for grad in grads if grad is not None]
        rows = [row for grad, row in zip(grads, read, strict=True) if grad is not None]
        if own and self._replaces:
            torch._foreach_copy_(own, rows)
        elif own:
            torch._foreach_add_(own, rows)
        for param, grad, row in zip(params, grads, read, strict=True):
            if grad is None and param.requires_grad:
                param.grad = torch.zeros_like(param)
                local(param.grad).copy_(row)

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
