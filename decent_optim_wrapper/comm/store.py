"""Waiting that ends: calls to a store, and whatever else depends on it, with a deadline.

A call to a `TCPStore` waits for ever on a server that is stopped or out of reach, whatever timeout
the store has. Here such calls run on threads of their own, and are given up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistStoreError

Result = TypeVar("Result")

# However long a store has been silent: an answer to a question asked only now takes its time.
_LEAST_SECONDS = 1.5
# To connect, torch asks the resolver for the name of the other side's address, and so does the
# store's process. An answer that gets lost costs either of them 5 s, twice at most.
_LEAST_SECONDS_TO_CONNECT = 12.0
# Between two looks at whether to wait on.
_LOOK_SECONDS = 0.05
# What takes longer on a busy machine counts as this.
_LONGEST_LOOK_SECONDS = 0.25


def within(
    seconds: float, action: Callable[[], Result], pointless: Callable[[], bool] | None = None
) -> Result:
    """Run something on a daemon thread, and wait no longer than that for its end.

    What is given up runs on, and nobody hears of it any more.

    Args:
        seconds: bound of the wait.
        action: blocks outside of Python.
        pointless: tells whether to give up earlier.

    Raises:
        TimeoutError: it was given up.
    """
    future: Future[Result] = Future()
    thread = threading.Thread(target=_run, args=(future, action), daemon=True, name="decent-within")
    thread.start()
    waited, last = 0.0, time.monotonic()
    try:
        while not wait([future], min(_LOOK_SECONDS, seconds)).done:
            now = time.monotonic()
            # A process that was stopped has not waited meanwhile: what it waits for may be there.
            waited, last = waited + min(now - last, _LONGEST_LOOK_SECONDS), now
            if waited > seconds or (pointless is not None and pointless()):
                raise TimeoutError(f"given up within {seconds:.1f} s")
        return future.result()
    finally:
        # The future holds the error, whose traceback holds this frame: a cycle would keep alive
        # what the action used, connections too, until the garbage is collected.
        del future


def _run(future: Future[Result], action: Callable[[], Result]) -> None:
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)
    finally:
        del future, action


def cloned(store: Any) -> Any:
    """The store over another connection, where it has any: calls that hang hold up nobody else."""
    return store.clone() if hasattr(store, "clone") else store


class BoundedStore:
    """A store whose calls end.

    Args:
        store: cloned, and not used itself.
        patience: a store that has been silent for so long is given up.
    """

    def __init__(self, store: Any, patience: timedelta) -> None:
        self._store = store
        self._connection: Any | None = None
        self._patience = patience.total_seconds()
        self._answered = time.monotonic()

    def connect(self) -> None:
        """Connect ahead of the first call, in more time than the store has for an answer.

        Raises:
            DistError: the store has gone, or does not answer.
        """
        self._call(lambda store: store.check([]), _LEAST_SECONDS_TO_CONNECT)

    def set(self, key: str, value: str) -> None:
        """Write a value; that it was sent says nothing of the store."""
        answered = self._answered
        self._call(lambda store: store.set(key, value))
        self._answered = answered

    def get(self, key: str) -> str:
        """The value of a key that is there."""
        return str(self._call(lambda store: store.get(key)).decode())

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all the keys are there."""
        return bool(self._call(lambda store: store.check(list(keys))))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum."""
        return int(self._call(lambda store: store.add(key, amount)))

    def claim(self, key: str, value: str) -> None:
        """Write a value, unless there is one already."""
        self._call(lambda store: store.compare_set(key, "", value))

    def clone(self) -> Any:
        """Another connection, whose calls have no bound: for a thread that nobody waits for."""
        return cloned(self._store)

    def note_answer(self) -> None:
        """The store has answered over another connection."""
        self._answered = time.monotonic()

    def _call(self, ask: Callable[[Any], Any], least: float = _LEAST_SECONDS) -> Any:
        """Ask the store, and wait at least so many seconds for an answer.

        Raises:
            DistError: it has gone, or does not answer.
        """
        known, self._connection = self._connection, None

        def connect_and_ask() -> tuple[Any, Any]:
            connection = self.clone() if known is None else known
            return connection, ask(connection)

        silent = time.monotonic() - self._answered
        try:
            # After a failure the connection is left alone: a late answer would be taken for that
            # to the next question.
            self._connection, answer = within(max(least, self._patience - silent), connect_and_ask)
        except TimeoutError as error:
            silent = time.monotonic() - self._answered
            raise DistStoreError(f"no answer for {silent:.1f} s") from error
        self.note_answer()
        return answer
