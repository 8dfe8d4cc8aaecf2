"""Starts the ranks of a node, and what they need: a store, logs, and a guard."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from decent_optim_wrapper.launcher.guard import MARK, Guard
from decent_optim_wrapper.launcher.meeting import Meeting, find_meeting
from decent_optim_wrapper.launcher.nodes import Nodes
from decent_optim_wrapper.launcher.options import LaunchOptions
from decent_optim_wrapper.launcher.rank_process import RankProcess
from decent_optim_wrapper.launcher.signals import ReceivedSignals
from decent_optim_wrapper.launcher.supervisor import Restarts, Supervisor


def launch(options: LaunchOptions) -> int:
    """Start the ranks of this node, and return when all of them have ended for good.

    A rank that ends with an error, or is killed, is restarted. All processes of the launcher end
    with it, even if it is killed.

    Args:
        options: what to start, where, and how often.

    Returns:
        0 if every rank has ended without an error in the end. Otherwise the exit code of the rank
        that was given up first; 128 + n if signal n killed it, or if the launcher has received
        signal n.

    Raises:
        ModuleNotFoundError: the client of etcd is needed and not installed.
        OSError: the port of the store or a log cannot be opened, or etcd is not installed.
        ValueError: the options of the store contradict each other.
    """
    with ExitStack() as stack:
        # From now on: a signal before the ranks are started ends them, too.
        signals = stack.enter_context(ReceivedSignals())
        guard = Guard(Path(tempfile.gettempdir()) / f"decent_optim_wrapper_{uuid.uuid4().hex}")
        stack.callback(guard.end)
        restarts = Restarts(most=options.max_restarts, backoff=options.backoff)
        meeting = find_meeting(options, restarts, guard)
        nodes = None
        if options.nnodes > 1:
            nodes = Nodes(meeting.connect, options.node_rank, options.nnodes, meeting.holders)
        logs = options.log_dir or Path(tempfile.mkdtemp(prefix="decent_optim_wrapper_"))
        surroundings = _Surroundings(signals, guard, meeting, nodes)
        environ = {**meeting.environ, MARK: guard.mark}
        supervisor = Supervisor(_ranks(options, environ, logs), restarts, surroundings)
        code = supervisor.run()
        if nodes is not None:
            waited_for = len(signals.received)
            nodes.leave(lambda: len(signals.received) > waited_for)
        if options.log_dir is None and not supervisor.had_failures:
            shutil.rmtree(logs, ignore_errors=True)
        return code


class _Surroundings:
    """The launcher's other processes, and the signals that it receives.

    Args:
        signals: those that the launcher receives.
        guard: ends what is left.
        meeting: where the ranks meet.
        nodes: the other nodes, if there are any.
    """

    def __init__(
        self,
        signals: ReceivedSignals,
        guard: Guard,
        meeting: Meeting,
        nodes: Nodes | None,
    ) -> None:
        self._signals = signals
        self._guard = guard
        self._meeting = meeting
        self._nodes = nodes
        self._finished = False

    @property
    def received(self) -> Sequence[signal.Signals]:
        """The signals that the launcher has received and that end it; it grows."""
        return self._signals.received

    @property
    def requests(self) -> Sequence[signal.Signals]:
        """The signals that it has received and that end nothing; it grows."""
        return self._signals.requests

    def check(self) -> None:
        """Look after the launcher's other processes."""
        self._guard.check()
        if self._meeting.holder is not None:
            self._meeting.holder.check()

    def note_finished(self) -> None:
        """A rank has ended without an error."""
        self._finished = True
        if self._nodes is not None:
            self._nodes.note_finished()

    def why_no_restart(self) -> str:
        """The reason; empty if there is none."""
        if self._finished or (self._nodes is not None and self._nodes.finished):
            return "others have ended without an error"
        if self._nodes is not None and (reason := self._nodes.why_no_restart()):
            return reason
        return self._meeting.holder.why_no_restart() if self._meeting.holder else ""

    def can_meet(self, died: float) -> bool:
        """Whether a rank that has died then would find the store now."""
        return self._nodes is None or self._nodes.can_meet(died)


def _ranks(options: LaunchOptions, environ: Mapping[str, str], logs: Path) -> list[RankProcess]:
    command = ("-m", *options.command) if options.is_module else options.command
    shared = {**_shared_environment(options), **environ}
    ranks = []
    for local_rank in range(options.nproc_per_node):
        rank = options.node_rank * options.nproc_per_node + local_rank
        own = {"RANK": str(rank), "ROLE_RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        ranks.append(RankProcess(rank, command, {**shared, **own}, logs / f"rank_{rank}"))
    return ranks


def _shared_environment(options: LaunchOptions) -> dict[str, str]:
    """The variables of torchrun that are the same for all ranks of this node."""
    environ = {
        "WORLD_SIZE": str(options.world_size),
        "LOCAL_WORLD_SIZE": str(options.nproc_per_node),
        "GROUP_RANK": str(options.node_rank),
        "GROUP_WORLD_SIZE": str(options.nnodes),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(options.world_size),
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        # As torchrun: otherwise every rank takes all the cores.
        environ["OMP_NUM_THREADS"] = "1"
    return environ
