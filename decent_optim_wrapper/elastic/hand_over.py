"""The transfer of state to a rank that comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from decent_optim_wrapper.comm.state_transfer import receive_state, send_state, sendable
from decent_optim_wrapper.gossip.gossip import Gossip
from decent_optim_wrapper.gossip.saved_state import gossip_state, read_state, restore
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wire.broadcast import broadcast
from decent_optim_wrapper.wire.bucket import Layout
from decent_optim_wrapper.wire.parameters import Named, named_parameters


class HandOver:
    """Sends parameters, buffers and states to ranks that need them.

    Args:
        optimizer: the base.
        gossip: the gossip of its parameters.
        others: tensors in addition to the parameters.
        parts: further objects with a `state_dict`, such as a scheduler.
        layout: how tensors are put into buckets.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gossip: Gossip,
        others: Sequence[Named],
        parts: Sequence[Any],
        layout: Layout,
    ) -> None:
        self._optimizer = optimizer
        self._gossip = gossip
        self._others = others
        self._parts = parts
        self._layout = layout
        # How often this rank has received its state from others.
        self.takeovers = 0

    def __call__(self, donor: int, takes: bool) -> None:
        """Send everything from one rank to all; collective.

        Args:
            donor: the position of the sender among the members.
            takes: whether this rank needs the state; otherwise it drops what it receives.
        """
        transport = self._gossip.pipeline.session.transport
        named = [*named_parameters(self._optimizer.param_groups), *self._others]
        broadcast([each.tensor for each in named], transport, self._layout, donor, keep=not takes)
        if transport.rank == donor:
            send_state(self._state(), transport)
            return
        base, saved, parts = receive_state(transport, donor)
        if takes:
            self.takeovers += 1
            self._optimizer.load_state_dict(base)
            for each in self._gossip.pipeline.extensions.all:
                if each.name and each.name not in saved.get("extensions", {}):
                    self._gossip.pipeline.extensions.drop(each)
            saved |= {"in_flight": False, "kept": False}
            rate = self._gossip.pipeline.mixing_rate
            restore(self._gossip, read_state(self._gossip, saved, rate))
            for part, state in zip(self._parts, parts, strict=True):
                if state is not None:
                    part.load_state_dict(state)

    def _state(self) -> list[Any]:
        """The states of the base, of the gossip, and of the further objects."""
        saved = gossip_state(self._gossip)
        # The round in flight is dropped, and references start again.
        for key in ("launch_snapshot", "references"):
            saved.pop(key, None)
        for each in self._gossip.pipeline.extensions.all:
            if each.belongs_to_rank:
                saved["extensions"][each.name] = None
        return [self._optimizer.state_dict(), saved, [self._state_of(part) for part in self._parts]]

    def _state_of(self, part: Any) -> Any | None:
        state = part.state_dict()
        if sendable(state):
            return state
        rank = self._gossip.pipeline.session.transport.initial_rank
        warn(
            f"rank {rank}: the state of {type(part).__name__} contains more than tensors, numbers "
            f"and strings; it is not sent to the rank that comes back, where it starts from the "
            f"beginning"
        )
        return None
