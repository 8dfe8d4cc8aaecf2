"""Where the time of a step goes: what every rank does, and when its link is idle.

    sudo python examples/benchmark/timeline.py --methods ours decent-dp --size 40

Runs methods of `step_time.py` in the network lab and records two things on one clock: what the
training thread of each rank is in (`record_function` ranges), and the bytes on each link, read
every millisecond behind the rate limit. Prints for each method how many TCP segments were lost and
sent again, how long the links were idle, and what the ranks did meanwhile; draws a few steps. A
method took a minute on 2 busy cores.
"""

from __future__ import annotations

import argparse
import functools
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

# The profiler's library reads it when it is loaded, and would log every start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import netlab
import progress
import step_time
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from decent_optim_wrapper.utils import init_distributed

SAMPLE_SECONDS = 0.001
# The link counts as idle while less than this share of its rate flows.
BUSY_SHARE = 0.2
# Averaged over some packets, which are up to 64 KiB large between namespaces.
PACKETS, PACKET_BYTES = 3, 65536
SHORTEST_IDLE_SECONDS = 0.003
# What a range says about the training thread, by the beginning of its name.
RANGES = {
    "decent::wait": "wait",
    "work.wait": "wait",
    "decent::mix": "mix",
    "decent::update": "update",
    "Optimizer.step": "update",
    "decent::launch": "send",
    "dist.all_reduce": "send",
    "busy.backward": "backward",
    "busy.forward": "forward",
}
# With their colours.
ACTIVITIES = {
    "forward": "lightsteelblue",
    "backward": "cornflowerblue",
    "wait": "lightgrey",
    "mix": "tab:green",
    "update": "tab:orange",
    "send": "tab:red",
}


class Span(NamedTuple):
    """What the training thread was in, and from when to when."""

    activity: str
    start: float
    end: float


class Sample(NamedTuple):
    """The counters of all links at a time."""

    time: float
    links: list[netlab.Traffic]


class Idle(NamedTuple):
    """A time in which a link was idle, and what its rank was in for the longest part of it."""

    start: float
    end: float
    during: str


class Trace(NamedTuple):
    """What one rank has recorded.

    Args:
        spans: what its training thread was in.
        steps: when each step began; the last entry is the end.
        retransmitted: TCP segments that it has sent again meanwhile.
    """

    spans: list[Span]
    steps: list[float]
    retransmitted: int


class Recording(NamedTuple):
    """One method: what each rank has recorded, and the bytes on the links."""

    traces: list[Trace]
    samples: list[Sample]


def record(method: str, size_mib: float, steps: int, adamw: bool) -> Trace:
    """Run in every rank."""
    init_distributed()
    if adamw:
        os.environ["STEP_TIME_ADAMW"] = "1"
    _name_range(dist.Work, "wait", "work.wait")
    _name_range(dist, "all_reduce", "dist.all_reduce")
    _name_range(step_time.Busy, "forward", "busy.forward")
    _name_range(step_time.Busy, "backward", "busy.backward")
    step = step_time.METHODS[method](step_time.build_model(size_mib))
    for _ in range(5):
        step()
    dist.barrier()
    # Behind a barrier the links are empty: make them as busy as in training.
    for _ in range(3):
        step()
    starts, before = [], netlab.retransmitted()
    # The library opens its ranges in a profile only. Its events are not read: reading them has
    # failed with std::bad_alloc.
    with profile(activities=[ProfilerActivity.CPU]), _noting_ranges() as spans:
        for _ in range(steps):
            starts.append(time.monotonic())
            step()
        starts.append(time.monotonic())
    again = netlab.retransmitted() - before
    if hasattr(step, "finish"):
        step.finish()
    dist.barrier()
    spans.sort(key=lambda span: (span.start, -span.end))
    return Trace(spans=_outermost(spans), steps=starts, retransmitted=again)


@contextmanager
def _noting_ranges() -> Iterator[list[Span]]:
    """List the ranges that this thread closes."""
    spans: list[Span] = []
    thread = threading.get_ident()
    enter, leave = record_function.__enter__, record_function.__exit__
    started: dict[int, float] = {}

    def entered(self: record_function) -> record_function:
        started[id(self)] = time.monotonic()
        return enter(self)

    def left(self: record_function, *error: Any) -> None:
        leave(self, *error)
        start = started.pop(id(self), None)
        activity = _activity(self.name)
        if activity and start is not None and threading.get_ident() == thread:
            spans.append(Span(activity, start, time.monotonic()))

    with (
        patch.object(record_function, "__enter__", entered),
        patch.object(record_function, "__exit__", left),
    ):
        yield spans


def _outermost(spans: list[Span]) -> list[Span]:
    """Leave out ranges inside another one of the same activity."""
    kept: list[Span] = []
    for span in spans:
        if not (kept and kept[-1].activity == span.activity and kept[-1].end >= span.end):
            kept.append(span)
    return kept


def _activity(name: str) -> str | None:
    return next((what for start, what in RANGES.items() if name.startswith(start)), None)


def _name_range(owner: Any, attribute: str, name: str) -> None:
    """Make calls of a function a range."""
    function = getattr(owner, attribute)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    setattr(owner, attribute, called)


@contextmanager
def sampling(where: netlab.Lab) -> Iterator[list[Sample]]:
    """Sample the links in a process of its own; the list is filled at the end."""
    fork = get_context("fork")
    here, there = fork.Pipe()
    sampler = fork.Process(target=_sample, args=(where, there))
    sampler.start()
    samples: list[Sample] = []
    try:
        yield samples
        here.send("stop")
        samples += here.recv()
    finally:
        sampler.kill()
        sampler.join()


def _sample(where: netlab.Lab, pipe: Connection) -> None:
    samples = []
    while not pipe.poll(SAMPLE_SECONDS):
        samples.append(Sample(time.monotonic(), netlab.traffic(where)))
    pipe.send(samples)


def idle_times(recording: Recording, rank: int, rate: float) -> list[Idle]:
    """When a rank's link was idle in both directions while its steps were recorded.

    Args:
        recording: of one method.
        rank: the rank; on loopback all ranks share the only link.
        rate: of the link, in bytes per second.
    """
    trace, samples = recording.traces[rank], recording.samples
    times = [sample.time for sample in samples]
    window = _window(rate)
    found: list[list[float]] = []
    for index in range(bisect_left(times, trace.steps[0]), bisect_right(times, trace.steps[-1])):
        before = max(0, bisect_left(times, times[index] - window) - 1)
        seconds = times[index] - times[before]
        if _most_bytes(samples[before], samples[index], rank) >= BUSY_SHARE * rate * seconds:
            continue
        if found and found[-1][1] >= times[before]:
            found[-1][1] = times[index]
        else:
            found.append([times[before], times[index]])
    return [Idle(start, end, _during(trace, start, end)) for start, end in found]


def _window(rate: float) -> float:
    """The seconds over which a link's traffic is averaged."""
    return max(SHORTEST_IDLE_SECONDS, PACKETS * PACKET_BYTES / rate)


def _most_bytes(before: Sample, after: Sample, rank: int) -> int:
    old, new = (sample.links[rank % len(sample.links)] for sample in (before, after))
    return max(new.sent - old.sent, new.received - old.received)


def _during(trace: Trace, start: float, end: float) -> str:
    """The activity that takes the longest part of a time."""
    seconds: dict[str, float] = defaultdict(float)
    for span in trace.spans:
        seconds[span.activity] += max(0.0, min(end, span.end) - max(start, span.start))
    return max(seconds, key=seconds.__getitem__) if any(seconds.values()) else "other"


def table(recordings: dict[str, Recording], rate: float) -> str:
    """Milliseconds per step in every activity, and how long the link was idle in it."""
    columns = ["ms per step (link idle)", "step", *ACTIVITIES, "other", "sent again"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for method, recording in recordings.items():
        traces = recording.traces
        steps = sum(len(trace.steps) - 1 for trace in traces)
        spent: dict[str, float] = defaultdict(float)
        idle: dict[str, float] = defaultdict(float)
        for rank, trace in enumerate(traces):
            for span in trace.spans:
                spent[span.activity] += span.end - span.start
            spent["step"] += trace.steps[-1] - trace.steps[0]
            for each in idle_times(recording, rank, rate):
                idle[each.during] += each.end - each.start
        spent["other"] = spent["step"] - sum(spent[activity] for activity in ACTIVITIES)
        idle["step"] = sum(idle.values())
        cells = [
            f"{1000 * spent[column] / steps:.1f} ({1000 * idle[column] / steps:.1f})"
            for column in columns[1:-1]
        ]
        again = sum(trace.retransmitted for trace in traces) / steps
        lines.append(f"| {method} | " + " | ".join(cells) + f" | {again:.1f} |")
    return "\n".join(lines)


def draw(recordings: dict[str, Recording], rate: float, steps: int, path: Path) -> None:
    """Draw the first steps of every method: the activities of each rank above its link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    ranks = max(len(recording.traces) for recording in recordings.values())
    figure, axes = pyplot.subplots(
        len(recordings),
        1,
        figsize=(14, 1 + 0.8 * ranks * len(recordings)),
        layout="constrained",
        squeeze=False,
    )
    for axis, (method, recording) in zip(axes[:, 0], recordings.items(), strict=True):
        origin = min(trace.steps[0] for trace in recording.traces)
        end = max(trace.steps[: steps + 1][-1] for trace in recording.traces)
        for rank, trace in enumerate(recording.traces):
            for span in trace.spans:
                bar = [(1000 * (span.start - origin), 1000 * (span.end - span.start))]
                axis.broken_barh(bar, (rank + 0.55, 0.35), color=ACTIVITIES[span.activity])
            times, rates = _rates(recording, rank, origin, end, _window(rate))
            scaled = [rank + 0.5 * min(1.0, each / rate) for each in rates]
            axis.fill_between(times, rank, scaled, step="pre", color="dimgrey", linewidth=0)
            for start in trace.steps:
                axis.plot([1000 * (start - origin)] * 2, [rank, rank + 0.95], "k:", linewidth=1)
        axis.set(title=method, xlim=(0, 1000 * (end - origin)), xlabel="ms", ylabel="rank")
        axis.set_yticks([rank + 0.5 for rank in range(ranks)], map(str, range(ranks)))
    patches = [Patch(color=colour, label=name) for name, colour in ACTIVITIES.items()]
    patches.append(Patch(color="dimgrey", label="bytes sent"))
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _rates(
    recording: Recording, rank: int, start: float, end: float, window: float
) -> tuple[list[float], list[float]]:
    """Milliseconds since the start, and the bytes per second sent in the window before."""
    shown = [sample for sample in recording.samples if start - window <= sample.time <= end]
    times = [sample.time for sample in shown]
    sent = [sample.links[rank % len(sample.links)].sent for sample in shown]
    found: tuple[list[float], list[float]] = ([], [])
    for index in range(1, len(shown)):
        before = max(0, bisect_left(times, times[index] - window) - 1)
        found[0].append(1000 * (times[index] - start))
        found[1].append((sent[index] - sent[before]) / (times[index] - times[before]))
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=step_time.METHODS, required=True)
    parser.add_argument("--size", type=float, default=40, metavar="MIB")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", default="400mbit", help="of each link, such as 400mbit")
    parser.add_argument("--steps", type=int, default=12, help="recorded for the table")
    parser.add_argument("--drawn", type=int, default=3, help="steps in the picture")
    parser.add_argument("--adamw", action="store_true", help="AdamW instead of SGD with momentum")
    parser.add_argument("--output", type=Path, default=Path("runs/timeline.png"))
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    args.rate = netlab.possible(args.rate)
    os.environ.setdefault("LOGURU_LEVEL", "ERROR")
    recordings = {}
    with (
        netlab.lab(args.ranks, args.rate) as where,
        progress.bar(len(args.methods), "method") as bar,
    ):
        for method in args.methods:
            with sampling(where) as samples:
                call = (record, method, args.size, args.steps, args.adamw)
                traces = netlab.run(where, args.ranks, *call, timeout=240)
            recordings[method] = Recording(traces=traces, samples=samples)
            bar.update()
    # Without a limit: what loopback carries at least.
    rate = step_time.bits(args.rate) / 8 if args.rate else 1e8
    print(table(recordings, rate))
    draw(recordings, rate, args.drawn, args.output)


if __name__ == "__main__":
    main()
