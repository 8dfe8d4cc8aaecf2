"""How the ranks find each other, in a process group or a store, and which share a node."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from typing import NamedTuple

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.config import Settings, read_timeout
from decent_optim_wrapper.elastic.epoch import FIRST_NOTE
from decent_optim_wrapper.elastic.recovery import Recovery
from decent_optim_wrapper.elastic.rendezvous import Rendezvous
from decent_optim_wrapper.start.arguments import (
    Arguments,
    check_sizes,
    launched_ranks,
    resolve_store,
    resolve_topology,
)
from decent_optim_wrapper.start.start import Start, exchange
from decent_optim_wrapper.topo import Topology

Outline = Callable[[Topology], Sequence[str]]


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


def find_world(
    start: Start, topology: str | Topology | None, settings: Settings, outline: Outline
) -> World:
    """Meet the other ranks in the process group or in the store; collective.

    Args:
        start: reaches the other ranks.
        topology: a name or an instance; None for the default.
        settings: the checked settings.
        outline: the first lines of the description in which the ranks must agree, for the topology.

    Raises:
        ValueError: ranks that are training already have another outline.
    """
    arguments, elastic = start.arguments, start.arguments.elastic
    if elastic is None:
        return _in_process_group(start, topology)
    with start.failing_together():
        world = resolve_store(arguments)
        # The ranks cannot agree yet: every rank takes the size of its own node for all.
        own = local_world_size_of(arguments, world.launched_as or range(world.world_size))
        resolved = resolve_topology(topology, world.world_size, arguments, own)
    timeout = read_timeout(settings.timeout) or world.timeout
    rendezvous = Rendezvous(world.store, world.rank, world.world_size, timeout, elastic.stale_after)
    rendezvous.check_outline(outline(resolved))
    epoch = rendezvous.gather(FIRST_NOTE)
    recovery = Recovery(
        rendezvous, epoch, resolved, settings.schedule, elastic.on_membership_change
    )
    return World(transport=epoch.transport, topology=resolved, recovery=recovery)


def _in_process_group(start: Start, topology: str | Topology | None) -> World:
    arguments = start.arguments
    with start.failing_together():
        transport, group = start.transport, start.process_group
        check_sizes(group, arguments)
        own = local_world_size_of(arguments, launched_ranks(group))
    is_same = set(exchange(transport, [own])[:, 0].tolist()) == {own}
    with start.failing_together():
        local_world_size = own if is_same else 1
        resolved = resolve_topology(topology, transport.world_size, arguments, local_world_size)
    return World(transport=transport, topology=resolved, recovery=None)


def local_world_size_of(arguments: Arguments, launched_as: Sequence[int]) -> int:
    """The number of ranks per node: the user's argument, or what follows from the launcher's.

    Args:
        arguments: the user's arguments.
        launched_as: the number that the launcher gave to each rank; consecutive ones share a node.
    """
    if arguments.local_world_size is not None:
        return arguments.local_world_size
    size = launched_local_world_size()
    place, rank = (os.environ.get(name, "") for name in ("LOCAL_RANK", "RANK"))
    is_known = place.isdecimal() and rank.isdecimal()
    if is_known and int(rank) % size != int(place) < size:
        # Not in blocks of this size, as with Slurm's cyclic distribution.
        return 1
    return ranks_per_node([rank // size for rank in launched_as])


def ranks_per_node(nodes: Sequence[Hashable]) -> int:
    """The number of consecutive ranks on a node, or 1 if it is not the same on all nodes.

    Args:
        nodes: an identifier of the node of each rank, by rank.
    """
    blocks = [len(list(block)) for _, block in groupby(nodes)]
    regular = len(set(blocks)) == 1 and len(blocks) == len(set(nodes))
    return blocks[0] if regular else 1


def launched_local_world_size() -> int:
    """LOCAL_WORLD_SIZE, or 1 if it is not set."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"the variable LOCAL_WORLD_SIZE must be a number above 0, got {text!r}; set it to the "
            f"number of ranks of this node, or unset it"
        )
    return int(text)
