"""What kills cost: steps made against steps possible, and seconds until the others go on.

    python examples/benchmark/after_a_kill.py --ranks 8 --minutes 10
    python examples/benchmark/after_a_kill.py --published --ranks 32 --minutes 30
    uv run --with torchft==0.2.0 python examples/benchmark/after_a_kill.py --torchft 10 5

Our launcher starts the ranks, which train a small model on the CPU. They are killed (SIGKILL) at
drawn times, and started again by the launcher: 62 kills in 30 minutes for 32 ranks, as was
published for another system. With `--published` fewer ranks have as many kills, otherwise each rank
is killed as often. The launcher has the store; with torchft this process has its lighthouse, whose
timeouts for joins and heartbeats `--torchft` takes. The manager of torchft averages the gradients.

Goodput is the steps of all ranks while ranks are killed, divided by what they would have made in
that time at their pace in the quiet times before the first kill and after the last return. A step
counts if the same ranks made it from beginning to end and, with torchft, if it was committed.

Ends with an error if a killed rank does not come back, or if the ranks agree on members (recover)
more often than kills and returns explain. torchft 0.2.0 is in the index for Linux; it brings
opentelemetry with it, and logs every step.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

from decent_optim_wrapper import DecentOptimWrapper, Elastic
from decent_optim_wrapper.comm.store import part_of_run
from decent_optim_wrapper.elastic.membership.rendezvous import key_prefix

HOST = "127.0.0.1"
# As published: of all ranks, of which there were so many.
KILLS_PER_MINUTE, PUBLISHED_RANKS = 62 / 30, 32
# For the return of a rank, and for the start of each.
PATIENCE, START_SECONDS = 120.0, 30.0
# Of a kill that meets ranks which have agreed on members and not yet made a step with them.
SLACK_SECONDS = 2.0
# As in torchft's own example, train_ddp.py.
GLOO_TIMEOUT, MANAGER_TIMEOUT = timedelta(seconds=5), timedelta(seconds=30)

# Makes one step, and returns how many ranks have made it together, 0 if it does not count, and the
# number of their agreement on the members.
Train = Callable[[], tuple[int, int]]


class Step(NamedTuple):
    """A step of a rank.

    Args:
        end: when it ended.
        ranks: how many ranks made it together; 0 if it does not count.
        epoch: the number of their agreement on the members.
    """

    end: float
    ranks: int
    epoch: int


class Kill(NamedTuple):
    """When a rank was killed, and its process."""

    time: float
    rank: int
    process: int


class Cause(NamedTuple):
    """The members may agree once, after this time and up to that one, because of a fault."""

    after: float
    until: float


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def backward(model: nn.Module) -> None:
    inputs = torch.randn(8, 32)
    output: Tensor = model(inputs)
    (output - inputs[:, :4].sin()).square().mean().backward()


def prepare_ours(stale_after: float) -> Train:
    model, base = build()
    optimizer = DecentOptimWrapper(base, timeout=30, elastic=Elastic(stale_after=stale_after))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False)
    meetings = part_of_run(store, key_prefix(0), timedelta(seconds=PATIENCE), ours=True)

    def train() -> tuple[int, int]:
        members = optimizer.members
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        return len(members) if optimizer.members == members else 0, int(meetings.get("epoch"))

    return train


def serve_lighthouse(join: float, heartbeat: float) -> tuple[Any, str]:
    server = importlib.import_module("torchft.coordination").LighthouseServer(
        bind=f"{HOST}:0",
        min_replicas=1,
        join_timeout_ms=int(1000 * join),
        heartbeat_timeout_ms=int(1000 * heartbeat),
    )
    return server, f"http://{HOST}:{server.address().rpartition(':')[2]}"


def prepare_torchft(rank: int, lighthouse: str) -> Train:
    torchft = importlib.import_module("torchft")
    model, base = build()
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        base.load_state_dict(state["base"])

    manager = torchft.Manager(
        torchft.ProcessGroupGloo(timeout=GLOO_TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "base": base.state_dict()},
        min_replica_size=1,
        timeout=MANAGER_TIMEOUT,
        rank=0,  # of a replica of one rank
        world_size=1,
        replica_id=f"rank_{rank}",
        store_addr=HOST,
        store_port=store.port,
        hostname=HOST,
        lighthouse_addr=lighthouse,
    )
    optimizer = torchft.Optimizer(manager, base)

    def train(_: TCPStore = store) -> tuple[int, int]:  # the store lives as long as this
        step = manager.current_step()
        optimizer.zero_grad()
        backward(model)
        for work in [manager.allreduce(param.grad) for param in model.parameters()]:
            work.wait()
        optimizer.step()
        ranks = int(manager.num_participants()) if manager.current_step() > step else 0
        # It has no public name.
        return ranks, int(vars(manager)["_quorum_id"])

    return train


def work(args: argparse.Namespace, rank: int) -> None:
    """Train as a rank of the launcher, until it is killed."""
    torch.set_num_threads(1)
    log = (args.folder / f"{rank}_{time.monotonic()}_{os.getpid()}").open("w", buffering=1)
    ours = not args.lighthouse
    train = prepare_ours(args.stale_after) if ours else prepare_torchft(rank, args.lighthouse)
    while True:
        time.sleep(args.step)
        ranks, epoch = train()
        log.write(f"{time.monotonic()} {ranks} {epoch}\n")


class Life(NamedTuple):
    """One process of a rank.

    Args:
        rank: the rank.
        start: when it started.
        process: its number, which may have ended.
        steps: those that count.
    """

    rank: int
    start: float
    process: int
    steps: list[Step]


class Logs(NamedTuple):
    """What the ranks write.

    Args:
        folder: with a file of each process.
    """

    folder: Path

    def lives(self, rank: int | str = "*") -> list[Life]:
        """All processes of the rank, or of all ranks, in the order of their starts."""
        found = [read(path) for path in self.folder.glob(f"{rank}_*")]
        return sorted(found, key=lambda life: life.start)

    def last(self, rank: int) -> Life:
        """The newest process of the rank."""
        return self.lives(rank)[-1]

    def wait(self, ranks: int, start: float, patience: float) -> None:
        """Wait until all ranks have ended a step of so many together after the start.

        Raises:
            TimeoutError: one of them makes no such step.
        """
        over, missing = time.monotonic() + patience, {*range(ranks)}
        while missing:
            if time.monotonic() > over:
                raise TimeoutError(f"ranks {sorted(missing)} make no step of {ranks}")
            time.sleep(0.5)
            for life in self.lives():
                if any(step.end > start and step.ranks == ranks for step in life.steps[-1:]):
                    missing.discard(life.rank)


def read(path: Path) -> Life:
    """What a process has written."""
    rank, start, process = path.name.split("_")
    # The last line may be incomplete.
    lines = [line.split() for line in path.read_text().split("\n")[:-1]]
    steps = [Step(float(end), int(ranks), int(epoch)) for end, ranks, epoch in lines]
    counted = [step for step in steps if step.ranks]
    return Life(int(rank), float(start), int(process), counted)


def kill_ranks(args: argparse.Namespace, logs: Logs, begin: float) -> list[Kill]:
    """Kill ranks at times drawn from the seed, the same ones for the same seed."""
    chance = random.Random(args.seed)
    rate = KILLS_PER_MINUTE * (1 if args.published else args.ranks / PUBLISHED_RANKS)
    count = args.kills or max(1, round(rate * args.minutes))
    kills: list[Kill] = []
    for after in sorted(chance.uniform(0, 60 * args.minutes) for _ in range(count)):
        victims = chance.sample(range(args.ranks), args.ranks)
        time.sleep(max(0.0, begin + after - time.monotonic()))
        killed = {kill.process for kill in kills}
        # One that trains.
        lives = (logs.last(rank) for rank in victims)
        life = next(life for life in lives if life.steps and life.process not in killed)
        kills.append(Kill(time.monotonic(), life.rank, life.process))
        os.kill(life.process, signal.SIGKILL)
    return kills


def begins(lives: list[Life]) -> dict[int, float]:
    """When the first step of each epoch ended."""
    found: dict[int, float] = {}
    for life in lives:
        for step in life.steps:
            found[step.epoch] = min(step.end, found.get(step.epoch, step.end))
    return found


def recoveries(lives: list[Life]) -> list[int]:
    """The epochs after the first one in which all ranks made a step together."""
    made = [step for life in lives for step in life.steps]
    most = max(step.ranks for step in made)
    together = min(step.epoch for step in made if step.ranks == most)
    return sorted({step.epoch for step in made if step.epoch > together})


def unexplained(lives: list[Life], kills: list[Kill]) -> list[int]:
    """The recoveries that neither a kill nor a return explains."""
    epochs, later = begins(lives), recoveries(lives)
    causes = []
    for kill in kills:
        latest = math.inf
        if life := back(lives, kill):
            latest = epochs[life.steps[0].epoch]
            causes.append(Cause(life.start, latest))
        noticed = [begin for begin in epochs.values() if begin > kill.time + SLACK_SECONDS]
        causes.append(Cause(kill.time, min([latest, *noticed])))
    found = []
    for epoch in later:
        fitting = [cause for cause in causes if cause.after < epochs[epoch] <= cause.until]
        if fitting:
            causes.remove(min(fitting, key=lambda cause: cause.until))
        else:
            found.append(epoch)
    return found


def back(lives: list[Life], kill: Kill) -> Life | None:
    """The process with which a killed rank makes steps again."""
    after = (life for life in lives if life.rank == kill.rank and life.start > kill.time)
    return next((life for life in after if life.steps), None)


def seconds_from(lives: list[Life], kill: Kill, epoch: int) -> list[float]:
    """The seconds from a kill to the first step of each other rank in this epoch or later."""
    ends: dict[int, float] = {}
    for life in lives:
        for step in life.steps:
            if step.end > kill.time and step.epoch >= epoch and life.rank != kill.rank:
                ends.setdefault(life.rank, step.end - kill.time)
    return list(ends.values())


def measure(args: argparse.Namespace, logs: Logs) -> tuple[list[str], list[str]]:
    """Kill ranks now and then; return the cells of a row, and a text for all that is wrong."""
    logs.wait(args.ranks, 0, PATIENCE + START_SECONDS * args.ranks)
    start = time.monotonic()
    begin = start + args.quiet
    kills = kill_ranks(args, logs, begin)
    time.sleep(max(0.0, begin + 60 * args.minutes - time.monotonic()))
    wrong = []
    try:
        logs.wait(args.ranks, kills[-1].time + SLACK_SECONDS, PATIENCE)
    except TimeoutError as error:
        wrong.append(str(error))
    over = time.monotonic()
    time.sleep(args.quiet)
    end, lives = time.monotonic(), logs.lives()
    stalls, returns = [], []
    for kill in kills:
        before = max(epoch for epoch, time in begins(lives).items() if time < kill.time)
        stalls += seconds_from(lives, kill, before + 1)
        if life := back(lives, kill):
            first = life.steps[0]
            returns += [first.end - kill.time, *seconds_from(lives, kill, first.epoch)]
        else:
            wrong.append(f"rank {kill.rank} was killed, and has made no step since")
    if more := unexplained(lives, kills):
        wrong.append(f"the ranks recovered without a fault, {len(more)} times: epochs {more}")
    ends = [step.end for life in lives for step in life.steps]

    def steps(a: float, b: float) -> int:
        return sum(a < each <= b for each in ends)

    pace = (steps(start, begin) + steps(over, end)) / (begin - start + end - over)
    share = steps(begin, over) / (pace * (over - begin))
    times = [
        f"{statistics.median(each):.2f}, {max(each):.2f}" if each else "-"
        for each in (stalls, returns)
    ]
    counts = [str(len(kills)), f"{len(recoveries(lives))} of {2 * len(kills)}"]
    return [*counts, f"{share:.2%}", *times, f"{args.ranks / pace:.3f}"], wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the kills")
    parser.add_argument("--step", type=float, default=0.2, help="seconds of a step at least")
    parser.add_argument("--published", action="store_true", help="as many kills with fewer ranks")
    parser.add_argument("--kills", type=int, help="so many in place of these rates")
    parser.add_argument("--quiet", type=float, default=30, help="seconds without kills at each end")
    parser.add_argument("--stale-after", type=float, default=2.0, help="of Elastic, in seconds")
    parser.add_argument("--torchft", type=float, nargs=2, help="seconds: for joins, for heartbeats")
    parser.add_argument(
        "--spare", action="append_const", const="--spare", default=[], help="of the launcher"
    )
    # Of a rank.
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--lighthouse", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        work(args, int(os.environ["RANK"]))
    # Otherwise a signal leaves the launcher and its ranks behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with TemporaryDirectory() as folder:
        server, address = serve_lighthouse(*args.torchft) if args.torchft else (None, "")
        options = ["--step", args.step, "--stale-after", args.stale_after, "--folder", folder]
        launcher = [
            sys.executable,
            "-m",
            "decent_optim_wrapper",
            "run",
            "--nproc-per-node",
            args.ranks,
        ]
        command = [
            *launcher,
            "--max-restarts",
            1000,
            *args.spare,
            __file__,
            *options,
            "--lighthouse",
            address,
        ]
        process = subprocess.Popen(list(map(str, command)), stdout=sys.stderr)
        try:
            row, wrong = measure(args, Logs(Path(folder)))
        finally:
            # The kernel kills its ranks.
            process.kill()
            process.wait()
            del server
    name = f"torchft, {args.torchft}" if args.torchft else f"ours, stale_after={args.stale_after}"
    columns = (
        "ranks | kills | recoveries, of losses and returns | goodput | kill to next step | "
        "kill to step with it | seconds a step"
    )
    for text in wrong:
        print(f"failed: {text}")
    print(f"| | {columns} |")
    print("|---" * 8 + "|")
    print(f"| {name} | {args.ranks} | {' | '.join(row)} |")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
