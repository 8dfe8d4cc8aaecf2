"""Where the ranks meet: in a store that the launchers hold, or in one that is there already."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from torch._C._distributed_c10d import TCPStore

from decent_optim_wrapper.comm.etcd_store import read_endpoints
from decent_optim_wrapper.comm.store_url import STORE_VARIABLE, StoreUrl
from decent_optim_wrapper.launcher.etcd_server import EtcdServer, free_port
from decent_optim_wrapper.launcher.guard import MARK, Guard
from decent_optim_wrapper.launcher.options import LaunchOptions
from decent_optim_wrapper.launcher.output import say
from decent_optim_wrapper.launcher.store_process import Address, StoreProcess, listen
from decent_optim_wrapper.launcher.supervisor import Restarts

# How long the launcher of another node may be earlier than those that hold the store.
_CONNECT = timedelta(minutes=5)


class Holder(Protocol):
    """What holds the store on this node, or a part of it."""

    def check(self) -> None:
        """Look after it; called again and again."""

    def why_no_restart(self) -> str:
        """Why no rank can be started again; empty if the store may answer."""


class Meeting(NamedTuple):
    """Where the ranks meet.

    Args:
        environ: the variables by which the ranks find the store.
        connect: connects to it; it may block.
        holders: the numbers of the nodes that hold the store.
        holder: what holds it on this node, if anything does.
    """

    environ: Mapping[str, str]
    connect: Callable[[], Any]
    holders: Collection[int]
    holder: Holder | None = None


def find_meeting(options: LaunchOptions, restarts: Restarts, guard: Guard) -> Meeting:
    """Start what holds the store on this node.

    Args:
        options: those of the launch.
        restarts: how often and when an etcd server is started again.
        guard: ends what is started here.

    Raises:
        ModuleNotFoundError: the client of etcd is not installed.
        OSError: a port cannot be opened, or etcd is not installed.
        ValueError: the store's options contradict each other.
    """
    if options.with_etcd:
        return _in_own_etcd(options, restarts, guard)
    return _in_tcp(options, guard) if options.store is None else _in_etcd(options.store)


class _TcpHolder:
    """A `TCPStore`, which nobody can bring back with what it held."""

    def __init__(self, process: StoreProcess) -> None:
        self._process = process
        self._ended = False

    def check(self) -> None:
        if self._process.has_ended and not self._ended:
            self._ended = True
            say(
                "the process that held the store has ended: the ranks go on until one of them is "
                "lost, and none is started again"
            )

    def why_no_restart(self) -> str:
        return "the process that held the store has ended" if self._ended else ""


def _in_tcp(options: LaunchOptions, guard: Guard) -> Meeting:
    """Hold the store if this is node 0."""
    holder = None
    if options.node_rank > 0 and options.endpoint is not None:
        address = Address(*options.endpoint)
    else:
        listening, address = listen(options.endpoint)
        process = StoreProcess(listening, {**os.environ, MARK: guard.mark})
        holder = _TcpHolder(process)
    host, port = address
    run_id = uuid.uuid4().hex if options.endpoint is None else f"{host}:{port}"
    environ = {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        # Rank 0 is a client of the store, too.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return Meeting(
        environ=environ,
        connect=lambda: TCPStore(host, port, is_master=False, timeout=_CONNECT),
        holders=range(1),
        holder=holder,
    )


def _in_etcd(url: StoreUrl) -> Meeting:
    store = url.open(_CONNECT)
    environ = {
        STORE_VARIABLE: url.text,
        "TORCHELASTIC_RUN_ID": f"{url.endpoints}/{url.prefix}",
    }
    return Meeting(environ=environ, connect=lambda: store, holders=())


def _in_own_etcd(options: LaunchOptions, restarts: Restarts, guard: Guard) -> Meeting:
    """Hold a server of the cluster, one of each node."""
    url = options.store or StoreUrl.parse(f"etcd://127.0.0.1:{free_port()}/run")
    meeting = _in_etcd(url)
    addresses = read_endpoints(url.endpoints)
    server = EtcdServer(addresses, options.node_rank, url.prefix, restarts, guard)
    return meeting._replace(holders=range(options.nnodes), holder=server)
