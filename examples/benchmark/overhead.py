"""The cost of the wrapper if the network costs nothing.

    python examples/benchmark/overhead.py    # 2 ranks on loopback, 100 M float32 parameters

It compares one round (pack, send and receive, mix) with one bare send and receive of the same
bytes, and the step of a lone rank, which exchanges nothing, with that of the base optimizer.
`gpu.py` measures the packing and the mixing on a GPU. It takes 46 s of CPU time, of both ranks
together.
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

from decent_optim_wrapper import DecentOptimWrapper

TENSORS = 400


class Overhead(NamedTuple):
    """Median seconds on the slower rank."""

    bare: float
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

    bare = median_seconds("one send and receive", send_and_receive, repeats)
    rounds = []
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
    args = parser.parse_args()
    base, alone = lone_step(args.seconds)
    print(f"a step of SGD alone:  {1e6 * base:.0f} us")
    print(f"wrapped, a lone rank: {1e6 * alone:.0f} us, ratio {alone / base:.2f}")
    count = int(args.parameters)
    with netlab.lab(2, rate="") as where:
        ranks = netlab.run(where, 2, measure, count, args.repeats, timeout=300)
    bare, copies, views = (max(column) for column in zip(*ranks, strict=True))
    print(f"{count / 1e6:g} M float32 parameters in {TENSORS} tensors, 2 ranks on loopback")
    print(f"one send and receive: {1000 * bare:.0f} ms")
    print(f"one round:            {1000 * copies:.0f} ms, ratio {copies / bare:.2f}")
    print(f"one round, views:     {1000 * views:.0f} ms, ratio {views / bare:.2f}")


if __name__ == "__main__":
    main()
