"""How the ranks find each other: in a process group, or in a store."""

from __future__ import annotations

from typing import NamedTuple

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.config import Elastic, Settings, read_timeout
from decent_optim_wrapper.elastic.epoch import FIRST_NOTE
from decent_optim_wrapper.elastic.recovery import Recovery
from decent_optim_wrapper.elastic.rendezvous import Rendezvous
from decent_optim_wrapper.start.arguments import check_sizes, resolve_store, resolve_topology
from decent_optim_wrapper.start.nodes import (
    agree_on_local_world_size,
    launched_local_world_size,
    node_name,
    ranks_per_node,
)
from decent_optim_wrapper.start.start import Start
from decent_optim_wrapper.topo import Topology


class World(NamedTuple):
    """The ranks and their connections.

    Args:
        transport: connects the ranks.
        topology: the topology of all ranks.
        recovery: continues without lost ranks; None if their loss is an error.
    """

    transport: Transport
    topology: Topology
    recovery: Recovery | None


def find_world(start: Start, topology: str | Topology, settings: Settings) -> World:
    """Meet the other ranks in the process group or in the store; collective."""
    if start.arguments.elastic is None:
        return _in_process_group(start, topology)
    return _in_store(start, topology, settings, start.arguments.elastic)


def _in_process_group(start: Start, topology: str | Topology) -> World:
    arguments = start.arguments
    with start.failing_together():
        transport = start.transport
        check_sizes(start.process_group, arguments.rank, arguments.world_size)
        node = node_name(arguments.local_world_size or launched_local_world_size(), transport.rank)
    local_world_size = agree_on_local_world_size(arguments.local_world_size, node, transport)
    with start.failing_together():
        resolved = resolve_topology(topology, transport.world_size, arguments, local_world_size)
    return World(transport=transport, topology=resolved, recovery=None)


def _in_store(
    start: Start, topology: str | Topology, settings: Settings, elastic: Elastic
) -> World:
    arguments = start.arguments
    with start.failing_together():
        world = resolve_store(arguments)
        # Nobody is there to agree with yet: every rank takes its own node for the size of all.
        local_world_size = arguments.local_world_size
        if local_world_size is None:
            size = launched_local_world_size()
            local_world_size = ranks_per_node([rank // size for rank in world.launched_as])
        resolved = resolve_topology(topology, world.world_size, arguments, local_world_size)
    timeout = read_timeout(settings.timeout) or world.timeout
    rendezvous = Rendezvous(world.store, world.rank, world.world_size, timeout, elastic.stale_after)
    epoch = rendezvous.gather(FIRST_NOTE)
    recovery = Recovery(
        rendezvous, epoch, resolved, settings.schedule, elastic.on_membership_change
    )
    return World(transport=epoch.transport, topology=resolved, recovery=recovery)
