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
        store: any store; if it has no server, `check` never raises.
    """

    def __init__(self, store: Any) -> None:
        self._refused = False
        self._socket: socket.socket | None = None
        if (server := _server_of(store)) is None:
            return
        try:
            self._socket = socket.create_connection(server)
            self._socket.setblocking(False)
            # Python warns of a socket that is dropped while it is open.
            weakref.finalize(self, self._socket.close)
        except ConnectionRefusedError:
            self._refused = True
        except OSError:
            # The store may still be within reach for torch, which tries longer.
            self._socket = None

    def check(self) -> None:
        """Check for the end of the server; never blocks.

        Raises:
            DistStoreError: the server has ended.
        """
        if self._refused or (self._socket is not None and _is_closed(self._socket)):
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
