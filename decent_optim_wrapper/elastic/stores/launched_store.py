"""The store that a launcher names: one in etcd by its URL, or the launcher's own."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from torch._C._distributed_c10d import TCPStore

from decent_optim_wrapper.comm.store import store_errors
from decent_optim_wrapper.comm.waiting import within
from decent_optim_wrapper.elastic.stores.etcd_store import EtcdStore, read_endpoint
from decent_optim_wrapper.start.launch import find_launch, use_interface
from decent_optim_wrapper.start.membership import StoreWorld

# The environment variable with the URL of a store.
STORE_VARIABLE = "DECENT_STORE"
EXAMPLE = "etcd://host1:2379,host2:2379,host3:2379/my-run"
_OPTIONS = {"user", "password", "ca_cert", "client_cert", "client_key"}
# The process that serves the store may still be starting. If it has ended, no rank waits for long.
_SHORTEST_CONNECT, _LONGEST_CONNECT = timedelta(minutes=1), timedelta(minutes=5)


class StoreUrl(NamedTuple):
    """Where a store is, such as ``etcd://host1:2379,host2:2379,host3:2379/my-run?ca_cert=ca.pem``.

    Args:
        text: the URL.
        endpoints: host and port of each server, separated by commas.
        prefix: of all keys.
        options: further arguments of `EtcdStore`, by name.
    """

    text: str
    endpoints: str
    prefix: str
    options: Mapping[str, str]

    def __repr__(self) -> str:
        # Without the options, which may contain a password.
        return f"StoreUrl({self.endpoints!r}, {self.prefix!r})"

    @classmethod
    def parse(cls, text: str) -> StoreUrl:
        """Read a URL.

        Raises:
            ValueError: it is malformed. Of what may be a password, the text quotes nothing.
        """
        scheme, _, place = text.partition("://")
        place, _, query = place.partition("?")
        endpoints, _, prefix = place.partition("/")
        if scheme != "etcd" or not prefix:
            what = "without a prefix" if scheme == "etcd" else "of another kind"
            raise ValueError(f"expected a store as {EXAMPLE!r}, got one {what}")
        for each in endpoints.split(","):
            read_endpoint(each)
        options = dict(parse_qsl(query, keep_blank_values=True))
        if ";" in text or not options.keys() <= _OPTIONS:
            raise ValueError(
                f"expected options of the store etcd://{endpoints} as in ?ca_cert=ca.pem&user=me, "
                f"of {', '.join(sorted(_OPTIONS))}, got others; in a value & is %26, and ; is %3B"
            )
        return cls(text=text, endpoints=endpoints, prefix=prefix, options=options)

    def open(self, timeout: timedelta) -> EtcdStore:
        """The store.

        Args:
            timeout: bound of each of its calls.

        Raises:
            ModuleNotFoundError: the extra is not installed.
            ValueError: one of a pair of options is missing.
        """
        return EtcdStore(self.endpoints, self.prefix, timeout, **self.options)


def find_launched_store(environ: Mapping[str, str], timeout: timedelta | None) -> StoreWorld | None:
    """Connect to the store that the launcher of this process names; None if it names none.

    Args:
        environ: the environment variables.
        timeout: the bound of every wait; this one is bounded by one to five minutes.

    Raises:
        ModuleNotFoundError: the store is in etcd, whose client is not installed.
        RuntimeError: a variable is missing.
        ValueError: a variable has a wrong value, or names no interface of this machine.
        PeerError: the store does not answer.
    """
    bound = min(max(timeout or _LONGEST_CONNECT, _SHORTEST_CONNECT), _LONGEST_CONNECT)
    text = environ.get(STORE_VARIABLE)
    if not text and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # Rank 0 itself would serve the store.
        return None
    launch = find_launch(environ)
    use_interface(launch, None, serves=launch.rank == 0 and not text)
    if text:
        url = StoreUrl.parse(text)
        where = f"the store in etcd at {url.endpoints}"
        remedy = "start most of these servers, or correct the URL"
        connect = partial(_open, url, bound)
    else:
        host, port = launch.master_addr, launch.master_port
        where, remedy = f"the launcher's store at {host}:{port}", "look at the launcher of node 0"
        connect = partial(TCPStore, host, int(port), is_master=False, timeout=bound)
    with store_errors(launch.rank, where, remedy):
        # On another thread: Ctrl-C does not end a call of C++.
        store = within(bound.total_seconds(), connect)
    return StoreWorld(store=store, rank=launch.rank, world_size=launch.world_size)


def _open(url: StoreUrl, timeout: timedelta) -> Any:
    store = url.open(timeout)
    # Servers that start with the ranks take a while, and servers on other nodes start later.
    store.check(["any key"])
    return store
