"""From the kill of a rank to the next step of the others, and to the first step with it again.

    uv run --with torchft==0.2.0 python examples/benchmark/after_a_kill.py 2> torchft.log

Three ranks train a small model on the CPU. One is drawn and killed (SIGKILL) while it trains, and
started again once the others have gone on for two seconds. A step counts if the same ranks made it
from beginning to end and, with torchft, if it was committed. What outlives the ranks is in this
process: our store, and the lighthouse of torchft, which is tried with several of its timeouts. The
manager of torchft averages the gradients, its `DistributedDataParallel` in the last row.

torchft 0.2.0 is in the index for Linux; it brings opentelemetry with it, and logs every step to
stderr. Without torchft the script measures our wrapper only. All rows take 7 minutes, most of which
is waiting; ours take 2.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

from decent_optim_wrapper import DecentOptimWrapper, Elastic

PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch._dynamo", "decent_optim_wrapper"])
HOST = "127.0.0.1"
STEP_SECONDS = 0.02
AWAY_SECONDS = 2.0
# For any one step.
PATIENCE = 60.0
# Those of torchft's own example, train_ddp.py.
GLOO_TIMEOUT, MANAGER_TIMEOUT = timedelta(seconds=5), timedelta(seconds=30)

# Makes one step, and returns how many ranks have made it together; 0 if it does not count.
Train = Callable[[], int]
# Starts what outlives the ranks, and returns it and its address.
Serve = Callable[[], tuple[Any, str]]
# Called on a rank with its number, the number of ranks and that address.
Prepare = Callable[[int, int, str], Train]


class Step(NamedTuple):
    """When a step ended, and how many ranks made it together; 0 if it does not count."""

    end: float
    ranks: int


class Method(NamedTuple):
    """How the ranks train."""

    name: str
    prepare: Prepare
    serve: Serve


class Outcome(NamedTuple):
    """What a kill has cost each of the others, in seconds.

    Args:
        stalls: from the kill to the end of the first step without the killed rank.
        returns: from when that rank, all imports done, begins again to the end of the first step
            with it.
        held: the longest step in that time.
    """

    stalls: list[float]
    returns: list[float]
    held: list[float]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def backward(model: nn.Module) -> None:
    inputs = torch.randn(8, 32)
    output: Tensor = model(inputs)
    (output - inputs[:, :4].sin()).square().mean().backward()


def serve_store() -> tuple[Any, str]:
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    return store, str(store.port)


def prepare_ours(rank: int, world_size: int, address: str, *, stale_after: float) -> Train:
    model, base = build()
    store = TCPStore(HOST, int(address), is_master=False)
    elastic = Elastic(store=store, stale_after=stale_after)
    optimizer = DecentOptimWrapper(
        base, rank, world_size, topology="complete", timeout=30, elastic=elastic
    )

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


def prepare_torchft(rank: int, world_size: int, address: str, *, ddp: bool = False) -> Train:
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
        lighthouse_addr=address,
    )
    trained = torchft.DistributedDataParallel(manager, model) if ddp else model
    optimizer = torchft.Optimizer(manager, base)

    def train(_: TCPStore = store) -> int:  # the store lives as long as this
        step = manager.current_step()
        optimizer.zero_grad()
        backward(trained)
        if not ddp:
            for work in [manager.allreduce(param.grad) for param in model.parameters()]:
                work.wait()
        optimizer.step()
        return int(manager.num_participants()) if manager.current_step() > step else 0

    return train


OURS = [
    Method(f"ours, stale_after={seconds}", partial(prepare_ours, stale_after=seconds), serve_store)
    for seconds in (2.0, 0.5)  # the default, and less
]
TORCHFT = [
    Method(
        f"torchft, {'DDP, ' if ddp else ''}join timeout {join:g} s, heartbeat timeout {beat:g} s",
        partial(prepare_torchft, ddp=ddp),
        partial(serve_lighthouse, join, beat),
    )
    # The defaults of LighthouseServer, those of torchft's README, our `stale_after`.
    for ddp, join, beat in [(False, 0.1, 5), (False, 10, 5), (False, 10, 2), (True, 10, 5)]
]


def work(start: Callable[[int], Train], rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if importlib.util.find_spec("torchft"):  # not a part of the start
        importlib.import_module("torchft")
    pipe.send(Step(time.monotonic(), 0))
    train = start(rank)
    while True:
        time.sleep(STEP_SECONDS)
        ranks = train()
        pipe.send(Step(time.monotonic(), ranks))


class Fleet:
    """The processes of the ranks, and the steps that they report."""

    def __init__(self, method: Method, address: str, world_size: int) -> None:
        self._name = method.name
        self._start = partial(method.prepare, world_size=world_size, address=address)
        self.steps: dict[int, list[Step]] = {}
        self._processes: dict[int, Any] = {}
        self._pipes: dict[Connection, int] = {}

    def start(self, rank: int) -> None:
        """Start a rank, for the first time or again."""
        self.steps[rank] = []
        ours, theirs = PROCESSES.Pipe(duplex=False)
        args = (self._start, rank, theirs)
        self._processes[rank] = PROCESSES.Process(target=work, args=args, daemon=True)
        self._processes[rank].start()
        theirs.close()
        self._pipes[ours] = rank

    def kill(self, ranks: Iterable[int]) -> float:
        """Kill these ranks, and return when."""
        now = time.monotonic()
        for rank in ranks:
            self._processes[rank].kill()
        return now

    def listen(self, seconds: float) -> None:
        """Read what the ranks report for that time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for pipe in wait([*self._pipes], left):
                assert isinstance(pipe, Connection)
                try:
                    self.steps[self._pipes[pipe]].append(pipe.recv())
                except EOFError:
                    del self._pipes[pipe]

    def first(self, ranks: Iterable[int], together: int, start: float) -> list[float]:
        """When each of the ranks has ended its first step after the start of so many together.

        Raises:
            ChildProcessError: one of them has ended.
            TimeoutError: one of them makes no such step.
        """
        over, ends = time.monotonic() + PATIENCE, []
        for rank in ranks:
            while (end := self._first(rank, together, start)) is None:
                if rank not in self._pipes.values():
                    raise ChildProcessError(f"{self._name}: rank {rank} has ended")
                if time.monotonic() > over:
                    raise TimeoutError(f"{self._name}: rank {rank} makes no step of {together}")
                self.listen(0.1)
            ends.append(end)
        return ends

    def _first(self, rank: int, together: int, start: float) -> float | None:
        counted = (step.end for step in self.steps[rank] if step.ranks == together)
        return next((end for end in counted if end > start), None)

    def longest(self, rank: int, start: float, end: float) -> float:
        """The longest step of the rank that ended in this time."""
        ends = [step.end for step in self.steps[rank]]
        return max(b - a for a, b in itertools.pairwise(ends) if start < b <= end)


def measure(method: Method, seed: int, world_size: int) -> Outcome:
    """Kill a drawn rank once, and start it again."""
    chance = random.Random(seed)
    victim = chance.randrange(world_size)
    others = [rank for rank in range(world_size) if rank != victim]
    server, address = method.serve()
    fleet = Fleet(method, address, world_size)
    try:
        for rank in range(world_size):
            fleet.start(rank)
        fleet.first(range(world_size), together=world_size, start=0)
        fleet.listen(1 + chance.random())
        killed = fleet.kill([victim])
        stalls = [end - killed for end in fleet.first(others, world_size - 1, killed)]
        fleet.listen(AWAY_SECONDS)
        fleet.start(victim)
        [began] = fleet.first([victim], 0, killed)
        ends = fleet.first(others, world_size, began)
        held = [fleet.longest(*of) for of in zip(others, itertools.repeat(began), ends)]
        return Outcome(stalls, [end - began for end in ends], held)
    finally:
        fleet.kill(range(world_size))
        del server


def cells(outcomes: list[Outcome], kills: int) -> list[str]:
    """The median and the longest of all survivors, and how many kills the others survived."""
    columns = [[*itertools.chain(*lists)] for lists in zip(*outcomes, strict=True)]
    times = [f"{statistics.median(column):.2f}, {max(column):.2f}" for column in columns]
    return [*(times or ["-"] * len(Outcome._fields)), f"{len(outcomes)} of {kills}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="one a kill")
    args = parser.parse_args()
    has_torchft = importlib.util.find_spec("torchft")
    if not has_torchft:
        print("torchft is not installed (pip install torchft==0.2.0): ours only", file=sys.stderr)
    print(f"{args.ranks} ranks, seeds {args.seeds}; seconds: median, longest of all survivors")
    print("| | kill to next step | start to step with it | longest step then | went on |")
    print("|---|---|---|---|---|")
    for method in [*OURS, *(TORCHFT if has_torchft else ())]:
        outcomes = []
        for seed in args.seeds:
            try:
                outcomes.append(measure(method, seed, args.ranks))
            except (ChildProcessError, TimeoutError) as error:
                print(f"seed {seed}: {error}", file=sys.stderr, flush=True)
        print(f"| {method.name} | {' | '.join(cells(outcomes, len(args.seeds)))} |", flush=True)
    print(f"load at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
