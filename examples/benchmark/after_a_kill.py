"""What kills cost: steps made against steps possible, and seconds until the others go on.

    python examples/benchmark/after_a_kill.py --ranks 8 --minutes 10
    uv run --with torchft==0.2.0 python examples/benchmark/after_a_kill.py --torchft 10 5

Our launcher starts the ranks, which train a small model on the CPU. One after the other is killed
(SIGKILL), at a rate of 62 kills in 30 minutes for 32 ranks, and started again by the launcher. The
launcher has the store; with torchft this process has its lighthouse, whose timeouts for joins
and heartbeats `--torchft` takes. The manager of torchft averages the gradients.

Goodput is the steps of all ranks, divided by what as many healthy ranks would have made in the same
time: at their pace from half a minute after each kill to the next one. A step counts if the same
ranks made it from beginning to end and, with torchft, if it was committed. torchft 0.2.0 is in the
index for Linux; it brings opentelemetry with it, and logs every step.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

from decent_optim_wrapper import DecentOptimWrapper, Elastic

HOST = "127.0.0.1"
# Seconds of a rank between kills, and from a kill until the ranks count as healthy.
SECONDS_PER_KILL, RECOVERED_SECONDS = 30 * 60 * 32 / 62, 30.0
# For any one step.
PATIENCE = 120.0
# As in torchft's own example, train_ddp.py.
GLOO_TIMEOUT, MANAGER_TIMEOUT = timedelta(seconds=5), timedelta(seconds=30)

# Makes one step, and returns how many ranks have made it together; 0 if it does not count.
Train = Callable[[], int]


class Step(NamedTuple):
    """When a step ended, and how many ranks made it together; 0 if it does not count."""

    end: float
    ranks: int


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

    def train() -> int:
        members = optimizer.members
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        return len(members) if optimizer.members == members else 0

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

    def train(_: TCPStore = store) -> int:  # the store lives as long as this
        step = manager.current_step()
        optimizer.zero_grad()
        backward(model)
        for work in [manager.allreduce(param.grad) for param in model.parameters()]:
            work.wait()
        optimizer.step()
        return int(manager.num_participants()) if manager.current_step() > step else 0

    return train


def work(args: argparse.Namespace, rank: int) -> None:
    """Train as a rank of the launcher, until it is killed."""
    torch.set_num_threads(1)
    log = (args.folder / f"{rank}_{time.monotonic()}_{os.getpid()}").open("w", buffering=1)
    ours = not args.lighthouse
    train = prepare_ours(args.stale_after) if ours else prepare_torchft(rank, args.lighthouse)
    while True:
        time.sleep(args.step)
        ranks = train()
        log.write(f"{time.monotonic()} {ranks}\n")


class Logs(NamedTuple):
    """What the ranks write.

    Args:
        folder: with a file of each process.
    """

    folder: Path

    def of(self, rank: int) -> list[Path]:
        """The files of the processes of a rank, the last one at the end."""
        found = self.folder.glob(f"{rank}_*")
        return sorted(found, key=lambda path: float(path.name.split("_")[1]))

    def pid(self, rank: int) -> int:
        """The process of the rank, which may have ended."""
        return int(self.of(rank)[-1].name.split("_")[2])

    def steps(self, rank: int) -> Iterator[Step]:
        """All steps of a rank."""
        for path in self.of(rank):
            # The last line may be incomplete.
            for line in path.read_text().split("\n")[:-1]:
                end, ranks = line.split()
                yield Step(float(end), int(ranks))

    def first(self, rank: int, together: int, start: float) -> float | None:
        """When the rank has ended its first step after the start of so many together."""
        ends = (step.end for step in self.steps(rank) if step.ranks == together)
        return next((end for end in ends if end > start), None)

    def wait(self, ranks: list[int], together: int, start: float) -> list[float]:
        """When each of these ranks has ended its first such step, which may take a while.

        Raises:
            TimeoutError: one of them makes no such step.
        """
        over = time.monotonic() + PATIENCE
        while None in (ends := [self.first(rank, together, start) for rank in ranks]):
            if time.monotonic() > over:
                raise TimeoutError(f"ranks {ranks} make no step of {together}: {ends}")
            time.sleep(0.2)
        return [end for end in ends if end]


def measure(args: argparse.Namespace, logs: Logs) -> list[str]:
    """Kill a rank now and then, and return the cells of a row."""
    everyone, chance = list(range(args.ranks)), random.Random(args.seed)
    victims = chance.sample(everyone, args.ranks)
    logs.wait(everyone, args.ranks, 0)
    start, kills, stalls, returns = time.monotonic(), [], [], []
    # From each start or return to the next kill.
    healthy_from = [start]
    pause = args.pause or SECONDS_PER_KILL / args.ranks
    while time.monotonic() + pause / 2 < start + 60 * args.minutes:
        time.sleep(pause / 2)
        victim, now = victims[len(kills) % args.ranks], time.monotonic()
        os.kill(logs.pid(victim), signal.SIGKILL)
        kills.append(now)
        others = [rank for rank in everyone if rank != victim]
        stepped = logs.wait(others, args.ranks - 1, now)
        stalls += [end - now for end in stepped]
        back = logs.wait(everyone, args.ranks, max(stepped))
        returns += [end - now for end in back]
        healthy_from.append(max(now + RECOVERED_SECONDS, *back))
        time.sleep(max(0.0, now + pause / 2 - time.monotonic()))
    end = time.monotonic()
    steps = [step.end for rank in everyone for step in logs.steps(rank) if step.ranks]
    spans = list(zip(healthy_from, [*kills, end], strict=True))
    healthy = sum(b - a for a, b in spans if b > a) * args.ranks
    pace = sum(a < step <= b for step in steps for a, b in spans) / healthy
    share = sum(start < step <= end for step in steps) / (pace * args.ranks * (end - start))
    times = [f"{statistics.median(each):.2f}, {max(each):.2f}" for each in (stalls, returns)]
    return [str(len(kills)), f"{share:.2%}", *times, f"{1 / pace:.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the kills")
    parser.add_argument("--step", type=float, default=0.2, help="seconds of a step at least")
    parser.add_argument("--pause", type=float, help="seconds between kills")
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
            row = measure(args, Logs(Path(folder)))
        finally:
            # The kernel kills its ranks.
            process.kill()
            process.wait()
            del server
    name = f"torchft, {args.torchft}" if args.torchft else f"ours, stale_after={args.stale_after}"
    columns = "ranks | kills | goodput | kill to next step | kill to step with it | seconds a step"
    print(f"| | {columns} |")
    print("|---" * 7 + "|")
    print(f"| {name} | {args.ranks} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
