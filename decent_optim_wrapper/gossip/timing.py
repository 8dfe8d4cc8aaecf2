"""The time of a step by its parts: clocks that are also ranges in a profile."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any, NamedTuple

from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

# The steps of which reports tell.
KEPT_STEPS = 100


class StepStats(NamedTuple):
    """Bytes, seconds and counts of the last `step()` on this rank.

    Seconds are measured on the host. On a GPU they are the time to queue the work, except for
    waits, which last until the host may continue. A profile shows the kernels.

    Args:
        bytes_sent: number of bytes sent; an all-reduce counts as a ring all-reduce.
        wait_seconds: time spent waiting for communication, and on CPUs for codes.
        mix_seconds: time to mix what has arrived, and to pack what is sent. On CPUs it is coded by
            another thread.
        update_seconds: time of the base optimizer's local update.
        buckets: number of buckets.
        rounds: number of rounds so far, including idle ones.
        staleness: number of steps from the launch of the round that this step has mixed; 0 if it
            has mixed none.
        skipped: whether GradScaler has found an overflow that skipped the last local update;
            inside a backward pass, the update of at least one bucket.
    """

    bytes_sent: int
    wait_seconds: float
    mix_seconds: float
    update_seconds: float
    buckets: int
    rounds: int
    staleness: int = 0
    skipped: bool = False


class Clock:
    """Adds up the seconds spent inside its `with` blocks, each of which is a range in a profile.

    Args:
        name: the range's name in a profile.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.seconds = 0.0
        self._start = 0.0
        self._range: record_function | None = None

    def __enter__(self) -> None:
        # A range costs more than everything else here.
        if _profiler_enabled():
            self._range = record_function(self._name)
            self._range.__enter__()  # type: ignore[no-untyped-call]
        self._start = perf_counter()

    def __exit__(self, *error: Any) -> None:
        self.seconds += perf_counter() - self._start
        if self._range is not None:
            self._range.__exit__(*error)
            self._range = None


class Meter:
    """The clocks and the byte count of one step."""

    def __init__(self) -> None:
        names = ("wait", "mix", "update", "launch")
        self.wait, self.mix, self.update, self.launch = (Clock(f"decent::{n}") for n in names)
        self.reset()
        # The last step that was closed, without `skipped`, which the local update knows.
        self.last = StepStats(0, 0.0, 0.0, 0.0, 0, 0)
        # The end, the cost and the group of each of the last steps.
        self.history = deque[tuple[float, StepStats, tuple[int, ...]]](maxlen=KEPT_STEPS)

    def reset(self) -> None:
        """Start a new step."""
        mix = self.mix.seconds + self.launch.seconds
        # The clocks at the beginning of the step: waiting, mixing and packing, updating.
        self._before = self.wait.seconds, mix, self.update.seconds
        self.bytes_sent = self.staleness = 0
        # The positions of the ranks in the group that the step has mixed with.
        self.mixed_with: tuple[int, ...] = ()

    def count_bytes(self, count: int) -> None:
        """Count bytes that are sent."""
        self.bytes_sent += count

    def note_round(self, staleness: int, ranks: tuple[int, ...]) -> None:
        """Note the staleness and the group of the round that this step mixes."""
        self.staleness, self.mixed_with = staleness, ranks

    def close(self, buckets: int, rounds: int) -> None:
        """End the step: nothing is counted until the next one."""
        wait, mix, update = self._before
        self.last = StepStats(
            bytes_sent=self.bytes_sent,
            wait_seconds=self.wait.seconds - wait,
            mix_seconds=self.mix.seconds + self.launch.seconds - mix,
            update_seconds=self.update.seconds - update,
            buckets=buckets,
            rounds=rounds,
            staleness=self.staleness,
        )
        self.history.append((perf_counter(), self.last, self.mixed_with))
