"""Step times of this library and its peers, side by side on the same rate-limited network.

    sudo python examples/benchmark/step_time.py

Four ranks, each in its own network namespace behind a 400 Mbit/s link (root and iproute2 needed;
without them, plain loopback). The model has 10 layers whose forward and backward take 0.1 s and
0.2 s of wall time without using the CPU, as on an accelerator; its parameters total M MiB. SGD
with momentum, gloo, and every method with its own defaults. The times may vary from step to step,
rank 0 may be slower than the others, and links may lose and delay packets (TUN devices needed). One
method with 20 MiB takes 5 s of CPU time, of all ranks together, and 15 s in all; by default it runs
all methods with three sizes.

Ranks that share cores work at the same time, so they take longer than on machines of their own.
With --slow-motion 2 (four ranks on two cores) all that takes no CPU, which is computing and the
wire, takes twice as long, and the result is halved: the work of a rank then counts as it does on a
core of its own.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import os
import random
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import netlab
import torch
import torch._dynamo  # the first optimizer step would import it, in every rank
import torch.distributed as dist
from methods import FAR_METHODS, METHODS, Recipe
from torch import Tensor, nn

from decent_optim_wrapper.topo import Group
from decent_optim_wrapper.utils import init_distributed

# A layer is a matrix with so many columns, as PowerSGD wants it.
LAYERS, COLUMNS = 10, 512
FORWARD_SECONDS, BACKWARD_SECONDS = 0.1, 0.2
HEADERS = 1.04
MIB = 1024 * 1024


class Timing(NamedTuple):
    """Seconds per step, and the figures of `stats()` if there are any."""

    step: float
    wait: float | None = None
    mix: float | None = None


class Workload(NamedTuple):
    """What the ranks compute.

    Args:
        jitter: sigma of the log-normal factor of a step's time, whose mean is 1.
        slow_factor: how many times longer rank 0 takes.
        slow_motion: how many times longer computing takes than in the result.
    """

    jitter: float = 0.0
    slow_factor: float = 1.0
    slow_motion: float = 1.0


class _Clock:
    """How much longer than usual this process takes to compute."""

    factor = 1.0


class Busy(torch.autograd.Function):
    """Sleeps in the forward and backward pass, and gives its weight a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        time.sleep(_Clock.factor * FORWARD_SECONDS / LAYERS)
        return x + 0.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = ctx.saved_tensors
        time.sleep(_Clock.factor * BACKWARD_SECONDS / LAYERS)
        return grad, torch.full_like(weight, 1e-3)


class Layer(nn.Module):
    """A layer of the given size."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(max(1, numel // COLUMNS), COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        return Busy.apply(x, self.weight)


def build_model(size_mib: float) -> nn.Module:
    numel = int(size_mib * MIB / 4 / LAYERS)
    return nn.Sequential(*(Layer(numel) for _ in range(LAYERS)))


RECIPE = Recipe(partial(torch.optim.SGD, lr=0.01, momentum=0.9))


def measure(method: str, size_mib: float, steps: int, warmup: int, workload: Workload) -> Timing:
    """Run in every rank: mean seconds per step."""
    init_distributed()
    training = (METHODS | FAR_METHODS)[method](build_model(size_mib), RECIPE)
    _Clock.factor = workload.slow_motion
    inputs = torch.ones(1, requires_grad=True)
    for _ in range(warmup):
        training.step(inputs)
    dist.barrier()
    # The wire is empty after a barrier: make a few steps until it is as busy as in training.
    for _ in range(3):
        training.step(inputs)
    waits, mixes = [], []
    chance = random.Random(dist.get_rank())
    slow = workload.slow_motion * (workload.slow_factor if dist.get_rank() == 0 else 1.0)
    sigma = workload.jitter
    start = time.perf_counter()
    for _ in range(steps):
        _Clock.factor = slow * chance.lognormvariate(-(sigma**2) / 2, sigma)
        training.step(inputs)
        if training.ours is not None:
            waits.append(training.ours.stats().wait_seconds)
            mixes.append(training.ours.stats().mix_seconds)
    steps_made = steps * workload.slow_motion
    seconds = (time.perf_counter() - start) / steps_made
    training.finish()
    dist.barrier()
    if not waits:
        return Timing(seconds)
    return Timing(seconds, sum(waits) / steps_made, sum(mixes) / steps_made)


def bits(rate: str) -> float:
    """Bits per second of a rate in the notation of tc."""
    number, unit = re.fullmatch(r"([0-9.]+)([kmg])bit", rate.lower()).groups()  # type: ignore[union-attr]
    return float(number) * {"k": 1e3, "m": 1e6, "g": 1e9}[unit]


def wire_seconds(size_mib: float, rate: str) -> float:
    """The time of sending one copy of the parameters over the link; 0 without a limit."""
    return size_mib * MIB * 8 * HEADERS / bits(rate) if rate else 0.0


def floor_seconds(size_mib: float, rate: str) -> float:
    """The longer time of computing and of sending one copy of the parameters over the link."""
    return max(FORWARD_SECONDS + BACKWARD_SECONDS, wire_seconds(size_mib, rate))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[10, 20, 40], metavar="MIB")
    parser.add_argument("--methods", nargs="+", choices=METHODS | FAR_METHODS, metavar="METHOD")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", default="400mbit", help="of each link, such as 400mbit")
    text = "one size behind links whose all-reduce takes so many times as long as computing"
    parser.add_argument("--ratios", type=float, nargs="+", metavar="RATIO", help=text)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1, help="runs of a cell; the median counts")
    parser.add_argument("--jitter", type=float, default=0.0, help="sigma of log-normal times")
    parser.add_argument("--slow-factor", type=float, default=1.0, help="how much slower rank 0 is")
    text = "how many times slower than it is all that takes no CPU goes, before times are divided"
    parser.add_argument("--slow-motion", type=float, default=1.0, metavar="TIMES", help=text)
    parser.add_argument("--loss", type=float, default=0.0, help="share of the packets")
    text = "seconds by which packets are late, in each direction"
    parser.add_argument("--delay", type=float, default=0.0, help=text)
    parser.add_argument("--seed", type=int, default=0, help="of the losses")
    text = "for each pair of ranks, where several nodes take --interface: 16 / ranks"
    parser.add_argument("--connections", type=int, default=1, help=text)
    picture = Path("runs/step_time.png")
    parser.add_argument("--output", type=Path, default=picture, help="the picture, with --ratios")
    parser.add_argument("--timeout", type=float, default=240, help="seconds of a run of a method")
    parser.add_argument("--csv", type=Path, help="file to which rows are added, with --ratios")
    args = parser.parse_args()
    if args.rate and not re.fullmatch(r"([0-9.]+)([kmg])bit", args.rate.lower()):
        parser.error(f"--rate expects something like 400mbit or 1gbit, got {args.rate}")
    if args.ratios and (args.loss or args.delay):
        parser.error("--ratios are of links without latency; pass --rate with --loss and --delay")
    args.sizes = args.sizes[:1] if args.ratios else args.sizes
    args.methods = args.methods or [*METHODS]
    return args


def run_cell(args: argparse.Namespace, where: netlab.Lab, method: str, size: float) -> Timing:
    """The mean over the ranks, without rank 0 if it is slower than the others."""
    workload = Workload(args.jitter, args.slow_factor, args.slow_motion)
    call = (measure, method, size, args.steps, args.warmup, workload)
    where = where.with_connections(args.connections)
    ranks = netlab.run(where, args.ranks, *call, timeout=args.timeout)
    if workload.slow_factor > 1:
        ranks = ranks[1:]
    means = [sum(v) / len(v) if None not in v else None for v in zip(*ranks, strict=True)]
    return Timing(*means)


def median(timings: list[Timing]) -> Timing:
    return sorted(timings)[len(timings) // 2]


def rate_of(ratio: float, size_mib: float, args: argparse.Namespace) -> str:
    """The rate of a link at which an all-reduce takes `ratio` times the computing; "" for 0."""
    if not ratio:
        return ""
    bits = Group(range(args.ranks)).copies_sent * size_mib * MIB * 8 * HEADERS / args.slow_motion
    return f"{bits / ratio / (FORWARD_SECONDS + BACKWARD_SECONDS) / 1e3:.0f}kbit"


def over_ratios(args: argparse.Namespace) -> None:
    """Measure one size behind links of several rates; print a table, and draw it."""
    (size,) = args.sizes
    rows: dict[str, list[float]] = {method: [] for method in args.methods}
    for ratio in args.ratios:
        rate = netlab.possible(rate_of(ratio, size, args))
        with netlab.lab(args.ranks, rate) as where:
            for method, row in rows.items():
                row.append(run_cell(args, where, method, size).step)
                print(f"{method}, {ratio:g}: {1000 * row[-1]:.0f} ms", flush=True)
                if args.csv:
                    cells = args.ranks, args.jitter, ratio, method, round(1000 * row[-1], 1)
                    args.csv.parent.mkdir(parents=True, exist_ok=True)
                    with args.csv.open("a", newline="") as file:
                        csv.writer(file, lineterminator="\n").writerow(cells)
    print("", table([f"{ratio:g}" for ratio in args.ratios], rows), sep="\n")
    draw_ratios(args.ratios, rows, args.output)


def draw_ratios(
    ratios: list[float],
    rows: dict[str, list[float]],
    path: Path,
    what: str = "steps per second, relative to DDP",
) -> None:
    """How much faster than DDP the rows are, over the time of an all-reduce."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    reference = rows.get("DDP") or next(iter(rows.values()))
    for method, row in rows.items():
        speed = [base / own for base, own in zip(reference, row, strict=True)]
        color = "black" if row is reference else None
        axis.plot(ratios, speed, marker="o", color=color, label=method)
    if all(ratios):
        axis.set_xscale("log", base=2)
    axis.set_xticks(ratios, [f"{ratio:.2g}" for ratio in ratios])
    axis.set(
        xlabel="seconds of an all-reduce / seconds of computing",
        ylabel=what,
    )
    axis.grid(alpha=0.3)
    axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def table(columns: Iterable[str], rows: Mapping[str, Sequence[float]]) -> str:
    """Rows of seconds, in milliseconds."""
    head = ["ms per step", *columns]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for method, row in rows.items():
        lines.append(f"| {method} | " + " | ".join(f"{1000 * each:.0f}" for each in row) + " |")
    return "\n".join(lines)


def main() -> None:
    args = parse_arguments()
    if importlib.util.find_spec("decent_dp") is None and "decent-dp" in args.methods:
        print("decent-dp is not installed (pip install decent-dp): left out")
        args.methods.remove("decent-dp")
    os.environ.setdefault("LOGURU_LEVEL", "ERROR")
    if args.ratios:
        over_ratios(args)
        return
    args.rate = netlab.possible(args.rate)
    runs: dict[tuple[str, float], list[Timing]] = {}
    with (
        netlab.lab(args.ranks, args.rate) as where,
        netlab.lossy(where, args.loss, args.delay, args.seed),
    ):
        # The methods by turns, so that whatever else the machine does falls on all of them.
        for _, size, method in product(range(args.repeats), args.sizes, args.methods):
            timing = run_cell(args, where, method, size)
            runs.setdefault((method, size), []).append(timing)
            extra = ""
            if timing.wait is not None and timing.mix is not None:
                extra = f", waited {1000 * timing.wait:.0f}, mixed {1000 * timing.mix:.0f}"
            print(f"{method}, M = {size:g}: {1000 * timing.step:.0f} ms{extra}", flush=True)
    measured = {
        method: [median(runs[method, size]).step for size in args.sizes] for method in args.methods
    }
    floors = [floor_seconds(size, args.rate) for size in args.sizes]
    columns = [f"M = {size:g} MiB" for size in args.sizes]
    print("\n" + table(columns, {"floor: max(compute, wire)": floors, **measured}))


if __name__ == "__main__":
    main()
