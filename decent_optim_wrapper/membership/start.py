"""The start: an error on one rank before the ranks have agreed is raised on all of them.

Every rank takes part in the same few exchanges. A rank that fails between two of them takes part in
the next one with its error, so that no rank waits for it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from decent_optim_wrapper.comm.state_transfer import share_text
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.config import Elastic, read_timeout
from decent_optim_wrapper.gossip.replica import Dimension
from decent_optim_wrapper.membership.arguments import (
    Place,
    other_groups,
    resolve_process_group,
    resolve_store,
)
from decent_optim_wrapper.membership.rendezvous import Rendezvous, tell_failure

# A SHA-256 digest. All exchanges have one size: a failing rank does not know which one is next.
_NUMBERS = 4
# How long a rank that cannot start waits for others, which may be meeting elsewhere.
_TELL = timedelta(seconds=5)


class Start:
    """Reaches the other ranks while this one starts.

    Args:
        place: the arguments, not checked yet.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._built = Rendezvous.built
        # Whether the other dimensions of the mesh have been told how the start went.
        self._told_mesh = False

    @property
    def elastic(self) -> bool:
        """Whether the ranks meet in a store, without a process group for the exchanges."""
        return isinstance(self.place.elastic, Elastic)

    @cached_property
    def process_group(self) -> Any | None:
        """The process group; None in a world of one rank, or if the ranks meet in a store."""
        return None if self.elastic else resolve_process_group(self.place)

    @cached_property
    def transport(self) -> Transport:
        """Connects the ranks of the process group."""
        return Transport.over(self.process_group, self._timeout)

    @cached_property
    def dimensions(self) -> list[Dimension]:
        """The other dimensions of the mesh."""
        groups = other_groups(self.place)
        return [Dimension(group, Transport.over(group, self._timeout)) for group in groups]

    @property
    def _timeout(self) -> timedelta | None:
        try:
            return read_timeout(self.place.timeout)
        except (TypeError, ValueError):
            # The settings reject it later; the others are notified with the group's own timeout.
            return None

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Send an error of the body to the other ranks, in the exchange in which they wait."""
        try:
            yield
        except Exception as error:
            self._tell(error)
            raise

    @contextmanager
    def over_the_mesh(self, description: Callable[[], str]) -> Iterator[None]:
        """Fail on all ranks of the mesh if the body fails on one, or if descriptions differ.

        The ranks of one gossip group have told each other already; each of them tells those along
        the other dimensions.

        Args:
            description: of what must be the same everywhere, known after the body.

        Raises:
            ValueError: a rank cannot start, or has another description.
        """
        try:
            yield
        except Exception as error:
            self._tell_mesh(error)
            raise
        failure = self._exchange_over_mesh(description(), None)
        if failure is not None:
            raise failure

    def _tell(self, error: Exception) -> None:
        for tell in (self._tell_in_store, self._tell_in_process_group, self._tell_mesh):
            try:
                tell(error)
            except Exception as untold:
                # If the process group itself is the error, the others cannot be reached.
                logger.debug("the other ranks could not be told of {!r}: {}", error, untold)

    def _tell_in_store(self, error: Exception) -> None:
        if self.place.elastic is None or Rendezvous.built != self._built:
            return
        # If `elastic` is the wrong argument, the others may be in the process group's store.
        place = self.place if self.elastic else replace(self.place, elastic=Elastic())
        found = resolve_store(place)
        tell_failure(found.store, found.rank, error)

    def _tell_in_process_group(self, error: Exception) -> None:
        if self.elastic:
            return
        if self.place.elastic is not None:
            # It is not known whether the others come here.
            self.transport.limit_waits(_TELL)
        exchange(self.transport, (), f"{type(error).__name__}: {error}")

    def _tell_mesh(self, error: Exception) -> None:
        if not self._told_mesh:
            self._exchange_over_mesh("", error)

    def _exchange_over_mesh(self, text: str, failure: Exception | None) -> Exception | None:
        """Compare along one dimension after the other, and pass on what is wrong."""
        self._told_mesh = True
        for dimension in self.dimensions:
            try:
                if failure is None:
                    check_same(text, dimension.transport)
                else:
                    exchange(dimension.transport, (), f"{type(failure).__name__}: {failure}")
            except Exception as error:
                failure = failure or error
        return failure


def check_same(text: str, transport: Transport) -> None:
    """Compare a description with those of the other ranks; collective.

    Raises:
        ValueError: on every rank; names a rank that differs from rank 0 and the first thing in
            which it does.
    """
    digest = hashlib.sha256(text.encode()).digest()
    digests = exchange(transport, struct.unpack("<4q", digest))
    differing = (digests != digests[0]).any(dim=1).nonzero().flatten().tolist()
    if differing:
        there, here = (share_text(text, transport, source) for source in (differing[0], 0))
        raise ValueError(
            f"the ranks disagree: rank {differing[0]} has {difference(there, here, 'rank 0')}; "
            f"build the same model, optimizer and wrapper in the same order on every rank "
            f"(seen on rank {transport.name}; ranks unlike rank 0: {differing})"
        )


def exchange(transport: Transport, numbers: Sequence[int], failure: str = "") -> Tensor:
    """Gather a few numbers of every rank; collective.

    Args:
        transport: connects the ranks.
        numbers: at most 4, of 64 bits.
        failure: why this rank cannot start; empty if it can.

    Returns:
        int64 tensor of shape (world_size, 4), on the CPU.

    Raises:
        ValueError: another rank cannot start.
    """
    row = [int(bool(failure)), *numbers, *[0] * (_NUMBERS - len(numbers))]
    rows = transport.all_gather(torch.tensor(row, dtype=torch.int64, device="cpu"))
    failed = rows[:, 0].nonzero().flatten().tolist()
    if failed:
        reason = share_text(failure, transport, failed[0])
        if not failure:
            raise ValueError(
                f"rank {transport.name}: the ranks cannot start, because rank "
                f"{transport.members[failed[0]]} raised {reason} (ranks that failed: {failed})"
            )
    return rows[:, 1:]


def difference(theirs: str, ours: str, whose: str) -> str:
    """The first line in which two descriptions differ, in words.

    Args:
        theirs: one description.
        ours: another.
        whose: the owner of `ours`.
    """
    pairs = zip_longest(theirs.split("\n"), ours.split("\n"), fillvalue="nothing more")
    one, other = next(pair for pair in pairs if pair[0] != pair[1])
    return f"<{one}> where {whose} has <{other}>"
