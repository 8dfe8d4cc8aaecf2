"""Gradient tracking: every rank corrects its gradients towards the mean of all ranks.

With m a running mean of the gradients g of this rank, and W the mixing of a round, a rank keeps a
correction c and sends y:

    y = m + c,    c <- c + 0.3 (W y - y),    c = 0 at first.

The base reads g + c. The corrections of all ranks always sum to zero, so that the mean gradient is
what it is; and c stops changing where y, and with it m + c, is the same on all ranks. Adam and its
like read y in place of a momentum of their own.

It is DSGT (Pu and Nedic 2018), of a momentum (Momentum Tracking; Takezawa et al. 2022) and with
damped mixing. Without the mean or without the damping it diverges at the rates that are best for
all-reduced gradients, since W of a sparse topology takes many rounds to spread a change.

y travels in the same round as the parameters. Between two rounds c stays as it is (K-GT; Liu et al.
2023).
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
from decent_optim_wrapper.wire.bucket import HALF_DTYPES, Bucket, Layout

# How far a round mixes y, and the weight of a new gradient in the mean.
_DAMPING, _NEW = 0.3, 0.1
# Their first moment is a mean of gradients, of which they are given a better one. Exact types only.
_WITH_MOMENTS: tuple[type[Optimizer], ...] = (Adam, AdamW, Adamax, RAdam)


@dataclass(eq=False)
class Estimate:
    """What is tracked of one parameter, with its shape.

    Args:
        y: the estimate y; between the mixing of a round and the next launch, the correction c.
        mean: the running mean m.
        steps: how many gradients are in the mean.
    """

    y: Tensor
    mean: Tensor
    steps: int = 0

    @classmethod
    def of(cls, param: Tensor) -> Estimate:
        """Zeros."""
        # The corrections are small differences, which half precision would not hold.
        dtype = torch.float32 if param.dtype in HALF_DTYPES else param.dtype
        y, mean = (torch.zeros_like(param, dtype=dtype, requires_grad=False) for _ in range(2))
        return cls(y=y, mean=mean)

    def count_step(self) -> int:
        """Count a gradient, and return how many there were."""
        self.steps += 1
        return self.steps

    def forget_steps(self) -> None:
        """Count from the start."""
        self.steps = 0

    def load(self, row: dict[str, Any]) -> None:
        """Continue with what was saved."""
        self.y.copy_(row["y"])
        self.mean.copy_(row["mean"])
        self.steps = index(row["steps"])


class _Tracked:
    """What is tracked of the parameters of one bucket.

    Args:
        params: its members.
        estimates: one for each of them.
        layout: how y is exchanged.
    """

    def __init__(
        self, params: Sequence[Tensor], estimates: Sequence[Estimate], layout: Layout
    ) -> None:
        self.params = params
        self.estimates = estimates
        self.bucket = Bucket([each.y for each in estimates], layout, rate=_DAMPING)
        # Whether y holds the correction.
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
            in_flight: whether y is still to be mixed, and must not change until then.
        """
        if in_flight:
            return list(torch._foreach_sub(self.y, self.means))
        if not self.is_open:
            torch._foreach_sub_(self.y, self.means)
            self.is_open = True
        return self.y

    @torch.no_grad()
    def collect(self, grads: Sequence[Tensor | None], starts_full: bool) -> None:
        """Move the means towards these gradients; None counts as zero.

        Args:
            grads: those of the members.
            starts_full: take the first gradient as a mean, or start from zero.
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
        """Continue with y that holds the correction, or does not."""
        self.is_open = is_open

    @torch.no_grad()
    def close(self) -> None:
        """Make y of the corrections, to send it."""
        if self.is_open:
            torch._foreach_add_(self.y, self.means)
            self.is_open = False


class GradientTracking(Extension):
    """Tracks the gradients of the base optimizer's parameters.

    It costs two copies of the parameters, and what y needs on the wire.
    """

    name = "gradient_tracking"
    sends = True
    corrects_gradients = True
    belongs_to_rank = True

    def __init__(self) -> None:
        self._tracked: dict[Bucket, _Tracked] = {}
        # By parameter: the bucket's, and its own.
        self._of: dict[int, tuple[_Tracked, Estimate]] = {}
        # Whether a round is in flight during the updates.
        self._in_flight = False

    def attach(self, context: ExtensionContext) -> None:
        """Track the gradients of the base.

        Raises:
            ValueError: the base or ``on_nonfinite="skip"`` does not go with it.
        """
        optimizer = context.optimizer
        if context.nonfinite.replaces:
            raise ValueError(
                'gradient_tracking=True expects on_nonfinite="raise" or "ignore": with "skip" the '
                "sum of the estimates would no longer be that of the gradients, for good"
            )
        if reason := evaluates_inside_step(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} {reason}, which does not work with "
                f"gradient_tracking=True: the gradient is corrected before the step; pass "
                f"gradient_tracking=False"
            )
        self._optimizer: Any = optimizer
        # Rounding errors of y end up in the corrections, and with these in the next y.
        self._layout = context.layout._replace(uses_reference=False)
        # Whether the base takes y for its momentum.
        self._replaces = type(optimizer) in _WITH_MOMENTS

    def plan(self, buckets: Sequence[Bucket]) -> None:
        """Track the members of these buckets; what is known of them is kept."""
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
        """That of a parameter; a new one if it is in no bucket yet."""
        return self._of[id(param)][1] if id(param) in self._of else Estimate.of(param)

    def received(self, in_flight: bool) -> None:
        """Take note of whether y is in flight during the updates of a step."""
        self._in_flight = in_flight

    def launch(self, bucket: Bucket) -> list[Bucket]:
        """The bucket of the estimates for a bucket of parameters, to send it."""
        tracked = self._tracked[bucket]
        tracked.close()
        return [tracked.bucket]

    @torch.no_grad()
    def restart(self) -> None:
        """Start again, on all ranks together."""
        for each in self._tracked.values():
            each.restart()

    def state_dict(self) -> dict[str, Any]:
        """Copies of what is tracked of each parameter."""
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
            ValueError: it is that of something else.
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
            params: those to update, with their gradients: of whole buckets, or of none.
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
        """Correct the gradients; returns the parameters that had none."""
        corrections = tracked.corrections(self._in_flight)
        grads = [None if p.grad is None else local_grad(p) for p in tracked.params]
        if not self._in_flight:
            # A full one for Adam, whose step is as long if the mean is small.
            tracked.collect(grads, starts_full=self._replaces)
        read = corrections
        if self._replaces:
            read = list(torch._foreach_add(tracked.means, corrections))
        self._put(tracked.params, grads, read)
        return [p for p, grad in zip(tracked.params, grads, strict=True) if grad is None]

    def _put(
        self, params: Sequence[Tensor], grads: Sequence[Tensor | None], read: Sequence[Tensor]
    ) -> None:
        """Let the base read these gradients, or these in addition to its own."""
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
        """Let Adam take what it reads for its momentum."""
        groups = self._optimizer.param_groups if self._replaces else []
        before = [group["betas"] for group in groups]
        for group in groups:
            group["betas"] = (0.0, group["betas"][1])
        try:
            yield
        finally:
            for group, betas in zip(groups, before, strict=True):
                group["betas"] = betas
