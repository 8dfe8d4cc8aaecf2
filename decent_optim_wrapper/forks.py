"""What a forked process, such as a worker of a DataLoader, leaves to its parent.

It inherits the connections, but none of the threads that serve them: their destructors wait for
these threads or end the process, and what it sends would reach the peers as if from its parent.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, WeakSet

# The connections of this process that still exist.
_connections = WeakSet[Any]()
_in_child = set[WeakMethod[Callable[[], object]]]()


def leave_to_parent(connection: Any) -> None:
    """Never destroy a connection in a forked process, whoever drops it there."""
    _connections.add(connection)


def after_fork(method: Callable[[], object]) -> None:
    """Call a method in each forked process, as long as its object exists."""
    _in_child.add(WeakMethod(method, _in_child.discard))


def _begin_child() -> None:
    for connection in _connections:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
    for each in list(_in_child):
        if method := each():
            method()


os.register_at_fork(after_in_child=_begin_child)
