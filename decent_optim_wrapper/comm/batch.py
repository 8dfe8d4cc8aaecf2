"""Exchanges on a GPU that start as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from decent_optim_wrapper.comm.waiting import Waitable

Fail = Callable[[BaseException], None]


class Batches:
    """What starts on GPUs: at once, or a round together, once everything of it is known."""

    def __init__(self) -> None:
        # By communicator and GPU, in the order of the buckets, which is the same on all ranks. None
        # if everything starts at once.
        self._open: dict[tuple[Any, torch.device], Batch] | None = None

    @property
    def collects(self) -> bool:
        """Whether operations wait for `launch`."""
        return self._open is not None

    def collect(self) -> None:
        """Start nothing before `launch`."""
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
            batch.launch(fail)
        return batch

    def launch(self, fail: Fail) -> None:
        """Start what was collected; `fail` as in `Batch.launch`."""
        batches, self._open = self._open or {}, None
        while batches:
            batches.pop(next(iter(batches))).launch(fail)

    def drop(self) -> None:
        """Start nothing of it."""
        self._open = None


class Batch:
    """Operations of one communicator of NCCL that start together, as one kernel; a work.

    As `dist.batch_isend_irecv`, for any communicator and also for sums. The operations are noted
    first: work of the GPU that a later one sends does not come between them.

    Args:
        group: the communicator.
        device: the GPU.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._operations: list[Callable[[], object]] = []
        self._work: Waitable | None = None

    def add(self, *operations: Callable[[], object]) -> Batch:
        """Start these with `launch`, too."""
        self._operations += operations
        return self

    def launch(self, fail: Fail) -> None:
        """Start everything.

        Args:
            fail: called with the error if only some of the operations have started, for which the
                peers would wait in vain: nothing ends them but aborting the communicator.
        """
        operations, self._operations = self._operations, []
        self._group._start_coalescing(self._device)
        has_begun = False
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
        self._work = self._group._end_coalescing(self._device)

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        """Order the current stream behind everything, as `OnStream.wait` does."""
        if self._work is None:
            raise RuntimeError("a batch expects to be launched before a stream waits for it")
        self._work.wait()

    def is_completed(self) -> bool:
        """Whether the GPU has finished everything, or it could not start."""
        # Nothing is left of it after a launch that failed, for which no thread must wait.
        return not self._operations if self._work is None else self._work.is_completed()
