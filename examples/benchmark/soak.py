"""Train for as long as asked while ranks are killed, stopped, held up and brought back.

    python examples/benchmark/soak.py --minutes 5                # with faults
    python examples/benchmark/soak.py --quiet-rounds 10000       # without

Reports rounds, faults, recoveries and losses, and what every rank holds of memory, file descriptors
and threads after warm-up and at the end. Ends with an error if a rank is lost for good.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from faults import LEAST, Injector, draw_faults
from torch import nn
from torch.distributed import TCPStore

from decent_optim_wrapper import DecentOptimWrapper

PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch._dynamo", "decent_optim_wrapper"])
# Rounds of a process until it holds what it needs.
WARM_UP = 500
REPORT_SECONDS = 0.25
TIMEOUT = 5.0


class Footprint(NamedTuple):
    """What a process holds."""

    mib: float
    files: int
    threads: int


class Stall(NamedTuple):
    """A step in which the members changed.

    Args:
        end: on the clock that all processes of the machine share.
        seconds: that it took.
    """

    end: float
    seconds: float


class Progress(NamedTuple):
    """What a rank says of itself, several times a second and at the end.

    Args:
        round: reached.
        members: in its view.
        steps: made by this process.
        footprint: of this process.
        stalls: since the last report.
        average: of all parameters at the end; empty before.
    """

    round: int
    members: tuple[int, ...]
    steps: int
    footprint: Footprint
    stalls: tuple[Stall, ...]
    average: tuple[float, ...] = ()


def footprint() -> Footprint:
    status = Path("/proc/self/status").read_text()
    of = dict(line.split(":", 1) for line in status.splitlines())
    files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (one number, no paths)
    return Footprint(int(of["VmRSS"].split()[0]) / 1024, files, int(of["Threads"]))


def train(
    rank: int, world_size: int, store: Any, report: Callable[[Progress], None], topology: str
) -> None:
    """Train until the launcher says up to which round."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4)).double()
    stalls: list[Stall] = []
    steps, changes, told = 0, 0, time.monotonic()

    def note_change(old: tuple[int, ...], new: tuple[int, ...]) -> None:
        nonlocal changes
        changes += 1

    optimizer = DecentOptimWrapper(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        *(rank, world_size),
        topology=topology,
        bucket_cap_mb=0.01,
        store=store,
        timeout=TIMEOUT,
        on_peer_failure="continue",
        on_membership_change=note_change,
    )

    def progress() -> Progress:
        return Progress(optimizer.round, optimizer.members, steps, footprint(), tuple(stalls))

    while not store.check(["finish"]) or optimizer.round < int(store.get("finish")):
        sleep_if_told(rank, store)
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
    # A rank that has ended is a lost one to those that still average.
    last = progress()
    optimizer.global_avg(may_revert=False)
    average = nn.utils.parameters_to_vector(model.parameters()).tolist()
    report(last._replace(average=tuple(average)))


def sleep_if_told(rank: int, store: Any) -> None:
    key = f"delay {rank}"
    if store.check([key]):
        time.sleep(float(store.get(key)))
        store.delete_key(key)


def work(rank: int, world_size: int, port: int, pipe: Connection, topology: str) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    try:
        train(rank, world_size, store, pipe.send, topology)
    except Exception:
        pipe.send(traceback.format_exc())


class Life(NamedTuple):
    """A process of a rank."""

    rank: int
    process: Any


class Fleet:
    """The ranks as processes, and what they have said; the store is this process's."""

    def __init__(self, world_size: int, topology: str) -> None:
        self._world_size, self._topology = world_size, topology
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: dict[int, Any] = {}
        # A pipe for each life: reports of a killed process must not pass for those of the next.
        self._lives: dict[Connection, Life] = {}
        self.newest: dict[int, Progress] = {}
        self.warm: dict[int, Footprint] = {}
        self.stalls: list[Stall] = []
        # The stall of a rank that was stopped itself says nothing of the recovery.
        self._returning: set[int] = set()
        self.lost: dict[int, str] = {}
        for rank in range(world_size):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Start the rank, for the first time or again."""
        ours, theirs = PROCESSES.Pipe(duplex=False)
        self.warm.pop(rank, None)
        args = (rank, self._world_size, self._store.port, theirs, self._topology)
        process = PROCESSES.Process(target=work, args=args, daemon=True)
        process.start()
        theirs.close()
        self._processes[rank] = process
        self._lives[ours] = Life(rank, process)

    def kill(self, rank: int) -> None:
        """End the rank without a word."""
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

    def reach(self, rounds: int, patience: float = 60) -> None:
        """Listen until a rank has reached that round."""
        heard = time.monotonic()
        while self.round < rounds:
            if self.listen(1):
                heard = time.monotonic()
            elif time.monotonic() > heard + patience:
                raise TimeoutError(f"no rank was heard for {patience} s")

    def end(self, patience: float = 60) -> None:
        """Let the ranks end a little later, all after the same round, and compare them."""
        self._store.set("finish", str(self.round + WARM_UP))
        deadline = time.monotonic() + patience
        while not all(progress.average for progress in self.newest.values()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all ranks ended within {patience} s")
            self.listen(1)
        rows = torch.tensor([p.average for p in self.newest.values()], dtype=torch.float64)
        if not rows.isfinite().all() or (rows - rows[0]).abs().max() > 1e-12:
            raise ValueError("expected the same finite average on all ranks; they differ")

    def close(self) -> None:
        """End what still runs."""
        for process in self._processes.values():
            process.kill()
            process.join()

    @property
    def round(self) -> int:
        """The latest that a rank has reached."""
        return max((progress.round for progress in self.newest.values()), default=0)

    def listen(self, seconds: float) -> set[int]:
        """Take what comes within that time; the ranks that it came from."""
        heard = set()
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

    def _look_at_end(self, life: Life) -> None:
        life.process.join()
        if life.process.exitcode not in (0, -signal.SIGKILL):
            self.lost.setdefault(life.rank, f"exit code {life.process.exitcode}")
        if life.rank in self.lost:
            raise ChildProcessError(f"rank {life.rank} ended: {self.lost[life.rank]}")

    def _note(self, rank: int, progress: Progress) -> None:
        self.newest[rank] = progress
        if rank not in self._returning:
            self.stalls += progress.stalls
        self._returning.discard(rank)
        if progress.steps >= WARM_UP:
            self.warm.setdefault(rank, progress.footprint)


def recoveries(stalls: list[Stall]) -> list[float]:
    """The longest stall of each recovery: what ends together on several ranks is one."""
    ends, longest = -1.0, []
    for stall in sorted(stalls):
        if stall.end - ends > 0.5:
            longest.append(stall.seconds)
        longest[-1] = max(longest[-1], stall.seconds)
        ends = stall.end
    return longest


def soak(fleet: Fleet, injector: Injector, args: argparse.Namespace) -> None:
    """Do faults, or nothing, until time or rounds are over; then let everyone end."""
    injector.settle()
    if args.quiet_rounds:
        fleet.reach(args.quiet_rounds)
    else:
        over = time.monotonic() + 60 * args.minutes
        for fault in draw_faults(args.seed, args.ranks, TIMEOUT):
            if time.monotonic() > over:
                break
            injector.inject(fault)
        injector.settle()
    fleet.end()


def tell(fleet: Fleet, injector: Injector, seconds: float) -> None:
    print(f"{fleet.round} rounds in {seconds:.0f} s")
    done = [f"{count} x {kind.value}" for kind, count in injector.done.items()]
    print("faults:", ", ".join(done) or "none")
    stalls = recoveries(fleet.stalls)
    if stalls:
        middle, worst = statistics.median(stalls), max(stalls)
        print(f"recoveries: {len(stalls)}, median stall {middle:.1f} s, longest {worst:.1f} s")
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
    parser.add_argument("--quiet-rounds", type=int, default=0, help="that many rounds, no faults")
    args = parser.parse_args()
    if args.ranks <= LEAST:
        parser.error(f"--ranks: expected more than {LEAST}, which must stay, got {args.ranks}")
    return args


def main() -> int:
    args = parse_arguments()
    start = time.monotonic()
    fleet = Fleet(args.ranks, args.topology)
    injector = Injector(fleet, args.ranks)
    failure = ""
    try:
        soak(fleet, injector, args)
    except (TimeoutError, ChildProcessError, ValueError) as error:
        failure = f"failed: {error}\n"
    finally:
        fleet.close()
    tell(fleet, injector, time.monotonic() - start)
    print(failure, end="")
    return int(bool(failure))


if __name__ == "__main__":
    sys.exit(main())
