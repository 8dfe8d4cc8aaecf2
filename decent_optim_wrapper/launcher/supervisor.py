"""Watches the ranks of a node, restarts those that die, and passes signals on."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

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
# A script that fails in all ranks so soon, as of a wrong argument, fails in the next start as well.
_EARLY_SECONDS = 60.0


@dataclass(eq=False)
class Supervisor:
    """Watches the ranks until all of them have ended for good.

    Args:
        ranks: the ranks, which are not started yet.
        options: how often and when a rank is started again.
        signals: the signals that the launcher has received; it grows.
        console: where the launcher says what happens.
        nodes: the other nodes, if there are any.
    """

    ranks: Sequence[RankProcess]
    options: LaunchOptions
    signals: Sequence[signal.Signals]
    console: Console
    nodes: Nodes | None

    def __post_init__(self) -> None:
        self._running = set[RankProcess]()
        # The ranks that have died: how, when, and seconds until they are started again.
        self._due: dict[RankProcess, tuple[End, float, float]] = {}
        # The first failure of each rank, and how those ended that were given up, in this order.
        self._first: dict[RankProcess, End] = {}
        self._lost: dict[RankProcess, End] = {}
        # Until when it counts that all ranks have failed alike.
        self._early = time.monotonic() + _EARLY_SECONDS
        # Why no rank is started again; empty while one is.
        self._reason = ""
        # How many signals were passed on, and when all is killed that is still there.
        self._passed_on = 0
        self._deadline = float("inf")

    def run(self) -> int:
        """Start the ranks, and return the exit code of the launcher; see `launch`."""
        try:
            for rank in self.ranks:
                self._start(rank)
            while self._running or self._due:
                self._pass_signals_on()
                self._look_at_ranks()
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
        return next((end.exit_code for end in self._lost.values()), 0)

    @property
    def had_failures(self) -> bool:
        """True if a rank has ended with an error, even if it came back."""
        return bool(self._first)

    def _start(self, rank: RankProcess) -> None:
        rank.start()
        self._running.add(rank)

    def _look_at_ranks(self) -> None:
        for rank in list(self._running):
            if (end := rank.poll()) is not None:
                self._running.discard(rank)
                self._note_end(rank, end)

    def _note_end(self, rank: RankProcess, end: End) -> None:
        if end.code == 0:
            self._reason = self._reason or FINISHED
            if self.nodes is not None:
                self.nodes.note_finished()
            return
        self._first.setdefault(rank, end)
        if not self._reason and self._have_failed_alike():
            within = f"within {_EARLY_SECONDS:g} s of their first start"
            self._reason = f"all ranks of this node failed {within}"
            # Ranks that were started again already would wait for the others.
            self._kill()
        longest = max(self.options.backoff, _LONGEST_BACKOFF)
        pause = min(self.options.backoff * 2 ** (rank.starts - 1), longest)
        self._due[rank] = (end, time.monotonic(), pause)
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
                    self._start(rank)
                except OSError as error:
                    # The other ranks go on: a disk that is full now need not be so at the next try.
                    self._note_end(rank, End(1, f"it cannot be started: {error}", rank.folder))

    def _have_failed_alike(self) -> bool:
        """Return whether all ranks have failed in a way that the next start will not mend."""
        ends = self._first.values()
        # A kill says nothing about the next start, and a missing peer may be there by then.
        own = [end for end in ends if "PeerError" not in end.error]
        errors = {(end.code, re.sub(r"\d+", "", end.error)) for end in own}
        return (
            time.monotonic() < self._early
            and len(ends) == len(self.ranks)
            and all(end.code > 0 for end in ends)
            and len(errors) == 1
        )

    def _pass_signals_on(self) -> None:
        """Pass signals on; a second one that ends the launch kills, and so does the time."""
        for number in self.signals[self._passed_on :]:
            self._passed_on += 1
            if number not in ENDING:
                self.console.say(f"{number.name}: passed on to the ranks")
                for rank in self._running:
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
                for rank in self._running:
                    rank.signal(first)
        if time.monotonic() > self._deadline:
            self._kill()

    def _kill(self) -> None:
        for rank in self._running:
            rank.signal(signal.SIGKILL)
