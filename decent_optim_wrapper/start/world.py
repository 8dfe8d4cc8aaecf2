"""How the ranks find each other, in a process group or a store, and which share a node."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch.distributed as dist

from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.config import Elastic, Settings, read_timeout
from decent_optim_wrapper.elastic.epoch import FIRST_NOTE
from decent_optim_wrapper.elastic.recovery import Recovery
from decent_optim_wrapper.elastic.rendezvous import Rendezvous
from decent_optim_wrapper.start.arguments import check_sizes, resolve_store, resolve_topology
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
    if start.arguments.elastic is None:
        return _in_process_group(start, topology)
    return _in_store(start, topology, settings, start.arguments.elastic, outline)


def _in_process_group(start: Start, topology: str | Topology | None) -> World:
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
    start: Start,
    topology: str | Topology | None,
    settings: Settings,
    elastic: Elastic,
    outline: Outline,
) -> World:
    arguments = start.arguments
    with start.failing_together():
        world = resolve_store(arguments)
        # The ranks cannot agree yet: every rank takes the size of its own node for all.
        local_world_size = arguments.local_world_size
        if local_world_size is None:
            size = launched_local_world_size()
            local_world_size = ranks_per_node([rank // size for rank in world.launched_as])
        resolved = resolve_topology(topology, world.world_size, arguments, local_world_size)
    timeout = read_timeout(settings.timeout) or world.timeout
    rendezvous = Rendezvous(world.store, world.rank, world.world_size, timeout, elastic.stale_after)
    rendezvous.check_outline(outline(resolved))
    epoch = rendezvous.gather(FIRST_NOTE)
    recovery = Recovery(
        rendezvous, epoch, resolved, settings.schedule, elastic.on_membership_change
    )
    return World(transport=epoch.transport, topology=resolved, recovery=recovery)


def agree_on_local_world_size(given: int | None, node: str, transport: Transport) -> int:
    """The number of ranks per node, the same on all ranks; collective.

    Args:
        given: the user's argument, which is used if it is the same on all ranks.
        node: `node_name` of this rank.
        transport: connects the ranks.
    """
    digest = hashlib.sha256(node.encode()).digest()[:8]
    rows = exchange(transport, [given or 0, int.from_bytes(digest, "little", signed=True)])
    stated, nodes = rows[:, 0].tolist(), rows[:, 1].tolist()
    if given is not None and len(set(stated)) == 1:
        return given
    return ranks_per_node(nodes)


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


def node_name(local_world_size: int, rank: int) -> str:
    """A name for the node of this process: the host and the first rank on the node.

    The host alone would be the same for several simulated nodes on one machine.

    Args:
        local_world_size: number of ranks on this node.
        rank: this rank, for processes that no launcher has numbered.
    """
    number = _variable("RANK")
    if number is None:
        number = dist.get_rank() if dist.is_initialized() else rank
    place = _variable("LOCAL_RANK")
    if place is None or not place < local_world_size or place > number:
        place = number % local_world_size
    return f"{socket.gethostname()} from rank {number - place}"


def _variable(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None
