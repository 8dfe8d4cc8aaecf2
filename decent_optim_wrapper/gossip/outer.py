"""An outer optimizer: any of torch's, over anchors; its gradient is the change by the mixing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from decent_optim_wrapper.gossip.bucket import is_finite
from decent_optim_wrapper.gossip.schedule import Kind
from decent_optim_wrapper.optim.shards import local

MakeOptimizer = Callable[[list[Tensor]], Optimizer]


class Outer:
    """Steps an optimizer over anchors, the parameters after the previous outer step.

    With φ the anchors and x̄ the parameters after a round was mixed, the gradient is g = φ - x̄;
    after the step x <- φ. An anchor starts as a copy of its parameter at the beginning of a step.

    Args:
        make: makes the optimizer from the anchors.
        base: the optimizer of the parameters.
        kind: the kind of rounds after which there is an outer step.

    Raises:
        TypeError: `make` does not make an optimizer.
        ValueError: the optimizer is one of other tensors.
    """

    # Tensors made under inference_mode could not be changed outside of it.
    @torch.inference_mode(False)
    def __init__(self, make: MakeOptimizer, base: Optimizer, kind: Kind) -> None:
        self._make = make
        self._base = base
        self.kind = kind
        # By parameter, in the order of the groups. An anchor that never started shares its
        # parameter's memory: it costs nothing, and the optimizer sees its shape.
        self._anchors = {param: param.detach() for param in self._params()}
        self._started: set[Tensor] = set()
        self._optimizer = make(list(self._anchors.values()))
        if not isinstance(self._optimizer, Optimizer):
            raise TypeError(
                f"outer expects a function that makes a torch.optim.Optimizer from a list of "
                f"tensors, but it has returned a {type(self._optimizer).__name__}"
            )
        groups = self._optimizer.param_groups
        if {a for group in groups for a in group["params"]} != {*self._anchors.values()}:
            raise ValueError(
                "outer expects a function whose optimizer updates the tensors that it is given, "
                "all of them and nothing else, such as partial(torch.optim.SGD, lr=0.7)"
            )

    @property
    def params(self) -> Sequence[Tensor]:
        """The parameters that have anchors, in the order of `state_dict`."""
        self._add_new()
        return [*self._anchors]

    @property
    def groups(self) -> Sequence[dict[str, Any]]:
        """The optimizer's groups, their parameters by place."""
        self._add_new()
        groups: Sequence[dict[str, Any]] = self._optimizer.state_dict()["param_groups"]
        return groups

    def __repr__(self) -> str:
        return f"{type(self._optimizer).__name__}({self._optimizer.defaults})"

    @torch.inference_mode(False)
    @torch.no_grad()
    def anchor(self, params: Iterable[Tensor]) -> None:
        """Start the anchors that have not started, if their parameters are finite."""
        self._add_new()
        for param in params:
            if param not in self._started and is_finite(local(param)):
                # Of a DTensor only the local tensor has data of its own.
                local(self._anchors[param]).data = local(param).detach().clone()
                self._started.add(param)

    def rebase(self) -> None:
        """Restart all anchors from the parameters of the next step; the optimizer's state stays."""
        self._started.clear()

    @torch.inference_mode(False)
    def forget(self, params: Iterable[Tensor]) -> None:
        """Restart the anchors of these parameters in the next step, without any state."""
        for param in self._started.intersection(params):
            self._started.remove(param)
            self._reset(self._anchors[param])

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, params: Sequence[Tensor], kind: Kind) -> None:
        """Take the outer step, if this kind of round has one.

        Args:
            params: the parameters after the mixing; changed in place.
            kind: the kind of the round.
        """
        if kind is not self.kind:
            return
        known = [param for param in params if param in self._started]
        self.anchor(params)
        if not known:
            return
        anchors = [self._anchors[param] for param in known]
        for anchor, away in zip(anchors, torch._foreach_sub(anchors, known), strict=True):
            anchor.grad = away
        # The anchors of other buckets have no gradient and are skipped.
        self._optimizer.step()
        for anchor in anchors:
            anchor.grad = None
        torch._foreach_copy_([*map(local, known)], [*map(local, anchors)])

    def state_dict(self) -> dict[str, Any]:
        """The anchors, in the order of the groups, and the optimizer's own state dict.

        Both cover all parameters, since torch.distributed.checkpoint loads only into existing
        entries. The two lists say which of them are mere placeholders.
        """
        self._add_new()
        values = [a if p in self._started else p for p, a in self._anchors.items()]
        own = self._optimizer.state_dict()
        stepped = [place in own["state"] for place in range(len(values))]
        blank = {at: self._blank_state(v) for at, v in enumerate(values) if not stepped[at]}
        return {
            "anchors": [value.detach().clone() for value in values],
            "started": [param in self._started for param in self._anchors],
            "stepped": stepped,
            "optimizer": {**own, "state": {**blank, **own["state"]}},
        }

    def restarted(self) -> Outer:
        """A new outer optimizer that starts from the parameters of the next step."""
        return Outer(self._make, self._base, self.kind)

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state dict.

        Raises:
            ValueError: the state dict is that of other parameters.
        """
        found = [tensor.shape for tensor in state["anchors"]]
        expected = [param.shape for param in self._anchors]
        if found != expected:
            raise ValueError(
                f"the anchors of the outer optimizer are of the shapes {[*map(tuple, found)]}, not "
                f"{[*map(tuple, expected)]}; load the state of a wrapper around the same model"
            )
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        rows = zip(
            *(self._anchors.items(), state["anchors"], state["started"], state["stepped"]),
            strict=True,
        )
        for (param, anchor), value, started, stepped in rows:
            if started:
                local(anchor).data = local(torch.empty_like(param).copy_(value))
                self._started.add(param)
            if not stepped:
                self._reset(anchor)

    def _add_new(self) -> None:
        """Add the parameters that were added to the base."""
        new = [param for param in self._params() if param not in self._anchors]
        if not new:
            return
        self._anchors |= {param: param.detach() for param in new}
        optimizer = self._make(list(self._anchors.values()))
        optimizer.state.update(self._optimizer.state)
        self._optimizer = optimizer

    def _reset(self, anchor: Tensor) -> None:
        """Give an anchor its initial state, which is empty in most optimizers."""
        self._optimizer.state.pop(anchor, None)
        self._optimizer.state.update(self._make([anchor]).state)

    @torch.inference_mode(False)
    def _blank_state(self, value: Tensor) -> dict[str, Any]:
        """The state of a tensor like this, with the shapes that it has after a step.

        One by one: torch's foreach kernels do not take DTensors together with other tensors.
        """
        place = torch.zeros_like(value)
        place.grad = torch.zeros_like(place)
        optimizer = self._make([place])
        optimizer.step()
        state: dict[str, Any] = optimizer.state_dict()["state"].get(0, {})
        return state

    def _params(self) -> Iterable[Tensor]:
        return (param for group in self._base.param_groups for param in group["params"])
