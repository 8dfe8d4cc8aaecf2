"""Waits for other ranks: bounded, in the background, and given up where they lead nowhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from torch import Tensor

from decent_optim_wrapper.comm.background import Ongoing, in_background, within
from decent_optim_wrapper.comm.streams import Waitable

# What torch's backends can wait for. Who waits for the thread has a timeout of its own.
LONGEST_WAIT = timedelta(seconds=2_000_000)
# Interval of the checks whether a GPU has finished its work.
_POLL_SECONDS = 0.001
# How much later than at its timeout gloo may end a wait.
_SLACK_SECONDS = 1.0


class WireError(RuntimeError):
    """An exchange failed: a peer is gone, has closed its connections, or does not answer.

    Args:
        text: the error of torch.
        silent: whether the wait timed out; otherwise a connection was closed.
    """

    def __init__(self, text: str, silent: bool = False) -> None:
        super().__init__(text)
        self.silent = silent


class Awaited(NamedTuple):
    """A work to wait for.

    Args:
        work: the work.
        on_gpu: whether it tells whether it is done. A wait for it orders a stream, so that the
            thread that mixes must do so itself.
    """

    work: Waitable
    on_gpu: bool = False


class PendingMessage(NamedTuple):
    """A small message on its way from another rank.

    Args:
        rank: the sender.
        works: the works to wait for before the message is read.
        message: the tensor in which it arrives.
        suspects: the ranks of which one is lost if the message does not arrive.
    """

    rank: int
    works: list[Waitable]
    message: Tensor
    suspects: tuple[int, ...]


class Arrival(Ongoing):
    """Waits for works on a thread of its own: works of gloo do not tell whether they are done.

    Args:
        works: the works; nobody else waits for those that are not on a GPU.
        further: finds further works, on the thread; None if there are none.
    """

    def __init__(
        self, works: Sequence[Awaited], further: Callable[[], Sequence[Awaited]] | None = None
    ) -> None:
        # The thread does not hold the arrival: an error would keep alive all that it refers to.
        self._finished = [0]
        if works or further:
            wait = partial(_wait_for_each, tuple(works), further, self._finished)
            super().__init__(in_background(wait))
        else:
            super().__init__(Future())
            self.future.set_result(None)

    @property
    def finished(self) -> int:
        """How many works are done."""
        return self._finished[0]


class WaitLimits:
    """What ends a wait.

    Args:
        timeout: bound of every wait.
        should_stop: tells that another rank has lost a peer, or comes back, so that all members
            meet again and waiting is in vain; None if they never do.
    """

    def __init__(self, timeout: timedelta, should_stop: Callable[[], bool] | None = None) -> None:
        self.timeout = timeout
        self.should_stop = should_stop

    def tighten(self, timeout: timedelta) -> None:
        """Wait no longer than `timeout` from now on, and do not meet again."""
        self.timeout = min(timeout, self.timeout)
        self.should_stop = None


def wait_watchfully(works: Sequence[Waitable], limits: WaitLimits) -> None:
    """Wait on another thread, and check here whether to stop.

    Repeated short waits do not do: gloo closes all connections when a wait times out. If the check
    ends the wait here, closing the connections ends that of the thread.

    Raises:
        TimeoutError: the check has ended it.
    """

    def wait() -> None:
        for work in works:
            work.wait(limits.timeout)

    most = len(works) * limits.timeout.total_seconds() + _SLACK_SECONDS
    within(most, wait, limits.should_stop)


def _wait_for_each(
    works: Sequence[Awaited],
    further: Callable[[], Sequence[Awaited]] | None,
    finished: list[int],
) -> None:
    for work, on_gpu in works:
        if on_gpu:
            while not work.is_completed():
                time.sleep(_POLL_SECONDS)
        else:
            work.wait(LONGEST_WAIT)
        finished[0] += 1
    if further is not None:
        _wait_for_each(further(), None, finished)
