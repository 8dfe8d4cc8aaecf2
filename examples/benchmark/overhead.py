"""The cost of the wrapper if the network costs nothing.

    python examples/benchmark/overhead.py    # 2 ranks on loopback, 100 M float32 parameters

It compares one round (pack, send and receive, mix) with one bare send and receive of the same
bytes and with the all-reduce of DDP, and the step of a lone rank, which exchanges nothing, with
that of the base optimizer. With --training it measures whole steps of every method of
`step_time.py` by turns, where the memory is the limit. `gpu.py` measures the packing and
the mixing on a GPU. It takes 46 s of CPU time, of both ranks together.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import netlab
import torch
import torch._dynamo  # the first optimizer step would import it, in every rank
import torch.distributed as dist
from methods import METHODS
from step_time import RECIPE
from torch import Tensor, nn

from decent_optim_wrapper import DecentOptimWrapper

TENSORS = 400
WIDTH = 1000
# Elements of a bucket of DDP.
BUCKET = 25 * 2**20 // 4


class Overhead(NamedTuple):
    """Median seconds on the slower rank."""

    bare: float
    all_reduce: float
    copies: float
    views: float


def make_params(count: int) -> list[torch.Tensor]:
    return [torch.zeros(count // TENSORS, requires_grad=True) for _ in range(TENSORS)]


def median_seconds(what: str, action: Callable[[], None], repeats: int) -> float:
    if dist.get_rank() == 0:
        print(f"{what}, {repeats} times ...", file=sys.stderr, flush=True)
    seconds = []
    for _ in range(repeats + 2):
        dist.barrier()
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def measure(count: int, repeats: int) -> Overhead:
    dist.init_process_group("gloo")
    peer = 1 - dist.get_rank()
    outgoing, incoming = torch.zeros(count), torch.empty(count)

    def send_and_receive() -> None:
        works = [dist.irecv(incoming, peer), dist.isend(outgoing, peer)]
        for work in works:
            work.wait()

    def all_reduce() -> None:
        works = [dist.all_reduce(bucket, async_op=True) for bucket in outgoing.split(BUCKET)]
        for work in works:
            work.wait()

    bare = median_seconds("one send and receive", send_and_receive, repeats)
    rounds = [median_seconds("one all-reduce", all_reduce, repeats)]
    for views in (False, True):
        # Without gradients the local update is empty: a step is the round and nothing else.
        optimizer = DecentOptimWrapper(
            torch.optim.SGD(make_params(count), lr=0.1),
            topology="ring",
            overlap=False,
            param_as_bucket_view=views,
        )
        what = "one round, views" if views else "one round"
        rounds.append(median_seconds(what, lambda optimizer=optimizer: optimizer.step(), repeats))
    return Overhead(bare, *rounds)


class Dense(nn.Module):
    """A layer of which the memory counts, and hardly the computing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.expand(1, WIDTH)).mean(dim=1)


def whole_steps(method: str, count: int, repeats: int) -> float:
    """Median seconds of a step of a method with its own defaults."""
    dist.init_process_group("gloo")
    model = nn.Sequential(*(Dense() for _ in range(max(1, count // WIDTH**2))))
    training = METHODS[method](model, RECIPE)
    inputs = torch.ones(1, requires_grad=True)
    seconds = median_seconds(method, lambda: training.step(inputs), repeats)
    training.finish()
    dist.barrier()
    return seconds


def print_training(where: netlab.Lab, count: int, repeats: int, turns: int) -> None:
    """Print the medians of all methods over turns, and their ratios to decent-dp."""
    rows: dict[str, list[float]] = {name: [] for name in METHODS}
    for _ in range(turns):
        for name, row in rows.items():
            row.append(max(netlab.run(where, 2, whole_steps, name, count, repeats, timeout=300)))
    print("| method | ms per step | by decent-dp |\n|---|---|---|")
    peer = statistics.median(rows["decent-dp"])
    for name, row in rows.items():
        seconds = statistics.median(row)
        print(f"| {name} | {1000 * seconds:.0f} | {seconds / peer:.2f} |")


def lone_step(seconds: float) -> tuple[float, float]:
    """Seconds of a step of SGD with 64 small parameters, and of the wrapper around it alone.

    Args:
        seconds: how long both are timed together, by turns.
    """
    params = [torch.zeros(64, requires_grad=True) for _ in range(64)]
    for param in params:
        param.grad = torch.ones_like(param)
    base = torch.optim.SGD(params, lr=1e-3)
    optimizers = [base, DecentOptimWrapper(base, rank=0, world_size=1)]
    times: list[list[float]] = [[], []]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[1]) < 100:
        for optimizer, row in zip(optimizers, times, strict=True):
            start = time.perf_counter()
            optimizer.step()
            row.append(time.perf_counter() - start)
    base_alone, wrapped = map(statistics.median, times)
    return base_alone, wrapped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=3.0, help="for the step of a lone rank")
    parser.add_argument("--training", type=int, default=0, metavar="TURNS", help="whole steps")
    args = parser.parse_args()
    if args.training:
        with netlab.lab(2, rate="") as where:
            print_training(where, int(args.parameters), args.repeats, args.training)
        return
    base, alone = lone_step(args.seconds)
    print(f"a step of SGD alone:  {1e6 * base:.0f} us")
    print(f"wrapped, a lone rank: {1e6 * alone:.0f} us, ratio {alone / base:.2f}")
    count = int(args.parameters)
    with netlab.lab(2, rate="") as where:
        ranks = netlab.run(where, 2, measure, count, args.repeats, timeout=300)
    bare, reduced, copies, views = (max(column) for column in zip(*ranks, strict=True))
    print(f"{count / 1e6:g} M float32 parameters in {TENSORS} tensors, 2 ranks on loopback")
    print(f"one send and receive: {1000 * bare:.0f} ms")
    print(f"one all-reduce:       {1000 * reduced:.0f} ms, ratio {reduced / bare:.2f}")
    print(f"one round:            {1000 * copies:.0f} ms, ratio {copies / bare:.2f}")
    print(f"one round, views:     {1000 * views:.0f} ms, ratio {views / bare:.2f}")


if __name__ == "__main__":
    main()
