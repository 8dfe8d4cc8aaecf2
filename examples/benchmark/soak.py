"""Train for as long as you ask while ranks are killed, stopped, delayed and restarted.

    python examples/benchmark/soak.py --minutes 5                        # with faults
    python examples/benchmark/soak.py --quiet-rounds 10000               # without
    python examples/benchmark/soak.py --quiet-rounds 100 --slow 0.2      # with one slow rank
    python examples/benchmark/soak.py --minutes 5 --auto --jitter 0.05   # rounds that never wait
    python examples/benchmark/soak.py --minutes 5 --codes int8 --tracking
    python examples/benchmark/soak.py --minutes 5 --lab                  # links, too; needs root

Other faults: the process of the store is stopped; a second process with the number of a living
rank is started, and must be refused; several ranks are killed and come back together. With `--lab`
links are cut or slowed, or lose packets. In the first quarter of the time no fault takes a rank
away. The last line shows the seed that repeats the faults, and the goodput.

Goodput is steps made against steps possible: the steps of all ranks, and what as many healthy ranks
would have made in the same time, at the pace of the times in which all were there and did not
recover. Ranks that share cores step faster when one is away, so it may exceed 100 %.
`after_a_kill.py` measures it with few kills, under the launcher.

Ends with an error if a rank is lost for good, if the ranks recover more often than the faults
explain or take too long, if they do not agree on the average at the end, if their parameters have
not moved, or if the memory, file descriptors or threads of a rank grow after warm-up. If no rank
gets further for a minute, it prints the stacks of all.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import os
import random
import signal
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import netlab
import torch
from faults import HARMLESS, LEAST, LINKS, Injector, Kind, draw_faults
from torch import nn
from torch.distributed import TCPStore

from decent_optim_wrapper import (
    AsItArrives,
    DecentOptimWrapper,
    Elastic,
    GradientTracking,
)
from decent_optim_wrapper.comm.store import part_of_run
from decent_optim_wrapper.elastic.membership.rendezvous import key_prefix

PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch._dynamo", "decent_optim_wrapper"])
# Rounds of a process after which its memory should no longer grow.
WARM_UP = 500
REPORT_SECONDS = 0.25
EPOCH_SECONDS = 0.02
# No rank is that far beyond its last report, at the pace of healthy ranks.
AHEAD_SECONDS = 8
LEAST_MARGIN = 20
# Without any progress of any rank for that long, they hang. How long all of it takes says nothing.
PATIENCE = 60.0
STACKS_SECONDS = 1.0
# The others go on without a rank, and later together with it.
RECOVERIES_PER_LOSS = 2
MEDIAN_STALL_SECONDS = 2.5
# Of fewer, the draw of the faults decides: a stopped rank is missed later than a killed one.
LEAST_STALLS = 10
# Beyond the timeout.
LONGEST_STALL_SECONDS = 5.0
# Ranks that agree and connect wait for each other about that often, on a busy machine longer.
STEPS_PER_STALL = 50
LOOPBACK = netlab.Lab(hosts=(), master="127.0.0.1", interface="lo")
LINK_RATE = "400mbit"
# A step takes about 0.15 s then.
SLOW_RATE = "1mbit"
# Share of the packets that a lossy link loses.
LOSS = 0.05
# What a process may need more at the end than after its warm-up.
GROWTH = {"MiB of memory": 64, "open files": 8, "threads": 6}
# The least of the reports of so many seconds is what a process needs when nothing is under way.
# Where packets are lost, gloo tries to connect five times for the timeout, here for 25 s.
SETTLED_SECONDS = 30.0
SLOW_RANK = 1


class Job(NamedTuple):
    """What the ranks do.

    Args:
        ranks: number of ranks.
        topology: by name.
        timeout: in seconds.
        step: seconds that every step takes at least.
        slow: seconds that one rank needs longer for each step.
        jitter: seconds that any step of any rank may take longer.
        auto: whether a step mixes what has arrived and never waits.
        codes: the name of the `comm_dtype`; None sends the parameters as they are.
        tracking: whether the ranks track gradients.
        stale_after: seconds without a heartbeat after which a rank is dead.
    """

    ranks: int
    topology: str
    timeout: float
    step: float
    slow: float
    jitter: float
    auto: bool
    codes: str | None = None
    tracking: bool = False
    stale_after: float = 2.0


class Footprint(NamedTuple):
    """Memory, open files and threads of a process."""

    mib: float
    files: int
    threads: int


class Stall(NamedTuple):
    """A step in which the members changed.

    Args:
        end: time of its end, on the clock that all processes of the machine share.
        seconds: its duration.
    """

    end: float
    seconds: float


class Failure(NamedTuple):
    """The error with which a process has ended.

    Args:
        name: of its type.
        text: with the traceback.
    """

    name: str
    text: str


class Progress(NamedTuple):
    """A rank's report, several times a second and at the end.

    Args:
        round: the round that it has reached.
        members: the members that it knows.
        steps: number of steps of this process.
        footprint: footprint of this process.
        stalls: stalls since the last report.
        pace: median seconds of the other steps since then, without what they sleep.
        average: the average of all parameters at the end; empty before.
        moved: how far that is from the parameters with which this process started.
    """

    round: int
    members: tuple[int, ...]
    steps: int
    footprint: Footprint
    stalls: tuple[Stall, ...]
    pace: float | None
    average: tuple[float, ...] = ()
    moved: float = 0.0


class Control(NamedTuple):
    """What the launcher tells the ranks: numbers in files, which no fault affects.

    Args:
        folder: where these files are.
    """

    folder: Path

    def write(self, name: str, value: float) -> None:
        """Write a number as a whole or not at all."""
        part = self.folder / f"{name}.part"
        part.write_text(str(value))
        part.replace(self.folder / name)

    def read(self, name: str) -> float | None:
        """The number, or None before it is told."""
        try:
            return float((self.folder / name).read_text())
        except FileNotFoundError:
            return None

    def clear(self, name: str) -> None:
        """Forget the number."""
        (self.folder / name).unlink(missing_ok=True)


class Host(NamedTuple):
    """Where a process runs.

    Args:
        address: its address.
        space: its network namespace; empty for the launcher's.
        interface: its network device.
    """

    address: str = "127.0.0.1"
    space: str = ""
    interface: str = "lo"


class Goodput:
    """Steps made against steps possible.

    Args:
        newest: the last report of every rank.
    """

    def __init__(self, newest: dict[int, Progress]) -> None:
        self._start = time.monotonic()
        self._last: dict[int, tuple[float, Progress | None]] = {
            rank: (self._start, progress) for rank, progress in newest.items()
        }
        self._made = 0
        # While all ranks were there and did not recover.
        self._healthy_steps, self._healthy_seconds = 0, 0.0

    def restart(self, rank: int) -> None:
        """Count the steps of a new process of a rank from zero."""
        self._last[rank] = time.monotonic(), None

    def note(self, rank: int, progress: Progress) -> None:
        """Note a report of a rank."""
        (before, last), now = self._last[rank], time.monotonic()
        self._last[rank] = now, progress
        steps = progress.steps - (last.steps if last else 0)
        self._made += steps
        sizes = {len(self._last), len(progress.members), len(last.members) if last else 0}
        if len(sizes) == 1 and not progress.stalls:
            self._healthy_steps += steps
            self._healthy_seconds += now - before

    @property
    def pace(self) -> float:
        """Steps of a healthy rank in a second."""
        return self._healthy_steps / max(self._healthy_seconds, REPORT_SECONDS)

    @property
    def share(self) -> float:
        """Steps made by steps possible."""
        seconds = sum(now - self._start for now, _ in self._last.values())
        return self._made / max(1.0, self.pace * seconds)


def footprint() -> Footprint:
    status = Path("/proc/self/status").read_text()
    of = dict(line.split(":", 1) for line in status.splitlines())
    files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (one number, no paths)
    return Footprint(int(of["VmRSS"].split()[0]) / 1024, files, int(of["Threads"]))


def train(
    rank: int, job: Job, control: Control, store: Any, report: Callable[[Progress], None]
) -> None:
    """Train up to the round that the launcher names."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4)).double()
    torch.manual_seed(rank)
    stalls: list[Stall] = []
    quiet: list[float] = []
    steps, changes, told = 0, 0, time.monotonic()

    def note_change(old: tuple[int, ...], new: tuple[int, ...]) -> None:
        nonlocal changes
        changes += 1

    optimizer = DecentOptimWrapper(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        *(rank, job.ranks),
        topology=job.topology,
        bucket_cap_mb=0.01,
        timeout=job.timeout,
        overlap=AsItArrives() if job.auto else True,
        comm_dtype=getattr(torch, job.codes) if job.codes else None,
        extensions=[GradientTracking()] if job.tracking else [],
        elastic=Elastic(store, note_change, job.stale_after),
    )
    chance = random.Random(rank)
    first = nn.utils.parameters_to_vector(model.parameters()).detach()

    def progress() -> Progress:
        pace = statistics.median(quiet) if quiet else None
        known = (optimizer.round, optimizer.members, steps, footprint())
        return Progress(*known, tuple(stalls), pace)

    while (finish := control.read("finish")) is None or optimizer.round < finish:
        sleep_if_told(rank, control)
        extra = job.slow if rank == SLOW_RANK else 0.0
        time.sleep(job.step + extra + chance.uniform(0, job.jitter))
        optimizer.zero_grad()
        inputs = torch.randn(8, 32, dtype=torch.float64)
        (model(inputs) - inputs[:, :4].sin()).square().mean().backward()
        before, start = changes, time.monotonic()
        optimizer.step()
        steps += 1
        seconds = time.monotonic() - start
        if changes > before:
            stalls.append(Stall(start + seconds, seconds))
        else:
            quiet.append(seconds)
        if time.monotonic() - told > REPORT_SECONDS:
            report(progress())
            stalls.clear()
            quiet.clear()
            told = time.monotonic()
    optimizer.global_avg(may_revert=False)
    average = nn.utils.parameters_to_vector(model.parameters()).detach()
    moved = float((average - first).norm())
    report(progress()._replace(average=tuple(average.tolist()), moved=moved))
    # To ranks that still train, a rank that has ended is lost.
    while control.read("over") is None:
        time.sleep(REPORT_SECONDS)


def sleep_if_told(rank: int, control: Control) -> None:
    if (seconds := control.read(f"delay {rank}")) is not None:
        time.sleep(seconds)
        control.clear(f"delay {rank}")


def keep_store(host: Host, pipe: Connection) -> None:
    """Serve the store in which the ranks agree, and report the last epoch whenever it changes."""
    if host.space:
        netlab.enter(host.space)
    store = TCPStore(host.address, 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    # The ranks count their recoveries here.
    meetings, last = part_of_run(store, key_prefix(0), timedelta(seconds=20)), ""
    # Until the launcher has ended.
    while not pipe.poll(EPOCH_SECONDS):
        if (epoch := meetings.find("epoch") or "") != last:
            last = epoch
            pipe.send(epoch)


def work(rank: int, job: Job, hosts: list[Host], control: Control, pipe: Connection) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    if hosts[rank].space:
        netlab.enter(hosts[rank].space)
        os.environ["GLOO_SOCKET_IFNAME"] = hosts[rank].interface
    try:
        patience, port = timedelta(seconds=60), int(control.read("port") or 0)
        store = TCPStore(hosts[-1].address, port, is_master=False, timeout=patience)
        train(rank, job, control, store, pipe.send)
    except Exception as error:
        pipe.send(Failure(type(error).__name__, traceback.format_exc()))


class Life(NamedTuple):
    """One process of a rank, from its start to its end.

    Args:
        rank: its number.
        process: the process.
        is_twin: whether another process with this number was alive when it was started.
    """

    rank: int
    process: Any
    is_twin: bool


class Stop(NamedTuple):
    """A time in which a rank was stopped or cut off; its end is unknown at first."""

    start: float
    end: float = math.inf


class Fleet:
    """The processes of the ranks and of their store, and what they report."""

    def __init__(self, job: Job, where: netlab.Lab = LOOPBACK) -> None:
        self._job = job
        self._where = where
        self._hosts = hosts_of(where, job.ranks + 1)
        self._folder = TemporaryDirectory()
        self._control = Control(Path(self._folder.name))
        self._epochs, theirs = PROCESSES.Pipe()
        args = (self._hosts[-1], theirs)
        self._keeper: Any = PROCESSES.Process(target=keep_store, args=args, daemon=True)
        self._keeper.start()
        theirs.close()
        self._control.write("port", self._epochs.recv())
        self.gatherings = 0
        self._processes: dict[int, Any] = {}
        # One pipe per process: what a killed process has reported is not for the next.
        self._lives: dict[Connection, Life] = {}
        self.newest: dict[int, Progress] = {}
        self.goodput = Goodput({})
        # What each process has needed since its warm-up, by report.
        self.footprints: dict[int, list[Footprint]] = {}
        self.stalls: list[Stall] = []
        # Median seconds of the steps of each rank, by report.
        self._paces: dict[int, list[float]] = defaultdict(list)
        # The stall of a rank that was itself stopped does not measure the recovery.
        self._stops: dict[int, list[Stop]] = defaultdict(list)
        self._returning: set[int] = set()
        # Ranks that are cut off may end with a PeerError.
        self._cut: set[int] = set()
        # What loses packets of ranks.
        self._lossy: dict[int, Any] = {}
        # Ranks that have not trained since they were cut off.
        self._mended: set[int] = set()
        # How often one of these was refused, and started again as a launcher does.
        self.refused = 0
        self.lost: dict[int, Failure] = {}
        for rank in range(job.ranks):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Start the rank, for the first time or again."""
        self.footprints.pop(rank, None)
        self.goodput.restart(rank)
        self._processes[rank] = self._start(rank, is_twin=False)

    def start_twin(self, rank: int) -> None:
        """Start a second process with the number of this rank, which is to be refused."""
        self._start(rank, is_twin=True)

    @property
    def twins(self) -> int:
        """Number of second processes that have not been refused yet."""
        return sum(life.is_twin for life in self._lives.values())

    def _start(self, rank: int, is_twin: bool) -> Any:
        ours, theirs = PROCESSES.Pipe(duplex=False)
        args = (rank, self._job, self._hosts, self._control, theirs)
        process = PROCESSES.Process(target=work, args=args, daemon=True)
        process.start()
        theirs.close()
        self._lives[ours] = Life(rank, process, is_twin)
        return process

    def kill(self, rank: int) -> None:
        """Kill the rank."""
        killed = self._processes[rank]
        killed.kill()
        killed.join()
        self._lives = {pipe: each for pipe, each in self._lives.items() if each.process != killed}

    def signal(self, rank: int, number: signal.Signals) -> None:
        """SIGSTOP or SIGCONT."""
        os.kill(self._processes[rank].pid, number)
        self._note_stop(rank, ends=number is signal.SIGCONT)

    def cut(self, rank: int) -> None:
        """Lose all that the rank sends."""
        self._cut.add(rank)
        self._note_stop(rank, ends=False)
        netlab.cut(self._where, rank)

    def mend(self, rank: int) -> None:
        """Lose no more of what the rank sends."""
        netlab.mend(self._where, rank)
        self._cut.remove(rank)
        self._mended.add(rank)
        self._note_stop(rank, ends=True)

    def slow_down(self, rank: int, is_slow: bool) -> None:
        """Limit the rate at which the rank sends, or restore the first rate."""
        netlab.slow_down(self._where, rank, SLOW_RATE if is_slow else LINK_RATE)

    def lose_packets(self, rank: int, is_lossy: bool) -> None:
        """Lose some of the packets that the rank sends, or no more."""
        if is_lossy:
            self._lossy[rank] = netlab.lose(self._where, rank, LOSS)
        else:
            relay = self._lossy.pop(rank)
            relay.kill()
            relay.wait()

    def _note_stop(self, rank: int, ends: bool) -> None:
        if ends:
            self._returning.add(rank)
            stops = self._stops[rank]
            stops[-1] = stops[-1]._replace(end=time.monotonic())
        else:
            self._stops[rank].append(Stop(time.monotonic()))

    def stop_store(self) -> None:
        """Stop the process of the store."""
        os.kill(self._keeper.pid, signal.SIGSTOP)

    def continue_store(self) -> None:
        """Continue the process of the store."""
        os.kill(self._keeper.pid, signal.SIGCONT)

    def delay(self, rank: int, seconds: float) -> None:
        """Ask the rank to sleep before its next step."""
        self._control.write(f"delay {rank}", seconds)

    def reach(self, rounds: int, patience: float = PATIENCE) -> None:
        """Wait until a rank has reached that round."""
        self._wait(lambda: self.round >= rounds, f"round {rounds}", patience)

    def end(self, patience: float = PATIENCE) -> None:
        """End the ranks a little later, all after the same round, and compare them."""
        while self.listen(0):
            pass
        finish = self.round + self._margin
        self._control.write("finish", finish)
        self._wait(
            lambda: self._have_ended(finish), f"all ranks to end at round {finish}", patience
        )
        self._control.write("over", 1)
        check_ends(self.newest, self._job.ranks)

    def show_stacks(self) -> None:
        """Make all ranks that are alive print the stacks of all their threads to stderr."""
        for rank, process in self._processes.items():
            if process.is_alive():
                print(f"stacks of rank {rank}:", file=sys.stderr, flush=True)
                # One that is stopped says nothing.
                for number in (signal.SIGCONT, signal.SIGUSR1):
                    os.kill(process.pid, number)
                time.sleep(STACKS_SECONDS)

    def _wait(self, done: Callable[[], bool], what: str, patience: float) -> None:
        """Wait for as long as any rank gets further."""
        reached, since = self._reached(), time.monotonic()
        while not done():
            self.listen(1)
            if (now := self._reached()) != reached:
                reached, since = now, time.monotonic()
            elif time.monotonic() > since + patience:
                raise TimeoutError(
                    f"expected {what}, but no rank has got further for {patience} s; they are at "
                    f"rounds {reached}"
                )

    def _reached(self) -> list[tuple[int, bool]]:
        """The round of each rank, and whether it has ended."""
        return [(each.round, bool(each.average)) for _, each in sorted(self.newest.items())]

    def _have_ended(self, finish: int) -> bool:
        for rank, progress in self.newest.items():
            if progress.round > finish and not progress.average:
                raise ValueError(
                    f"expected rank {rank} to end at round {finish}, but it was at "
                    f"{progress.round} already: the margin is too small for its pace"
                )
        return len(self.newest) == self._job.ranks and all(
            progress.average for progress in self.newest.values()
        )

    def close(self) -> None:
        """Kill all processes that still run."""
        twins = [life.process for life in self._lives.values() if life.is_twin]
        for process in (*self._processes.values(), *twins, self._keeper):
            process.kill()
            process.join()
        for rank in [*self._lossy]:
            self.lose_packets(rank, False)
        self._folder.cleanup()

    @property
    def round(self) -> int:
        """The latest round that a rank has reached."""
        return max((progress.round for progress in self.newest.values()), default=0)

    @property
    def _margin(self) -> int:
        """More rounds than a rank can have made since its last report."""
        return LEAST_MARGIN + math.ceil(AHEAD_SECONDS * self.goodput.pace)

    @property
    def allowance(self) -> float:
        """Seconds that recoveries may take longer at the pace of this machine."""
        # With others than the fastest one the waits for a slow rank count, too.
        paces = [statistics.median(paces) for paces in self._paces.values()]
        return STEPS_PER_STALL * min(paces, default=0.0)

    def listen(self, seconds: float) -> set[int]:
        """Receive reports for that time, and return the ranks that have sent one."""
        heard = set()
        self._count_gatherings()
        for pipe in wait(list(self._lives), timeout=seconds):
            life = self._lives[pipe]
            try:
                said = pipe.recv()
            except EOFError:
                del self._lives[pipe]
                self._look_at_end(life)
                continue
            if life.is_twin:
                check_refusal(life.rank, said)
            elif isinstance(said, Failure):
                self._note_failure(life.rank, said)
            else:
                self._note(life.rank, said)
                heard.add(life.rank)
        return heard

    def _note_failure(self, rank: int, failure: Failure) -> None:
        if rank in self._cut and failure.name == "PeerError":
            return
        if rank in self._mended and is_refusal(failure):
            # The last heartbeat of the process that was cut off has only now been sent again.
            self.refused += 1
            self.start(rank)
        else:
            self.lost[rank] = failure

    def _count_gatherings(self) -> None:
        while self._epochs.poll():
            self._epochs.recv()
            self.gatherings += 1

    @property
    def recoveries(self) -> int:
        """Number of recoveries since the start."""
        return max(0, self.gatherings - 1)

    def _look_at_end(self, life: Life) -> None:
        life.process.join()
        if life.process.exitcode not in (0, -signal.SIGKILL):
            failure = Failure("", f"exit code {life.process.exitcode}")
            self.lost.setdefault(life.rank, failure)
        if life.rank in self.lost:
            raise ChildProcessError(f"rank {life.rank} ended: {self.lost[life.rank].text}")

    def _note(self, rank: int, progress: Progress) -> None:
        self.newest[rank] = progress
        self.goodput.note(rank, progress)
        self._mended.discard(rank)
        if progress.pace is not None:
            self._paces[rank].append(progress.pace)
        if rank not in self._returning:
            self.stalls += without_stops(progress.stalls, self._stops[rank])
        self._returning.discard(rank)
        if progress.steps >= WARM_UP:
            self.footprints.setdefault(rank, []).append(progress.footprint)


def without_stops(stalls: Iterable[Stall], stops: Sequence[Stop]) -> list[Stall]:
    """The stalls of a rank in which it was not stopped or cut off."""
    return [
        stall
        for stall in stalls
        if all(stop.end < stall.end - stall.seconds or stall.end < stop.start for stop in stops)
    ]


def hosts_of(where: netlab.Lab, count: int) -> list[Host]:
    """So many hosts, or this machine for all."""
    spaces = enumerate(where.hosts)
    return [Host(netlab.address(i), space, where.interface) for i, space in spaces] or [
        Host()
    ] * count


def is_refusal(failure: Failure) -> bool:
    """Return whether a process has ended because another one with its number is alive."""
    return failure.name == "ValueError" and "another process with this rank" in failure.text


def check_refusal(rank: int, said: Progress | Failure) -> None:
    """Check what a second process with the number of a living rank has said.

    Raises:
        ValueError: it was not refused.
    """
    if isinstance(said, Progress) or not is_refusal(said):
        raise ValueError(f"expected a second process of rank {rank} to be refused, got {said}")


def check_ends(ends: dict[int, Progress], world_size: int) -> None:
    """Check the last reports of the ranks.

    Raises:
        ValueError: the ranks have not trained together up to the end.
    """
    rows = torch.tensor([end.average for end in ends.values()], dtype=torch.float64)
    if not rows.isfinite().all() or (rows - rows[0]).abs().max() > 1e-12:
        raise ValueError("expected the same finite average on all ranks; they differ")
    for rank, end in sorted(ends.items()):
        if end.members != tuple(range(world_size)):
            raise ValueError(f"expected all ranks as members of rank {rank}, got {end.members}")
        if not end.moved > 0:
            raise ValueError(f"expected parameters that train, but rank {rank} does not train")


def worst_stalls(stalls: list[Stall]) -> list[float]:
    """The longest stall of each change; stalls that end together on several ranks are one."""
    ends, longest = -1.0, []
    for stall in sorted(stalls):
        if stall.end - ends > 0.5:
            longest.append(stall.seconds)
        longest[-1] = max(longest[-1], stall.seconds)
        ends = stall.end
    return longest


def check_stalls(stalls: list[float], timeout: float, allowance: float) -> list[str]:
    """A text for each bound that the stalls do not keep.

    Args:
        stalls: the longest stall of each change, in seconds.
        timeout: of the ranks, in seconds.
        allowance: seconds that they may take longer on this machine.
    """
    longest, found = timeout + LONGEST_STALL_SECONDS, []
    if len(stalls) >= LEAST_STALLS:
        found.append(("median", MEDIAN_STALL_SECONDS, statistics.median(stalls)))
    if stalls:
        found.append(("longest", longest, max(stalls)))
    return [
        f"expected a {name} stall of at most {most:g} s and {allowance:.1f} s at this machine's "
        f"pace, got {seconds:.1f} s"
        for name, most, seconds in found
        if seconds > most + allowance
    ]


def least(footprints: Sequence[Footprint]) -> Footprint:
    """What a process needs even when nothing is under way, such as a probe of a link."""
    return Footprint(*map(min, zip(*footprints, strict=True)))


def growth(footprints: Sequence[Footprint]) -> tuple[Footprint, Footprint]:
    """What a process has needed in the first and in the last seconds after its warm-up."""
    count = max(1, min(round(SETTLED_SECONDS / REPORT_SECONDS), len(footprints) // 2))
    return least(footprints[:count]), least(footprints[-count:])


def check_growth(footprints: dict[int, list[Footprint]]) -> list[str]:
    """A text for everything that a rank has more of at the end than after its warm-up."""
    return [
        f"expected at most {most} more {what} of rank {rank} than after its warm-up, got "
        f"{last:g} after {first:g}"
        for rank, known in sorted(footprints.items())
        for (what, most), first, last in zip(GROWTH.items(), *growth(known), strict=True)
        if last > first + most
    ]


def soak(fleet: Fleet, injector: Injector, args: argparse.Namespace) -> list[str]:
    """Inject faults, or none, until time or rounds are over; then end all ranks.

    Returns:
        A text for everything that is wrong with the recoveries and with what the ranks need.
    """
    wrong = []
    kinds = tuple(kind for kind in Kind if args.lab or kind not in LINKS)
    harmless = tuple(kind for kind in kinds if kind in HARMLESS)
    injector.settle()
    fleet.goodput = Goodput(fleet.newest)
    if args.quiet_rounds:
        fleet.reach(args.quiet_rounds, args.patience)
    else:
        inject(injector, args, harmless, 15 * args.minutes)
    if not fleet.gatherings:
        wrong.append("expected to see the ranks gather at the start: nothing counts recoveries")
    if fleet.recoveries:
        wrong.append(f"expected no recovery before a rank was lost, got {fleet.recoveries}")
    before = fleet.recoveries
    if not args.quiet_rounds:
        inject(injector, args, kinds, 45 * args.minutes)
    fleet.end(args.patience)
    recoveries, losses = fleet.recoveries - before, injector.losses
    if recoveries > RECOVERIES_PER_LOSS * losses:
        wrong.append(
            f"expected at most {RECOVERIES_PER_LOSS} recoveries for each of {losses} losses, got "
            f"{recoveries}"
        )
    wrong += check_stalls(worst_stalls(fleet.stalls), args.timeout, fleet.allowance)
    return wrong + check_growth(fleet.footprints)


def inject(
    injector: Injector,
    args: argparse.Namespace,
    kinds: tuple[Kind, ...],
    seconds: float,
) -> None:
    """Inject faults of these kinds for that time, and wait until all ranks are back."""
    over = time.monotonic() + seconds
    for fault in draw_faults(args.seed, args.ranks, args.timeout, kinds):
        if time.monotonic() > over:
            break
        injector.inject(fault)
    injector.settle()


def tell(fleet: Fleet, injector: Injector, seed: int, seconds: float, wrong: list[str]) -> None:
    print("| rank | MiB after warm-up | at the end | files | at the end | threads | at the end |")
    print("|---" * 7 + "|")
    for rank, progress in sorted(fleet.newest.items()):
        pairs = zip(*growth(fleet.footprints.get(rank, [progress.footprint])), strict=True)
        cells = [f"{value:.1f}".removesuffix(".0") for pair in pairs for value in pair]
        print(f"| {rank} | " + " | ".join(cells) + " |")
    print(f"losses: {len(fleet.stalls)} rounds in flight dropped, {len(fleet.lost)} ranks for good")
    print(f"restarts after a cut that were refused once: {fleet.refused}")
    print(f"allowance for the pace of this machine: {fleet.allowance:.1f} s")
    for failure in wrong:
        print(f"failed: {failure}")
    done = ", ".join(f"{count} x {kind.value}" for kind, count in injector.done.items())
    stalls = worst_stalls(fleet.stalls)
    print(
        f"seed {seed}: {fleet.round} rounds in {seconds:.0f} s; faults: {done or 'none'}; "
        f"recoveries: {fleet.recoveries} of {injector.losses} losses; "
        f"goodput: {fleet.goodput.share:.2%}; "
        f"stalls: {len(stalls)}, median {statistics.median(stalls or [0]):.1f} s, "
        f"longest {max(stalls, default=0):.1f} s"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, help="of the faults; drawn if it is not given")
    parser.add_argument("--topology", default="ring")
    parser.add_argument("--timeout", type=float, default=5, help="of the ranks, in seconds")
    parser.add_argument("--step", type=float, default=0, help="seconds of each step at least")
    parser.add_argument("--slow", type=float, default=0, help="seconds a rank needs longer")
    parser.add_argument("--jitter", type=float, default=0, help="seconds a step may take longer")
    parser.add_argument("--auto", action="store_true", help="overlap=AsItArrives()")
    parser.add_argument("--codes", choices=["bfloat16", "float16", "int8", "int4", "int3", "int2"])
    parser.add_argument("--stale-after", type=float, default=2.0, help="of Elastic, in seconds")
    parser.add_argument("--tracking", action="store_true", help="extensions=[GradientTracking()]")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE, help="seconds after which a rank hangs"
    )
    parser.add_argument("--quiet-rounds", type=int, default=0, help="that many rounds, no faults")
    parser.add_argument(
        "--lab", action="store_true", help="network namespaces, whose links are cut, slow and lossy"
    )
    args = parser.parse_args()
    if args.lab and not netlab.available():
        parser.error("--lab: expected root and iproute2")
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(10**6)
    if args.ranks <= LEAST:
        parser.error(f"--ranks: expected more than {LEAST}, which must stay, got {args.ranks}")
    return args


def main() -> int:
    args = parse_arguments()
    start = time.monotonic()
    job = Job(*(getattr(args, name) for name in Job._fields))
    # Also seen if this process is killed.
    print(f"seed {args.seed}", flush=True)
    with netlab.lab(args.ranks + 1, LINK_RATE if args.lab else "") as where:
        fleet = Fleet(job, where)
        injector = Injector(fleet, args.ranks, args.patience)
        try:
            wrong = soak(fleet, injector, args)
        except (TimeoutError, ChildProcessError, ValueError) as error:
            wrong = [str(error)]
            fleet.show_stacks()
        finally:
            fleet.close()
    tell(fleet, injector, args.seed, time.monotonic() - start, wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
