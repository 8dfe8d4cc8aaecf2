"""The cost of the wrapper if the network costs nothing.

    python examples/benchmark/overhead.py    # 2 ranks on loopback, 100 M float32 parameters

It compares one round (pack, send and receive, mix) with one bare send and receive of the same
bytes and with the all-reduce of DDP, and the step of a lone rank, which exchanges nothing, with
that of the base optimizer. With --training it measures whole steps of every method of
`step_time.py` by turns, where the memory is the limit, and with --small the CPU time of
steps of small parameters, beside that of the messages alone, and of the parts of a round in int8.
It takes 46 s of CPU time, of both ranks together.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import netlab
import torch
import torch._dynamo  # the first optimizer step would import it, in every rank
import torch.distributed as dist
from methods import METHODS
from step_time import RECIPE
from torch import Tensor, nn

from decent_optim_wrapper import DecentOptimWrapper, GradientTracking
from decent_optim_wrapper.codecs import codec_of
from decent_optim_wrapper.wire.bucket import Bucket
from decent_optim_wrapper.wire.layout import Layout

TENSORS = 400
WIDTH = 1000
# The small model, and how many steps of it make one figure.
SMALL, BLOCK = 64, 25
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


def int8_parts(count: int, blocks: int) -> dict[str, float]:
    """CPU seconds of what a pair does with `count` parameters in int8; the lowest of blocks."""
    codec = codec_of(torch.int8)
    params = [torch.randn(BUCKET // 16) for _ in range(16)]
    bucket = Bucket(params, Layout(cap_mb=None, codec=codec))
    packed, reference = bucket.new_flat().data, bucket.new_flat().data
    message, _ = bucket.messages(codec.nbytes(bucket.numel))

    def changes() -> Iterator[tuple[slice, Tensor]]:
        both = (message, message)
        for place, (theirs, ours) in codec.decode(*both, numel=bucket.numel, dtype=torch.float32):
            reference[place].add_(torch.add(theirs, ours), alpha=0.5)
            yield place, theirs.sub_(ours)

    parts: dict[str, Callable[[], object]] = {
        "pack": lambda: bucket.pack(bucket.view(packed)),
        "code": lambda: codec.encode(packed, message, reference),
        "decode both messages, move the reference": lambda: deque(changes(), maxlen=0),
        "decode, move the reference, and mix": lambda: bucket.absorb_(changes(), 0.5),
    }
    best = dict.fromkeys(parts, float("inf"))
    for _ in range(blocks):
        for name, part in parts.items():
            start = time.thread_time()
            part()
            seconds = time.thread_time() - start
            best[name] = min(best[name], seconds * count / bucket.numel)
    return best


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


class Floor:
    """A step of a pair with a round's two messages and nothing else, or packing and mixing, too.

    Args:
        params: the parameters.
        mixes: whether to pack and mix.
    """

    def __init__(self, params: list[Tensor], mixes: bool) -> None:
        self.params, self.mixes = params, mixes
        self.base = torch.optim.SGD(params, lr=1e-3)
        # What is sent and received: a header of six numbers, and the parameters.
        self.headers = [torch.zeros(6, dtype=torch.float64) for _ in range(2)]
        self.vectors = [torch.zeros(SMALL**2) for _ in range(2)]
        self.packed, self.arrived = (torch.split(vector, SMALL) for vector in self.vectors)
        self.works: list[Any] = []

    @torch.no_grad()
    def step(self) -> None:
        mixes = self.mixes and bool(self.works)
        self.synchronize()
        self.post(self.headers, 0)
        if mixes:
            torch._foreach_lerp_(self.params, self.arrived, 0.5)
        self.base.step()
        if self.mixes:
            torch._foreach_copy_(self.packed, self.params)
        self.post(self.vectors, 1)

    def post(self, pair: list[Tensor], tag: int) -> None:
        peer = 1 - dist.get_rank()
        outgoing, incoming = pair
        # As the library does, without the checks of `dist.isend`.
        world: Any = dist.group.WORLD
        self.works += [world.recv([incoming], peer, tag), world.send([outgoing], peer, tag)]

    def synchronize(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


def small_params() -> list[Tensor]:
    params = [torch.zeros(SMALL, requires_grad=True) for _ in range(SMALL)]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def small_steps(blocks: int) -> dict[str, float]:
    """CPU seconds of a step of small parameters by method, all threads: the lowest of blocks."""
    dist.init_process_group("gloo")

    def wrapped(**options: Any) -> DecentOptimWrapper:
        base = torch.optim.SGD(small_params(), lr=1e-3)
        return DecentOptimWrapper(base, topology="ring", **options)

    optimizers: dict[str, Any] = {
        "SGD alone": torch.optim.SGD(small_params(), lr=1e-3),
        "and two messages": Floor(small_params(), mixes=False),
        "and packing and mixing": Floor(small_params(), mixes=True),
        "the wrapper": wrapped(),
        "views": wrapped(param_as_bucket_view=True),
        "int8": wrapped(comm_dtype=torch.int8),
        "tracking": wrapped(extensions=[GradientTracking()]),
    }
    best = dict.fromkeys(optimizers, float("inf"))
    # By turns, so that whatever else the machine does falls on all of them.
    for _ in range(blocks):
        for name, optimizer in optimizers.items():
            start = time.process_time()
            for _ in range(BLOCK):
                optimizer.step()
            best[name] = min(best[name], (time.process_time() - start) / BLOCK)
    for optimizer in optimizers.values():
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
    dist.barrier()
    return best


def print_small(where: netlab.Lab, blocks: int) -> None:
    """Print the CPU time of the steps of small parameters, on the slower rank."""
    print(f"{SMALL} parameters of {SMALL} elements, one bucket, 2 ranks on loopback\n")
    ranks = netlab.run(where, 2, small_steps, blocks, timeout=600)
    print("| step | CPU us |\n|---|---|")
    for name in ranks[0]:
        print(f"| {name} | {1e6 * max(rank[name] for rank in ranks):.0f} |")


def print_int8(count: int, blocks: int) -> None:
    """Print the CPU time of the parts of a round in int8."""
    print(f"\n{count / 1e6:g} M parameters in buckets of 25 MiB\n")
    print("| part of a round in int8 | CPU ms |\n|---|---|")
    for name, seconds in int8_parts(count, blocks).items():
        print(f"| {name} | {1000 * seconds:.0f} |")


def lone_step(seconds: float) -> tuple[float, float]:
    """Seconds of a step of SGD with 64 small parameters, and of the wrapper around it alone.

    Args:
        seconds: how long both are timed together, by turns.
    """
    base = torch.optim.SGD(small_params(), lr=1e-3)
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
    parser.add_argument("--small", type=int, default=0, metavar="BLOCKS", help="small parameters")
    args = parser.parse_args()
    if args.small:
        with netlab.lab(2, rate="") as where:
            print_small(where, args.small)
        torch.set_num_threads(1)
        print_int8(int(args.parameters), args.small)
        return
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
