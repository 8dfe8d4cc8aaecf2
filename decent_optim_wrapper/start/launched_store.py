"""The store that a launcher names: one in etcd, or the store of our own launcher or of torchrun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError
from torch.distributed.constants import default_pg_timeout

from decent_optim_wrapper.comm.store_url import STORE_VARIABLE, StoreUrl
from decent_optim_wrapper.comm.waiting import within
from decent_optim_wrapper.errors import PeerError, text_of
from decent_optim_wrapper.start.launch import find_launch

# The process that holds the store may still be starting. If it has ended, no rank waits for long.
_SHORTEST_CONNECT, _LONGEST_CONNECT = timedelta(minutes=1), timedelta(minutes=5)


class StoreWorld(NamedTuple):
    """The ranks that gossip, and the store in which they can meet.

    Args:
        store: a connection to it; None if the ranks have none.
        rank: this rank.
        world_size: number of ranks.
        timeout: bound of every wait.
        launched_as: the number that the launcher gave to each rank; empty if it is the same.
    """

    store: Any
    rank: int
    world_size: int
    timeout: timedelta = default_pg_timeout
    launched_as: Sequence[int] = ()


def find_launched_store(environ: Mapping[str, str], timeout: timedelta | None) -> StoreWorld | None:
    """Connect to the store that the launcher of this process names; None if it names none.

    Args:
        environ: the environment variables.
        timeout: the bound of every wait; this one is bounded by one to five minutes.

    Raises:
        ModuleNotFoundError: the store is in etcd, whose client is not installed.
        RuntimeError: a variable is missing.
        ValueError: a variable has a wrong value.
        PeerError: the store does not answer.
    """
    bound = min(max(timeout or _LONGEST_CONNECT, _SHORTEST_CONNECT), _LONGEST_CONNECT)
    text = environ.get(STORE_VARIABLE)
    if not text and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # Rank 0 itself would hold the store.
        return None
    launch = find_launch(environ)
    if text:
        url = StoreUrl.parse(text)
        where = f"the store in etcd at {url.endpoints}"
        remedy = "start most of these servers, or correct the URL"
        connect = partial(_open, url, bound)
    else:
        host, port = launch.master_addr, launch.master_port
        where, remedy = f"the launcher's store at {host}:{port}", "look at the launcher of node 0"
        connect = partial(TCPStore, host, int(port), is_master=False, timeout=bound)
    try:
        # On another thread: Ctrl-C does not end a call of C++.
        store = within(bound.total_seconds(), connect)
    except (TimeoutError, DistError) as error:
        raise PeerError(
            f"rank {launch.rank}: {where} does not answer within {bound} ({text_of(error)}); "
            f"{remedy}"
        ) from error
    return StoreWorld(store=store, rank=launch.rank, world_size=launch.world_size)


def _open(url: StoreUrl, timeout: timedelta) -> Any:
    store = url.open(timeout)
    # Servers that start with the ranks take a while, and servers on other nodes start later.
    store.check(["any key"])
    return store
