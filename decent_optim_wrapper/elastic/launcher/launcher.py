"""Starts the ranks of a node, and what they need: a store, logs, and the other nodes."""

from __future__ import annotations

import os
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from decent_optim_wrapper.comm.interfaces import serve, socket_variables
from decent_optim_wrapper.comm.store import nonce_of_run
from decent_optim_wrapper.elastic.launcher.console import Console
from decent_optim_wrapper.elastic.launcher.nodes import Nodes
from decent_optim_wrapper.elastic.launcher.options import LaunchOptions
from decent_optim_wrapper.elastic.launcher.program import Program
from decent_optim_wrapper.elastic.launcher.rank_process import RankProcess
from decent_optim_wrapper.elastic.launcher.supervisor import ENDING, Supervisor
from decent_optim_wrapper.elastic.stores.launched_store import STORE_VARIABLE

_NAME = "decent_optim_wrapper"
# How long the launcher waits at its end for a console that nobody empties, after a signal.
_CONSOLE_SECONDS = 4.0
# How long the launcher of another node may be earlier than the launcher of node 0.
_CONNECT = timedelta(minutes=5)


def launch(options: LaunchOptions) -> int:
    """Start the ranks of this node, and return when all of them have ended for good.

    A rank that ends with an error, or is killed, is restarted. If the launcher is killed, so are
    its ranks (on Linux), but not what the ranks have started.

    Args:
        options: what to start, where, and how often.

    Returns:
        0 if every rank has ended without an error in the end. Otherwise the exit code of the rank
        that was given up first; 128 + n if signal n killed it.

    Raises:
        ModuleNotFoundError: the client of etcd is needed and not installed.
        OSError: the port of the store cannot be opened.
        ValueError: one of a pair of the store's options is missing.
    """
    # From now on: a signal before the ranks are started ends them, too.
    with _received_signals() as signals:
        environ, connect = _find_meeting(options)
        logs = options.log_dir or Path(tempfile.gettempdir()) / f"{_NAME}_{uuid.uuid4().hex}"
        console = Console()
        place = options.node_rank, options.nnodes, None if options.store else 0
        nodes = Nodes(connect, *place, console.say)
        program = _program(options, environ)
        first, keeps_all = options.node_rank * options.nproc_per_node, options.log_dir is not None
        ranks = [
            RankProcess(rank, rank - first, program, logs / f"rank_{rank}", keeps_all, console)
            for rank in range(first, first + options.nproc_per_node)
        ]
        code = Supervisor(ranks, program, options, signals, console, nodes).run()
        waited_for = len(signals)
        nodes.close(lambda: len(signals) > waited_for)
    console.close(_CONSOLE_SECONDS if ENDING.keys() & set(signals) else None)
    return code


@contextmanager
def _received_signals() -> Iterator[list[signal.Signals]]:
    """Yield the list of the signals that have come since, in place of what they would do."""
    received: list[signal.Signals] = []
    # What SIGUSR1 and SIGUSR2 mean is up to the script: Slurm sends one when the time of a job is
    # nearly up.
    before = {
        number: signal.signal(number, lambda each, _: received.append(signal.Signals(each)))
        for number in (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
        # With nohup the ranks outlive a terminal.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _program(options: LaunchOptions, environ: Mapping[str, str]) -> Program:
    ranks = options.nnodes * options.nproc_per_node
    # Variables of torchrun.
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(options.nproc_per_node),
        "GROUP_RANK": str(options.node_rank),
        "GROUP_WORLD_SIZE": str(options.nnodes),
        # As torchrun: otherwise every rank takes all the cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **socket_variables(options.interface, ranks, options.nnodes == 1),
    }
    return Program(options.command, {**shared, **environ})


def _find_meeting(options: LaunchOptions) -> tuple[dict[str, str], Callable[[], Any]]:
    """Serve the store, if this node does; it is served as long as the result exists.

    Returns:
        The variables by which the ranks find the store, and a function that connects to it, which
        may block.

    Raises:
        ModuleNotFoundError: the client of etcd is not installed.
        OSError: the port cannot be opened.
        ValueError: one of a pair of the store's options is missing.
    """
    if (url := options.store) is not None:
        store, run_id = url.open(_CONNECT), f"{url.endpoints}/{url.prefix}"
        return {STORE_VARIABLE: url.text, "TORCHELASTIC_RUN_ID": run_id}, lambda: store
    host, port = options.endpoint or ("127.0.0.1", 0)

    def connect() -> Any:
        return TCPStore(host, port, is_master=False, timeout=_CONNECT)

    if options.node_rank == 0:
        # At once, before anybody brings the nonce of an earlier run.
        nonce_of_run(served := serve(host, port, options.interface))
        # A clone has a connection of its own, which may be lost; the store goes on.
        port, connect = served.port, served.clone
    environ = {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"{host}:{port}" if options.endpoint else uuid.uuid4().hex,
        # Rank 0 is a client of the store, too.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # With --standalone the ranks must not meet in another store either.
        STORE_VARIABLE: "",
    }
    return environ, connect
