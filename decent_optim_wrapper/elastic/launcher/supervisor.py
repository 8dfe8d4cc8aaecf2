"""Watches the ranks of a node, restarts those that die, and passes signals on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.elastic.launcher.console import Console
from decent_optim_wrapper.elastic.launcher.nodes import Nodes
from decent_optim_wrapper.elastic.launcher.options import LaunchOptions
from decent_optim_wrapper.elastic.launcher.program import Program
from decent_optim_wrapper.elastic.launcher.rank_process import RankProcess
from decent_optim_wrapper.elastic.membership.ended import mark_end

_POLL_SECONDS = 0.05
# The signals that end the launch, and seconds until the remaining ranks are killed. On SIGTERM they
# may save something: torchrun, Slurm and Kubernetes wait as long by default.
ENDING = {signal.SIGINT: 4.0, signal.SIGTERM: 30.0, signal.SIGHUP: 30.0}


@dataclass(eq=False)
class Supervisor:
    """Watches the ranks until all of them have ended for good.

    Args:
        ranks: the ranks, which are not started yet.
        program: what they run.
        options: how often and when a rank is started again.
        signals: the signals that the launcher has received; it grows.
        console: where the launcher says what happens.
        nodes: the other nodes.
    """

    ranks: Sequence[RankProcess]
    program: Program
    options: LaunchOptions
    signals: Sequence[signal.Signals]
    console: Console
    nodes: Nodes

    def __post_init__(self) -> None:
        # The ranks that have died: their exit codes, and when.
        self._due: dict[RankProcess, tuple[int, float]] = {}
        # The exit codes of the ranks that were given up, in this order.
        self._lost: list[int] = []
        # Why no rank is started again; empty while one is.
        self._reason = ""
        # Number of signals that were passed on, and when the remaining ranks are killed.
        self._passed_on = 0
        self._deadline = float("inf")

    def run(self) -> int:
        """Start the ranks, and return the exit code of the launcher; see `launch`."""
        try:
            for rank in self.ranks:
                rank.start()
            while self._due or any(rank.is_running for rank in self.ranks):
                self._pass_signals_on()
                for rank in self.ranks:
                    if (code := rank.poll()) is not None:
                        self._note_end(rank, code)
                self._start_again()
                if self.options.spare and not self._reason:
                    self.program.prepare()
                time.sleep(_POLL_SECONDS)
        finally:
            self._kill()
        # As a shell reports them.
        return next((128 - code if code < 0 else code for code in self._lost), 0)

    def _note_end(self, rank: RankProcess, code: int) -> None:
        if code == 0:
            self.nodes.note_finished()
            return
        how = f"exit code {code}" if code > 0 else f"signal {-code}, {signal.strsignal(-code)}"
        self._due[rank] = code, time.monotonic()
        in_background(partial(mark_end, self.nodes.connect, rank.rank, rank.pid))
        self.console.say(f"rank {rank.rank} ended ({how}); see {rank.folder}")

    def _start_again(self) -> None:
        for rank, (code, died) in list(self._due.items()):
            backoff = self.options.pause_before(rank.starts)
            reason = self._reason or self.nodes.why_no_restart()
            if rank.starts > self.options.max_restarts:
                reason = reason or f"--max-restarts is {self.options.max_restarts}"
            if reason:
                del self._due[rank]
                self._lost.append(code)
                self.console.say(f"rank {rank.rank} is not started again, because {reason}")
            elif time.monotonic() >= died + backoff and self.nodes.can_meet(died):
                del self._due[rank]
                restart = f"restart {rank.starts} of {self.options.max_restarts}"
                self.console.say(f"rank {rank.rank} is started again ({restart})")
                try:
                    rank.start()
                except OSError as error:
                    # The other ranks go on.
                    self.console.say(f"rank {rank.rank} cannot be started: {error}")
                    self._note_end(rank, 1)

    def _pass_signals_on(self) -> None:
        """Pass signals on. A second one that ends the launch, or the deadline, kills the ranks."""
        for number in self.signals[self._passed_on :]:
            self._passed_on += 1
            if number not in ENDING:
                self.console.say(f"{number.name}: passed on to the ranks")
                for rank in self.ranks:
                    rank.signal(number, os.kill)
            elif self._deadline < float("inf"):
                self._deadline = 0.0
            else:
                self._reason = f"of {number.name}"
                self._deadline = time.monotonic() + ENDING[number]
                self.console.say(f"{number.name}: passed on; a second signal kills the ranks")
                for rank in self.ranks:
                    rank.signal(number)
        if time.monotonic() > self._deadline:
            self._kill()

    def _kill(self) -> None:
        for rank in self.ranks:
            rank.signal(signal.SIGKILL)
