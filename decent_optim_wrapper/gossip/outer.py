"""Outer optimizers: momentum on what a whole stretch of steps and its mixing have done."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from decent_optim_wrapper.gossip.schedule import Kind
from decent_optim_wrapper.gossip.storage import is_finite


class SlowMomentum(NamedTuple):
    """The outer momentum of SlowMo (Wang et al., 2020), at every scheduled exact average.

    With x_0 the parameters after the average before (at first, those of the first step), x̄ the
    average, and η the learning rate of the base::

        u <- β u + (x_0 - x̄) / η,    x <- x_0 - α η u

    Where η is 0, u stays as it is, and x <- x_0 - α (x_0 - x̄).

    Args:
        beta: β, in [0, 1).
        lr: α, above 0.
    """

    beta: float = 0.5
    lr: float = 1.0


class OuterNesterov(NamedTuple):
    """An outer step of SGD with Nesterov momentum at every meeting of gossip.

    With φ the parameters after the outer step before (at first, those of the first step), and x̄
    what the meeting has mixed::

        g = φ - x̄,    m <- μ m + g,    φ <- φ - η (g + μ m),    x <- φ

    In pairs it is NoLoCo (Kolehmainen et al., 2025) with its γ = β, for which the exchange of x is
    enough; among all ranks it is DiLoCo (Douillard et al., 2023).

    Args:
        momentum: μ, in [0, 1).
        lr: η, above 0.
    """

    momentum: float = 0.9
    lr: float = 0.7


Rule = SlowMomentum | OuterNesterov


class Outer:
    """The state of an outer optimizer: two copies of the parameters.

    Args:
        rule: what it does, and when.
        optimizer: the base, whose learning rates count.
    """

    def __init__(self, rule: Rule, optimizer: Optimizer) -> None:
        self._rule = rule
        self._optimizer = optimizer
        self._anchors: dict[Tensor, Tensor] = {}
        self._momenta: dict[Tensor, Tensor] = {}

    # What is made under inference_mode could not be written outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def anchor(self, params: Iterable[Tensor]) -> None:
        """Start from here wherever there is no start yet, and something to start from."""
        for param in params:
            if param not in self._anchors and is_finite(param):
                self._anchors[param] = param.detach().clone()

    def rebase(self) -> None:
        """Start anew from the parameters of the next step; the momentum stays."""
        self._anchors.clear()

    def forget(self, params: Iterable[Tensor]) -> None:
        """Start these parameters anew in the next step, without momentum."""
        for param in params:
            self._anchors.pop(param, None)
            self._momenta.pop(param, None)

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, params: Sequence[Tensor], kind: Kind) -> None:
        """Take the outer step, if this kind of meeting has one.

        Args:
            params: as they were mixed; changed in place.
            kind: of the meeting.
        """
        if kind is not self.kind:
            return
        known = [param for param in params if param in self._anchors]
        self.anchor(params)
        if known:
            self._step(known)

    def _step(self, params: list[Tensor]) -> None:
        anchors = [self._anchors[param] for param in params]
        for param in params:
            if param not in self._momenta:
                self._momenta[param] = torch.zeros_like(param)
        momenta = [self._momenta[param] for param in params]
        away = torch._foreach_sub(anchors, params)
        if isinstance(self._rule, SlowMomentum):
            self._slow_step(self._rule, anchors, momenta, away, self._rates(params))
        else:
            torch._foreach_mul_(momenta, self._rule.momentum)
            torch._foreach_add_(momenta, away)
            torch._foreach_add_(anchors, away, alpha=-self._rule.lr)
            torch._foreach_add_(anchors, momenta, alpha=-self._rule.lr * self._rule.momentum)
        torch._foreach_copy_(params, anchors)

    @property
    def kind(self) -> Kind:
        """The kind of meeting after which there is an outer step."""
        return Kind.AVERAGE if isinstance(self._rule, SlowMomentum) else Kind.GOSSIP

    def state_dict(self) -> dict[str, Any]:
        """Anchor and momentum of every parameter, in the order of the groups.

        Both of all of them: torch.distributed.checkpoint loads only into what is there.
        """
        params = list(self._params())
        return {
            "anchor": [self._anchors.get(param, param).detach().clone() for param in params],
            "momentum": [
                self._momenta[param].clone() if param in self._momenta else torch.zeros_like(param)
                for param in params
            ],
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Make sure that a state dict can be loaded.

        Raises:
            ValueError: it is that of other parameters.
        """
        expected = [param.shape for param in self._params()]
        for name in ("anchor", "momentum"):
            found = [tensor.shape for tensor in state[name]]
            if found != expected:
                raise ValueError(
                    f"the {name} of the outer optimizer is of tensors of the shapes "
                    f"{[*map(tuple, found)]}, not {[*map(tuple, expected)]}"
                )

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from a state dict; None starts from the parameters of the next step."""
        params = list(self._params())
        for name, own in (("anchor", self._anchors), ("momentum", self._momenta)):
            own.clear()
            if state is not None:
                for param, tensor in zip(params, state[name], strict=True):
                    own[param] = torch.empty_like(param).copy_(tensor)

    def _slow_step(
        self,
        rule: SlowMomentum,
        anchors: list[Tensor],
        momenta: list[Tensor],
        away: tuple[Tensor, ...],
        rates: list[float],
    ) -> None:
        torch._foreach_mul_(momenta, [rule.beta if rate else 1.0 for rate in rates])
        scaled = torch._foreach_mul(away, [1 / rate if rate else 0.0 for rate in rates])
        torch._foreach_add_(momenta, scaled)
        moved = torch._foreach_mul(momenta, [rule.lr * rate for rate in rates])
        torch._foreach_sub_(anchors, moved)
        at_rest = torch._foreach_mul(away, [0.0 if rate else rule.lr for rate in rates])
        torch._foreach_sub_(anchors, at_rest)

    def _params(self) -> Iterable[Tensor]:
        return (param for group in self._optimizer.param_groups for param in group["params"])

    def _rates(self, params: Sequence[Tensor]) -> list[float]:
        groups = self._optimizer.param_groups
        rates = {param: float(group["lr"]) for group in groups for param in group["params"]}
        return [rates[param] for param in params]


def find_rule(slow_momentum: Any, outer_momentum: Any) -> Rule | None:
    """Read the two keywords of the wrapper, of which at most one is given.

    Raises:
        TypeError: neither a number nor the record of the keyword.
        ValueError: out of range, or both are given.
    """
    if slow_momentum is not None and outer_momentum is not None:
        raise ValueError(
            "expected slow_momentum or outer_momentum, got both: each is an outer optimizer"
        )
    if slow_momentum is not None:
        return _checked("slow_momentum", slow_momentum, SlowMomentum)
    if outer_momentum is not None:
        return _checked("outer_momentum", outer_momentum, OuterNesterov)
    return None


def _checked(name: str, value: Any, kind: type[SlowMomentum] | type[OuterNesterov]) -> Rule:
    if not isinstance(value, kind):
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} expects a number, {kind.__name__}(…) or None, got {value!r}")
        value = kind(float(value))
    momentum, lr = value
    if not 0 <= momentum < 1 or not 0 < lr < math.inf:
        raise ValueError(
            f"{name} expects a momentum of at least 0 and below 1 and a rate above 0, got {value!r}"
        )
    rule: Rule = value
    return rule
