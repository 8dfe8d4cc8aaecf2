"""Sends messages of several sizes in the order in which they are needed, a few at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from heapq import heappop, heappush
from itertools import count
from typing import Any

from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.waiting import LONGEST_WAIT, Waitable

# With one, the wire would be idle from the end of a message to the start of the next.
_AT_ONCE = 2


class QueuedSend:
    """A message that is sent in its turn; a work to wait for.

    Args:
        start: starts sending it.
    """

    def __init__(self, start: Callable[[], Waitable]) -> None:
        self._start = start
        # Done when the message is sent, or has failed.
        self.sent: Future[None] = Future()

    def begin(self) -> Waitable | None:
        """Start sending it; None if that failed, which `wait` then raises."""
        try:
            return self._start()
        except BaseException as error:
            self.sent.set_exception(error)
            return None

    def wait(self, timeout: timedelta = LONGEST_WAIT) -> Any:
        """Wait until it is sent; any number of times."""
        self.sent.result(timeout.total_seconds())

    def is_completed(self) -> bool:
        """Return whether it is sent."""
        return self.sent.done()


class SendQueue:
    """Sends the message that is needed first; a message in progress is not interrupted.

    Connections send in the order of posting, so an urgent message would wait for all that were
    posted before. The messages of a peer must be received at any time and in any order, since the
    peer chooses its own.
    """

    def __init__(self) -> None:
        # Whether messages wait for their turn instead of being posted at once.
        self.is_open = False
        self._lock = threading.Lock()
        self._beginning = threading.Lock()
        self._turns = count()
        # When a message is needed, by its position.
        self._needed: dict[int, int] = {}
        # A heap of the waiting messages, by need and then by turn.
        self._waiting: list[tuple[int, int, QueuedSend]] = []
        # The number of messages in progress.
        self._under_way = 0

    def open(self) -> None:
        """Send the messages that are added from now on in the order of need."""
        self.is_open = True

    def plan(self, position: int, needed: int) -> None:
        """Send the message of this position before those that are needed later."""
        self._needed[position] = needed

    def add(self, start: Callable[[], Waitable], position: int) -> Waitable:
        """Send a message in its turn; at once unless the queue is open.

        Args:
            start: function that starts sending it.
            position: as in `plan`; messages that were not planned are sent in this order.
        """
        if not self.is_open:
            return start()
        queued = QueuedSend(start)
        with self._lock:
            needed = self._needed.get(position, position)
            heappush(self._waiting, (needed, next(self._turns), queued))
            begins = self._under_way < _AT_ONCE
            self._under_way += begins
        if begins:
            # On another thread: a message that the connection takes at once is copied there.
            in_background(self._send_all)
        return queued

    def drop(self) -> None:
        """Start no more messages; those in progress end with their connection."""
        with self._lock:
            dropped, self._waiting = self._waiting, []
        for *_, queued in dropped:
            queued.sent.cancel()

    def _send_all(self) -> None:
        """Send one message after the other until none waits."""
        while (begun := self._begin_next()) is not None:
            queued, work = begun
            try:
                if work is not None:
                    work.wait(LONGEST_WAIT)
                    queued.sent.set_result(None)
            except BaseException as error:
                queued.sent.set_exception(error)
            finally:
                # The error holds this frame, and the message the error.
                del queued, begun

    def _begin_next(self) -> tuple[QueuedSend, Waitable | None] | None:
        """Start sending the message that is needed first; None if none waits."""
        # Pieces of one message are sent in their order; `add` does not wait for this lock.
        with self._beginning:
            with self._lock:
                if not self._waiting:
                    self._under_way -= 1
                    return None
                *_, queued = heappop(self._waiting)
            return queued, queued.begin()
