"""Seeded faults for ranks that are processes: they are killed, stopped, delayed and restarted."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple, Protocol

# With fewer ranks nobody could let a restarted rank rejoin when one more is lost.
LEAST = 2
_TICK = 0.02


class Kind(Enum):
    """What happens to a rank; the first two end before the other ranks give it up."""

    DELAY = "delay"
    SHORT_STOP = "short stop"
    LONG_STOP = "long stop"
    KILL = "kill"


MILD = (Kind.DELAY, Kind.SHORT_STOP)


class Fault(NamedTuple):
    """One fault.

    Args:
        kind: the kind of fault.
        rank: the rank that has it.
        seconds: seconds until the rank continues or is restarted.
        pause: seconds until the next fault.
    """

    kind: Kind
    rank: int
    seconds: float
    pause: float


def draw_faults(
    seed: int, world_size: int, timeout: float, kinds: tuple[Kind, ...] = tuple(Kind)
) -> Iterator[Fault]:
    """Yield faults without end, the same ones for the same seed.

    Args:
        seed: seed of the random faults.
        world_size: number of ranks.
        timeout: number of seconds that the ranks wait for each other.
        kinds: the kinds of faults to choose from.
    """
    draw = random.Random(seed)
    spans = {
        Kind.DELAY: (0.05, 0.3),
        Kind.SHORT_STOP: (0.05, 0.3),
        Kind.LONG_STOP: (1.2, 1.8),
        Kind.KILL: (0.05, 1.5),
    }
    while True:
        kind, rank = draw.choice(kinds), draw.randrange(world_size)
        seconds, pause = draw.uniform(*spans[kind]), draw.uniform(0, 0.6)
        yield Fault(kind, rank, timeout * seconds, timeout * pause)


class Ranks(Protocol):
    """Processes into which faults are injected."""

    def kill(self, rank: int) -> None:
        """Kill the process."""

    def start(self, rank: int) -> None:
        """Start the rank again."""

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Stop the process, or let it continue."""

    def delay(self, rank: int, seconds: float) -> None:
        """Let the rank sleep before its next step."""

    def listen(self, seconds: float) -> set[int]:
        """Return the ranks that report a round within that time."""


class Injector:
    """Injects faults into ranks, and restarts or continues these.

    Args:
        ranks: the processes, all started.
        world_size: number of ranks.
        patience: seconds within which a rank must report again.
    """

    def __init__(self, ranks: Ranks, world_size: int, patience: float = 60) -> None:
        self._ranks = ranks
        self._everyone = set(range(world_size))
        self._patience = patience
        self._away: dict[int, tuple[float, Kind]] = {}
        # Ranks that have trained since their last fault.
        self.there: set[int] = set()
        self.done: Counter[Kind] = Counter()

    @property
    def losses(self) -> int:
        """Number of faults after which the other ranks may have gone on without the rank."""
        return sum(count for kind, count in self.done.items() if kind not in MILD)

    def inject(self, fault: Fault) -> None:
        """Inject the fault as soon as it leaves enough ranks, and wait for its pause.

        Raises:
            TimeoutError: a rank has not reported in time.
        """
        self._listen_until(lambda: self._bearable(fault))
        self.done[fault.kind] += 1
        if fault.kind is Kind.DELAY:
            self._ranks.delay(fault.rank, fault.seconds)
        else:
            self._take_away(fault)
        over = time.monotonic() + fault.pause
        self._listen_until(lambda: time.monotonic() > over)

    def settle(self) -> None:
        """Wait until all ranks are back.

        Raises:
            TimeoutError: a rank has not reported in time.
        """
        self._listen_until(lambda: self.there == self._everyone)

    def _bearable(self, fault: Fault) -> bool:
        return fault.rank in self.there and len(self.there) > LEAST

    def _take_away(self, fault: Fault) -> None:
        if fault.kind is Kind.KILL:
            self._ranks.kill(fault.rank)
        else:
            self._ranks.signal(fault.rank, signal.SIGSTOP)
        self.there.remove(fault.rank)
        self._away[fault.rank] = (time.monotonic() + fault.seconds, fault.kind)

    def _listen_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._patience
        while not condition():
            if time.monotonic() > deadline:
                missing = sorted(self._everyone - self.there)
                raise TimeoutError(
                    f"expected a report of every rank within {self._patience} s, got none from "
                    f"ranks {missing}"
                )
            self.there |= self._ranks.listen(_TICK) - self._away.keys()
            self._bring_back()

    def _bring_back(self) -> None:
        for rank, (due, kind) in list(self._away.items()):
            if time.monotonic() < due:
                continue
            del self._away[rank]
            if kind is Kind.KILL:
                self._ranks.start(rank)
            else:
                self._ranks.signal(rank, signal.SIGCONT)
