"""Where the ranks meet: in a store that the launcher of node 0 holds, or in one that is there."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from torch._C._distributed_c10d import TCPStore

from decent_optim_wrapper.comm.store_url import STORE_VARIABLE
from decent_optim_wrapper.launcher.options import LaunchOptions

# How long the launcher of another node may be earlier than the launcher of node 0.
_CONNECT = timedelta(minutes=5)


class Meeting(NamedTuple):
    """Where the ranks meet.

    Args:
        environ: the variables by which the ranks find the store.
        connect: connects to it; it may block.
        keeper: the node whose launcher holds the store; None if none does.
    """

    environ: Mapping[str, str]
    connect: Callable[[], Any]
    keeper: int | None = None


def find_meeting(options: LaunchOptions) -> Meeting:
    """Serve the store, if this node does; it is served as long as the result exists.

    Raises:
        ModuleNotFoundError: the client of etcd is not installed.
        OSError: the port cannot be opened.
        ValueError: one of a pair of the store's options is missing.
    """
    if (url := options.store) is not None:
        store, run_id = url.open(_CONNECT), f"{url.endpoints}/{url.prefix}"
        return Meeting({STORE_VARIABLE: url.text, "TORCHELASTIC_RUN_ID": run_id}, lambda: store)
    host, port = options.endpoint or ("127.0.0.1", 0)

    def connect() -> Any:
        return TCPStore(host, port, is_master=False, timeout=_CONNECT)

    if options.node_rank == 0:
        served = _serve(options.endpoint)
        # A clone has a connection of its own, which may be lost; the store goes on.
        port, connect = served.port, served.clone
    environ = {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"{host}:{port}" if options.endpoint else uuid.uuid4().hex,
        # Rank 0 is a client of the store, too.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return Meeting(environ, connect, keeper=0)


def _serve(endpoint: tuple[str, int] | None) -> TCPStore:
    """Serve a store; without an endpoint on a free port that only this machine can reach."""
    host, port = endpoint or ("127.0.0.1", 0)
    is_local = host == "localhost" or host.startswith("127.")
    dual = not is_local and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    # Others on all addresses: the name of the host may stand for one that is not known here.
    address = host if is_local else "", port
    listening = socket.create_server(address, family=family, dualstack_ipv6=dual)
    # The store's own threads serve, and close the socket.
    port, descriptor = listening.getsockname()[1], listening.detach()
    here = host if is_local else "localhost"
    return TCPStore(here, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
