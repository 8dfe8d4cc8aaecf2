"""Seeded faults for ranks that are processes, for their links and for their store."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from soak import Fleet

# With fewer ranks nobody could admit a restarted rank when one more is lost.
LEAST = 2
# Less than the time without a heartbeat after which the others give a rank up.
_LONGEST_SHORT_STOP = 1.5
# What was lost is sent again within twice the time.
_LONGEST_SHORT_CUT = 0.3
_TICK = 0.02


class Kind(Enum):
    """What happens to one or more ranks, or to the store."""

    DELAY = "delay"
    SHORT_STOP = "short stop"
    TWIN = "twin"
    STORE_STOP = "store stop"
    SLOW_LINK = "slow link"
    LOSSY_LINK = "lossy link"
    SHORT_CUT = "short cut"
    LONG_STOP = "long stop"
    KILL = "kill"
    STORM = "rejoin storm"
    CUT = "cut link"


# The other ranks give nobody up.
HARMLESS = (
    *(Kind.DELAY, Kind.SHORT_STOP, Kind.TWIN, Kind.STORE_STOP),
    *(Kind.SLOW_LINK, Kind.LOSSY_LINK, Kind.SHORT_CUT),
)
# Between network namespaces.
LINKS = (Kind.SLOW_LINK, Kind.LOSSY_LINK, Kind.SHORT_CUT, Kind.CUT)


class Fault(NamedTuple):
    """One fault.

    Args:
        kind: the kind of fault.
        ranks: the ranks that have it; the store has it instead if that is its kind.
        gap: seconds between these ranks.
        seconds: seconds until they continue or are restarted.
        pause: seconds until the next fault.
    """

    kind: Kind
    ranks: tuple[int, ...]
    gap: float
    seconds: float
    pause: float


def draw_faults(
    seed: int, world_size: int, timeout: float, kinds: tuple[Kind, ...]
) -> Iterator[Fault]:
    """Yield faults without end, the same ones for the same seed.

    Args:
        seed: seed of the random faults.
        world_size: number of ranks.
        timeout: number of seconds that the ranks wait for each other.
        kinds: the kinds of faults to choose from.
    """
    draw = random.Random(seed)
    short = min(0.3, _LONGEST_SHORT_STOP / timeout)
    cut = min(0.1, _LONGEST_SHORT_CUT / timeout)
    spans = {
        Kind.DELAY: (0.05, 0.3),
        Kind.SHORT_STOP: (short / 6, short),
        Kind.TWIN: (0.0, 0.0),
        Kind.STORE_STOP: (0.1, 0.7),
        Kind.SLOW_LINK: (0.1, 1.0),
        Kind.LOSSY_LINK: (0.1, 1.0),
        Kind.SHORT_CUT: (cut / 3, cut),
        Kind.LONG_STOP: (1.2, 1.8),
        Kind.KILL: (0.05, 1.5),
        # If a third rank is out, the members wait for these, at most for the timeout.
        Kind.STORM: (0.05, 0.25),
        Kind.CUT: (0.5, 2.0),
    }
    while True:
        kind = draw.choice(kinds)
        # At least half of the members must go on.
        count = min(draw.choice((2, 3)), world_size // 2) if kind is Kind.STORM else 1
        ranks = tuple(draw.sample(range(world_size), count))
        gap, pause = timeout * draw.uniform(0, 0.1), timeout * draw.uniform(0, 0.6)
        yield Fault(kind, ranks, gap, timeout * draw.uniform(*spans[kind]), pause)


class Injector:
    """Injects faults into ranks, and restarts or continues these.

    Args:
        ranks: the processes, all started.
        world_size: number of ranks.
        patience: seconds within which a rank must report again.
    """

    def __init__(self, ranks: Fleet, world_size: int, patience: float = 60) -> None:
        self._ranks = ranks
        self._everyone = set(range(world_size))
        self._patience = patience
        self._away: dict[int, tuple[float, Kind]] = {}
        # Ranks that have trained since their last fault.
        self.there: set[int] = set()
        self.done: Counter[Kind] = Counter()
        # How often the other ranks may have gone on without a rank.
        self.losses = 0

    def inject(self, fault: Fault) -> None:
        """Inject the fault as soon as it leaves enough ranks, and wait for its pause.

        Raises:
            TimeoutError: a rank has not reported, or a second process was not refused, in time.
        """
        self._listen_until(lambda: self._bearable(fault))
        self.done[fault.kind] += 1
        if fault.kind is Kind.DELAY:
            self._ranks.delay(fault.ranks[0], fault.seconds)
        elif fault.kind is Kind.TWIN:
            self._ranks.start_twin(fault.ranks[0])
            self._listen_until(lambda: not self._ranks.twins)
        elif fault.kind is Kind.STORE_STOP:
            self._ranks.stop_store()
            # Ranks that are due meanwhile come back: a short cut would become a long one.
            self._listen_for(fault.seconds)
            self._ranks.continue_store()
        else:
            self._take_away(fault)
        self._listen_for(fault.pause)

    def settle(self) -> None:
        """Wait until all ranks are back.

        Raises:
            TimeoutError: a rank has not reported in time.
        """
        self._listen_until(lambda: self.there == self._everyone)

    def _bearable(self, fault: Fault) -> bool:
        if fault.kind is Kind.STORM:
            return self.there == self._everyone
        return self.there.issuperset(fault.ranks) and len(self.there) > LEAST

    def _take_away(self, fault: Fault) -> None:
        due = time.monotonic() + fault.seconds + fault.gap * (len(fault.ranks) - 1)
        for number, rank in enumerate(fault.ranks):
            if number:
                self._listen_for(fault.gap)
            self._begin(fault.kind, rank)
            self.there.remove(rank)
            self._away[rank] = (due, fault.kind)
        if fault.kind not in HARMLESS:
            self.losses += len(fault.ranks)

    def _listen_for(self, seconds: float) -> None:
        over = time.monotonic() + seconds
        self._listen_until(lambda: time.monotonic() > over, seconds)

    def _listen_until(self, condition: Callable[[], bool], longer: float = 0) -> None:
        deadline = time.monotonic() + self._patience + longer
        while not condition():
            if time.monotonic() > deadline:
                missing = sorted(self._everyone - self.there)
                raise TimeoutError(
                    f"expected a report of every rank and the end of every twin within "
                    f"{self._patience} s, got none from ranks {missing}, and "
                    f"{self._ranks.twins} twins are left"
                )
            self.there |= self._ranks.listen(_TICK) - self._away.keys()
            self._bring_back()

    def _bring_back(self) -> None:
        # Read once: ranks that are due together come back in their order.
        now = time.monotonic()
        for rank, (due, kind) in list(self._away.items()):
            if now < due:
                continue
            del self._away[rank]
            self._end(kind, rank)

    def _begin(self, kind: Kind, rank: int) -> None:
        if kind in (Kind.SHORT_STOP, Kind.LONG_STOP):
            self._ranks.signal(rank, signal.SIGSTOP)
        elif kind in (Kind.SLOW_LINK, Kind.LOSSY_LINK):
            self._impair(kind, rank, True)
        elif kind in (Kind.SHORT_CUT, Kind.CUT):
            self._ranks.cut(rank)
        else:
            self._ranks.kill(rank)

    def _impair(self, kind: Kind, rank: int, is_on: bool) -> None:
        change = self._ranks.slow_down if kind is Kind.SLOW_LINK else self._ranks.lose_packets
        change(rank, is_on)

    def _end(self, kind: Kind, rank: int) -> None:
        if kind in (Kind.SHORT_STOP, Kind.LONG_STOP):
            self._ranks.signal(rank, signal.SIGCONT)
        elif kind in (Kind.SLOW_LINK, Kind.LOSSY_LINK):
            self._impair(kind, rank, False)
        elif kind is Kind.SHORT_CUT:
            self._ranks.mend(rank)
        else:
            if kind is Kind.CUT:
                # It has raised, or it would come back by itself.
                self._ranks.kill(rank)
                self._ranks.mend(rank)
            self._ranks.start(rank)
