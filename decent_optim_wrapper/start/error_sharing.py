"""The start: an error on one rank before the ranks have agreed is raised on all of them.

Every rank takes part in the same few exchanges. A rank that fails between two of them takes part in
the next one with its error, so that no rank waits for it.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from pkgutil import resolve_name
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.state_transfer import difference, share_text
from decent_optim_wrapper.comm.store import WARN_AFTER_SECONDS, late_ranks, warn_of
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.config import read_timeout
from decent_optim_wrapper.errors import PeerError
from decent_optim_wrapper.gossip.schedule import Intervals
from decent_optim_wrapper.mesh.replica import Dimension, Replica
from decent_optim_wrapper.start.meeting import Meeting, resolve_process_group, resolve_world
from decent_optim_wrapper.start.membership import Elasticity, Membership, StoreWorld
from decent_optim_wrapper.topo import Topology

# A rank and a SHA-256 digest. All exchanges have this size: a failing rank does not know the next
# one.
_NUMBERS = 5
# How long a rank that cannot start waits for others, which may be meeting elsewhere.
_NOTIFY = timedelta(seconds=5)


class OtherRankError(ValueError):
    """Another rank cannot start."""


class ErrorSharing:
    """Reaches the other ranks while this one starts.

    Args:
        meeting: who meets, not checked yet.
    """

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        # The ranks that have met in a store; None if they have not, or are fixed.
        self.membership: Membership | None = None

    @property
    def elasticity(self) -> Elasticity | None:
        """How the ranks meet in a store, without a process group; None if they are fixed."""
        elastic, mesh = self.meeting.elastic, self.meeting.mesh
        return elastic if isinstance(elastic, Elasticity) and mesh is None else None

    @cached_property
    def process_group(self) -> Any | None:
        """The process group; None in a world of one rank, or if the ranks meet in a store."""
        return None if self.elasticity else resolve_process_group(self.meeting)

    @cached_property
    def world(self) -> StoreWorld:
        """The ranks that gossip, as the process group or the store numbers them."""
        return resolve_world(self.meeting)

    @cached_property
    def transport(self) -> Transport:
        """Connects the ranks of the process group."""
        return Transport.over(self.process_group, self._timeout)

    @property
    def transports(self) -> list[Transport]:
        """Reach all ranks together: along each dimension of the mesh, or of the process group."""
        return [each.transport for each in self._mesh.values()] or [self.transport]

    def replica(self, model: nn.Module | None) -> Replica:
        """The ranks over which one copy of the model is spread."""
        others = dict(self._mesh)
        gossip = others.pop(str(self.meeting.gossip_dim), None)
        return Replica([*others.values()], model, None if gossip is None else gossip.ranks)

    @cached_property
    def _mesh(self) -> dict[str, Dimension]:
        """All dimensions of the mesh by name; none without a mesh."""
        mesh = self.meeting.mesh
        if not isinstance(mesh, DeviceMesh):
            return {}
        groups = {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()}
        return {name: Dimension(group, self._timeout) for name, group in groups.items()}

    @property
    def _timeout(self) -> timedelta | None:
        with suppress(TypeError, ValueError):
            return read_timeout(self.meeting.timeout)
        # `check_meeting` rejects it later; the others are notified with the group's own timeout.
        return None

    def meet(self, topology: Topology, intervals: Intervals) -> None:
        """Meet the other ranks in a store, unless they are fixed; collective.

        Args:
            topology: the topology of all ranks.
            intervals: how often rounds are launched.
        """
        if elastic := self.elasticity:
            world = self.world._replace(timeout=self._timeout or self.world.timeout)
            self.membership = elastic.meet(world, topology, intervals)

    @contextmanager
    def propagating_errors(self) -> Iterator[None]:
        """Send an error of the body to the other ranks, in the exchange in which they wait."""
        try:
            yield
        except Exception as error:
            for notify in (self._notify_in_store, self._notify_in_process_group):
                try:
                    notify(error)
                except Exception as failure:
                    # The process group itself may be the error.
                    logger.debug("could not notify the other ranks of {!r}: {}", error, failure)
            raise

    @contextmanager
    def naming_late_ranks(self) -> Iterator[None]:
        """Warn of ranks that have not come if the body, the first exchange, takes long."""
        came = threading.Event()
        in_background(lambda: self._name_late_ranks(came))
        try:
            yield
        finally:
            came.set()

    def _name_late_ranks(self, came: threading.Event) -> None:
        if not came.wait(WARN_AFTER_SECONDS) and (found := self.world).store is not None:
            warn_of(late_ranks(found.store, found.rank, found.world_size), found.rank)

    def _notify_in_store(self, error: Exception) -> None:
        meeting = self.meeting
        are_fixed = meeting.elastic is None or meeting.mesh is not None
        if are_fixed or self.membership or isinstance(error, PeerError):
            # Or they have met there already, or the store itself does not answer.
            return
        # If `elastic` is the wrong argument, the others have probably passed an `Elastic`, which is
        # loaded only now, and may be in the process group's store.
        elastic = self.elasticity or resolve_name("decent_optim_wrapper:Elastic")()
        world = self.world if self.elasticity else resolve_world(replace(meeting, elastic=elastic))
        elastic.tell_failure(world, error)

    def _notify_in_process_group(self, error: Exception) -> None:
        if self.elasticity:
            return
        if self.meeting.elastic is not None:
            # The others may never come here.
            for transport in self.transports:
                transport.limit_waits(_NOTIFY)
        rank = self.transports[0].initial_rank
        exchange(self.transports, (), f"rank {rank} raised {type(error).__name__}: {error}")


def check_same(text: str, transports: Sequence[Transport]) -> None:
    """Compare a description with the other ranks' descriptions; collective.

    Args:
        text: the description.
        transports: reach all ranks together.

    Raises:
        ValueError: the descriptions differ; raised on all ranks. It names a rank that differs from
            the first one, and the first difference.
    """
    own, digest = transports[0].initial_rank, hashlib.sha256(text.encode()).digest()
    rows = exchange(transports, [own, *struct.unpack("<4q", digest)])
    first = [0] * len(transports)
    differing = (rows != rows[tuple(first)])[..., 1:].any(dim=-1).nonzero().tolist()
    if differing:
        there, here = (_share(text, transports, place) for place in (differing[0], first))
        rank, *others = (int(rows[tuple(place)][0]) for place in (first, *differing))
        raise ValueError(
            f"the ranks disagree: rank {others[0]} has {difference(there, here, f'rank {rank}')}; "
            f"build the same model, optimizer and wrapper in the same order on every rank "
            f"(seen on rank {own}; ranks unlike rank {rank}: {others})"
        )


def exchange(transports: Sequence[Transport], numbers: Sequence[int], failure: str = "") -> Tensor:
    """Gather a few numbers of every rank; collective.

    Args:
        transports: reach all ranks together.
        numbers: at most 5 numbers of 64 bits.
        failure: why this rank cannot start; empty if it can.

    Returns:
        int64 tensor on the CPU, whose shape is the number of ranks along each dimension, and 5.

    Raises:
        OtherRankError: another rank cannot start.
    """
    row = [int(bool(failure)), *numbers, *[0] * (_NUMBERS - len(numbers))]
    rows = torch.tensor(row, dtype=torch.int64, device="cpu")
    # The transport that stacks last makes the first dimension of the result.
    for transport in reversed(transports):
        rows = transport.all_gather(rows)
    if failed := rows[..., 0].nonzero().tolist():
        reason = _share(failure, transports, failed[0])
        if not failure:
            raise OtherRankError(f"the ranks cannot start, because {reason}")
    return rows[..., 1:]


def _share(text: str, transports: Sequence[Transport], source: Sequence[int]) -> str:
    """The text of the rank at this position along each dimension, on every rank; collective."""
    for transport, place in zip(transports, source, strict=True):
        text = share_text(text, transport, place)
    return text
