"""Waits for other ranks: with a bound, in the background, and given up if a check says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from decent_optim_wrapper.comm.background import Result, in_background
from decent_optim_wrapper.errors import text_of

# The longest wait of torch's backends. The caller that waits for the thread has its own timeout.
LONGEST_WAIT = timedelta(seconds=2_000_000)
# Interval of the checks whether a rank is lost.
_CHECK = timedelta(seconds=1)
# How long a collective may go on once one is.
_LOST = timedelta(seconds=4)
# Interval of the checks whether to keep waiting.
_LOOK_SECONDS = 0.05
# An interval that is longer on a busy machine counts as this.
_LONGEST_LOOK_SECONDS = 0.25
# Interval of the checks whether a GPU has finished its work.
_POLL_SECONDS = 0.001


def never() -> bool:
    """Give up no wait: in place of a check that may end one."""
    return False


class WireError(RuntimeError):
    """An exchange failed: a peer is gone, has closed its connections, or does not answer.

    Args:
        text: the error of torch.
        silent: whether the wait timed out; otherwise a connection was closed.
    """

    def __init__(self, text: str, silent: bool = False) -> None:
        super().__init__(text)
        self.silent = silent


def raise_if_closed(error: RuntimeError) -> None:
    """Raise that a connection is closed already if nothing could be sent; not if memory is full."""
    if not isinstance(error, torch.OutOfMemoryError):
        raise WireError(text_of(error)) from error


class Waitable(Protocol):
    """A work to wait for, of torch or made of several."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Wait until it is done; once, unless it says otherwise."""

    def is_completed(self) -> bool:
        """Return whether it is done; works of gloo do not know before they are waited for."""


class Collective:
    """A collective of gloo that ends soon after a rank has failed, or has lost another one.

    gloo forgets a send whose write fails when the receiver's notice arrives. The collective would
    then go on until its timeout, also on other ranks, although all connections may be closed.
    Nothing may be sent to find that out: it would break a connection that the other end has closed
    and on which data is still on its way.

    Args:
        work: the work of torch.
        is_lost: returns whether a rank has noted that it failed, or has lost another one.
    """

    def __init__(self, work: Waitable, is_lost: Callable[[], bool]) -> None:
        self._work, self._is_lost = work, is_lost

    def wait(self, timeout: timedelta = LONGEST_WAIT) -> None:
        """Wait until it is done.

        Raises:
            RuntimeError: it has failed, or not ended within the timeout.
        """
        while timeout > _CHECK and not self._work.is_completed():
            with suppress(RuntimeError):
                self._work.wait(_CHECK)
                return
            timeout -= _CHECK
            if self._is_lost():
                # What is on its way may still arrive.
                timeout = min(timeout, _LOST)
        self._work.wait(timeout)

    def is_completed(self) -> bool:
        """Return whether it is done."""
        return self._work.is_completed()


class PendingMessage(NamedTuple):
    """A small message on its way from another rank.

    Args:
        rank: the sender.
        works: the works to wait for before the message is read.
        message: the tensor in which it arrives.
    """

    rank: int
    works: list[Waitable]
    message: Tensor


class Expected(NamedTuple):
    """Works to wait for, and the bucket and the ranks to name if they fail.

    Args:
        works: the works; receives come first.
        bucket: the position of the bucket that an error names.
        suspects: the ranks, by position.
        on_gpu: whether the works are a GPU's, which know whether they are done. A wait for
            them orders a stream, so the thread that mixes must wait itself.
    """

    works: list[Waitable]
    bucket: int
    suspects: tuple[int, ...]
    on_gpu: bool = False


class Arrival:
    """Waits for works on a separate thread, since works of gloo do not know if they are done.

    Args:
        expected: the works; no other thread may wait for works that are not on a GPU.
        further: called on the thread once these are done, finds further works; None if there are
            none.
    """

    def __init__(
        self, expected: Sequence[Expected], further: Callable[[], Sequence[Expected]] | None = None
    ) -> None:
        # The thread does not hold the arrival: an error would keep alive all that it refers to.
        self._begun: list[Expected] = []
        # Is done when everything has arrived, or something has failed.
        self.future: Future[None] = Future()
        if expected or further:
            self.future = in_background(partial(_wait_for_each, expected, further, self._begun))
        else:
            self.future.set_result(None)

    def lost(self) -> Expected | None:
        """The works that did not arrive, after the wait has failed; None if not known."""
        return self._begun[-1] if self._begun else None


def _wait_for_each(
    expected: Sequence[Expected],
    further: Callable[[], Sequence[Expected]] | None,
    begun: list[Expected],
) -> None:
    # First one receive of each: gloo may forget a send whose connection closes, but no receive. A
    # thread that waited for the send would keep its connections until the process ends.
    for part in (slice(1), slice(None)):
        for each in expected:
            begun.append(each)
            _wait_for(each.works[part], each)
    if further is not None:
        # These have arrived: it may be any rank for which `further` waits.
        begun.clear()
        _wait_for_each(further(), None, begun)


def _wait_for(works: Sequence[Waitable], expected: Expected) -> None:
    """Wait for some of the expected works."""
    for work in works:
        if expected.on_gpu:
            while not work.is_completed():
                time.sleep(_POLL_SECONDS)
        else:
            work.wait(LONGEST_WAIT)
            # A second wait for a work of gloo would last forever.
            expected.works.remove(work)


def wait_for_any(
    futures: Collection[Future[Any]], seconds: float, should_stop: Callable[[], bool] = never
) -> None:
    """Wait until one of the futures is done, for a limited time.

    Args:
        futures: one or more.
        seconds: bound of the wait.
        should_stop: returns True to give up earlier.

    Raises:
        TimeoutError: none of them is done.
    """
    waited, last = 0.0, time.monotonic()
    while not wait(futures, min(_LOOK_SECONDS, seconds), FIRST_COMPLETED).done:
        now = time.monotonic()
        # Time in which this process was stopped does not count: the answer may have arrived.
        waited, last = waited + min(now - last, _LONGEST_LOOK_SECONDS), now
        if waited > seconds or should_stop():
            raise TimeoutError(f"given up within {seconds:.1f} s")


def within(
    seconds: float, action: Callable[[], Result], should_stop: Callable[[], bool] = never
) -> Result:
    """Run an action on a daemon thread, and wait for it for a limited time.

    An abandoned action continues, and its result is ignored.

    Args:
        seconds: bound of the wait.
        action: the action, which may block outside of Python.
        should_stop: returns True to abandon it earlier.

    Raises:
        TimeoutError: the action was abandoned.
    """
    future = in_background(action)
    try:
        wait_for_any([future], seconds, should_stop)
        return future.result()
    finally:
        # The future holds the error, whose traceback holds this frame. The cycle would keep alive
        # what the action used, such as connections, until the next garbage collection.
        del future
