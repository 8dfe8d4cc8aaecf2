"""The ranks that save and load together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from decent_optim_wrapper.checkpoint.files import FileName
from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.waiting import wait_for_any
from decent_optim_wrapper.errors import PeerError
from decent_optim_wrapper.mesh.replica import Replica
from decent_optim_wrapper.warn import warn
from decent_optim_wrapper.wrapper import DecentOptimWrapper

Result = TypeVar("Result")

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
    def rank(self) -> int:
        """This rank, as numbered at the start."""
        return self._optimizer.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that take part now."""
        return self._optimizer.world_size

    @property
    def replica(self) -> Replica:
        """The ranks of a mesh that together hold one copy of the model."""
        return self._optimizer.replica

    @property
    def warns(self) -> bool:
        """Whether this rank warns for all of them."""
        return self.rank == self.replica.shard == 0

    def own_name(self) -> FileName:
        """The name of this rank's file."""
        return self._name(self.rank, self.replica.shard)

    def _name(self, rank: int, shard: int) -> FileName:
        return FileName(rank, self.world_size, shard, self.replica.size)

    def gather(self, *numbers: int) -> Tensor:
        """Stack numbers of all ranks; collective.

        Returns:
            int64 tensor of shape (files of a set, len(numbers)); the shards of a replica follow
            each other.

        Raises:
            PeerError: a rank did not answer.
        """
        answers = self._optimizer.all_gather(torch.tensor(numbers, device="cpu"))
        if len(answers) != self.world_size * self.replica.size:
            raise PeerError(
                f"rank {self.rank}: expected all {self.world_size} ranks to take part in a "
                f"checkpoint, but {len(answers)} answered: a rank was lost before; look at the "
                f"other ranks for the first error"
            )
        return answers

    def rows(self, which: Tensor) -> Iterator[tuple[int, int]]:
        """The rank and the shard of each row of `gather` that is True."""
        return (divmod(row, self.replica.size) for row in which.nonzero().flatten().tolist())

    def in_touch(self, action: Callable[[], Result]) -> Result:
        """Run an action on every rank, which may take any time; collective.

        Meanwhile the ranks meet again and again, so that none waits for another one longer than its
        timeout.

        Raises:
            PeerError: a rank was lost. The action has ended on this rank, and its own error is
                raised first.
        """
        future = in_background(action)
        try:
            everywhere = False
            while not everywhere:
                with suppress(TimeoutError):
                    wait_for_any([future], _TOUCH_SECONDS)
                everywhere = bool(self.gather(int(future.done()))[:, 0].all())
        except Exception:
            # Values must not change while they are being written.
            future.result()
            raise
        return future.result()

    def warn(self, place: Path, problem: str, bad: Tensor) -> None:
        """Warn once for all ranks of files of a set.

        Args:
            place: the folder of the set.
            problem: what is wrong, before the names of the files.
            bad: for each row of `gather`, whether its file is bad.
        """
        if self.warns:
            names = ", ".join(str(self._name(*each)) for each in self.rows(bad))
            warn(f"checkpoint {place} {problem} {names}")
