"""The options of the launcher, as on the command line."""

from __future__ import annotations

import argparse
import os
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path

from decent_optim_wrapper.comm.store_url import EXAMPLE, STORE_VARIABLE, StoreUrl, read_endpoint

# Options of torchrun keep their names.
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
        store: a store in etcd in place of the store of node 0.
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
    max_restarts: int = 3
    backoff: float = 1.0
    log_dir: Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("nproc_per_node", 1), ("nnodes", 1), ("max_restarts", 0)):
            if (given := getattr(self, name)) < least:
                raise ValueError(f"{_option(name)} must be at least {least}, got {given}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"--node-rank must be below {self.nnodes}, got {self.node_rank}")
        if not 0 <= self.backoff < float("inf"):
            raise ValueError(f"--backoff must be a number of seconds from 0, got {self.backoff}")
        if self.endpoint and self.store:
            raise ValueError("--store replaces the store at --endpoint; leave one of them out")
        if self.nnodes > 1 and not self.endpoint and not self.store:
            raise ValueError(
                f"--nnodes {self.nnodes} needs --endpoint host:port, the same on all nodes: the "
                f"host of node 0, and a free port there"
            )
        if not self.command:
            raise ValueError(f"expected a script; start it with `{USAGE}`")

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return self.nnodes * self.nproc_per_node


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    default, add = LaunchOptions(("script.py",)), parser.add_argument
    numbers = {
        "nproc_per_node": "ranks on each node",
        "nnodes": "number of nodes",
        "node_rank": "number of this node, from 0",
        "max_restarts": "how often each rank that dies is started again",
        "backoff": "seconds before the first restart of a rank, which double with each",
    }
    for name, about in numbers.items():
        value = getattr(default, name)
        text = f"{about}; {value:g} by default"
        add(_option(name), type=type(value), default=value, metavar="N", help=text)
    text = "where node 0 holds the store; on one node a free port by default"
    add("--endpoint", metavar="HOST:PORT", help=text)
    text = f"{EXAMPLE} in place of the store of node 0; ${STORE_VARIABLE} by default"
    add("--store", default=os.environ.get(STORE_VARIABLE), metavar="URL", help=text)
    add("--log-dir", type=Path, help="a folder for the output of each rank")
    text = "start a module, as `python -m` does"
    add("-m", "--module", dest="is_module", action="store_true", help=text)
    add("command", nargs=argparse.REMAINDER, metavar="script.py ...", help="and its arguments")


def read_arguments(args: argparse.Namespace) -> LaunchOptions:
    """The options from the parsed command line.

    Raises:
        ValueError: an option is malformed or out of range, or contradicts another one.
    """
    given = {each.name: getattr(args, each.name) for each in fields(LaunchOptions)}
    given["command"] = tuple(args.command)
    if args.endpoint is not None:
        host, port = read_endpoint(args.endpoint)
        # As an address of IPv6 is written before a port.
        given["endpoint"] = host.strip("[]"), port
    if args.store is not None:
        given["store"] = StoreUrl.parse(args.store)
    return LaunchOptions(**given)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
