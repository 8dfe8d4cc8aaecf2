"""Actions on threads of their own, which may block outside of Python, and waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

Result = TypeVar("Result")

# Interval of the checks whether to keep waiting.
_LOOK_SECONDS = 0.05
# An interval that is longer on a busy machine counts as this.
_LONGEST_LOOK_SECONDS = 0.25
_THREAD_NAME = "decent-background"


def is_background() -> bool:
    """Whether this thread was started by `in_background`."""
    return threading.current_thread().name == _THREAD_NAME


def in_background(action: Callable[[], Result]) -> Future[Result]:
    """Run an action on a daemon thread, which does not hold up the end of the process."""
    future: Future[Result] = Future()
    threading.Thread(target=_run, args=(future, action), daemon=True, name=_THREAD_NAME).start()
    return future


class Ongoing:
    """What goes on in the background.

    Args:
        future: is done when it is over.
    """

    def __init__(self, future: Future[None]) -> None:
        self.future = future

    @property
    def is_over(self) -> bool:
        """Whether it is done, or has failed."""
        return self.future.done()


def wait_for_any(
    futures: Collection[Future[Any]], seconds: float, should_stop: Callable[[], bool] | None = None
) -> None:
    """Wait until one of the futures is done, for a limited time.

    Args:
        futures: one or more.
        seconds: bound of the wait.
        should_stop: tells whether to give up earlier.

    Raises:
        TimeoutError: none of them is done.
    """
    waited, last = 0.0, time.monotonic()
    while not wait(futures, min(_LOOK_SECONDS, seconds), FIRST_COMPLETED).done:
        now = time.monotonic()
        # Time in which this process was stopped does not count: the answer may be there.
        waited, last = waited + min(now - last, _LONGEST_LOOK_SECONDS), now
        if waited > seconds or (should_stop is not None and should_stop()):
            raise TimeoutError(f"given up within {seconds:.1f} s")


def within(
    seconds: float, action: Callable[[], Result], should_stop: Callable[[], bool] | None = None
) -> Result:
    """Run an action on a daemon thread, and wait for it for a limited time.

    An abandoned action runs on, and its result is ignored.

    Args:
        seconds: bound of the wait.
        action: the action, which may block outside of Python.
        should_stop: tells whether to abandon it earlier.

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


def _run(future: Future[Result], action: Callable[[], Result]) -> None:
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)
    finally:
        del future, action
