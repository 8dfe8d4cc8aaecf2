"""The ranks that save and load together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import compress

import torch

from decent_optim_wrapper.checkpoint.saved_set import FileName, SavedSet
from decent_optim_wrapper.comm.background import Result, in_background
from decent_optim_wrapper.comm.waiting import wait_for_any
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wrapper import DecentOptimWrapper

# How often the ranks meet while one of them writes or reads a file.
_TOUCH_SECONDS = 0.25


class SavingRanks:
    """The ranks of a wrapper, each of which has one file in a set.

    Args:
        optimizer: the wrapper.
    """

    def __init__(self, optimizer: DecentOptimWrapper) -> None:
        self._optimizer = optimizer

    @property
    def own(self) -> FileName:
        """The name of this rank's file."""
        wrapper, replica = self._optimizer, self._optimizer.replica
        return FileName(wrapper.rank, wrapper.world_size, replica.shard, replica.size)

    @property
    def names(self) -> list[FileName]:
        """The names of all files; the shards of a replica follow each other."""
        own, members = self.own, self._optimizer.members
        return [own._replace(rank=r, shard=s) for r in members for s in range(own.shards)]

    def files_of(self, saved: SavedSet) -> list[FileName]:
        """The files of a set that this rank reads: only its own if exactly these ranks saved it."""
        if saved.digests.keys() == {*self.names}:
            return [self.own]
        return [name for name in saved.digests if name.shard == self.own.shard]

    def gather(self, *numbers: int, same_round: bool = False) -> list[tuple[int, ...]]:
        """The numbers of every rank, in the order of `names`; collective.

        Args:
            numbers: of this rank.
            same_round: as in `DecentOptimWrapper.all_gather`.

        Raises:
            PeerError: a rank did not answer.
        """
        answers = self._optimizer.all_gather(torch.tensor(numbers, device="cpu"), same_round)
        return [tuple(row) for row in answers.tolist()]

    def together(self, action: Callable[[], Result]) -> tuple[Result, str]:
        """Run an action on every rank, which may take any time; collective, and after `gather`.

        Meanwhile the ranks meet again and again, so that none waits for another one longer than its
        timeout.

        Returns:
            This rank's result, and the ranks on which the action has failed, for messages; empty
            if there are none.

        Raises:
            PeerError: a rank was lost. The action has ended on this rank. An error of the action
                on this rank is raised first.
        """
        future = in_background(action)
        try:
            # The state of every rank: 0 while it runs, then 1, or 2 if it has failed.
            states: list[tuple[int, ...]] = [(0,)]
            while (0,) in states:
                with suppress(TimeoutError):
                    wait_for_any([future], _TOUCH_SECONDS)
                state = 0 if not future.done() else 2 if future.exception() else 1
                # Nothing is mixed into values that are being written.
                states = self.gather(state, same_round=True)
        except Exception:
            # Values must not change while they are being written.
            future.result()
            raise
        return future.result(), self.savers(state == (2,) for state in states)

    def savers(self, which: Iterable[bool]) -> str:
        """Some of the ranks, for messages.

        Args:
            which: for every rank, in the order of `names`.
        """
        return ", ".join(name.saver for name in compress(self.names, which))

    def warn(self, text: str) -> None:
        """Warn once for all ranks."""
        if self.own == self.names[0]:
            warn(text)
