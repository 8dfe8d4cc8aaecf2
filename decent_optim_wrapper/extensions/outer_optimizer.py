"""An outer optimizer of torch over anchors, whose gradient is the change of the parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.gossip.extension import Extension, ExtensionContext, ReceivedBucket
from decent_optim_wrapper.gossip.schedule import RoundKind
from decent_optim_wrapper.optim.gradients import params_of
from decent_optim_wrapper.optim.shards import local
from decent_optim_wrapper.wire.bucket import Bucket, members_of


class OuterOptimizer(Extension):
    """Steps an optimizer over anchors, the parameters after the previous outer step.

    With φ the anchors and x̄ the parameters after the mixing, the gradient is g = φ - x̄. After the
    step, x <- φ. An anchor starts as a copy of its parameter at the beginning of a step. There is
    an outer step after every exact average if the schedule has any, otherwise after every round of
    gossip (DiLoCo, Douillard et al. 2023; SlowMo, Wang et al. 2020). The optimizer is stepped
    bucket by bucket, so it must update each tensor by itself. It costs a copy of the parameters,
    and its own state.

    Args:
        make: function that makes the optimizer from a list of tensors, the anchors, such as
            ``partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)``.
    """

    name = "outer_optimizer"

    def __init__(self, make: Callable[[list[Tensor]], Optimizer]) -> None:
        self._make = make

    # Tensors made in inference mode could not be changed outside of it.
    @torch.inference_mode(False)
    def attach(self, context: ExtensionContext) -> None:
        """Make the optimizer over the parameters of the base.

        Raises:
            ValueError: the optimizer updates other tensors than the anchors.
        """
        self._context = context
        averages = context.intervals.global_avg_every is not None
        self._kind = RoundKind.AVERAGE if averages else RoundKind.GOSSIP
        # By parameter, in the order of the groups. An anchor that never started shares its
        # parameter's memory: it costs nothing, and the optimizer sees its shape.
        self._anchors = {param: param.detach() for param in params_of(context.optimizer)}
        self._started: set[Tensor] = set()
        self._optimizer = self._make(list(self._anchors.values()))
        if {*params_of(self._optimizer)} != {*self._anchors.values()}:
            raise ValueError(
                "OuterOptimizer expects a function whose optimizer updates the tensors that it is "
                "given, all of them and nothing else, such as partial(torch.optim.SGD, lr=0.7)"
            )

    def describe(self) -> str:
        """The optimizer and its settings."""
        return f"OuterOptimizer({type(self._optimizer).__name__}({self._optimizer.defaults}))"

    def begin_step(self, buckets: Sequence[Bucket]) -> None:
        """Start the anchors of new parameters."""
        self._start([*members_of(buckets)])

    @contextmanager
    def mixing(self, received: ReceivedBucket) -> Iterator[None]:
        """Take the outer step after the mixing, without the local updates since the launch."""
        bucket, steps = received.bucket, received.kind is self._kind
        snapshot = received.snapshot() if steps else None
        drift = None
        if snapshot is not None:
            drift = bucket.copy()
            drift.data.sub_(snapshot.data.to(bucket.device, bucket.dtype))
        yield
        # Mixing replaces parameters that are not finite; these must not get into its state.
        if self._context.nonfinite.replaces and not bucket.is_finite():
            self._forget(bucket.members)
        elif steps:
            if drift is not None:
                bucket.add_(drift, -1.0)
            self._step(bucket.members)
            if drift is not None:
                bucket.add_(drift, 1.0)

    def kept(self, buckets: Sequence[Bucket], transport: Transport) -> None:
        """Restart the anchors from the parameters of the next step; the optimizer's state stays."""
        self._started.clear()

    def prepare_load(self, state: dict[str, Any] | None) -> Callable[[], None]:
        """Check a state, and return the function that loads it.

        Raises:
            ValueError: the state belongs to other parameters.
        """
        loaded = OuterOptimizer(self._make)
        loaded.attach(self._context)
        if state is not None:
            loaded.load_state_dict(state)
        return partial(vars(self).update, vars(loaded))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _start(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Start the anchors that have not started, if their parameters are finite.

        Parameters that the base has no more have no anchors.

        Returns:
            The parameters whose anchors had started before.
        """
        self._follow()
        known = [param for param in params if param in self._started]
        for param in (self._anchors.keys() - self._started).intersection(params):
            if bool(local(param).isfinite().all()):
                # A DTensor has no data of its own, only its local tensor has.
                local(self._anchors[param]).data = local(param).detach().clone()
                self._started.add(param)
        return known

    @torch.inference_mode(False)
    def _forget(self, params: Iterable[Tensor]) -> None:
        """Restart the anchors of these parameters in the next step, without any state."""
        for param in self._started.intersection(params):
            self._started.remove(param)
            self._reset(self._anchors[param])

    @torch.inference_mode(False)
    @torch.no_grad()
    def _step(self, params: Sequence[Tensor]) -> None:
        """Take the outer step.

        Args:
            params: the parameters after the mixing; changed in place.
        """
        if not (known := self._start(params)):
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
        """The anchors and the state of their optimizer, by parameter.

        Every row is complete, since torch.distributed.checkpoint loads only into existing entries.
        A row marks entries that are only placeholders.
        """
        self._follow()
        own = self._optimizer.state_dict()
        settings = {
            place: {key: value for key, value in group.items() if key != "params"}
            for group in own["param_groups"]
            for place in group["params"]
        }
        rows = [
            {
                "anchor": (anchor if param in self._started else param).detach().clone(),
                "started": param in self._started,
                "stepped": place in own["state"],
                "state": own["state"].get(place) or self._blank_state(anchor),
                "settings": settings[place],
            }
            for place, (param, anchor) in enumerate(self._anchors.items())
        ]
        return {"params": rows}

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load a state, before the first step.

        Each group takes the settings of its first parameter. A group without parameters, as on a
        pipeline stage, keeps its own settings.

        Raises:
            ValueError: the state belongs to other parameters.
        """
        rows = state["params"] if state else []
        found = [row["anchor"].shape for row in rows]
        expected = [param.shape for param in self._anchors]
        if found != expected:
            raise ValueError(
                f"the anchors of the outer optimizer are of the shapes {[*map(tuple, found)]}, not "
                f"{[*map(tuple, expected)]}; load the state of a wrapper around the same model"
            )
        groups = [
            {**group, **rows[group["params"][0]]["settings"]} if group["params"] else group
            for group in self._optimizer.state_dict()["param_groups"]
        ]
        states = {place: row["state"] for place, row in enumerate(rows)}
        self._optimizer.load_state_dict(copy.deepcopy({"state": states, "param_groups": groups}))
        for (param, anchor), row in zip(self._anchors.items(), rows, strict=True):
            if row["started"]:
                local(anchor).data = local(torch.empty_like(param).copy_(row["anchor"]))
                self._started.add(param)
            if not row["stepped"]:
                self._reset(anchor)

    def _follow(self) -> None:
        """Follow parameters that were added to the base, or dropped, in its order."""
        params = params_of(self._context.optimizer)
        if [*map(id, params)] != [*map(id, self._anchors)]:
            self._anchors = {param: self._anchors.get(param, param.detach()) for param in params}
            self._started.intersection_update(params)
            state = self._optimizer.state
            self._optimizer = self._make([*self._anchors.values()])
            kept = {a: state[a] for a in self._anchors.values() if a in state}
            self._optimizer.state.update(kept)

    def _reset(self, anchor: Tensor) -> None:
        """Reset the state of an anchor, which is empty in most optimizers."""
        self._optimizer.state.pop(anchor, None)
        self._optimizer.state.update(self._make([anchor]).state)

    @torch.inference_mode(False)
    def _blank_state(self, value: Tensor) -> dict[str, Any]:
        """A state for a tensor like this one, with the shapes that it has after a step.

        Each tensor is stepped by itself, because torch's foreach kernels do not take DTensors
        together with other tensors.
        """
        place = torch.zeros_like(value)
        place.grad = torch.zeros_like(place)
        optimizer = self._make([place])
        optimizer.step()
        state: dict[str, Any] = optimizer.state_dict()["state"].get(0, {})
        return state
