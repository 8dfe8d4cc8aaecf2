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
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Adamax, AdamW, Optimizer, RAdam

from decent_optim_wrapper.checks import evaluates_inside_step
from decent_optim_wrapper.gossip.extension import Extension, ExtensionContext
from decent_optim_wrapper.optim.gradients import params_of
from decent_optim_wrapper.optim.shards import local, local_grad
from decent_optim_wrapper.wire.bucket import HALF_DTYPES, Bucket, members_of

# How far a round mixes y, and the weight of a new gradient in the mean.
_DAMPING, _NEW = 0.3, 0.1
# Optimizers whose first moment, a mean of gradients, is replaced by y. Exact types only.
_WITH_MOMENTS: tuple[type[Optimizer], ...] = (Adam, AdamW, Adamax, RAdam)


# What is tracked of one parameter: the estimate "y", of its shape; the running "mean" m; "steps",
# the number of gradients in the mean; and "is_open": from the mixing of a round to the next launch,
# "y" is the correction c.
Estimate = dict[str, Any]


def _new(param: Tensor) -> Estimate:
    """Start the estimate of a parameter from zeros."""
    # The corrections are small differences, which half precision would lose.
    dtype = torch.float32 if param.dtype in HALF_DTYPES else param.dtype
    y, mean = (torch.zeros_like(param, dtype=dtype, requires_grad=False) for _ in range(2))
    return {"y": y, "mean": mean, "steps": 0, "is_open": False}


def _load(estimate: Estimate, row: Estimate) -> None:
    """Continue with a saved estimate."""
    estimate["y"].copy_(row["y"])
    estimate["mean"].copy_(row["mean"])
    estimate.update(steps=row["steps"], is_open=row["is_open"])


def _parts(estimates: Sequence[Estimate]) -> tuple[list[Tensor], list[Tensor]]:
    """The local y and means."""
    return [local(each["y"]) for each in estimates], [local(each["mean"]) for each in estimates]


@torch.no_grad()
def _switch(estimates: Iterable[Estimate], opens: bool) -> None:
    """Turn y into the corrections, or the corrections into y, unless they are so already."""
    others = [each for each in estimates if each["is_open"] is not opens]
    if others:
        torch._foreach_add_(*_parts(others), alpha=-1 if opens else 1)
    for each in others:
        each["is_open"] = opens


def _collect(
    means: Sequence[Tensor], grads: Sequence[Tensor | None], weights: Sequence[float]
) -> None:
    """Move means towards gradients by these weights; None counts as zero."""
    rows = [*zip(means, grads, weights, strict=True)]
    for mean, grad, weight in rows:
        if grad is None:
            mean.mul_(1 - weight)
    # `to` takes as long as everything else here if the gradients are small.
    if moved := [
        (m, g if g.dtype is m.dtype else g.to(m.dtype), w) for m, g, w in rows if g is not None
    ]:
        torch._foreach_lerp_(*zip(*moved, strict=True))


class GradientTracking(Extension):
    """Corrects the gradients towards the mean of all ranks, for shards that differ between ranks.

    With m a running mean of the rank's gradients g, ``y = m + c``, ``c <- c + 0.3 (W_t y - y)``,
    and the base reads g + c (after DSGT, Pu and Nedic 2018, and Momentum Tracking, Takezawa et al.
    2022). Torch's Adam, AdamW, Adamax and RAdam use y as their first moment, subclasses of them do
    not. Tracking doubles the bytes sent, and costs two copies of the parameters and the buffers for
    y. Clip before `step()`.
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
                "sum of the estimates would differ from the sum of the gradients for good"
            )
        if reason := evaluates_inside_step(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} {reason}, which does not work with "
                f"GradientTracking(): the gradient is corrected before the step; leave it out"
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
        self._buckets = {each: self._buckets.get(each) or self._attached(each) for each in buckets}

    def _attached(self, bucket: Bucket) -> Bucket:
        """The bucket of y that is sent after a bucket of parameters."""
        return Bucket([self._of(p)["y"] for p in bucket.members], self._layout, rate=_DAMPING)

    def _of(self, param: Tensor) -> Estimate:
        """The estimate of a parameter; a new one if there is none yet."""
        return self._estimates.get(id(param)) or _new(param)

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
            _load(each, _new(each["y"]))

    def state_dict(self) -> dict[str, Any]:
        """Copies of the estimates of all parameters."""
        found = map(self._of, params_of(self._optimizer))
        return {"params": [{**e, "y": e["y"].clone(), "mean": e["mean"].clone()} for e in found]}

    def _rows(self, state: dict[str, Any] | None) -> Iterator[tuple[Tensor, Estimate]]:
        """The parameters, each with its saved estimate; none for a state of None."""
        if state is not None:
            yield from zip(params_of(self._optimizer), state["params"], strict=True)

    def prepare_load(self, state: dict[str, Any] | None) -> Callable[[], None]:
        """Check a state, and return the function that loads it.

        Raises:
            ValueError: the state does not fit the parameters.
        """
        for param, row in self._rows(state):
            found = row["y"].shape, row["mean"].shape, type(row["is_open"]), type(row["steps"])
            if found != (param.shape, param.shape, bool, int):
                raise ValueError(f"expected estimates of shape {param.shape}, got {row}")
        return super().prepare_load(state)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue with saved estimates."""
        self.restart()
        for param, row in self._rows(state):
            _load(self._of(param), row)

    @contextmanager
    def updating(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Correct the gradients for the update that the body makes.

        Args:
            params: the parameters to update: all members of some buckets, or of no bucket.
        """
        lent = self._correct([param for param in params if id(param) in self._estimates])
        # Adam uses the gradient that it reads as its momentum.
        groups = self._optimizer.param_groups if self._replaces else []
        before = [group["betas"] for group in groups]
        for group in groups:
            group["betas"] = (0.0, group["betas"][1])
        try:
            yield
        finally:
            for group, betas in zip(groups, before, strict=True):
                group["betas"] = betas
            for param in lent:
                param.grad = None

    @torch.no_grad()
    def _correct(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Correct the gradients, and return the parameters that had none."""
        if not params:
            return []
        estimates = [*map(self._of, params)]
        y, means = _parts(estimates)
        if self._in_flight:
            # y must not change until it is mixed.
            read = list(torch._foreach_sub(y, means))
        else:
            _switch(estimates, opens=True)
            for each in estimates:
                each["steps"] += 1
            # Adam makes a step of the same length if the mean is small, so its mean starts full.
            weights = [max(_NEW, self._replaces / each["steps"]) for each in estimates]
            grads = [None if param.grad is None else local_grad(param) for param in params]
            _collect(means, grads, weights)
            read = y
        if self._replaces:
            read = list(torch._foreach_add(means, read))
        lent = [param for param in params if param.grad is None and param.requires_grad]
        for param in lent:
            param.grad = torch.zeros_like(param)
        pairs = zip(params, read, strict=True)
        if found := [(local_grad(param), row) for param, row in pairs if param.grad is not None]:
            put = torch._foreach_copy_ if self._replaces else torch._foreach_add_
            put([grad for grad, _ in found], [row for _, row in found])
        return lent
