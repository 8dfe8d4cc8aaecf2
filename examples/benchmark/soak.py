"""Train for as long as you ask while ranks are killed, stopped, delayed and restarted.

    python examples/benchmark/soak.py --minutes 5                        # with faults
    python examples/benchmark/soak.py --quiet-rounds 10000               # without
    python examples/benchmark/soak.py --quiet-rounds 100 --slow 0.2      # with one slow rank
    python examples/benchmark/soak.py --minutes 5 --auto --jitter 0.05   # rounds that never wait
    python examples/benchmark/soak.py --minutes 5 --codes int8 --tracking

In the first quarter of the time ranks are only delayed, for less than the timeout. Reports rounds,
faults, recoveries and losses, and the memory, file descriptors and threads of every rank after
warm-up and at the end. Ends with an error if a rank is lost for good, if the ranks recover more
often than the faults explain, if they do not agree on the average at the end, or if their
parameters have not moved. If no rank gets further for a minute, it prints the stacks of all.
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
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from faults import LEAST, MILD, Injector, Kind, draw_faults
from torch import nn
from torch.distributed import PrefixStore, TCPStore

from decent_optim_wrapper import DecentOptimWrapper, Elastic, Schedule
from decent_optim_wrapper.elastic.rendezvous import key_prefix

PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch._dynamo", "decent_optim_wrapper"])
# Rounds of a process after which its memory should not grow any more.
WARM_UP = 500
REPORT_SECONDS = 0.25
# No rank is that far beyond its last report, at the pace of the last seconds.
AHEAD_SECONDS = 4
PACE_SECONDS = 10
LEAST_MARGIN = 20
# Without any progress of any rank for that long, they hang. How long all of it takes says nothing.
PATIENCE = 60.0
STACKS_SECONDS = 5.0
# The others go on without a rank, and later together with it.
RECOVERIES_PER_LOSS = 2
SLOW_RANK = 1


class Job(NamedTuple):
    """What the ranks do.

    Args:
        world_size: number of ranks.
        topology: by name.
        timeout: in seconds.
        step: seconds that every step takes at least.
        slow: seconds that one rank needs longer for each step.
        jitter: seconds that any step of any rank may take longer.
        auto: whether a step mixes what has arrived and never waits.
        codes: the name of the `comm_dtype`; None sends the parameters as they are.
        tracking: whether the ranks track gradients.
    """

    world_size: int
    topology: str
    timeout: float
    step: float
    slow: float
    jitter: float
    auto: bool
    codes: str | None = None
    tracking: bool = False


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


class Progress(NamedTuple):
    """A rank's report, several times a second and at the end.

    Args:
        round: the round that it has reached.
        members: the members that it knows.
        steps: number of steps of this process.
        footprint: footprint of this process.
        stalls: stalls since the last report.
        average: the average of all parameters at the end; empty before.
        moved: how far that is from the parameters with which this process started.
    """

    round: int
    members: tuple[int, ...]
    steps: int
    footprint: Footprint
    stalls: tuple[Stall, ...]
    average: tuple[float, ...] = ()
    moved: float = 0.0


class Pace:
    """How fast the ranks have been lately."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, now: float, round: int) -> None:
        """Note the round that the fastest rank has reached."""
        self._seen.append((now, round))
        while now - self._seen[0][0] > PACE_SECONDS:
            self._seen.popleft()

    @property
    def margin(self) -> int:
        """More rounds than a rank can have made since its last report."""
        if len(self._seen) < 2:
            return LEAST_MARGIN
        (start, first), (end, last) = self._seen[0], self._seen[-1]
        per_second = (last - first) / max(end - start, REPORT_SECONDS)
        return LEAST_MARGIN + math.ceil(AHEAD_SECONDS * per_second)


def footprint() -> Footprint:
    status = Path("/proc/self/status").read_text()
    of = dict(line.split(":", 1) for line in status.splitlines())
    files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (one number, no paths)
    return Footprint(int(of["VmRSS"].split()[0]) / 1024, files, int(of["Threads"]))


def train(rank: int, job: Job, store: Any, report: Callable[[Progress], None]) -> None:
    """Train up to the round that the launcher names in the store."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4)).double()
    torch.manual_seed(rank)
    stalls: list[Stall] = []
    steps, changes, told = 0, 0, time.monotonic()

    def note_change(old: tuple[int, ...], new: tuple[int, ...]) -> None:
        nonlocal changes
        changes += 1

    optimizer = DecentOptimWrapper(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        *(rank, job.world_size),
        topology=job.topology,
        bucket_cap_mb=0.01,
        timeout=job.timeout,
        schedule=Schedule(gossip_every="auto" if job.auto else 1),
        comm_dtype=getattr(torch, job.codes) if job.codes else None,
        gradient_tracking=job.tracking,
        elastic=Elastic(store=store, on_membership_change=note_change),
    )
    chance = random.Random(rank)
    first = nn.utils.parameters_to_vector(model.parameters()).detach()

    def progress() -> Progress:
        return Progress(optimizer.round, optimizer.members, steps, footprint(), tuple(stalls))

    while not store.check(["finish"]) or optimizer.round < int(store.get("finish")):
        sleep_if_told(rank, store)
        extra = job.slow if rank == SLOW_RANK else 0.0
        time.sleep(job.step + extra + chance.uniform(0, job.jitter))
        optimizer.zero_grad()
        inputs = torch.randn(8, 32, dtype=torch.float64)
        (model(inputs) - inputs[:, :4].sin()).square().mean().backward()
        before, start = changes, time.monotonic()
        optimizer.step()
        steps += 1
        if changes > before:
            stalls.append(Stall(time.monotonic(), time.monotonic() - start))
        if time.monotonic() - told > REPORT_SECONDS:
            report(progress())
            stalls.clear()
            told = time.monotonic()
    optimizer.global_avg(may_revert=False)
    average = nn.utils.parameters_to_vector(model.parameters()).detach()
    moved = float((average - first).norm())
    report(progress()._replace(average=tuple(average.tolist()), moved=moved))
    # To ranks that still train, a rank that has ended is lost.
    while not store.check(["over"]):
        time.sleep(REPORT_SECONDS)


def sleep_if_told(rank: int, store: Any) -> None:
    key = f"delay {rank}"
    if store.check([key]):
        time.sleep(float(store.get(key)))
        store.delete_key(key)


def work(rank: int, job: Job, port: int, pipe: Connection, stacks: Path) -> None:
    # Open for as long as the process lives.
    file = stacks.open("w")
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    try:
        train(rank, job, store, pipe.send)
    except Exception:
        pipe.send(traceback.format_exc())


class Life(NamedTuple):
    """One process of a rank, from its start to its end."""

    rank: int
    process: Any


class Fleet:
    """The processes of the ranks, their reports, and the store, which this process holds."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # The ranks count their recoveries here.
        self._meetings = PrefixStore(key_prefix(0), self._store)
        self._gathered = ""
        self.gatherings = 0
        self._processes: dict[int, Any] = {}
        self._folder = TemporaryDirectory()
        self._pace = Pace()
        # One pipe per process: reports of a killed process must not be taken for those of the next.
        self._lives: dict[Connection, Life] = {}
        self.newest: dict[int, Progress] = {}
        self.warm: dict[int, Footprint] = {}
        self.stalls: list[Stall] = []
        # The stall of a rank that was itself stopped does not measure the recovery.
        self._returning: set[int] = set()
        self.lost: dict[int, str] = {}
        for rank in range(job.world_size):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Start the rank, for the first time or again."""
        ours, theirs = PROCESSES.Pipe(duplex=False)
        self.warm.pop(rank, None)
        args = (rank, self._job, self._store.port, theirs, self._stacks_of(rank))
        process = PROCESSES.Process(target=work, args=args, daemon=True)
        process.start()
        theirs.close()
        self._processes[rank] = process
        self._lives[ours] = Life(rank, process)

    def kill(self, rank: int) -> None:
        """Kill the rank."""
        self._processes[rank].kill()
        self._processes[rank].join()

    def signal(self, rank: int, number: signal.Signals) -> None:
        """SIGSTOP or SIGCONT."""
        os.kill(self._processes[rank].pid, number)
        if number is signal.SIGCONT:
            self._returning.add(rank)

    def delay(self, rank: int, seconds: float) -> None:
        """Ask the rank to sleep before its next step."""
        self._store.set(f"delay {rank}", str(seconds))

    def reach(self, rounds: int, patience: float = PATIENCE) -> None:
        """Wait until a rank has reached that round."""
        self._wait(lambda: self.round >= rounds, f"round {rounds}", patience)

    def end(self, patience: float = PATIENCE) -> None:
        """Let the ranks end a little later, all after the same round, and compare them."""
        while self.listen(0):
            pass
        finish = self.round + self._pace.margin
        self._store.set("finish", str(finish))
        self._wait(
            lambda: self._have_ended(finish), f"all ranks to end at round {finish}", patience
        )
        self._store.set("over", "1")
        check_ends(self.newest, self._job.world_size)

    def stacks(self) -> str:
        """The stacks of all threads of all ranks that are alive."""
        alive = [rank for rank, each in self._processes.items() if each.is_alive()]
        for rank in alive:
            # One that is stopped says nothing.
            for number in (signal.SIGCONT, signal.SIGUSR1):
                os.kill(self._processes[rank].pid, number)
        deadline = time.monotonic() + STACKS_SECONDS
        while time.monotonic() < deadline and not all(map(self._read_stacks, alive)):
            time.sleep(REPORT_SECONDS)
        return "\n".join(f"stacks of rank {r}:\n{self._read_stacks(r) or 'none'}" for r in alive)

    def _stacks_of(self, rank: int) -> Path:
        return Path(self._folder.name, f"{rank}.txt")

    def _read_stacks(self, rank: int) -> str:
        path = self._stacks_of(rank)
        return path.read_text() if path.exists() else ""

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
        return len(self.newest) == self._job.world_size and all(
            progress.average for progress in self.newest.values()
        )

    def close(self) -> None:
        """Kill all processes that still run."""
        for process in self._processes.values():
            process.kill()
            process.join()
        self._folder.cleanup()

    @property
    def round(self) -> int:
        """The latest round that a rank has reached."""
        return max((progress.round for progress in self.newest.values()), default=0)

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
            if isinstance(said, str):
                self.lost[life.rank] = said
            else:
                self._note(life.rank, said)
                heard.add(life.rank)
        return heard

    def _count_gatherings(self) -> None:
        if (
            self._meetings.check(["epoch"])
            and (now := self._meetings.get("epoch")) != self._gathered
        ):
            self._gathered = now
            self.gatherings += 1

    @property
    def recoveries(self) -> int:
        """Number of recoveries since the start."""
        return max(0, self.gatherings - 1)

    def _look_at_end(self, life: Life) -> None:
        life.process.join()
        if life.process.exitcode not in (0, -signal.SIGKILL):
            self.lost.setdefault(life.rank, f"exit code {life.process.exitcode}")
        if life.rank in self.lost:
            raise ChildProcessError(f"rank {life.rank} ended: {self.lost[life.rank]}")

    def _note(self, rank: int, progress: Progress) -> None:
        self.newest[rank] = progress
        self._pace.note(time.monotonic(), self.round)
        if rank not in self._returning:
            self.stalls += progress.stalls
        self._returning.discard(rank)
        if progress.steps >= WARM_UP:
            self.warm.setdefault(rank, progress.footprint)


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
            raise ValueError(f"expected parameters that train, but those of rank {rank} do not")


def worst_stalls(stalls: list[Stall]) -> list[float]:
    """The longest stall of each change; stalls that end together on several ranks are one."""
    ends, longest = -1.0, []
    for stall in sorted(stalls):
        if stall.end - ends > 0.5:
            longest.append(stall.seconds)
        longest[-1] = max(longest[-1], stall.seconds)
        ends = stall.end
    return longest


def soak(fleet: Fleet, injector: Injector, args: argparse.Namespace) -> list[str]:
    """Inject faults, or none, until time or rounds are over; then let all ranks end.

    Returns:
        A text for everything that is wrong with the recoveries.
    """
    wrong = []
    injector.settle()
    if args.quiet_rounds:
        fleet.reach(args.quiet_rounds, args.patience)
    else:
        inject(injector, args, MILD, 15 * args.minutes)
    if not fleet.gatherings:
        wrong.append("expected to see the ranks gather at the start: nothing counts recoveries")
    if fleet.recoveries:
        wrong.append(f"expected no recovery before a rank was lost, got {fleet.recoveries}")
    before = fleet.recoveries
    if not args.quiet_rounds:
        inject(injector, args, tuple(Kind), 45 * args.minutes)
    fleet.end(args.patience)
    recoveries, losses = fleet.recoveries - before, injector.losses
    if recoveries > RECOVERIES_PER_LOSS * losses:
        wrong.append(
            f"expected at most {RECOVERIES_PER_LOSS} recoveries for each of {losses} losses, got "
            f"{recoveries}"
        )
    return wrong


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


def tell(fleet: Fleet, injector: Injector, seconds: float) -> None:
    print(f"{fleet.round} rounds in {seconds:.0f} s")
    done = [f"{count} x {kind.value}" for kind, count in injector.done.items()]
    print("faults:", ", ".join(done) or "none")
    print(f"recoveries: {fleet.recoveries}, of {injector.losses} losses")
    if stalls := worst_stalls(fleet.stalls):
        middle, worst = statistics.median(stalls), max(stalls)
        print(f"changes: {len(stalls)}, median stall {middle:.1f} s, longest {worst:.1f} s")
    print(f"losses: {len(fleet.stalls)} rounds in flight dropped, {len(fleet.lost)} ranks for good")
    print("| rank | MiB after warm-up | at the end | files | at the end | threads | at the end |")
    print("|---" * 7 + "|")
    for rank, progress in sorted(fleet.newest.items()):
        pairs = zip(fleet.warm.get(rank, progress.footprint), progress.footprint, strict=True)
        cells = [f"{value:.1f}".removesuffix(".0") for pair in pairs for value in pair]
        print(f"| {rank} | " + " | ".join(cells) + " |")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--topology", default="ring")
    parser.add_argument("--timeout", type=float, default=5, help="of the ranks, in seconds")
    parser.add_argument("--step", type=float, default=0, help="seconds of each step at least")
    parser.add_argument("--slow", type=float, default=0, help="seconds a rank needs longer")
    parser.add_argument("--jitter", type=float, default=0, help="seconds a step may take longer")
    parser.add_argument("--auto", action="store_true", help='gossip_every="auto"')
    parser.add_argument("--codes", choices=["bfloat16", "float16", "int8", "int4"])
    parser.add_argument("--tracking", action="store_true", help="gradient_tracking=True")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE, help="seconds after which a rank hangs"
    )
    parser.add_argument("--quiet-rounds", type=int, default=0, help="that many rounds, no faults")
    args = parser.parse_args()
    if args.ranks <= LEAST:
        parser.error(f"--ranks: expected more than {LEAST}, which must stay, got {args.ranks}")
    return args


def main() -> int:
    args = parse_arguments()
    start = time.monotonic()
    job = Job(
        world_size=args.ranks,
        topology=args.topology,
        timeout=args.timeout,
        step=args.step,
        slow=args.slow,
        jitter=args.jitter,
        auto=args.auto,
        codes=args.codes,
        tracking=args.tracking,
    )
    fleet = Fleet(job)
    injector, stacks = Injector(fleet, args.ranks, args.patience), ""
    try:
        wrong = soak(fleet, injector, args)
    except (TimeoutError, ChildProcessError, ValueError) as error:
        wrong, stacks = [str(error)], fleet.stacks()
    finally:
        fleet.close()
    tell(fleet, injector, time.monotonic() - start)
    print(stacks, end="")
    for failure in wrong:
        print(f"failed: {failure}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
