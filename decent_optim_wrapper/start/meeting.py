"""Resolves the constructor's arguments: process group, store, sizes, nodes, topology."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from types import NoneType
from typing import Annotated, Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed.device_mesh import DeviceMesh

from decent_optim_wrapper.checks import check_fields, converted, instance_of, optional, whole
from decent_optim_wrapper.comm.process_groups import is_registered, store_of, timeout_of
from decent_optim_wrapper.config import read_timeout
from decent_optim_wrapper.start.membership import Elasticity, StoreWorld
from decent_optim_wrapper.topo import Topology, TopologyFactory
from decent_optim_wrapper.warn import warn

_WHOLE = "a whole number or None"
_mesh = instance_of("a torch.distributed.DeviceMesh or None", DeviceMesh, NoneType)
_elastic = instance_of("an Elastic or None", Elasticity, NoneType)
_INITIALISE = (
    "call decent_optim_wrapper.utils.init_distributed() or torch.distributed.init_process_group() "
    "before building the wrapper"
)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Who meets: the arguments of `DecentOptimWrapper` by which this rank finds the others.

    They are not checked here: this rank needs them to send its error to the others.
    """

    rank: Annotated[int | None, optional(whole(0, _WHOLE))] = None
    """This rank; None takes the rank in the process group."""
    world_size: Annotated[int | None, optional(whole(1, _WHOLE))] = None
    """Number of ranks; None takes the size of the process group."""
    local_world_size: Annotated[int | None, optional(whole(0, _WHOLE))] = None
    """Ranks per node; None or 0, which `torch.cuda.device_count()` returns without a GPU, takes it
    from the launcher."""
    process_group: dist.ProcessGroup | None = None
    """The ranks that gossip; None takes the default group."""
    mesh: Annotated[DeviceMesh | None, _mesh] = None
    """All ranks, if a replica is spread over several of them."""
    gossip_dim: str | None = None
    """The dimension of the mesh along which replicas gossip."""
    elastic: Annotated[Elasticity | None, _elastic] = None
    """How to continue without a lost rank; None raises an error."""
    timeout: Annotated[timedelta | float | None, converted(read_timeout)] = None
    """How long to wait for a peer; None takes the timeout of the process group."""


def check_meeting(meeting: Meeting) -> None:
    """Check each argument, and that the mesh and the dimension of the gossip fit together.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range or missing, or contradicts another one.
    """
    check_fields(meeting)
    mesh, name = meeting.mesh, meeting.gossip_dim
    if mesh is None:
        if name is not None:
            raise ValueError(f"gossip_dim={name!r} expects a mesh; pass mesh=DeviceMesh, too")
        return
    if meeting.process_group is not None:
        raise ValueError(
            "mesh and process_group both say who gossips; pass mesh and gossip_dim alone, or "
            "process_group=mesh.get_group(name) for replicas of one rank each"
        )
    if meeting.elastic is not None:
        raise ValueError(
            "elastic expects replicas of one rank each, not a mesh: a lost rank would leave the "
            "other shards of its replica alone; leave elastic out and restart from a checkpoint"
        )
    names = mesh.mesh_dim_names or ()
    if name not in names:
        raise ValueError(
            f"gossip_dim expects the dimension of the mesh on which replicas gossip, one of "
            f"{names}, got {name!r}; name the dimensions in init_device_mesh(mesh_dim_names=...)"
        )


def resolve_process_group(meeting: Meeting) -> Any | None:
    """Find the process group.

    Returns:
        The given group, the group of the mesh, or the default group; None for a world of one rank.

    Raises:
        TypeError: it is not a process group, or does not contain this rank.
    """
    group: Any = meeting.process_group
    if meeting.mesh is not None:
        group = meeting.mesh.get_group(meeting.gossip_dim)
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if not isinstance(group, (dist.ProcessGroup, Backend, NoneType)):
        raise TypeError(
            f"process_group expects a torch.distributed.ProcessGroup of which this rank is a "
            f"member, or None, got {group!r}"
        )
    return group


def resolve_world(meeting: Meeting) -> StoreWorld:
    """Find the ranks that gossip, this rank's number among them, and the store that they share.

    Raises:
        ValueError: `rank` or `world_size` is missing or contradicts the process group or the
            launcher, or the ranks are elastic and have no store.
        RuntimeError: there is more than one rank and no process group.
        PeerError: the launcher's store does not answer.
    """
    rank, world_size, elastic = meeting.rank, meeting.world_size, meeting.elastic
    if elastic is not None and elastic.store is not None:
        if rank is None or world_size is None or not 0 <= rank < world_size:
            raise ValueError(
                f"Elastic(store=...) needs rank and world_size, got {rank=}, {world_size=}"
            )
        return StoreWorld(store=elastic.store, rank=rank, world_size=world_size)
    group = resolve_process_group(meeting)
    whose, found = "the process group", None
    if group is not None:
        found = StoreWorld(
            store=store_of(group),
            rank=group.rank(),
            world_size=group.size(),
            timeout=timeout_of(group),
            launched_as=dist.get_process_group_ranks(group) if is_registered(group) else (),
        )
    elif elastic is not None:
        whose = "the launcher"
        found = elastic.find_launched(os.environ, read_timeout(meeting.timeout))
    if found is None:
        _check_alone(world_size)
        whose, found = "a world of one rank", StoreWorld(store=None, rank=0, world_size=1)
    for name in ("rank", "world_size"):
        given, actual = getattr(meeting, name), getattr(found, name)
        if given is not None and given != actual:
            raise ValueError(
                f"{name}={given} contradicts {whose}, whose {name} is {actual} here; leave it out"
            )
    if elastic is not None and found.store is None:
        raise ValueError(
            "elastic needs a store in which the ranks agree: start the script with `python -m "
            "decent_optim_wrapper run` or torchrun, or pass rank, world_size and Elastic(store=...)"
        )
    return found


def local_world_size_of(meeting: Meeting, launched_as: Sequence[int]) -> int:
    """The number of ranks per node: the user's argument, or what follows from the launcher's.

    Args:
        meeting: who meets.
        launched_as: the number that the launcher gave to each rank; consecutive ones share a node.
    """
    if meeting.local_world_size:
        return meeting.local_world_size
    size = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
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
    return blocks[0] if len(set(blocks)) == 1 and len(blocks) == len(set(nodes)) else 1


def resolve_topology(
    topology: str | Topology, world_size: int, meeting: Meeting, local_world_size: int
) -> Topology:
    """Build the topology of that name, or check that the instance fits the process group.

    Args:
        topology: a name or an instance.
        world_size: number of ranks.
        meeting: who meets; an instance must fit its sizes.
        local_world_size: ranks per node, for a topology that is built by name.

    Raises:
        TypeError: `topology` is neither a name nor a `Topology`.
        ValueError: the name is unknown, or the sizes do not fit.
    """
    if isinstance(topology, str):
        return TopologyFactory.create(topology, world_size, local_world_size)
    if not isinstance(topology, Topology):
        raise TypeError(f"topology expects a name, a Topology or None, got {topology!r}")
    for name, given, actual in (
        ("world_size", topology.world_size, world_size),
        ("local_world_size", topology.local_world_size, meeting.local_world_size),
    ):
        if actual and given != actual:
            raise ValueError(
                f"topology={topology!r} was built for {name}={given}, but here it is {actual}; "
                f"pass a name, or build the topology with the sizes of this run"
            )
    return topology


def _check_alone(world_size: int | None) -> None:
    if world_size not in (None, 1):
        raise RuntimeError(
            f"world_size={world_size} needs a process group: {_INITIALISE}, and start the script "
            f"with `torchrun --nproc-per-node {world_size} script.py`"
        )
    launched = os.environ.get("WORLD_SIZE", "1")
    if world_size is None and launched not in ("", "1"):
        warn(
            f"WORLD_SIZE={launched}, but there is no process group: this rank trains alone; "
            f"{_INITIALISE}, or pass world_size=1"
        )
