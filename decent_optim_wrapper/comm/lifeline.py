"""Whether the server of a store is gone, without a call to the store."""

from __future__ import annotations

import socket
import weakref
from contextlib import suppress
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistStoreError


class Lifeline:
    """An idle connection to the server of a `TCPStore`, which ends with the server.

    If a connection of torch is used after its server has ended, torch writes a C++ stack of 25
    lines to stderr. A program cannot switch this off after it has imported torch.

    Args:
        connection: the connection; None if there is no server to watch.
        refused: whether the server did not accept it.
    """

    def __init__(self, connection: socket.socket | None, refused: bool = False) -> None:
        self._connection = connection
        self._refused = refused
        if connection is not None:
            connection.setblocking(False)
            # Python warns of a socket that is dropped while it is open.
            weakref.finalize(self, connection.close)

    @classmethod
    def to_server_of(cls, store: Any) -> Lifeline:
        """Connect to the server of any store; if it has none, `check` never raises."""
        server = _server_of(store)
        try:
            return cls(None if server is None else socket.create_connection(server))
        except ConnectionRefusedError:
            return cls(None, refused=True)
        except OSError:
            # The store may still be within reach for torch, which tries longer.
            return cls(None)

    def check(self) -> None:
        """Check for the end of the server; never blocks.

        Raises:
            DistStoreError: the server has ended.
        """
        if self._refused or (self._connection is not None and _is_closed(self._connection)):
            raise DistStoreError("its server has ended")


def _server_of(store: Any) -> tuple[str, int] | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection, over which it never sends anything."""
    with suppress(BlockingIOError):
        try:
            return not connection.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            return True
    return False
