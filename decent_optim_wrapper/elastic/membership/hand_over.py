"""Sends parameters, buffers and states to ranks that come back."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from decent_optim_wrapper.comm.state_transfer import describe, receive_state, send_state
from decent_optim_wrapper.gossip import saved_state
from decent_optim_wrapper.gossip.coordinator import Coordinator
from decent_optim_wrapper.start.membership import Trained
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wire.broadcast import broadcast
from decent_optim_wrapper.wire.parameters import named_parameters
from decent_optim_wrapper.wire.plan import in_agreed_order


def hand_over(trained: Trained, coordinator: Coordinator, donor: int, takes: bool) -> None:
    """Send everything from one rank to all; collective.

    Args:
        trained: what is sent besides the parameters and the state of the gossip.
        coordinator: coordinates the rounds of the parameters.
        donor: the position of the sender among the members.
        takes: whether this rank needs the state; otherwise it ignores what it receives.
    """
    rounds, optimizer, layout = coordinator.rounds, trained.optimizer, trained.layout
    transport, extensions = rounds.session.transport, rounds.extensions
    named = in_agreed_order(named_parameters(optimizer.param_groups), layout)
    tensors = [n.tensor for n in (*named, *trained.state.on_all_ranks(transport, donor))]
    if transport.rank == donor:
        # The members may meet in the middle of its forward pass.
        tensors = coordinator.early.restored(tensors)
    broadcast(tensors, transport, layout, donor, keep=not takes)
    if transport.rank == donor:
        send_state(_state(trained, coordinator), transport)
        return
    state, parts = receive_state(transport, donor)
    if takes:
        base = saved_state.renumbered(state, optimizer.param_groups)
        saved = base.pop(saved_state.GOSSIP_KEY)
        optimizer.load_state_dict(base)
        for each in extensions.all:
            if each.name and each.name not in saved.get("extensions", {}):
                extensions.drop(each)
        saved |= {"in_flight": False, "kept": False}
        saved_state.prepare_load(coordinator, saved, rounds.mixing_rate)()
        for part, state in zip(trained.parts, parts, strict=True):
            if state is not None:
                part.load_state_dict(state)


def _state(trained: Trained, coordinator: Coordinator) -> list[Any]:
    """The states of the base, of the gossip and of the further objects."""
    saved = saved_state.gossip_state(coordinator)
    # The round in flight is dropped, and references start again.
    for key in ("launch_snapshot", "references"):
        saved.pop(key, None)
    for each in coordinator.rounds.extensions.all:
        if each.belongs_to_rank:
            saved["extensions"][each.name] = None
    rank = coordinator.rounds.session.transport.initial_rank
    state = {**trained.optimizer.state_dict(), saved_state.GOSSIP_KEY: saved}
    return [state, [_state_of(part, rank) for part in trained.parts]]


def _state_of(part: Any, rank: int) -> Any | None:
    state = part.state_dict()
    with suppress(TypeError):
        describe(state, [])
        return state
    warn(
        f"rank {rank}: the state of {type(part).__name__} contains more than tensors, numbers "
        f"and strings; it is not sent to the rank that comes back, where it starts again"
    )
    return None
