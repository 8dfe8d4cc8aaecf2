"""Where the ranks meet: in a store that node 0 holds, or in one that is there already."""

from __future__ import annotations

import socket
import subprocess
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from torch._C._distributed_c10d import TCPStore

from decent_optim_wrapper.comm.store_url import STORE_VARIABLE
from decent_optim_wrapper.launcher import store_process
from decent_optim_wrapper.launcher.options import LaunchOptions

# How long the launcher of another node may be earlier than that of node 0.
_CONNECT = timedelta(minutes=5)


class Meeting(NamedTuple):
    """Where the ranks meet.

    Args:
        environ: the variables by which the ranks find the store.
        connect: connects to it; it may block.
        keeper: the node that holds the store; None if none does.
        process: what holds it, on that node.
    """

    environ: Mapping[str, str]
    connect: Callable[[], Any]
    keeper: int | None = None
    process: subprocess.Popen[bytes] | None = None


def find_meeting(options: LaunchOptions) -> Meeting:
    """Start what holds the store, if this node does.

    Raises:
        ModuleNotFoundError: the client of etcd is not installed.
        OSError: the port cannot be opened.
        ValueError: one of a pair of the store's options is missing.
    """
    if (url := options.store) is not None:
        store, run_id = url.open(_CONNECT), f"{url.endpoints}/{url.prefix}"
        environ = {STORE_VARIABLE: url.text, "TORCHELASTIC_RUN_ID": run_id}
        return Meeting(environ=environ, connect=lambda: store)
    host, port = options.endpoint or ("127.0.0.1", 0)
    process = None
    if options.node_rank == 0:
        listening = _listen(options.endpoint)
        port = listening.getsockname()[1]
        process = store_process.start(listening)
    environ = {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"{host}:{port}" if options.endpoint else uuid.uuid4().hex,
        # Rank 0 is a client of the store, too.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return Meeting(
        environ=environ,
        connect=lambda: TCPStore(host, port, is_master=False, timeout=_CONNECT),
        keeper=0,
        process=process,
    )


def _listen(endpoint: tuple[str, int] | None) -> socket.socket:
    """Open the port of the store; without an endpoint one that only this machine can reach."""
    if endpoint is None:
        return socket.create_server(("127.0.0.1", 0))
    # On all addresses: the name of the host may stand for one that this machine does not know.
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", endpoint[1]), family=family, dualstack_ipv6=dual)
