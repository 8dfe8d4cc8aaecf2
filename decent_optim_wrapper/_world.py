"""From the constructor's arguments to the world they mean: process group, sizes, topology."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Store
from torch.distributed.constants import default_pg_timeout

from decent_optim_wrapper._backend import is_closed, store_of, timeout_of
from decent_optim_wrapper.topo import Topology, TopologyFactory


def resolve_process_group(group: Any, rank: int | None, world_size: int | None) -> Any | None:
    """Find the process group and check what the user says of it.

    Returns:
        The group given, else the default group, else None: a world of one rank.

    Raises:
        TypeError: `group` is not a process group.
        ValueError: the group is closed, contradicts `rank` or `world_size`, or lacks this rank.
        RuntimeError: more than one rank and no process group.
    """
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        _check_alone(rank, world_size)
        return None
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"rank {dist.get_rank()} is not a member of the process group given; "
            f"build the wrapper on its members only"
        )
    if not isinstance(group, (dist.ProcessGroup, Backend)):
        raise TypeError(
            f"process_group expects a torch.distributed.ProcessGroup or None, got {group!r}"
        )
    if is_closed(group):
        raise ValueError(
            "process_group has been destroyed; build the wrapper before destroy_process_group()"
        )
    for name, given, actual in (
        ("rank", rank, group.rank()),
        ("world_size", world_size, group.size()),
    ):
        if given is not None and given != actual:
            raise ValueError(
                f"{name}={given} contradicts the process group, whose {name} is {actual} here; "
                f"leave {name} out or pass the process group's"
            )
    return group


class Found(NamedTuple):
    """Ranks that meet through a store."""

    store: Any
    rank: int
    world_size: int
    timeout: timedelta


def resolve_crew(group: Any, store: Any, rank: int | None, world_size: int | None) -> Found:
    """Find the store, and who this rank is in it.

    Raises:
        TypeError: `store` is no store.
        ValueError: neither a store with `rank` and `world_size` nor a process group that has one.
    """
    if store is not None and not isinstance(store, Store):
        raise TypeError(f"store expects a torch.distributed.Store or None, got {store!r}")
    if store is None:
        group = resolve_process_group(group, rank, world_size)
        store = None if group is None else store_of(group)
        if group is None or store is None:
            raise ValueError(
                'on_peer_failure="continue" needs a store in which the ranks agree: pass store, '
                "rank and world_size, or call torch.distributed.init_process_group() before"
            )
        return Found(store, group.rank(), group.size(), timeout_of(group))
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ValueError(
            f"a store needs rank and world_size beside it, with rank below world_size; got "
            f"{rank=}, {world_size=}"
        )
    return Found(store, rank, world_size, default_pg_timeout)


def resolve_topology(
    topology: str | Topology, world_size: int, local_world_size: int | None
) -> Topology:
    """Build the topology of that name, or check that the instance fits the process group.

    Raises:
        TypeError: neither a name nor a `Topology`.
        ValueError: an unknown name, or sizes that do not fit.
    """
    if isinstance(topology, str):
        if local_world_size is None:
            local_world_size = _local_world_size(world_size)
        return TopologyFactory.create(topology, world_size, local_world_size)
    if not isinstance(topology, Topology):
        raise TypeError(f"topology expects a name or a Topology, got {topology!r}")
    for name, given, actual in (
        ("world_size", topology.world_size, world_size),
        ("local_world_size", topology.local_world_size, local_world_size),
    ):
        if actual is not None and given != actual:
            raise ValueError(f"{topology!r} was built for {name}={given}, but here it is {actual}")
    return topology


def _check_alone(rank: int | None, world_size: int | None) -> None:
    if world_size is not None and world_size < 1:
        raise ValueError(f"world_size must be 1 or more, got {world_size}")
    if world_size not in (None, 1):
        raise RuntimeError(
            f"world_size={world_size} needs a process group: call "
            f"torch.distributed.init_process_group() before building the wrapper and start the "
            f"script with `torchrun --nproc-per-node {world_size} script.py`"
        )
    if rank not in (None, 0):
        raise ValueError(f"rank={rank} contradicts a world of one rank without a process group")
    launched = os.environ.get("WORLD_SIZE", "1")
    if world_size is None and launched not in ("", "1"):
        warnings.warn(
            f"WORLD_SIZE={launched}, but there is no process group: this rank trains alone; call "
            f"torch.distributed.init_process_group() before building the wrapper, or pass "
            f"world_size=1",
            stacklevel=4,
        )


def _local_world_size(world_size: int) -> int:
    """LOCAL_WORLD_SIZE, or 1 where it says nothing of this world (unset, or of a larger one)."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"the variable LOCAL_WORLD_SIZE must be a number above 0, got {text!r}")
    return int(text) if world_size % int(text) == 0 else 1
