"""The start: an error on one rank before the ranks have agreed is raised on all of them.

Every rank takes part in the same few exchanges. A rank that fails between two of them takes part in
the next one with its error, so that no rank waits for it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from decent_optim_wrapper.comm.state_transfer import difference, share_text
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.config import Elastic, read_timeout
from decent_optim_wrapper.elastic.rendezvous import Rendezvous
from decent_optim_wrapper.errors import PeerError
from decent_optim_wrapper.mesh.replica import Dimension
from decent_optim_wrapper.start.arguments import Arguments, resolve_process_group, resolve_store

# A SHA-256 digest. All exchanges have this size: a failing rank does not know the next one.
_NUMBERS = 4
# How long a rank that cannot start waits for others, which may be meeting elsewhere.
_TELL = timedelta(seconds=5)


class OtherRankError(ValueError):
    """Another rank cannot start.

    Args:
        reason: the rank and its error.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the ranks cannot start, because {reason}")
        self.reason = reason


class Start:
    """Reaches the other ranks while this one starts.

    Args:
        arguments: the arguments, not checked yet.
    """

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self._built = Rendezvous.built
        # Whether the ranks of a mesh know that they have the same one. Until then, an error is sent
        # along all its dimensions.
        self._met_in_mesh = False

    @property
    def elastic(self) -> bool:
        """True if the ranks meet in a store, without a process group for the exchanges."""
        return isinstance(self.arguments.elastic, Elastic)

    @cached_property
    def process_group(self) -> Any | None:
        """The process group; None in a world of one rank, or if the ranks meet in a store."""
        return None if self.elastic else resolve_process_group(self.arguments)

    @cached_property
    def transport(self) -> Transport:
        """Connects the ranks of the process group."""
        return Transport.over(self.process_group, self._timeout)

    @property
    def gossip_ranks(self) -> Sequence[int] | None:
        """The ranks along the mesh's dimension of the gossip; None without a mesh."""
        group = None if self.arguments.mesh is None else self.process_group
        return None if group is None else dist.get_process_group_ranks(group)

    @property
    def dimensions(self) -> list[Dimension]:
        """The other dimensions of the mesh."""
        return [each for name, each in self._mesh.items() if name != self.arguments.gossip_dim]

    @cached_property
    def _mesh(self) -> dict[str, Dimension]:
        """All dimensions of the mesh by name; none without a mesh."""
        mesh = self.arguments.mesh
        if not isinstance(mesh, DeviceMesh):
            return {}
        groups = {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()}
        return {name: Dimension(group, self._timeout) for name, group in groups.items()}

    @property
    def _timeout(self) -> timedelta | None:
        try:
            return read_timeout(self.arguments.timeout)
        except (TypeError, ValueError):
            # `Settings` rejects it later; the others are notified with the group's own timeout.
            return None

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Send an error of the body to the other ranks, in the exchange in which they wait."""
        try:
            yield
        except Exception as error:
            self._notify(error)
            raise

    @contextmanager
    def over_the_mesh(self) -> Iterator[list[str]]:
        """Fail on all ranks of the mesh if the body fails on one, or if the ranks differ.

        The ranks of one gossip group notify each other in the body; each of them notifies the ranks
        along the other dimensions.

        Yields:
            An empty list, for the lines of a description that must be the same on all ranks.

        Raises:
            ValueError: a rank cannot start, or has another description.
        """
        # Ranks that gossip along different dimensions would not find each other in the body.
        self._agree(
            self._mesh.values(), f"gossip_dim={self.arguments.gossip_dim!r}, {self.arguments.mesh}"
        )
        self._met_in_mesh = True
        description: list[str] = []
        try:
            yield description
        except Exception as error:
            self._pass_on(self.dimensions, error)
            raise
        self._agree(self.dimensions, "\n".join(description))

    def _notify(self, error: Exception) -> None:
        if self.arguments.mesh is not None and not self._met_in_mesh:
            with _at_best(error):
                self._pass_on(self._mesh.values(), error)
            return
        with _at_best(error):
            self._notify_in_store(error)
        with _at_best(error):
            self._notify_in_process_group(error)

    def _notify_in_store(self, error: Exception) -> None:
        if self.arguments.elastic is None or Rendezvous.built != self._built:
            return
        if isinstance(error, PeerError):
            # The store itself does not answer.
            return
        # If `elastic` is the wrong argument, the others may be in the process group's store.
        arguments = self.arguments if self.elastic else replace(self.arguments, elastic=Elastic())
        world = resolve_store(arguments)
        Rendezvous.tell_failure(world.store, world.rank, error)

    def _notify_in_process_group(self, error: Exception) -> None:
        if self.elastic:
            return
        if self.arguments.elastic is not None:
            # The others may never come here.
            self.transport.limit_waits(_TELL)
        exchange(self.transport, (), self._reason(error))

    def _agree(self, dimensions: Iterable[Dimension], text: str) -> None:
        """Compare along one dimension after the other; an error goes to the remaining ones."""
        remaining = iter(dimensions)
        for dimension in remaining:
            try:
                check_same(text, dimension.transport)
            except Exception as error:
                self._pass_on(remaining, error)
                raise

    def _pass_on(self, dimensions: Iterable[Dimension], error: Exception) -> None:
        """Send an error along these dimensions."""
        for dimension in dimensions:
            with _at_best(error):
                exchange(dimension.transport, (), self._reason(error))

    def _reason(self, error: Exception) -> str:
        """The description of an error for the other ranks."""
        if isinstance(error, OtherRankError):
            return error.reason
        rank = self.transport.initial_rank if self.arguments.mesh is None else dist.get_rank()
        return f"rank {rank} raised {type(error).__name__}: {error}"


@contextmanager
def _at_best(error: Exception) -> Iterator[None]:
    """Notify others of an error in the body, if they can be reached.

    They cannot if the process group itself is the error.
    """
    try:
        yield
    except Exception as untold:
        logger.debug("the other ranks could not be told of {!r}: {}", error, untold)


def check_same(text: str, transport: Transport) -> None:
    """Compare a description with the other ranks' descriptions; collective.

    Raises:
        ValueError: the descriptions differ; raised on all ranks. It names a rank that differs from
            rank 0, and the first difference.
    """
    digest = hashlib.sha256(text.encode()).digest()
    digests = exchange(transport, struct.unpack("<4q", digest))
    differing = (digests != digests[0]).any(dim=1).nonzero().flatten().tolist()
    if differing:
        there, here = (share_text(text, transport, source) for source in (differing[0], 0))
        first, *others = (transport.members[place] for place in (0, *differing))
        raise ValueError(
            f"the ranks disagree: rank {others[0]} has {difference(there, here, f'rank {first}')}; "
            f"build the same model, optimizer and wrapper in the same order on every rank "
            f"(seen on rank {transport.initial_rank}; ranks unlike rank {first}: {others})"
        )


def exchange(transport: Transport, numbers: Sequence[int], failure: str = "") -> Tensor:
    """Gather a few numbers of every rank; collective.

    Args:
        transport: connects the ranks.
        numbers: at most 4 numbers of 64 bits.
        failure: why this rank cannot start; empty if it can.

    Returns:
        int64 tensor of shape (world_size, 4), on the CPU.

    Raises:
        OtherRankError: another rank cannot start.
    """
    row = [int(bool(failure)), *numbers, *[0] * (_NUMBERS - len(numbers))]
    rows = transport.all_gather(torch.tensor(row, dtype=torch.int64, device="cpu"))
    failed = rows[:, 0].nonzero().flatten().tolist()
    if failed:
        reason = share_text(failure, transport, failed[0])
        if not failure:
            raise OtherRankError(reason)
    return rows[:, 1:]
