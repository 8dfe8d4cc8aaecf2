"""The start: an error on one rank before the ranks have agreed is raised on all of them.

Every rank takes part in the same few exchanges. A rank that fails between two of them takes part in
the next one with its error, so that no rank waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from decent_optim_wrapper.membership.arguments import Place, resolve_process_group, resolve_store
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

    @property
    def elastic(self) -> bool:
        """Whether the ranks meet in a store, without a process group for the exchanges."""
        return isinstance(self.place.elastic, Elastic)

    @cached_property
    def process_group(self) -> Any | None:
        """The process group; None in a world of one rank, or if the ranks meet in a store."""
        return None if self.elastic else resolve_process_group(self.place.process_group)

    @cached_property
    def transport(self) -> Transport:
        """Connects the ranks of the process group."""
        try:
            timeout = read_timeout(self.place.timeout)
        except (TypeError, ValueError):
            # The settings reject it later; the others are notified with the group's own timeout.
            timeout = None
        return Transport.over(self.process_group, timeout)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Send an error of the body to the other ranks, in the exchange in which they wait."""
        try:
            yield
        except Exception as error:
            self._tell(error)
            raise

    def _tell(self, error: Exception) -> None:
        for tell in (self._tell_in_store, self._tell_in_process_group):
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
