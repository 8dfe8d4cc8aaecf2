"""Watches the ranks of a node, restarts those that die, and passes signals on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.elastic.rendezvous import tell_end
from decent_optim_wrapper.launcher.console import Console
from decent_optim_wrapper.launcher.nodes import FINISHED, Nodes
from decent_optim_wrapper.launcher.options import LaunchOptions
from decent_optim_wrapper.launcher.rank_process import End, RankProcess

_POLL_SECONDS = 0.05
_LONGEST_BACKOFF = 60.0
# The signals that end the launch, and as what they count: ranks would dump their cores on SIGQUIT.
ENDING = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGHUP,
    signal.SIGQUIT: signal.SIGTERM,
}
# Seconds from a signal until the remaining ranks are killed. On SIGTERM they may save something, so
# the launcher waits as long as torchrun, Slurm and Kubernetes do by default.
_GRACE = {signal.SIGINT: 4.0}
_LONGEST_GRACE = 30.0


@dataclass(eq=False)
class Supervisor:
    """Watches the ranks until all of them have ended for good.

    Args:
        ranks: the ranks, which are not started yet.
        options: how often and when a rank is started again.
        signals: the signals that the launcher has received; it grows.
        console: where the launcher says what happens.
        nodes: the other nodes, if there are any.
        connect: connects to the store; it may block.
    """

    ranks: Sequence[RankProcess]
    options: LaunchOptions
    signals: Sequence[signal.Signals]
    console: Console
    nodes: Nodes | None
    connect: Callable[[], object]

    def __post_init__(self) -> None:
        # The ranks that have died: how, when, and seconds until they are started again.
        self._due: dict[RankProcess, tuple[End, float, float]] = {}
        # The first failure of each rank, and how those ended that were given up, in this order.
        self._first: dict[RankProcess, End] = {}
        self._lost: dict[RankProcess, End] = {}
        # Why no rank is started again; empty while one is.
        self._reason = ""
        # How many signals were passed on, and when all is killed that is still there.
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
                    if (end := rank.poll()) is not None:
                        self._note_end(rank, end)
                self._start_again()
                time.sleep(_POLL_SECONDS)
        finally:
            self._kill()
        for rank, end in self._first.items():
            outcome = "; it was given up" if rank in self._lost else ""
            self.console.say(f"first error: {end}{outcome}; see {end.log}", f"rank {rank.rank}")
        ending = [ENDING[number] for number in self.signals if number in ENDING]
        if self._lost and ending:
            return 128 + ending[0]
        # As a shell reports them.
        return next((128 - code if code < 0 else code for code, *_ in self._lost.values()), 0)

    @property
    def had_failures(self) -> bool:
        """True if a rank has ended with an error, even if it came back."""
        return bool(self._first)

    def _note_end(self, rank: RankProcess, end: End) -> None:
        if end.code == 0:
            self._reason = self._reason or FINISHED
            if self.nodes is not None:
                self.nodes.note_finished()
            return
        self._first.setdefault(rank, end)
        longest = max(self.options.backoff, _LONGEST_BACKOFF)
        pause = min(self.options.backoff * 2 ** (rank.starts - 1), longest)
        self._due[rank] = (end, time.monotonic(), pause)
        in_background(partial(tell_end, self.connect, rank.rank, rank.pid))
        self.console.say(f"rank {rank.rank} ended ({end})")

    def _why_not(self, rank: RankProcess) -> str:
        """Why a rank that has died is not started again; empty if it is."""
        if self._reason:
            return self._reason
        if rank.starts > self.options.max_restarts:
            return f"--max-restarts is {self.options.max_restarts}"
        return self.nodes.why_no_restart() if self.nodes else ""

    def _start_again(self) -> None:
        for rank, (end, died, pause) in list(self._due.items()):
            if reason := self._why_not(rank):
                del self._due[rank]
                self._lost[rank] = end
                self.console.say(f"rank {rank.rank} is not started again, because {reason}")
            elif time.monotonic() >= died + pause and (not self.nodes or self.nodes.can_meet(died)):
                del self._due[rank]
                restart = f"restart {rank.starts} of {self.options.max_restarts}"
                self.console.say(f"rank {rank.rank} is started again ({restart})")
                try:
                    rank.start()
                except OSError as error:
                    # The other ranks go on: a disk that is full now need not be so at the next try.
                    self._note_end(rank, End(1, f"it cannot be started: {error}", rank.folder))

    def _pass_signals_on(self) -> None:
        """Pass signals on; a second one that ends the launch kills, and so does the time."""
        for number in self.signals[self._passed_on :]:
            self._passed_on += 1
            if number not in ENDING:
                self.console.say(f"{number.name}: passed on to the ranks")
                for rank in self.ranks:
                    rank.request(number)
            elif self._deadline < float("inf"):
                self._deadline = 0.0
            else:
                first = ENDING[number]
                self._reason = f"of {first.name}"
                self._deadline = time.monotonic() + _GRACE.get(first, _LONGEST_GRACE)
                self.console.say(
                    f"{first.name}: passed on to the ranks; a second signal kills them"
                )
                for rank in self.ranks:
                    rank.signal(first)
        if time.monotonic() > self._deadline:
            self._kill()

    def _kill(self) -> None:
        for rank in self.ranks:
            rank.signal(signal.SIGKILL)
