"""Calls to a store with a deadline.

A call to a `TCPStore` waits forever for a server that is stopped or out of reach, whatever timeout
the store has. Here such calls run on separate threads and are abandoned after a while.
"""

from __future__ import annotations

import operator
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any

from loguru import logger
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError, DistNetworkError, DistStoreError

from decent_optim_wrapper.comm import secret
from decent_optim_wrapper.comm.waiting import within
from decent_optim_wrapper.errors import PeerError, text_of
from decent_optim_wrapper.warn import warn

# The least wait for an answer, however long the store has been silent before.
_LEAST_SECONDS = 1.5
# To connect, torch asks the resolver for the name of the other side's address, and so does the
# store's process. A lost answer costs each of them 5 s, at most twice.
_LEAST_SECONDS_TO_CONNECT = 12.0
# After how long a constructor that waits for other ranks says so; longer than most imports take.
WARN_AFTER_SECONDS = 60.0
# How long torch tries to connect again, and the pause before.
_RECONNECT, _PAUSE = timedelta(seconds=3), 0.1
# How often one write replaces a value that no process of the run has written.
_REPLACEMENTS = 8


def cloned(store: Any) -> Any:
    """The store over another connection if possible, so that a hanging call blocks no others.

    A store that is written in Python is returned as it is. Torch would drop the Python object of
    its clone behind a `PrefixStore`, and the next call would find a pure virtual function.
    """
    is_torchs = type(_innermost(store)).__module__.startswith("torch.")
    return store.clone() if is_torchs and hasattr(store, "clone") else store


def _innermost(store: Any) -> Any:
    """The store behind its prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _connected(store: Any) -> Any:
    """The store over another connection; fails at once if nobody listens at its address.

    Torch would try until the timeout of the store, and print C++ stacks.
    """
    if not isinstance(server := _innermost(store), TCPStore):
        return cloned(store)
    try:
        address = server.host, server.port
        socket.create_connection(address, _LEAST_SECONDS_TO_CONNECT).close()
    except OSError as error:
        raise DistNetworkError(text_of(error)) from error
    connection = cloned(store)
    # A clone of it has that, too: the server may end just after it has been found.
    connection.set_timeout(_RECONNECT)
    return connection


def own_part(store: Any | None, rank: int, timeout: timedelta) -> Any | None:
    """A part of the store for this wrapper only: ranks build wrappers in the same order."""
    if store is None:
        return None

    def connect() -> Any:
        # A call that hangs on this connection does not delay calls of the user.
        part = PrefixStore("decent_optim_wrapper", cloned(store))
        return PrefixStore(str(part.add(f"made by {rank}", 1)), part)

    with store_errors(rank, "the process group's store", "look at the process that serves it"):
        return within(timeout.total_seconds(), connect)


@contextmanager
def store_errors(rank: int, store: str, remedy: str) -> Iterator[None]:
    """Raise a `PeerError` if a store does not answer in the body.

    Args:
        rank: this rank.
        store: which store it is.
        remedy: what to do.
    """
    try:
        yield
    except (DistError, TimeoutError) as error:
        text = f"rank {rank}: {store} does not answer ({text_of(error)}); {remedy}"
        raise PeerError(text) from error


def late_ranks(store: Any, rank: int, world_size: int) -> list[int]:
    """The ranks that have made fewer parts of a store; none if a lower rank than this one sees it.

    Args:
        store: as for `own_part`.
        rank: this rank, which has made its part.
        world_size: number of ranks.
    """
    part = PrefixStore("decent_optim_wrapper", cloned(store))
    own = part.add(f"made by {rank}", 0)

    def is_late(each: int) -> bool:
        return bool(part.add(f"made by {each}", 0) < own)

    return [*filter(is_late, range(world_size))] if all(map(is_late, range(rank))) else []


def warn_of(late: Sequence[int], rank: int) -> None:
    """Warn of the ranks, if any, for which a constructor has waited for some time."""
    if late:
        warn(
            f"rank {rank}: the constructor of DecentOptimWrapper still waits for ranks {late}, "
            f"which have not called it; look there for an error or for slow loading, and call it "
            f"on every rank, not under `if rank == 0`"
        )


class BoundedStore:
    """A store whose calls have a deadline, over another connection after one was closed.

    Its values are signed, and those of others count as missing.

    Args:
        store: the store; it is cloned, not used itself.
        timeout: how long the store may be silent. Only waits for an answer count: between two calls
            the store owes none, and time in which this process is stopped is not its silence.
        place: which part of a store it is: a value that is copied to another part is none there.
        ours: whether only this object uses the store, so that it is cloned only after a failure.
    """

    def __init__(self, store: Any, timeout: timedelta, place: str = "", ours: bool = False) -> None:
        self._store, self.place = store, place
        # What is cloned for the next connection.
        self._source = store
        self._connection: Any | None = store if ours else None
        self.timeout = timeout.total_seconds()
        # Seconds of the waits since the last answer.
        self._silent = 0.0

    def connect(self) -> None:
        """Connect before the first call, with more time than for an answer.

        Raises:
            DistError: the store is gone, or does not answer.
        """
        self._call(lambda store: store.check([]), _LEAST_SECONDS_TO_CONNECT)

    def set(self, key: str, value: str) -> None:
        """Write a value; sending it does not count as an answer of the store."""
        value = secret.signed(self.place, key, value)
        self._call(lambda store: store.set(key, value), answers=False)

    def get(self, key: str) -> str:
        """The value of an existing key."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[str]:
        """The values of existing keys.

        Raises:
            DistError: a stranger has replaced one, or the store does not answer.
        """
        if "" in (values := self.look(keys)):
            raise DistStoreError(f"a stranger has replaced a value under {[*keys]}")
        return values

    def look(self, keys: Sequence[str]) -> list[str]:
        """The values of existing keys, in one call if the store can; empty if a stranger's."""

        def read(store: Any) -> list[bytes]:
            return store.multi_get([*keys]) if store.has_extended_api() else [*map(store.get, keys)]

        found = self._call(read)
        return [self._read(*each) or "" for each in zip(keys, found, strict=True)]

    def find(self, key: str) -> str | None:
        """The value of a key; None if it does not exist."""
        return self.look([key])[0] or None if self.exist([key]) else None

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all the keys have values."""
        return self.exist(keys) and "" not in self.look(keys)

    def exist(self, keys: Sequence[str]) -> bool:
        """Return whether all the keys have values, perhaps a stranger's."""
        return bool(self._call(lambda store: store.check([*keys])))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum."""
        try:
            return int(self._call(lambda store: store.add(key, amount)))
        except ValueError as error:
            raise DistStoreError(f"it has no number under {key!r}") from error

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Write a value if the key has the expected one; return the value of the key after that.

        "" expects a key without a value.
        """
        found, new = (each and secret.signed(self.place, key, each) for each in (expected, desired))
        for _ in range(_REPLACEMENTS):
            answer = self._call(operator.methodcaller("compare_set", key, found, new))
            if (value := self._read(key, answer)) is not None:
                return value
            # For a key that is missing by now, a store returns what was expected.
            found = "" if answer == found else answer
        raise DistStoreError(f"a stranger writes under {key!r} again and again")

    def another(self, timeout: timedelta) -> BoundedStore:
        """The same store over another connection, with another timeout."""
        return BoundedStore(self._source, timeout, self.place)

    def clone(self) -> Any:
        """Another connection, whose calls have no deadline: for a thread that nothing waits for."""
        return cloned(self._store)

    def note_answer(self) -> None:
        """Note that the store has answered over another connection."""
        self._silent = 0.0

    def _read(self, key: str, found: bytes) -> str | None:
        """A value as text; None, and it is logged once, if no process of the run has written it."""
        if (value := secret.verified(self.place, key, found.decode(errors="replace"))) is None:
            note_stranger(key)
        return value

    def _call(
        self, ask: Callable[[Any], Any], least: float = _LEAST_SECONDS, answers: bool = True
    ) -> Any:
        """Ask the store, and wait at least `least` seconds for an answer.

        Args:
            ask: the call.
            least: seconds to wait at least.
            answers: whether the store has answered once the call returns.

        Raises:
            DistError: the store is gone, or does not answer.
        """
        known, self._connection = self._connection, None

        def connect_and_ask() -> tuple[Any, Any]:
            if known is not None:
                # A call that was sent twice makes no difference to those who use this class.
                with suppress(DistNetworkError):
                    return known, ask(known)
                # A server that ends may close its connections before it takes no more of them.
                time.sleep(_PAUSE)
            connection = _connected(self._source)
            return connection, ask(connection)

        bound = max(least, self.timeout - self._silent)
        try:
            # After a failure the connection is not used again: a late answer would be read as the
            # answer to the next call.
            self._connection, answer = within(bound, connect_and_ask)
        except TimeoutError as error:
            self._silent += bound
            raise DistStoreError(f"no answer for {self._silent:.1f} s") from error
        self._source = self._connection
        if answers:
            self.note_answer()
        return answer


def part_of_run(store: Any, name: str, timeout: timedelta, ours: bool = False) -> BoundedStore:
    """A part of a store, which only this run finds if its processes share a secret.

    Args:
        store: as for `BoundedStore`.
        name: of the part.
        timeout: as for `BoundedStore`.
        ours: as for `BoundedStore`.

    Raises:
        DistError: the store is gone.
        ValueError: the secret is empty.
    """
    place = secret.named(name, nonce_of_run(store))
    return BoundedStore(PrefixStore(place, store), timeout, place, ours)


def nonce_of_run(store: Any) -> str:
    """What the first process of a run with a secret has written; empty without one."""
    if not secret.is_set():
        return ""
    # Another run with another secret has a nonce of its own. The caller may give up while a call
    # hangs, which must not block the store for others.
    key = secret.named("decent_optim_wrapper/nonce")
    nonce: bytes = cloned(store).compare_set(key, "", secrets.token_hex(16))
    return nonce.decode(errors="replace")


@cache
def note_stranger(key: str) -> None:
    """Log once that no process of the run writes such a value for this key."""
    logger.warning("the store has a value under {!r} that no rank has written: passed over", key)
