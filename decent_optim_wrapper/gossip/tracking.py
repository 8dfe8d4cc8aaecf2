"""Gradient tracking: every rank estimates the mean gradient of all ranks, and trains with it.

With g the gradient of this rank and W the mixing of a round, the estimate y is

    y <- W y + g - g_before,    y = g at first,

so that the sum of y over the ranks is always that of g (DSGT; Pu and Nedic 2018). The base reads y
in place of g. With `torch.optim.SGD`, what is tracked is its momentum (Momentum Tracking; Takezawa
et al. 2022): tracked gradients in front of a momentum are unstable at its usual rates.

y travels in the same round as the parameters. Between two rounds the correction y - g stays as it
is, and the next round exchanges the mean over the steps between them (K-GT; Liu et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from decent_optim_wrapper.gossip.bucket import HALF_DTYPES, Bucket, Layout
from decent_optim_wrapper.optim.shards import local, local_grad

# What a checkpoint holds where y is an estimate.
_NOTHING_COLLECTED = -1


class Estimate(NamedTuple):
    """What is tracked of one parameter, with its shape.

    Args:
        y: the estimate; while the bucket collects, the correction y - g.
        g: the gradient (or momentum) that y contains; while the bucket collects, the next one.
    """

    y: Tensor
    g: Tensor

    @classmethod
    def of(cls, param: Tensor) -> Estimate:
        """Zeros: the first y will be g."""
        # The corrections are small differences, which half precision would not hold.
        dtype = torch.float32 if param.dtype in HALF_DTYPES else param.dtype
        return cls(*(torch.zeros_like(param, dtype=dtype, requires_grad=False) for _ in range(2)))


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
        self.bucket = Bucket([each.y for each in estimates], layout)
        # None while y is an estimate; else the number of steps whose mean is in g.
        self.collected: int | None = None

    def estimate_of(self, param: Tensor) -> Estimate:
        """That of a member."""
        return next(e for p, e in zip(self.params, self.estimates, strict=True) if p is param)

    @property
    def y(self) -> list[Tensor]:
        return [local(each.y) for each in self.estimates]

    @property
    def g(self) -> list[Tensor]:
        return [local(each.g) for each in self.estimates]

    @torch.no_grad()
    def corrections(self, in_flight: bool) -> list[Tensor]:
        """Return y - g of the last round, for the update that is made now.

        Args:
            in_flight: whether y is still to be mixed, and must not change until then.
        """
        if in_flight:
            return list(torch._foreach_sub(self.y, self.g))
        if self.collected is None:
            torch._foreach_sub_(self.y, self.g)
            self.collected = 0
        return self.y

    @torch.no_grad()
    def collect(self, values: Iterable[Tensor | None]) -> None:
        """Add the values of a step to their mean; None counts as zero."""
        if self.collected is None:
            return
        self.collected += 1
        for mean, value in zip(self.g, values, strict=True):
            if value is None:
                mean.mul_(1 - 1 / self.collected)
            elif self.collected == 1:
                mean.copy_(value)
            else:
                mean.lerp_(value.to(mean.dtype), 1 / self.collected)

    @torch.no_grad()
    def close(self) -> None:
        """Make estimates of the corrections, to exchange them."""
        if self.collected is not None:
            torch._foreach_add_(self.y, self.g)
            self.collected = None


class Tracking:
    """Tracks the gradients, or the momentum, of a base optimizer's parameters.

    It costs two copies of the parameters, and what y needs on the wire.

    Args:
        optimizer: the base.
        layout: how y is exchanged.
    """

    def __init__(self, optimizer: Optimizer, layout: Layout) -> None:
        self._optimizer: Any = optimizer
        self._layout = layout
        # What the momentum needs is added after the update, so that it stays out of the momentum.
        self._follows = type(optimizer) is SGD
        self._tracked: dict[Bucket, _Tracked] = {}
        self._tracked_of: dict[int, _Tracked] = {}
        # Whether a round is in flight during the updates.
        self._in_flight = False

    def plan(self, buckets: Sequence[Bucket]) -> None:
        """Track the members of these buckets; what is known of them is kept."""
        known: dict[int, Estimate] = {}
        for each in self._tracked.values():
            each.close()
            known |= zip(map(id, each.params), each.estimates, strict=True)
        for bucket in buckets:
            if bucket not in self._tracked:
                estimates = [known.get(id(p)) or Estimate.of(p) for p in bucket.members]
                self._tracked[bucket] = _Tracked(bucket.members, estimates, self._layout)
        self._tracked = {bucket: self._tracked[bucket] for bucket in buckets}
        self._tracked_of = {id(p): each for each in self._tracked.values() for p in each.params}

    def begin_step(self, in_flight: bool) -> None:
        """Take note of whether y is in flight during the updates of a step."""
        self._in_flight = in_flight

    def launch(self, bucket: Bucket) -> list[Bucket]:
        """The bucket of the estimates for a bucket of parameters, to send it."""
        tracked = self._tracked[bucket]
        tracked.close()
        return [tracked.bucket]

    @torch.no_grad()
    def reset(self) -> None:
        """Start again with y = g, on all ranks together."""
        for each in self._tracked.values():
            torch._foreach_zero_([*each.y, *each.g])
            each.collected = None

    def rows(self, params: Iterable[Tensor]) -> list[dict[str, Any]]:
        """Copies of what is tracked of each parameter, to save them."""
        return [self._row(param) for param in params]

    def _row(self, param: Tensor) -> dict[str, Any]:
        tracked = self._tracked_of.get(id(param))
        y, g = tracked.estimate_of(param) if tracked else Estimate.of(param)
        collected = tracked.collected if tracked else None
        collected = _NOTHING_COLLECTED if collected is None else collected
        return {"y": y.detach().clone(), "g": g.detach().clone(), "collected": collected}

    @torch.no_grad()
    def load(self, params: Sequence[Tensor], rows: Sequence[dict[str, Any]]) -> None:
        """Continue with what was saved; `check_rows` has checked it."""
        self.reset()
        for param, row in zip(params, rows, strict=True):
            if tracked := self._tracked_of.get(id(param)):
                y, g = tracked.estimate_of(param)
                y.copy_(row["y"])
                g.copy_(row["g"])
                collected = row["collected"]
                tracked.collected = None if collected == _NOTHING_COLLECTED else collected

    @contextmanager
    def correcting(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Correct the update that the body makes.

        Args:
            params: those to update, with their gradients: of whole buckets, or of none.
        """
        found = (self._tracked_of.get(id(param)) for param in params)
        tracked = list(dict.fromkeys(each for each in found if each is not None))
        corrections = [each.corrections(self._in_flight) for each in tracked]
        correct = self._after if self._follows else self._before
        if self._follows:
            yield
        lent = [
            param
            for each, correction in zip(tracked, corrections, strict=True)
            for param in correct(each, correction)
        ]
        if not self._follows:
            yield
        for param in lent:
            param.grad = None

    @torch.no_grad()
    def _before(self, tracked: _Tracked, corrections: Sequence[Tensor]) -> list[Tensor]:
        """Correct the gradients; returns the parameters that had none."""
        grads = [None if p.grad is None else local_grad(p) for p in tracked.params]
        tracked.collect(grads)
        lent = []
        for param, grad, correction in zip(tracked.params, grads, corrections, strict=True):
            if grad is not None:
                grad.add_(correction)
            elif param.requires_grad:
                param.grad = torch.zeros_like(param)
                local(param.grad).copy_(correction)
                lent.append(param)
        return lent

    @torch.no_grad()
    def _after(self, tracked: _Tracked, corrections: Sequence[Tensor]) -> list[Tensor]:
        """Correct the parameters, which the base has updated; changes no gradients."""
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        values: list[Tensor | None] = []
        for param, correction in zip(tracked.params, corrections, strict=True):
            group = groups.get(id(param))
            values.append(group and self._momentum(param, group))
            if group and param.requires_grad:
                local(param).sub_(correction * group["lr"])
        tracked.collect(values)
        return []

    def _momentum(self, param: Tensor, group: dict[str, Any]) -> Tensor | None:
        """Along what `torch.optim.SGD` has moved a parameter.

        Without Nesterov's look ahead, which makes no difference once the gradient is steady.
        """
        if group["momentum"]:
            buffer = self._optimizer.state.get(param, {}).get("momentum_buffer")
            return None if buffer is None else local(buffer)
        if param.grad is None:
            return None
        grad = local_grad(param)
        return grad.neg() if group["maximize"] else grad


def check_rows(params: Sequence[Tensor], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check what `Tracking.rows` has returned for these parameters.

    Raises:
        ValueError: it is that of something else.
    """
    for param, row in zip(params, rows, strict=True):
        shapes = {row["y"].shape, row["g"].shape}
        if shapes != {param.shape}:
            raise ValueError(f"expected estimates of shape {param.shape}, got {shapes}")
        if index(row["collected"]) < _NOTHING_COLLECTED:
            raise ValueError(f"expected a number of steps, got {row['collected']}")
    return list(rows)
