"""The options of the launcher, as on the command line."""

from __future__ import annotations

import argparse
import os
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from decent_optim_wrapper.comm.etcd_store import read_endpoints
from decent_optim_wrapper.comm.store_url import STORE_VARIABLE, StoreUrl

# Those of torchrun have the names that they have there.
USAGE = "python -m decent_optim_wrapper run --nproc-per-node 4 script.py --its-options"


@dataclass(frozen=True)
class LaunchOptions:
    """What to start, where, and how often.

    Args:
        command: the script or module, and its arguments.
        is_module: whether `command` begins with the name of a module, as of ``python -m``.
        nproc_per_node: number of ranks on this node, and on every other one.
        nnodes: number of nodes.
        node_rank: the number of this node, from 0.
        endpoint: host and port at which node 0 holds the store; None takes a free port of this
            machine, for one node.
        store: a store in etcd in place of that of node 0.
        with_etcd: whether the launcher of each node holds a server of that store. Without `store`
            it takes free ports of this machine, for one node.
        max_restarts: how often each rank is started again after it has died.
        backoff: seconds from the first death of a rank to its restart; doubles with every death.
        log_dir: folder for the output of each rank; None keeps the output only if a rank fails.

    Raises:
        ValueError: an option is out of range, or contradicts another one.
    """

    command: tuple[str, ...]
    _: KW_ONLY
    is_module: bool = False
    nproc_per_node: int = 1
    nnodes: int = 1
    node_rank: int = 0
    endpoint: tuple[str, int] | None = None
    store: StoreUrl | None = None
    with_etcd: bool = False
    max_restarts: int = 3
    backoff: float = 1.0
    log_dir: Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("nproc_per_node", 1), ("nnodes", 1), ("max_restarts", 0)):
            if (given := getattr(self, name)) < least:
                raise ValueError(f"{_option(name)} must be at least {least}, got {given}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(
                f"--node-rank must be from 0 to {self.nnodes - 1} with --nnodes {self.nnodes}, got "
                f"{self.node_rank}"
            )
        if not 0 <= self.backoff < float("inf"):
            raise ValueError(f"--backoff must be a number of seconds from 0, got {self.backoff}")
        self._check_store()
        if not self.command:
            raise ValueError(f"expected a script; start it with `{USAGE}`")

    def _check_store(self) -> None:
        nnodes, store = self.nnodes, self.store
        if self.endpoint is not None and (self.with_etcd or store is not None):
            raise ValueError(
                "--endpoint is where node 0 holds a store, which --store and --with-etcd replace; "
                "leave it out, or the others"
            )
        if self.with_etcd and nnodes > 1 and store is None:
            raise ValueError(
                f"--with-etcd with --nnodes {nnodes} needs --store etcd://host0:2379,host1:2379,"
                f".../my-run, the same on all nodes: an endpoint on each, in the order of the nodes"
            )
        if nnodes > 1 and self.endpoint is None and store is None:
            raise ValueError(
                f"--nnodes {nnodes} needs --endpoint host:port, the same on all nodes: the "
                f"host of node 0, and a free port there"
            )
        if not self.with_etcd or store is None:
            return
        if (count := len(read_endpoints(store.endpoints))) != nnodes:
            raise ValueError(
                f"--with-etcd expects an endpoint of each node in --store, got {count} for "
                f"--nnodes {nnodes}"
            )
        if store.options:
            raise ValueError(
                f"the servers of --with-etcd take no {', '.join(store.options)}; leave that out of "
                f"--store, or start the servers yourself"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return self.nnodes * self.nproc_per_node


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    default = LaunchOptions(("script.py",))
    add = parser.add_argument
    add("--nproc-per-node", type=int, default=default.nproc_per_node, help="ranks on each node")
    add("--nnodes", type=int, default=default.nnodes, help="number of nodes")
    add("--node-rank", type=int, default=default.node_rank, help="number of this node, from 0")
    add(
        "--endpoint",
        type=_endpoint,
        metavar="HOST:PORT",
        help="where node 0 holds the store; on one node a free port by default",
    )
    add(
        "--store",
        type=_store,
        default=os.environ.get(STORE_VARIABLE),
        metavar="URL",
        help=f"etcd://host1:2379,host2:2379,host3:2379/my-run in place of the store of node 0; "
        f"${STORE_VARIABLE} by default",
    )
    add("--with-etcd", action="store_true", help="start an etcd server on each node")
    add(
        "--max-restarts",
        type=int,
        default=default.max_restarts,
        help=f"how often each rank that dies is started again; {default.max_restarts} by default",
    )
    add(
        "--backoff",
        type=float,
        default=default.backoff,
        metavar="SECONDS",
        help="before the first restart of a rank; doubles with each; 1 by default",
    )
    add("--log-dir", type=Path, help="a folder for the output of each rank")
    add("-m", "--module", action="store_true", help="start a module, as `python -m` does")
    add("command", nargs=argparse.REMAINDER, metavar="script.py ...", help="and its arguments")


def read_arguments(args: argparse.Namespace) -> LaunchOptions:
    """The options from the parsed command line.

    Raises:
        ValueError: an option is out of range, or contradicts another one.
    """
    return LaunchOptions(
        tuple(args.command),
        is_module=args.module,
        nproc_per_node=args.nproc_per_node,
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        endpoint=args.endpoint,
        store=args.store,
        with_etcd=args.with_etcd,
        max_restarts=args.max_restarts,
        backoff=args.backoff,
        log_dir=args.log_dir,
    )


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"expected host:port, got {text!r}")
    # As an address of IPv6 is written before a port.
    return host.strip("[]"), int(port)


def _store(text: str) -> StoreUrl:
    try:
        return StoreUrl.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
