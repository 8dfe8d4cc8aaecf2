"""Exchanges on a GPU that start as one kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from typing import Any

import torch

from decent_optim_wrapper.comm.waiting import Waitable

Fail = Callable[[BaseException], None]

# Large groups of operations may hang (pytorch#174288).
_MOST_OPERATIONS = 32


class Batches:
    """What starts on GPUs: at once, or a round together, once everything of it is known."""

    def __init__(self) -> None:
        # By communicator and GPU, in the order of the buckets, which is the same on all ranks. None
        # if everything starts at once.
        self._open: dict[tuple[Any, torch.device], Batch] | None = None

    @property
    def collects(self) -> bool:
        """True if operations wait for `start`."""
        return self._open is not None

    def collect(self) -> None:
        """Start nothing before `start`."""
        self._open = {}

    def add(
        self, group: Any, device: torch.device, fail: Fail, *operations: Callable[[], object]
    ) -> Batch:
        """Start operations of a communicator on a GPU; arguments as of `Batch`.

        Returns:
            The work, of this and perhaps of other operations.
        """
        batches = {} if self._open is None else self._open
        batch = batches.setdefault((group, device), Batch(group, device)).add(*operations)
        if self._open is None:
            batch.start(fail)
        return batch

    def start(self, fail: Fail) -> None:
        """Start what was collected; `fail` as in `Batch.start`."""
        batches, self._open = self._open or {}, None
        while batches:
            batches.pop(next(iter(batches))).start(fail)

    def drop(self) -> None:
        """Start nothing of it."""
        self._open = None


class Batch:
    """Operations of one communicator of NCCL that start together, as few kernels; a work.

    As `dist.batch_isend_irecv`, for any communicator and also for sums. The operations are noted
    first: work of the GPU that a later one sends does not come between them.

    Args:
        group: the communicator.
        device: the GPU.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._device = device
        # Those that must start in the same kernel, such as a send and its receive, as one entry.
        self._operations: list[tuple[Callable[[], object], ...]] = []
        self._works: list[Waitable] = []

    def add(self, *operations: Callable[[], object]) -> Batch:
        """Start these with `start`, too."""
        self._operations.append(operations)
        return self

    def start(self, fail: Fail) -> None:
        """Start everything.

        Args:
            fail: called with the error if only some of the operations have started, for which the
                peers would wait in vain: nothing ends them but aborting the communicator.
        """
        entries, self._operations = self._operations, []
        # The same cuts on all ranks, which add the same.
        at_once = _MOST_OPERATIONS // max(map(len, entries))
        for start in range(0, len(entries), at_once):
            self._start(chain.from_iterable(entries[start : start + at_once]), fail)

    def _start(self, operations: Iterable[Callable[[], object]], fail: Fail) -> None:
        """Start some operations as one kernel."""
        self._group._start_coalescing(self._device)
        has_begun = bool(self._works)
        try:
            for operation in operations:
                operation()
                has_begun = True
        except BaseException as error:
            # No communicator is aborted in the middle of a batch.
            with suppress(RuntimeError):
                self._group._end_coalescing(self._device)
            if has_begun:
                fail(error)
            raise
        self._works.append(self._group._end_coalescing(self._device))

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        """Order the current stream behind everything, as `OnStream.wait` does."""
        if not self._works:
            raise RuntimeError("a batch expects to be started before a stream waits for it")
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Return whether the GPU has finished everything, or it could not start."""
        # Nothing is left of it after a start that failed, for which no thread must wait.
        return not self._operations and all(work.is_completed() for work in self._works)
