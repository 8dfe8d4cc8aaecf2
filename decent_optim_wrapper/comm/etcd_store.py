"""A `torch.distributed.Store` in etcd 3, which outlives the loss of fewer than half of its servers.

A call whose answer is lost is repeated, perhaps on another server, and the first one may still take
effect. So every write names the revision that it replaces, and takes effect once or not at all.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

Result = TypeVar("Result")

# How long one server may take before another one is asked: less than a rank may be silent, so a
# server that hangs does not make a rank look dead.
_TRY_SECONDS = 1.5
# How long a server that has failed is not asked again.
_AVOID_SECONDS = 1.0
_RETRY_PAUSE = 0.05
# The pauses between two reads of a key that is waited for.
_SHORTEST_POLL, _LONGEST_POLL = 0.01, 0.1
# etcd refuses transactions of more than 128 operations.
_MOST_OPERATIONS = 100
_CHANNEL_OPTIONS = [
    # By default a server that comes back is tried only after up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # As for torch's own stores: the servers are in the same network.
    ("grpc.enable_http_proxy", 0),
]
# Codes of gRPC that are the same on any server and at any time.
_FINAL = {"INVALID_ARGUMENT", "PERMISSION_DENIED", "FAILED_PRECONDITION", "UNIMPLEMENTED"}
# C++ does not keep the Python half of a store alive: without it, a call ends the process.
_KEPT: list[EtcdStore] = []


class _Entry(NamedTuple):
    """A key's value, and the revision at which it was written; 0 if there is none."""

    value: bytes | None = None
    revision: int = 0


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
        user: user name, if the servers ask for one.
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
        self._servers = _Servers(
            endpoints,
            login=_pair("user", user, "password", password),
            ca_cert=ca_cert,
            certificate=_pair("client_cert", client_cert, "client_key", client_key),
        )
        self._prefix = prefix
        # What this store has written last, so that it need not be read before it is replaced.
        self._written: dict[str, _Entry] = {}
        self.set_timeout(timeout)
        _KEPT.append(self)

    def __repr__(self) -> str:
        return f"EtcdStore({self._servers.endpoints!r}, prefix={self._prefix!r})"

    def clone(self) -> EtcdStore:
        """Return the store itself, since its calls do not wait for each other."""
        return self

    def has_extended_api(self) -> bool:
        """Return whether there are `append`, `multi_get` and `multi_set`: True."""
        return True

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        name, new = self._name(key), _as_bytes(value)
        entry, written = _Entry(revision=self._last(name).revision), False
        # If the value is there already, an attempt whose answer was lost has written it.
        while not written and entry.value != new:
            written, entry = self._replace(name, entry.revision, new)
        self._written[name] = entry

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""
        return self.multi_get([key])[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all the keys have values."""
        return self._check(keys, self.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all the keys have values.

        Raises:
            DistStoreError: a key has no value after the timeout, or the servers do not answer.
        """
        timeout = self.timeout if timeout is None else timeout
        deadline, pause = time.monotonic() + timeout.total_seconds(), _SHORTEST_POLL
        while not self._check(keys, timeout):
            if time.monotonic() > deadline:
                raise DistStoreError(f"{self!r}: no values of all of {list(keys)} after {timeout}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which starts at 0, and return the sum."""
        if amount == 0:
            return int(self._read([key], self.timeout)[0] or 0)
        return int(self._change_once(key, lambda old: str(int(old or 0) + amount).encode()))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value, which starts empty."""
        self._change_once(key, lambda old: (old or b"") + _as_bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write a value if the key has the expected one; "" expects a key without a value.

        Returns:
            The value of the key after that.
        """
        name, old, new = self._name(key), _as_bytes(expected), _as_bytes(desired)
        # If the key has another value, the first attempt returns it.
        entry, written = self._last(name) if old else _Entry(), False
        if (entry.value or b"") != old:
            entry = self._entry(name)
        while not written and (entry.value or b"") == old:
            written, entry = self._replace(name, entry.revision, new)
        if written:
            self._written[name] = entry
        return old if entry.value is None else entry.value

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it had a value."""
        name = self._name(key)
        return bool(self._servers.call(lambda client: client.delete(name), self.timeout))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for all the keys, and return their values."""
        found = self._read(keys, self.timeout)
        while any(value is None for value in found):
            self.wait(keys)
            found = self._read(keys, self.timeout)
        return [value for value in found if value is not None]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several values, one after the other."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def num_keys(self) -> int:
        """Number of keys that have values."""
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """The keys that have values."""
        prefix = self._name("")

        def ask(client: Any) -> list[str]:
            rows = client.get_prefix(prefix, keys_only=True)
            return [about.key.decode().removeprefix(prefix) for _, about in rows]

        return self._servers.call(ask, self.timeout)

    # The names that a `PrefixStore` calls.
    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815

    def _last(self, name: str) -> _Entry:
        return self._written.get(name, _Entry())

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _check(self, keys: Sequence[str], timeout: timedelta) -> bool:
        return None not in self._read(keys, timeout)

    def _read(self, keys: Sequence[str], timeout: timedelta) -> list[bytes | None]:
        """The values of the keys, and None for those that have none."""
        found: list[bytes | None] = []
        for part in _batches([self._name(key) for key in keys]):

            def ask(client: Any, part: Sequence[str] = part) -> list[_Entry]:
                gets = [client.transactions.get(name) for name in part]
                return [_entry_of(rows) for rows in client.transaction([], gets, [])[1]]

            found += [entry.value for entry in self._servers.call(ask, timeout)]
        return found

    def _entry(self, name: str) -> _Entry:
        def ask(client: Any) -> _Entry:
            value, about = client.get(name)
            return _Entry() if about is None else _Entry(value, about.mod_revision)

        return self._servers.call(ask, self.timeout)

    def _replace(self, name: str, revision: int, value: bytes) -> tuple[bool, _Entry]:
        """Replace the value of this revision; return whether it did, and the present entry."""

        def ask(client: Any) -> tuple[bool, _Entry]:
            of = client.transactions
            written, answers = client.transaction(
                compare=[of.mod(name) == revision],
                success=[of.put(name, value), of.get(name)],
                failure=[of.get(name)],
            )
            return bool(written), _entry_of(answers[-1])

        return self._servers.call(ask, self.timeout)

    def _change_once(self, key: str, change: Callable[[bytes | None], bytes]) -> bytes:
        """Replace a value by one that depends on it, and return that.

        A receipt is written with it, which shows whether an attempt whose answer was lost has taken
        effect. Its lease removes it when no attempt can be in progress any more.
        """
        name, receipt = self._name(key), f"{self._prefix}.receipts/{uuid.uuid4()}"
        seconds = round(2 * self.timeout.total_seconds()) + 60
        lease = self._servers.call(lambda client: client.lease(seconds).id, self.timeout)
        entry = _Entry()
        while True:
            new = change(entry.value)
            compared = entry.revision

            def ask(client: Any, new: bytes = new, compared: int = compared) -> Any:
                of = client.transactions
                return client.transaction(
                    compare=[of.mod(name) == compared],
                    success=[of.put(name, new), of.put(receipt, new, lease)],
                    failure=[of.get(name), of.get(receipt)],
                )

            written, answers = self._servers.call(ask, self.timeout)
            if written:
                return new
            entry, done = map(_entry_of, answers)
            if done.value is not None:
                return done.value


class _Servers:
    """Makes calls to the servers, with a deadline, and tries another one if one fails.

    Args:
        endpoints: host and port of each, separated by commas.
        login: user and password, if any.
        ca_cert: file that turns on TLS.
        certificate: files with the certificate and the key of this client, if any.
    """

    def __init__(
        self,
        endpoints: str,
        login: tuple[str, str] | None,
        ca_cert: str | None,
        certificate: tuple[str, str] | None,
    ) -> None:
        self.endpoints = endpoints
        self._addresses = read_endpoints(endpoints)
        if certificate and ca_cert is None:
            raise ValueError("client_cert needs ca_cert, which turns on TLS; pass it, too")
        self._login = login
        self._ca_cert = ca_cert
        self._certificate = certificate
        self._library = _client_library()
        # The clients of this process and of its parents, whose connections a forked process must
        # not close.
        self._clients: dict[int, list[Any]] = {}

    def call(self, ask: Callable[[Any], Result], timeout: timedelta) -> Result:
        """Ask until a server answers.

        Raises:
            DistStoreError: no server has answered in time, or one has refused the call.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        reason = ""
        while True:
            try:
                return ask(self._client())
            except Exception as error:
                code, text = _code_and_text(error)
                reason = text or reason
                if code == "UNAUTHENTICATED" and self._login:
                    # A token ends with the server that issued it, or when it is not used.
                    self._clients.pop(os.getpid(), None)
                elif not code or code in _FINAL | {"UNAUTHENTICATED"}:
                    raise DistStoreError(f"etcd at {self.endpoints}: {reason}") from error
                if time.monotonic() > deadline:
                    raise DistStoreError(
                        f"no majority of the etcd servers at {self.endpoints} has answered for "
                        f"{timeout}: {reason}"
                    ) from error
            time.sleep(_RETRY_PAUSE)

    def _client(self) -> Any:
        """The connection of this process."""
        clients = self._clients.setdefault(os.getpid(), [])
        if not clients:
            # Two threads may do this at once; both clients work.
            clients.append(self._connect())
        return clients[0]

    def _connect(self) -> Any:
        library, credentials = self._library, None
        if self._ca_cert is not None:
            cert, key = self._certificate or (None, None)
            secure = library.MultiEndpointEtcd3Client.get_secure_creds
            credentials = secure(self._ca_cert, cert_key=key, cert_cert=cert)
        servers = [
            library.Endpoint(
                *(host, port),
                secure=credentials is not None,
                creds=credentials,
                time_retry=_AVOID_SECONDS,
                opts=_CHANNEL_OPTIONS,
            )
            for host, port in self._addresses
        ]
        user, password = self._login or (None, None)
        try:
            return library.MultiEndpointEtcd3Client(
                servers, timeout=_TRY_SECONDS, user=user, password=password, failover=True
            )
        except Exception:
            # It has asked one of them for a token.
            for server in servers:
                server.close()
            raise


def _client_library() -> Any:
    try:
        import pyetcd
    except ImportError as error:
        raise ModuleNotFoundError(
            f"EtcdStore needs etcd-sdk-python, protobuf and tenacity ({error}); install them with "
            f"the extra: pip install '.[etcd]'"
        ) from error
    return pyetcd


def _code_and_text(error: Exception) -> tuple[str, str]:
    """The name of gRPC's code ("" if the error is not one of gRPC), and the text."""
    # The client raises errors without a text while it handles those of gRPC.
    cause = error.__context__ if not hasattr(error, "code") else error
    if cause is not None and hasattr(cause, "code") and hasattr(cause, "details"):
        name = str(cause.code().name)
        return name, f"{name}, {cause.details()}"
    if type(error).__module__.startswith("pyetcd"):
        # All servers have just failed.
        return "UNAVAILABLE", ""
    return "", f"{type(error).__name__}: {error}"


def _entry_of(rows: Sequence[tuple[bytes, Any]]) -> _Entry:
    """The entry in the answer to a read of one key."""
    return _Entry(rows[0][0], rows[0][1].mod_revision) if rows else _Entry()


def read_endpoints(text: str) -> list[tuple[str, int]]:
    """Host and port of each server.

    Args:
        text: as in "host1:2379,host2:2379,host3:2379".

    Raises:
        ValueError: it has another form.
    """
    return [read_endpoint(each) for each in text.split(",")]


def read_endpoint(text: str) -> tuple[str, int]:
    """Host and port of a server.

    Raises:
        ValueError: it has another form than host:port, or there is no such port.
    """
    host, _, port = text.strip().rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"expected host:port, with a port from 1 to 65535, got {text!r}")
    return host, int(port)


def _pair(name: str, one: str | None, other_name: str, other: str | None) -> tuple[str, str] | None:
    if one is not None and other is not None:
        return one, other
    if one is None and other is None:
        return None
    raise ValueError(f"expected both {name} and {other_name}, got only one of them; pass both")


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), _MOST_OPERATIONS):
        yield names[start : start + _MOST_OPERATIONS]
