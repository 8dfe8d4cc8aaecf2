"""Watches the ranks of a node, restarts those that die, and passes signals on."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from decent_optim_wrapper.launcher.output import say
from decent_optim_wrapper.launcher.rank_process import End, RankProcess

_POLL_SECONDS = 0.05
_LONGEST_BACKOFF = 60.0
# Seconds from a signal until the remaining ranks are killed. On SIGTERM they may save something, so
# the launcher waits as long as torchrun, Slurm and Kubernetes do by default.
_GRACE = {signal.SIGINT: 4.0}
_LONGEST_GRACE = 30.0
# A script that fails in all ranks so soon, as of a wrong argument, fails in the next start as well.
_EARLY_SECONDS = 60.0


class Restarts(NamedTuple):
    """How often and when a rank is started again.

    Args:
        most: how often.
        backoff: seconds from the first death to the start; doubles with every death.
    """

    most: int
    backoff: float

    def pause(self, starts: int) -> float:
        """Seconds until the next start of a rank that was started so often."""
        return float(min(self.backoff * 2 ** (starts - 1), max(self.backoff, _LONGEST_BACKOFF)))


class Surroundings(Protocol):
    """What the ranks need besides each other."""

    @property
    def received(self) -> Sequence[signal.Signals]:
        """The signals that the launcher has received and that end it; it grows."""

    @property
    def requests(self) -> Sequence[signal.Signals]:
        """The signals that it has received and that end nothing; it grows."""

    def check(self) -> None:
        """Look after the launcher's other processes; called again and again."""

    def note_finished(self) -> None:
        """A rank has ended without an error."""

    def why_no_restart(self) -> str:
        """Why no rank is started again, whatever happened to it; empty if it may be."""

    def can_meet(self, died: float) -> bool:
        """Whether a rank that has died then could find the others if it were started now."""


class _Restart(NamedTuple):
    """When a rank has died, and when it is started again."""

    died: float
    due: float


class Supervisor:
    """Watches the ranks until all of them have ended for good.

    Args:
        ranks: the ranks, which are not started yet.
        restarts: how often and when a rank is started again.
        surroundings: what they need besides each other.
    """

    def __init__(
        self, ranks: Sequence[RankProcess], restarts: Restarts, surroundings: Surroundings
    ) -> None:
        self._ranks = ranks
        self._restarts = restarts
        self._surroundings = surroundings
        self._running = set[RankProcess]()
        # The ranks that have died and are started again.
        self._due: dict[RankProcess, _Restart] = {}
        # The first failure of each rank, and how those ended that were given up, in this order.
        self._first: dict[RankProcess, End] = {}
        self._lost: dict[RankProcess, End] = {}
        # Until when it counts that all ranks have failed at once, and whether they have.
        self._early = time.monotonic() + _EARLY_SECONDS
        self._failed_early = False
        # How many signals were passed on, and when all is killed that is still there.
        self._requested = 0
        self._passed_on = 0
        self._deadline = float("inf")

    def run(self) -> int:
        """Start the ranks, and return the exit code of the launcher; see `launch`."""
        for rank in self._ranks:
            self._start(rank)
        while self._running or self._due:
            self._pass_requests_on()
            self._react_to_signals()
            for rank in list(self._running):
                if (end := rank.poll()) is not None:
                    self._running.discard(rank)
                    self._note_end(rank, end)
                elif rank.has_finished:
                    self._surroundings.note_finished()
            self._start_again()
            self._surroundings.check()
            time.sleep(_POLL_SECONDS)
        self._sum_up()
        received = self._surroundings.received
        if self._lost and received:
            return 128 + received[0]
        return next((end.exit_code for end in self._lost.values()), 0)

    @property
    def had_failures(self) -> bool:
        """Whether a rank has ended with an error, even if it came back."""
        return bool(self._first)

    def _start(self, rank: RankProcess) -> None:
        rank.start()
        self._running.add(rank)

    def _note_end(self, rank: RankProcess, end: End) -> None:
        if end.code == 0:
            self._surroundings.note_finished()
            return
        self._first.setdefault(rank, end)
        self._look_for_early_failures()
        now, pause = time.monotonic(), self._restarts.pause(rank.starts)
        if reason := self._why_not(rank):
            self._lost[rank] = end
            say(f"rank {rank.rank} ended ({end}); it is not started again, because {reason}")
        else:
            self._due[rank] = _Restart(died=now, due=now + pause)
            say(
                f"rank {rank.rank} ended ({end}); it is started again in {pause:g} s (restart "
                f"{rank.starts} of {self._restarts.most})"
            )

    def _why_not(self, rank: RankProcess) -> str:
        """Why a rank that has died is not started again; empty if it is."""
        if self._passed_on:
            return f"of {self._surroundings.received[0].name}"
        if self._failed_early:
            return f"all ranks of this node failed within {_EARLY_SECONDS:g} s of their first start"
        if rank.starts > self._restarts.most:
            return f"--max-restarts is {self._restarts.most}"
        return self._surroundings.why_no_restart()

    def _start_again(self) -> None:
        for rank, restart in list(self._due.items()):
            if reason := self._why_not(rank):
                del self._due[rank]
                self._lost[rank] = self._first[rank]
                say(f"rank {rank.rank} is not started again, because {reason}")
            elif time.monotonic() >= restart.due and self._surroundings.can_meet(restart.died):
                del self._due[rank]
                self._start(rank)

    def _look_for_early_failures(self) -> None:
        if self._failed_early or time.monotonic() > self._early:
            return
        ends = list(self._first.values())
        # A kill says nothing about the next start, and a missing peer may be there by then.
        if len(ends) == len(self._ranks) and all(end.code > 0 for end in ends):
            self._failed_early = not all("PeerError" in end.error for end in ends)
        if self._failed_early:
            # Those that were started again already would wait for the others.
            for rank in self._running:
                rank.signal(signal.SIGKILL)

    def _pass_requests_on(self) -> None:
        for number in self._surroundings.requests[self._requested :]:
            self._requested += 1
            say(f"{number.name}: passed on to the ranks")
            for rank in self._running:
                rank.request(number)

    def _react_to_signals(self) -> None:
        """Pass the first signal on; kill at the second one, or when its time is up."""
        received = self._surroundings.received
        if len(received) > self._passed_on:
            first, self._passed_on = received[0], len(received)
            if len(received) == 1:
                self._deadline = time.monotonic() + _GRACE.get(first, _LONGEST_GRACE)
                say(f"{first.name}: passed on to the ranks; a second signal kills them")
                for rank in self._running:
                    rank.signal(first)
            else:
                self._deadline = 0.0
        if time.monotonic() > self._deadline:
            for rank in self._running:
                rank.signal(signal.SIGKILL)

    def _sum_up(self) -> None:
        """Say in the order of their ends which ranks have failed, and which were lost."""
        for rank, end in self._first.items():
            outcome = "; it was given up" if rank in self._lost else ""
            say(f"first error: {end}{outcome}; see {end.log}", f"rank {rank.rank}")
