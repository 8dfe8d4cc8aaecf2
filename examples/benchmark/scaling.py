"""How long many ranks take to start, to go on without one of them, and to let it come back.

    python examples/benchmark/scaling.py
    python examples/benchmark/scaling.py --wan

Each rank is a thread that agrees on the members over connections of its own to a `TCPStore` in
another process: all start, one stops, and it comes back. Up to 64 ranks are also measured with
their connections over gloo; 256 would need 65,000 sockets in this process. Lines through the
figures without gloo say what more ranks would take. All ranks share the cores and one interpreter,
which delays them. A name server that loses answers adds 5 s for some of the connections: without
network, as under `unshare -n sh -c "ip link set lo up; python ..."`, no name is asked for. It takes
31 s of CPU time in 2.5 minutes. With `--wan` it measures nothing, and prints what 1,000 ranks send
over a slow network, and how long a step takes by simulation.py: 7 s of CPU time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from heartbeats import Server, server
from loguru import logger
from simulated import INT8, MIB
from simulation import simulate
from torch._C._distributed_c10d import PrefixStore, TCPStore

from decent_optim_wrapper import TopologyFactory
from decent_optim_wrapper.comm.store import BoundedStore
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.elastic.epoch import FIRST_NOTE, Epoch, Note
from decent_optim_wrapper.elastic.heartbeat import pace
from decent_optim_wrapper.elastic.rendezvous import Rendezvous, key_prefix
from decent_optim_wrapper.topo import Topology

TIMEOUT = timedelta(seconds=120)
STALE_AFTER = 2.0
HAS_STATE = Note(round=5, needs_state=False)
# Interval in which a rank that trains looks whether the members meet: its step.
STEP_SECONDS = 0.05
# A round begins with one small message and ends with another one.
CONTROL_MESSAGES = 2
# Of a message of a store: a number for its kind, and one for each length.
LENGTH_BYTES = 8


class CountingStore(BoundedStore):
    """A store that counts the calls of a rank, without those of its heartbeats, and their keys."""

    def __init__(self, store: Any, timeout: timedelta) -> None:
        super().__init__(store, timeout)
        self.calls = self.keys = 0

    def check(self, keys: Sequence[str]) -> bool:
        self.keys += len(keys)
        return super().check(keys)

    def get_all(self, keys: Sequence[str]) -> list[str]:
        self.keys += len(keys)
        return super().get_all(keys)

    def _call(self, ask: Callable[[Any], Any], *least: float, **options: bool) -> Any:
        self.calls += 1
        return super()._call(ask, *least, **options)


class Rank(Rendezvous):
    """A rank whose calls are counted.

    Args:
        shared: the store, of which every rank makes connections of its own.
        rank: its number.
        size: number of ranks.
        with_gloo: whether the members connect to each other.
    """

    _store: CountingStore

    def __init__(self, shared: TCPStore, rank: int, size: int, with_gloo: bool) -> None:
        # As in a process of its own.
        Rendezvous.built = 0
        super().__init__(shared, rank, size, TIMEOUT, STALE_AFTER)
        self._with_gloo = with_gloo
        self._entered_last: Epoch | None = None

    @classmethod
    def _own_keys(cls, store: Any, timeout: timedelta) -> CountingStore:
        return CountingStore(PrefixStore(key_prefix(0), store), timeout)

    def _connect(self, epoch: int, members: tuple[int, ...]) -> Transport:
        if self._with_gloo:
            return super()._connect(epoch, members)
        return Transport(None, members.index(self.rank), members, TIMEOUT)

    @property
    def counts(self) -> tuple[int, int]:
        return self._store.calls, self._store.keys

    def meet(self, note: Note) -> Epoch:
        """Gather again, as a recovery does."""
        self.disconnect()
        self._entered_last = self.gather(note)
        return self._entered_last

    def meet_when_wanted(self) -> Epoch:
        """Train until the members must meet."""
        while not self.wanted:
            time.sleep(STEP_SECONDS)
        return self.meet(HAS_STATE)

    def disconnect(self) -> None:
        if self._entered_last is not None:
            self._entered_last.transport.abort("the members gather again")


class Figures(NamedTuple):
    """What a meeting of the ranks took.

    Args:
        seconds: until the last one had met the others.
        calls: of the store per rank.
        keys: that these calls name, per rank.
        store: CPU seconds of the process that holds the store, with heartbeats.
    """

    seconds: float
    calls: float
    keys: float
    store: float


PHASES = ("start", "loss", "return")


def meet(store: Server, ranks: Sequence[Rank], actions: Sequence[Callable[[], Epoch]]) -> Figures:
    """Let the ranks meet, each on its thread; what that took.

    Raises:
        RuntimeError: they do not agree on the members.
    """
    calls, keys = map(sum, zip(*(each.counts for each in ranks), strict=True))
    busy, start = store.cpu_seconds(), time.monotonic()
    with ThreadPoolExecutor(len(actions)) as pool:
        epochs = list(pool.map(lambda action: action(), actions))
    passed, busy = time.monotonic() - start, store.cpu_seconds() - busy
    expected = tuple(sorted(each.rank for each in ranks))
    if any(epoch.members != expected for epoch in epochs):
        raise RuntimeError(f"not all of {len(ranks)} ranks met: too few cores")
    calls_now, keys_now = map(sum, zip(*(each.counts for each in ranks), strict=True))
    count = len(ranks)
    return Figures(passed, (calls_now - calls) / count, (keys_now - keys) / count, busy)


@contextmanager
def members(shared: TCPStore, size: int, with_gloo: bool) -> Iterator[list[Rank]]:
    ranks = [Rank(shared, rank, size, with_gloo) for rank in range(size)]
    try:
        yield ranks
    finally:
        for each in ranks:
            each.leave()
            each.disconnect()
        # Torch would write the stack of a heartbeat that is cut off by the end of the store.
        time.sleep(2 * pace(STALE_AFTER).pause)


def measure(size: int, with_gloo: bool) -> dict[str, Figures]:
    """Start, lose a rank in the middle, and let it come back."""
    found: dict[str, Figures] = {}
    with server() as store:
        shared = TCPStore("127.0.0.1", store.port, is_master=False, timeout=TIMEOUT)
        with members(shared, size, with_gloo) as ranks:
            begun = time.monotonic()

            def note(phase: str, figures: Figures) -> None:
                found[phase] = figures
                text = f"{size} ranks, {phase}: {figures.seconds:.1f} s"
                print(f"{text} ({time.monotonic() - begun:.0f} s)", file=sys.stderr, flush=True)

            note("start", meet(store, ranks, [partial(r.meet, FIRST_NOTE) for r in ranks]))
            time.sleep(2 * pace(STALE_AFTER).pause)
            lost = ranks.pop(size // 2)
            lost.leave()
            note("loss", meet(store, ranks, [r.meet_when_wanted for r in ranks]))
            lost.disconnect()
            time.sleep(2 * pace(STALE_AFTER).pause)
            back = Rank(shared, lost.rank, size, with_gloo)
            others = [r.meet_when_wanted for r in ranks]
            ranks.append(back)
            note("return", meet(store, ranks, [*others, partial(back.meet, FIRST_NOTE)]))
    return found


class Line(NamedTuple):
    """A straight line."""

    base: float
    slope: float

    def at(self, ranks: int) -> float:
        return self.base + self.slope * ranks


def fit(sizes: Sequence[int], values: Sequence[float]) -> Line:
    """The line of least squares; a level one if it would fall, which nothing does."""
    slope, base = 0.0, statistics.mean(values)
    if len(set(sizes)) > 1:
        slope, base = statistics.linear_regression(sizes, values)
    return Line(base, slope) if slope >= 0 else Line(statistics.mean(values), 0.0)


def extrapolated(found: Sequence[tuple[int, Figures]], size: int) -> Figures:
    """What the lines through the measured figures say of more ranks.

    The store works for all ranks together, so the line is that of its work for each of them. It is
    one thread, so nobody is done before it.
    """
    sizes = [ranks for ranks, _ in found]
    lines = [fit(sizes, [getattr(each, name) for _, each in found]) for name in Figures._fields]
    per_rank = fit(sizes, [each.store / ranks for ranks, each in found])
    seconds, calls, keys, _ = (line.at(size) for line in lines)
    store = size * per_rank.at(size)
    return Figures(max(seconds, store), calls, keys, store)


def row(size: int, how: str, figures: Figures) -> str:
    seconds, calls, keys, store = figures
    return f"| {size:,} | {how} | {seconds:.1f} | {calls:,.0f} | {keys:,.0f} | {store:.1f} |"


def print_membership(sizes: Sequence[int], most_with_gloo: int, more: Sequence[int]) -> None:
    runs = [(size, size <= most_with_gloo) for size in sizes]
    # Those with gloo are also measured without: only the same work can be compared.
    runs = [*runs, *((size, False) for size, with_gloo in runs if with_gloo)]
    found: dict[bool, list[tuple[int, dict[str, Figures]]]] = {True: [], False: []}
    for size, with_gloo in sorted(runs):
        found[with_gloo].append((size, measure(size, with_gloo)))
    for phase in PHASES:
        print(f"\n| {phase}: ranks | | s | calls per rank | keys per rank | store, s of CPU |")
        print("|---" * 6 + "|")
        for with_gloo, how in ((True, "measured, with gloo"), (False, "measured, without gloo")):
            for size, figures in found[with_gloo]:
                print(row(size, how, figures[phase]))
        points = [(size, figures[phase]) for size, figures in found[False]]
        line = fit(*zip(*((size, each.seconds) for size, each in points), strict=True))
        for size in more:
            print(row(size, "extrapolated", extrapolated(points, size)), flush=True)
        print(f"\n{phase}: {line.base:.1f} s and {1000 * line.slope:.1f} ms for each rank")


class Wan(NamedTuple):
    """A slow network and a model.

    Args:
        mbit: per second, of each rank's link.
        latency: seconds per message.
        mib: of the parameters in float32.
        computing: seconds of a step without communication.
        jitter: standard deviation of these seconds.
        steps: number of steps to simulate.
    """

    mbit: float
    latency: float
    mib: float
    computing: float
    jitter: float
    steps: int


# The buckets of the wrapper's default.
BUCKET_MIB = 25
TOPOLOGIES = (("one-peer-exp", 1024), ("ring", 1024), ("base-2", 1000), ("hypercuboid", 1000))


def most(topology: Topology, cost: Callable[[int], float]) -> tuple[float, float]:
    """The mean over the phases of what a rank does in a group of some size, and the most."""
    sizes = [
        max(group.size for group in topology.groups(phase)) for phase in range(topology.period)
    ]
    costs = [cost(size) for size in sizes]
    return statistics.mean(costs), max(costs)


def copies(size: int) -> float:
    """Copies of the parameters that a member of a group sends."""
    return float(size - 1) if size <= 2 else 2 * (size - 1) / size


def messages(size: int, mib: float) -> float:
    """Messages that a member of a group sends in a round."""
    buckets = math.ceil(mib / BUCKET_MIB)
    in_turn = 1 if size <= 2 else 2 * (size - 1)
    return float(buckets * in_turn + CONTROL_MESSAGES * (size - 1))


def step_cells(topology: Topology, wan: Wan, share: float) -> list[str]:
    """Seconds per step: a round in every step, with "auto", and of the all-reduce."""

    def run(**schedule: Any) -> Any:
        return simulate(
            topology,
            compute_time=wan.computing,
            jitter=wan.jitter,
            bandwidth=wan.mbit * 1e6 / 8,
            latency=wan.latency,
            parameter_bytes=wan.mib * MIB * share,
            bucket_cap_mb=BUCKET_MIB * share,
            steps=wan.steps,
            **schedule,
        )

    always, auto = run(), run(gossip_every="auto")
    return [
        f"{always.overlap.step_time:.1f}",
        f"{auto.overlap.step_time:.1f}, every {auto.steps_per_round:.1f}",
        f"{always.all_reduce.step_time:.0f}",
    ]


def heartbeat_load(ranks: int) -> tuple[float, float]:
    """Most calls per second of all ranks, and kB per second of each, for heartbeats."""
    pause, watched = pace(STALE_AFTER).pause, max(1, (ranks - 1).bit_length())
    key = len(f"{key_prefix(0)}/heartbeat/{ranks}") + LENGTH_BYTES
    beat = len("1 100000 10 ") + LENGTH_BYTES
    # A heartbeat names a key and two values, and is answered with one; a look reads keys and
    # values, two of which are not heartbeats.
    sent = key + 3 * beat + (watched + 2) * (key + beat)
    return 2 * ranks / pause, sent / pause / 1000


def print_wan(wan: Wan, rows: Sequence[tuple[str, int]]) -> None:
    print(
        "| topology, ranks | code | MiB per rank and round | messages | s per step, every step "
        '| "auto" | all-reduce (DDP) |'
    )
    print("|---" * 7 + "|")
    for name, ranks in rows:
        topology = TopologyFactory.create(name, ranks, 1)
        sent, most_sent = most(topology, copies)
        count, most_count = most(topology, lambda size: messages(size, wan.mib))
        for code, share in (("float32", 1.0), ("int8", INT8)):
            volume = f"{sent * wan.mib * share:.0f}"
            numbers = f"{count:.0f}"
            if most_sent > sent:
                volume += f" (at most {most_sent * wan.mib * share:.0f})"
                numbers += f" (at most {most_count:.0f})"
            cells = [f"{name}, {ranks:,}", code, volume, numbers, *step_cells(topology, wan, share)]
            print("| " + " | ".join(cells) + " |", flush=True)
    print("\n| ranks | store calls per s, heartbeats | kB per s and rank | MB per s, the store |")
    print("|---" * 4 + "|")
    for ranks in sorted({ranks for _, ranks in rows}):
        calls, rate = heartbeat_load(ranks)
        print(f"| {ranks:,} | {calls:,.0f} | {rate:.1f} | {rate * ranks / 1000:.1f} |")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--most-with-gloo", type=int, default=64, help="0 for no connections")
    parser.add_argument("--extrapolate", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--wan", action="store_true", help="on paper, with the options below")
    parser.add_argument("--mbit", type=float, default=100, help="per second, of each link")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds per message")
    parser.add_argument("--mib", type=float, default=400, help="of the parameters in float32")
    parser.add_argument("--computing", type=float, default=10, help="seconds per step")
    parser.add_argument("--jitter", type=float, default=0.5, help="standard deviation, seconds")
    parser.add_argument("--steps", type=int, default=300, help="to simulate")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.wan:
        options = {name: getattr(args, name) for name in Wan._fields}
        print_wan(Wan(**options), TOPOLOGIES)
        return
    # Every rank would say that the members meet again.
    logger.disable("decent_optim_wrapper")
    print_membership(args.ranks, args.most_with_gloo, args.extrapolate)


if __name__ == "__main__":
    main()
