"""The cost of the wrapper if the network costs nothing.

    python examples/benchmark/overhead.py    # 2 ranks on loopback, 100 M float32 parameters

It prints the time of one round (pack, send and receive, mix) beside one bare send and receive of
the same bytes and the all-reduce of DDP, and the step of a lone rank, which exchanges nothing,
beside that of the base optimizer. With --training it measures whole steps of every method of
`step_time.py` by turns, where the memory is the limit, and with --small the CPU time of steps of
small parameters, beside that of the messages alone, and of the parts of a round in int8. It takes
46 s of CPU time, of both ranks together.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

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
LONE_STEPS = 10_000
# Elements of a bucket of DDP.
BUCKET = 25 * 2**20 // 4


def make_params(count: int) -> list[torch.Tensor]:
    return [torch.zeros(count // TENSORS, requires_grad=True) for _ in range(TENSORS)]


def median_seconds(what: str, action: Callable[[], object], repeats: int) -> float:
    if dist.get_rank() == 0:
        print(f"{what}, {repeats} times ...", file=sys.stderr, flush=True)
    seconds = []
    for _ in range(repeats + 2):
        dist.barrier()
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def measure(count: int, repeats: int) -> dict[str, float]:
    """Run in each of two ranks: median seconds of a round, and of what it is compared with."""
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

    actions: dict[str, Callable[[], object]] = {
        "one send and receive": send_and_receive,
        "one all-reduce": all_reduce,
    }
    for views in (False, True):
        # Without gradients the local update is empty: a step is the round and nothing else.
        actions["one round" + ", views" * views] = DecentOptimWrapper(
            torch.optim.SGD(make_params(count), lr=0.1),
            topology="ring",
            overlap=False,
            param_as_bucket_view=views,
        ).step
    return {name: median_seconds(name, action, repeats) for name, action in actions.items()}


def int8_parts(count: int, blocks: int) -> dict[str, float]:
    """CPU seconds of what a pair does with `count` parameters in int8; the lowest of blocks."""
    codec = codec_of(torch.int8)
    params = [torch.randn(BUCKET // 16) for _ in range(16)]
    bucket = Bucket(params, Layout(cap_mb=None, codec=codec))
    packed, reference = (bucket.on_device.new(bucket.dtype).data for _ in range(2))
    message, _ = bucket.wire.vectors(2, codec.nbytes(bucket.numel), torch.uint8)

    def changes() -> Iterator[tuple[slice, Tensor]]:
        both = (message, message)
        for place, (theirs, ours) in codec.decode(*both, numel=bucket.numel, dtype=torch.float32):
            reference[place].add_(torch.add(theirs, ours), alpha=0.5)
            yield place, theirs.sub_(ours)

    parts: dict[str, Callable[[], object]] = {
        "pack": lambda: bucket.pack(bucket.on_device.view(packed)),
        "code": lambda: codec.encode(packed, message, reference),
        "decode both messages, move the reference": lambda: deque(changes(), maxlen=0),
        "decode, move the reference, and mix": lambda: bucket.absorb_(changes(), 0.5, keeps=False),
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
    """Mean seconds of a step of a method with its own defaults."""
    dist.init_process_group("gloo")
    model = nn.Sequential(*(Dense() for _ in range(max(1, count // WIDTH**2))))
    training = METHODS[method](model, RECIPE)
    inputs = torch.ones(1, requires_grad=True)
    for _ in range(3):
        training.step(inputs)
    dist.barrier()
    # Without a barrier between them, at which rounds in flight would arrive.
    start = time.perf_counter()
    for _ in range(repeats):
        training.step(inputs)
    training.finish()
    seconds = (time.perf_counter() - start) / repeats
    dist.barrier()
    return seconds


def training_steps(
    run: Callable[..., list[float]],
    methods: Sequence[str],
    count: int,
    repeats: int,
    turns: int,
) -> dict[str, float]:
    """The medians of some methods over turns."""
    rows: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(turns):
        for name, row in rows.items():
            row.append(max(run(2, whole_steps, name, count, repeats)))
    return {name: statistics.median(row) for name, row in rows.items()}


class Floor:
    """A step of a pair with one message, or with a header, too, or with packing and mixing.

    Args:
        params: the parameters, of which nothing else is sent.
        header: whether to send the header of a round.
        mixes: whether to pack and mix.
    """

    def __init__(self, params: list[Tensor], header: bool = True, mixes: bool = False) -> None:
        self.params, self.header, self.mixes = params, header, mixes
        self.base = torch.optim.SGD(params, lr=1e-3)
        # What is sent and received: a header of six numbers, and the parameters.
        self.headers = [torch.zeros(6, dtype=torch.float64) for _ in range(2)]
        self.vectors = [torch.zeros(SMALL * len(params)) for _ in range(2)]
        self.packed, self.arrived = (torch.split(vector, SMALL) for vector in self.vectors)
        self.works: list[Any] = []

    @torch.no_grad()
    def step(self) -> None:
        mixes = self.mixes and bool(self.works)
        self.synchronize()
        if self.header:
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


def small_params(tensors: int = SMALL) -> list[Tensor]:
    params = [torch.zeros(SMALL, requires_grad=True) for _ in range(tensors)]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def small_steps(blocks: int, tensors: int) -> dict[str, float]:
    """CPU seconds of a step of small parameters by method, all threads: the lowest of blocks."""
    dist.init_process_group("gloo")

    def wrapped(**options: Any) -> DecentOptimWrapper:
        base = torch.optim.SGD(small_params(tensors), lr=1e-3)
        return DecentOptimWrapper(base, topology="ring", **options)

    optimizers: dict[str, Any] = {
        "SGD alone": torch.optim.SGD(small_params(tensors), lr=1e-3),
        "and one message": Floor(small_params(tensors), header=False),
        "and two messages": Floor(small_params(tensors)),
        "and packing and mixing": Floor(small_params(tensors), mixes=True),
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


def lone_steps() -> dict[str, float]:
    """Median seconds of a step of SGD, and of the wrapper around it alone, by turns."""
    bare, base = (torch.optim.SGD(small_params(), lr=1e-3) for _ in range(2))
    optimizers = [bare, DecentOptimWrapper(base, rank=0, world_size=1)]
    times: list[list[float]] = [[], []]
    for _ in range(LONE_STEPS):
        for optimizer, row in zip(optimizers, times, strict=True):
            start = time.perf_counter()
            optimizer.step()
            row.append(time.perf_counter() - start)
    return dict(zip(("SGD alone", "the wrapper"), map(statistics.median, times), strict=True))


def print_table(what: str, ranks: list[dict[str, float]], reference: str) -> None:
    """Print the seconds of the slower rank, and their ratio to a reference."""
    slowest = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    print(f"\n| {what} | ms | by {reference} |\n|---|---|---|")
    for name, seconds in slowest.items():
        print(f"| {name} | {1000 * seconds:.4g} | {seconds / slowest[reference]:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--repeats", type=int, default=16)
    parser.add_argument("--training", type=int, default=0, metavar="TURNS", help="whole steps")
    # Torch's hook of PowerSGD waits in gloo's threads, which stood still with the buckets here.
    usual = [name for name in METHODS if "PowerSGD" not in name]
    text = "for --training; decent-dp must be one of them"
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=usual, help=text)
    parser.add_argument("--small", type=int, default=0, metavar="BLOCKS", help="small parameters")
    args = parser.parse_args()
    count = int(args.parameters)
    print(f"{count / 1e6:g} M float32 parameters, or {SMALL} tensors of {SMALL} elements, or one")
    with netlab.lab(2, rate="") as where:
        run = partial(netlab.run, where, timeout=600)
        if args.small:
            for tensors in (SMALL, 1):
                ranks = run(2, small_steps, args.small, tensors)
                print_table(f"CPU time of a step of {tensors}", ranks, "and one message")
            parts = run(1, int8_parts, count, args.small)
            print_table("CPU time of a part of a round in int8", parts, "pack")
        elif args.training:
            medians = training_steps(run, args.methods, count, args.repeats, args.training)
            print_table("method", [medians], "decent-dp")
        else:
            print_table("step of a lone rank", run(1, lone_steps), "SGD alone")
            rounds = run(2, measure, count, args.repeats)
            print_table("2 ranks", rounds, "one send and receive")


if __name__ == "__main__":
    main()
