"""Starts the ranks of a node, and what they need: a store, logs, and the other nodes."""

from __future__ import annotations

import os
import signal
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from decent_optim_wrapper.comm.process_groups import gloo_variables
from decent_optim_wrapper.launcher.console import Console
from decent_optim_wrapper.launcher.meeting import find_meeting
from decent_optim_wrapper.launcher.nodes import Nodes
from decent_optim_wrapper.launcher.options import LaunchOptions
from decent_optim_wrapper.launcher.program import Program
from decent_optim_wrapper.launcher.rank_process import RankProcess
from decent_optim_wrapper.launcher.supervisor import ENDING, Supervisor

_NAME = "decent_optim_wrapper"
# How long the launcher waits at its end for a console that nobody empties, after a signal.
_CONSOLE_SECONDS = 4.0


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
        meeting = find_meeting(options)
        logs = options.log_dir or Path(tempfile.gettempdir()) / f"{_NAME}_{uuid.uuid4().hex}"
        console = Console()
        where = meeting.connect, options.node_rank, options.nnodes, meeting.keeper
        nodes = Nodes(*where, console.say)
        program = _program(options, meeting.environ)
        first, keeps_all = options.node_rank * options.nproc_per_node, options.log_dir is not None
        ranks = [
            RankProcess(rank, rank - first, program, logs / f"rank_{rank}", keeps_all, console)
            for rank in range(first, first + options.nproc_per_node)
        ]
        code = Supervisor(ranks, program, options, signals, console, nodes).run()
        waited_for = len(signals)
        nodes.leave(lambda: len(signals) > waited_for)
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
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _program(options: LaunchOptions, environ: Mapping[str, str]) -> Program:
    # Variables of torchrun.
    shared = {
        "WORLD_SIZE": str(options.nnodes * options.nproc_per_node),
        "LOCAL_WORLD_SIZE": str(options.nproc_per_node),
        "GROUP_RANK": str(options.node_rank),
        "GROUP_WORLD_SIZE": str(options.nnodes),
        # As torchrun: otherwise every rank takes all the cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **gloo_variables(options.nnodes == 1),
    }
    return Program(options.command, {**shared, **environ})
