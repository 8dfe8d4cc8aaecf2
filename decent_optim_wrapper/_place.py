"""Where this rank is among the others: the arguments that say so, and what they come to."""

from __future__ import annotations

from typing import Any, NamedTuple

from decent_optim_wrapper._crew import Crew
from decent_optim_wrapper._settings import Settings
from decent_optim_wrapper._survival import OnChange, Survival
from decent_optim_wrapper._transport import Transport
from decent_optim_wrapper._world import resolve_crew, resolve_process_group, resolve_topology
from decent_optim_wrapper.topo import Topology


class Place(NamedTuple):
    """Where this rank is among the others; what the fields mean is in `DecentOptimWrapper`."""

    rank: int | None
    world_size: int | None
    local_world_size: int | None
    process_group: Any | None
    store: Any | None
    on_membership_change: OnChange | None


class Found(NamedTuple):
    """The ranks and how to reach them.

    Args:
        process_group: the user's; None where the ranks meet in a store.
        transport: connects them.
        topology: of all ranks.
        survival: goes on without lost ranks; None where their loss is an error.
    """

    process_group: Any | None
    transport: Transport
    topology: Topology
    survival: Survival | None


def find_world(place: Place, topology: str | Topology, settings: Settings) -> Found:
    """Meet the other ranks, in the process group or in the store; collective there.

    Args:
        place: what the user says.
        topology: a name or an instance.
        settings: checked.
    """
    if settings.on_peer_failure == "raise":
        group = resolve_process_group(place.process_group, place.rank, place.world_size)
        transport = Transport(group, settings.patience)
        resolved = resolve_topology(topology, transport.world_size, place.local_world_size)
        return Found(group, transport, resolved, None)
    found = resolve_crew(place.process_group, place.store, place.rank, place.world_size)
    resolved = resolve_topology(topology, found.world_size, place.local_world_size)
    timeout = settings.patience or found.timeout
    transport = Transport(None, timeout)
    crew = Crew(found.store, found.rank, found.world_size, timeout)
    return Found(
        None, transport, resolved, Survival(crew, transport, resolved, place.on_membership_change)
    )
