"""Starts the ranks of a node, and what they need: a store, logs, and the other nodes."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from decent_optim_wrapper.launcher.console import Console
from decent_optim_wrapper.launcher.meeting import find_meeting
from decent_optim_wrapper.launcher.nodes import Nodes
from decent_optim_wrapper.launcher.options import LaunchOptions
from decent_optim_wrapper.launcher.rank_process import RankProcess
from decent_optim_wrapper.launcher.supervisor import ENDING, Supervisor

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
        that was given up first; 128 + n if signal n killed it, or if the launcher has received
        signal n.

    Raises:
        ModuleNotFoundError: the client of etcd is needed and not installed.
        OSError: the port of the store or a log cannot be opened.
        ValueError: one of a pair of the store's options is missing.
    """
    # From now on: a signal before the ranks are started ends them, too.
    with _received_signals() as signals:
        meeting = find_meeting(options)
        logs = options.log_dir or Path(tempfile.mkdtemp(prefix="decent_optim_wrapper_"))
        console = Console()
        where = (options.node_rank, options.nnodes, meeting.keeper)
        nodes = Nodes(meeting.connect, *where, console.say) if options.nnodes > 1 else None
        ranks = _ranks(options, meeting.environ, logs, console)
        supervisor = Supervisor(ranks, options, signals, console, nodes, meeting.connect)
        code = supervisor.run()
        if nodes is not None:
            waited_for = len(signals)
            nodes.leave(lambda: len(signals) > waited_for)
        deadline = time.monotonic() + _CONSOLE_SECONDS
        ends = ENDING.keys()
        shown = console.close(lambda: not ends.isdisjoint(signals) and time.monotonic() > deadline)
        if shown and options.log_dir is None and not supervisor.had_failures:
            shutil.rmtree(logs, ignore_errors=True)
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


def _ranks(
    options: LaunchOptions, environ: Mapping[str, str], logs: Path, console: Console
) -> list[RankProcess]:
    command = ("-m", *options.command) if options.is_module else options.command
    # Variables of torchrun.
    shared = {
        "WORLD_SIZE": str(options.world_size),
        "LOCAL_WORLD_SIZE": str(options.nproc_per_node),
        "GROUP_RANK": str(options.node_rank),
        "GROUP_WORLD_SIZE": str(options.nnodes),
        # As torchrun: otherwise every rank takes all the cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **environ,
    }
    first, ranks = options.node_rank * options.nproc_per_node, []
    for rank in range(first, first + options.nproc_per_node):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank - first)}
        ranks.append(RankProcess(rank, command, {**shared, **own}, logs / f"rank_{rank}", console))
    return ranks
