"""The options of the launcher, as on the command line."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.run import determine_local_world_size

from decent_optim_wrapper.checks import take_fields
from decent_optim_wrapper.comm import interfaces
from decent_optim_wrapper.elastic.stores.etcd_store import read_endpoint
from decent_optim_wrapper.elastic.stores.launched_store import EXAMPLE, STORE_VARIABLE, StoreUrl

# Options of torchrun, and what to use in their place.
_MEET = "--rdzv-endpoint", "--rdzv-backend", "--rdzv-id", "--master-addr", "--master-port"
_IN_PLACE_OF = dict.fromkeys(_MEET, "--endpoint HOST:PORT, or --store")
_IN_PLACE_OF |= dict.fromkeys(("--redirects", "-r", "--tee", "-t"), "--log-dir")
_LONGEST_BACKOFF = 60.0


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What to start, where, and how often.

    Args:
        command: the script, or "-m" and the name of a module, and its arguments.
        nproc_per_node: number of ranks on this node, and on every other one.
        nnodes: number of nodes.
        node_rank: the number of this node, from 0.
        endpoint: host and port at which node 0 serves the store; None takes a free port of this
            machine, for one node.
        store: a store in etcd in place of the store of node 0.
        interface: the network interface of gloo, NCCL and the store of node 0; None for any.
        max_restarts: how often each rank is started again after it has died.
        spare: whether one more process imports torch, and becomes the next rank that dies.
        backoff: seconds from the first death of a rank to its restart; doubles with every death.
        log_dir: folder for the output of each rank; None keeps the output only if a rank fails.

    Raises:
        ValueError: an option is out of range, or contradicts another one, or there is no script.
    """

    command: tuple[str, ...]
    nproc_per_node: int = 1
    nnodes: int = 1
    node_rank: int = 0
    endpoint: tuple[str, int] | None = None
    store: StoreUrl | None = None
    interface: str | None = None
    max_restarts: int = 3
    spare: bool = False
    backoff: float = 1.0
    log_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.nproc_per_node < 1:
            raise ValueError(f"--nproc-per-node must be at least 1, got {self.nproc_per_node}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"--node-rank must be below {self.nnodes}, got {self.node_rank}")
        if self.nnodes > 1 and not self.endpoint and not self.store:
            raise ValueError(f"--nnodes {self.nnodes} needs --endpoint host:port, a port of node 0")
        if self.command[0] != "-m" and not Path(self.command[0]).exists():
            raise ValueError(f"there is no script {self.command[0]!r} in {Path.cwd()}")
        if not self.backoff >= 0:
            raise ValueError(f"--backoff must be 0 seconds or more, got {self.backoff}")

    def pause_before(self, restart: int) -> float:
        """Seconds from the death of a rank to this restart, counted from 1."""
        # A float has no room for more doublings.
        return min(self.backoff * 2.0 ** min(restart - 1, 60), _LONGEST_BACKOFF)


class _Refuse(argparse.Action):
    """An option of torchrun, whose error names ours."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(f"{self.option_strings[0]} is an option of torchrun; use {self.const}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser; options that torchrun has, too, have the same names."""

    def add(*names: str, **details: Any) -> None:
        # As torchrun spells them, too. The defaults are in the record.
        names += tuple(name[:2] + name[2:].replace("-", "_") for name in names if "-" in name[2:])
        parser.add_argument(*names, **{"default": argparse.SUPPRESS, **details})

    add("--nproc-per-node", metavar="N", help="ranks on each node, auto, gpu or cpu; 1 by default")
    add("--nnodes", type=int, metavar="N", help="number of nodes; 1 by default")
    add("--node-rank", type=int, metavar="N", help="number of this node; 0 by default")
    add("--max-restarts", type=int, metavar="N", help="restarts of each rank; 3 by default")
    add("--backoff", type=float, metavar="N", help="seconds before the first one; 1 by default")
    add("--spare", action="store_true", help="keep a process with torch for a rank that dies")
    add("--endpoint", metavar="HOST:PORT", help="node 0 and a free port there, on all nodes")
    text = f"{EXAMPLE} in place of the store of node 0; ${STORE_VARIABLE} by default"
    add("--store", default=os.environ.get(STORE_VARIABLE) or None, metavar="URL", help=text)
    add("--standalone", dest="store", action="store_const", const=None, help="without etcd")
    text = f"network interface of all connections, such as wg0; ${interfaces.VARIABLE} by default"
    add("--interface", default=os.environ.get(interfaces.VARIABLE), metavar="NAME", help=text)
    add("--log-dir", type=Path, help="a folder for the output of each rank")
    text = "start a module, as `python -m` does"
    add("-m", "--module", dest="prefix", action="append_const", const="-m", default=[], help=text)
    for name, ours in _IN_PLACE_OF.items():
        add(name, action=_Refuse, nargs="?", const=ours, help=argparse.SUPPRESS)
    add("script", metavar="script.py")
    add("arguments", nargs=argparse.REMAINDER)


def read_arguments(args: argparse.Namespace) -> LaunchOptions:
    """The options from the parsed command line.

    Raises:
        ValueError: an option is malformed or out of range, or contradicts another one.
    """
    given = {**vars(args), "command": (*args.prefix, args.script, *args.arguments)}
    if "nproc_per_node" in given:
        given["nproc_per_node"] = determine_local_world_size(args.nproc_per_node)
    if "endpoint" in given:
        host, port = read_endpoint(args.endpoint)
        # As an address of IPv6 is written before a port.
        given["endpoint"] = host.strip("[]"), port
    if args.store is not None:
        given["store"] = StoreUrl.parse(args.store)
    return take_fields(LaunchOptions, given)
