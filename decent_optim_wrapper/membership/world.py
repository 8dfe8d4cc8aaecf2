"""Where this rank is among the others: the arguments that say so, and what they come to."""

from __future__ import annotations

from typing import Any, NamedTuple

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.config import Elastic, Settings
from decent_optim_wrapper.membership.arguments import (
    check_place,
    check_sizes,
    resolve_store,
    resolve_topology,
)
from decent_optim_wrapper.membership.nodes import (
    agree_on_local_world_size,
    launched_local_world_size,
    node_name,
    ranks_per_node,
)
from decent_optim_wrapper.membership.recovery import Recovery
from decent_optim_wrapper.membership.rendezvous import Rendezvous
from decent_optim_wrapper.membership.start import Start
from decent_optim_wrapper.topo import Topology


class Found(NamedTuple):
    """The ranks and how to reach them.

    Args:
        process_group: the user's; None where the ranks meet in a store.
        transport: connects them.
        topology: of all ranks.
        recovery: goes on without lost ranks; None where their loss is an error.
    """

    process_group: Any | None
    transport: Transport
    topology: Topology
    recovery: Recovery | None


def find_world(start: Start, topology: str | Topology, settings: Settings) -> Found:
    """Meet the other ranks, in the process group or in the store; collective there.

    Args:
        start: what the user says of them.
        topology: a name or an instance.
        settings: checked.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: one that contradicts another, or does not fit.
    """
    if start.place.elastic is None:
        return _in_process_group(start, topology)
    return _in_store(start, topology, settings, start.place.elastic)


def _in_process_group(start: Start, topology: str | Topology) -> Found:
    place = start.place
    with start.failing_together():
        check_place(place)
        group, transport = start.process_group, start.transport
        check_sizes(group, place.rank, place.world_size)
        node = node_name(place.local_world_size or launched_local_world_size(), transport.rank)
    local_world_size = agree_on_local_world_size(place.local_world_size, node, transport)
    with start.failing_together():
        resolved = resolve_topology(topology, transport.world_size, place, local_world_size)
    return Found(group, transport, resolved, None)


def _in_store(
    start: Start, topology: str | Topology, settings: Settings, elastic: Elastic
) -> Found:
    place = start.place
    with start.failing_together():
        check_place(place)
        found = resolve_store(place)
        # Nobody is there to agree with yet: every rank takes its own node for the size of all.
        local_world_size = place.local_world_size
        if local_world_size is None:
            size = launched_local_world_size()
            local_world_size = ranks_per_node([rank // size for rank in found.launched_as])
        resolved = resolve_topology(topology, found.world_size, place, local_world_size)
    timeout = settings.patience or found.timeout
    transport = Transport(None, timeout)
    rendezvous = Rendezvous(found.store, found.rank, found.world_size, timeout, elastic.stale_after)
    recovery = Recovery(rendezvous, transport, resolved, elastic.on_membership_change)
    return Found(None, transport, resolved, recovery)
