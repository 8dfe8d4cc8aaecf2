"""A `torch.distributed.Store` in etcd 3, which outlives the loss of fewer than half of its servers.

A call whose answer is lost is repeated, perhaps on another server, and the first one may still take
effect. So every write names what it replaces, and takes effect once or not at all.
"""

from __future__ import annotations

import os
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

# How long one server may take before another one is asked: less than a rank may be silent, so a
# server that hangs does not make a rank look dead.
_TRY_SECONDS = 1.5
# How long a server that has failed is not asked again.
_AVOID_SECONDS = 1.0
# Between two attempts, and between two reads of a key that is waited for.
_PAUSE = 0.05
# etcd refuses transactions of more than 128 operations.
_MOST_OPERATIONS = 100
_CHANNEL_OPTIONS = [
    # By default a server that comes back is tried only after up to two minutes.
    ("grpc.max_reconnect_backoff_ms", 1000),
    # As for torch's own stores: the servers are in the same network.
    ("grpc.enable_http_proxy", 0),
]
# Codes of gRPC that are the same on any server and at any time; "" is an error of another kind.
_FINAL = {"", "INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"}


class EtcdStore(Store):
    """A `torch.distributed.Store` in a cluster of etcd 3 servers.

    Calls go to one server, and to the next one if it fails or takes longer than 1.5 s. Reads are
    linearizable. It needs the extra `etcd` (`pip install '.[etcd]'`).

    Every process makes its own store. A forked process may use the store of its parent, with its
    own connection. Copies share the connection: `clone` returns the store itself. A store lives as
    long as its process.

    Args:
        endpoints: the servers, as in "host1:2379,host2:2379,host3:2379".
        prefix: prefix of all keys; runs with different prefixes do not see each other.
        timeout: upper bound of every call, including the wait of `get` and `wait` for a key.
        user: user name, if the servers ask for one. Needs `ca_cert`.
        password: its password.
        ca_cert: file with the certificate authority of the servers; turns on TLS.
        client_cert: file with the certificate of this client, if the servers ask for one.
        client_key: file with its private key.

    Raises:
        ModuleNotFoundError: the extra is not installed.
        ValueError: an argument is malformed, or one of a pair is missing.
    """

    # A property of torch's store, which is missing in its type stubs.
    timeout: timedelta

    def __init__(
        self,
        endpoints: str,
        prefix: str,
        timeout: timedelta = timedelta(seconds=60),
        *,
        user: str | None = None,
        password: str | None = None,
        ca_cert: str | None = None,
        client_cert: str | None = None,
        client_key: str | None = None,
    ) -> None:
        super().__init__()
        if not prefix:
            raise ValueError("expected a prefix for the keys of this run, such as 'my-run', got ''")
        login = {"user": user, "password": password}
        for pair in (login, {"client_cert": client_cert, "client_key": client_key}):
            if list(pair.values()).count(None) == 1:
                raise ValueError(f"expected both {' and '.join(pair)}, got only one; pass both")
        # The client sends no password over a connection that others can read.
        if ca_cert is None and (user is not None or client_cert is not None):
            raise ValueError("user and client_cert need ca_cert, which turns on TLS; pass it, too")
        self._endpoints = endpoints
        self._addresses = [read_endpoint(each) for each in endpoints.split(",")]
        self._library = _client_library()
        self._login = {} if user is None else login
        self._files = (ca_cert, client_key, client_cert)
        self._prefix = prefix
        # The clients of this process and of its parents, whose connections a forked process must
        # not close.
        self._clients: dict[int, Any] = {}
        self._is_closed = False
        self.set_timeout(timeout)
        # A thread must not return to C++ while Python is finalised. And this keeps the Python half
        # of the store alive, which C++ does not: without it, a call ends the process.
        weakref.finalize(self, self._close)

    def __repr__(self) -> str:
        return f"EtcdStore({self._endpoints!r})"

    def clone(self) -> EtcdStore:
        """Return the store itself, since its calls do not wait for each other."""
        return self

    def has_extended_api(self) -> bool:
        """Return whether there are `append`, `multi_get` and `multi_set`: True."""
        return True

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._change(key, lambda old: _as_bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""
        return self.multi_get([key])[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all the keys have values."""
        return None not in self._read(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all the keys have values.

        Raises:
            DistStoreError: a key has no value after the timeout, or the servers do not answer.
        """
        self.multi_get(keys, timeout)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which starts at 0, and return the sum."""
        return int(self._change(key, lambda old: str(int(old or 0) + amount).encode()))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value, which starts empty."""
        self._change(key, lambda old: old + _as_bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write a value if the key has the expected one; "" expects a key without a value.

        Returns:
            The value of the key after that.
        """
        of, name, old = self._library.transactions, self._name(key), _as_bytes(expected)
        # In one request. If an attempt whose answer was lost has written it, it is there.
        same = of.Value(name) == old if old else of.Version(name) == 0
        put, get = of.Put(name, _as_bytes(desired)), of.Get(name)
        rows = self._transact([same], [put, get], [get])[-1]
        return bytes(rows[0][0]) if rows else old

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it had a value."""
        return bool(self._call(lambda client: client.delete(self._name(key))))

    def multi_get(self, keys: Sequence[str], timeout: timedelta | None = None) -> list[bytes]:
        """Wait for all the keys, and return their values."""
        timeout = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout.total_seconds()
        while None in (values := self._read(keys)):
            if time.monotonic() > deadline:
                raise DistStoreError(f"{self!r}: no values of all of {list(keys)} after {timeout}")
            time.sleep(_PAUSE)
        return [value for value in values if value is not None]

    # The name that a `PrefixStore` calls.
    deleteKey = delete_key  # noqa: N815

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of the keys; None for a key without one."""
        found: list[bytes | None] = []
        for start in range(0, len(keys), _MOST_OPERATIONS):
            part = keys[start : start + _MOST_OPERATIONS]
            gets = [self._library.transactions.Get(self._name(key)) for key in part]
            found += [rows[0][0] if rows else None for rows in self._transact([], gets, [])]
        return found

    def _change(self, key: str, change: Callable[[bytes], bytes]) -> bytes:
        """Write what depends on the present value, which starts empty, and return it.

        A receipt that is written with the value shows whether an attempt whose answer was lost has
        taken effect.
        """
        of, names = self._library.transactions, [self._name(key)]
        names.append(f"{self._prefix}.receipts/{uuid.uuid4()}")
        gets = [of.Get(name) for name in names]
        present, receipt = self._transact([], gets, [])
        while not receipt:
            value, revision = (present[0][0], present[0][1].mod_revision) if present else (b"", 0)
            puts = [of.Put(name, change(value)) for name in names]
            same = of.Mod(names[0]) == revision
            present, receipt = self._transact([same], [*puts, *gets], gets)[-2:]
        self._call(lambda client: client.delete(names[1]))
        return bytes(receipt[0][0])

    def _transact(self, compare: Any, success: Any, failure: Any) -> Any:
        """The answers to `success` if `compare` is true, otherwise to `failure`."""
        return self._call(lambda client: client.transaction(compare, success, failure))[1]

    def _call(self, ask: Callable[[Any], Any]) -> Any:
        """Ask one server after the other until one answers.

        Raises:
            DistStoreError: no server has answered in time, or one has refused the call.
        """
        deadline, reason = time.monotonic() + self.timeout.total_seconds(), ""
        while True:
            try:
                # Two threads may connect at once; both clients work.
                client = self._clients.get(os.getpid()) or self._connect()
                return ask(self._clients.setdefault(os.getpid(), client))
            except Exception as error:
                code, text = _code_and_text(error)
                reason = text or reason
                if code == "UNAUTHENTICATED" and self._login:
                    # A token ends with the server that issued it, or when it is not used.
                    self._clients.pop(os.getpid(), None)
                    code = "UNAVAILABLE"
                refused = self._is_closed or code in _FINAL
                if refused or time.monotonic() > deadline:
                    late = "" if refused else f"no majority has answered for {self.timeout}: "
                    raise DistStoreError(f"etcd at {self._endpoints}: {late}{reason}") from error
            time.sleep(_PAUSE)

    def _connect(self) -> Any:
        library, (ca_cert, *own) = self._library, self._files
        make = library.MultiEndpointEtcd3Client
        credentials = None if ca_cert is None else make.get_secure_creds(ca_cert, *own)
        secure, more = ca_cert is not None, (credentials, _AVOID_SECONDS, _CHANNEL_OPTIONS)
        servers = [library.Endpoint(*address, secure, *more) for address in self._addresses]
        return make(servers, timeout=_TRY_SECONDS, failover=True, **self._login)

    def _close(self) -> None:
        """End the calls of this process, so that their threads return while they still can."""
        self._is_closed = True
        if (client := self._clients.get(os.getpid())) is not None:
            client.close()


def _client_library() -> Any:
    try:
        import pyetcd
    except ImportError as error:
        text = f"EtcdStore needs the extra etcd ({error}): pip install '.[etcd]'"
        raise ModuleNotFoundError(text) from error
    return pyetcd


def _code_and_text(error: Exception) -> tuple[str, str]:
    """The name of gRPC's code ("" if the error is not one of gRPC), and the text."""
    # The client raises errors without a text while it handles the errors of gRPC.
    cause: Any = error if hasattr(error, "code") else error.__context__
    if hasattr(cause, "code") and hasattr(cause, "details"):
        return cause.code().name, f"{cause.code().name}, {cause.details()}"
    # The client's own error without a cause: all servers have just failed.
    all_failed = type(error).__module__.startswith("pyetcd")
    return ("UNAVAILABLE", "") if all_failed else ("", f"{type(error).__name__}: {error}")


def read_endpoint(text: str) -> tuple[str, int]:
    """Host and port of a server.

    Raises:
        ValueError: it has another form than host:port, or there is no such port.
    """
    host, _, port = text.strip().rpartition(":")
    if "@" in text:
        # Without the text, which may contain a password.
        raise ValueError("expected host:port, got an @; pass a user and a password as options")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        given = text if port.isdecimal() else host or text
        raise ValueError(f"expected host:port, with a port from 1 to 65535, got {given!r}")
    return host, int(port)


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
