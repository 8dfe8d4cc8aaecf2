"""Seconds until the averaged model of a small GPT has the loss at which DDP ends, over slow links.

    sudo python examples/benchmark/time_to_loss.py

Four ranks with model, data and schedule of `train_gpt.py` and AdamW. The losses do not depend on
the network, and the seconds per step not on the data, so that they are measured apart: the losses
in whole trainings over loopback, with schedules of several lengths, as the learning rate falls to
zero in each; the seconds per step in 40 steps with each rank in its own network namespace behind
a slow link (root and iproute2 needed). What was measured before is read from the output and not
measured again. A training of 500 steps takes one to two minutes on 2 cores, all of them hours.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import netlab
import torch
import torch._dynamo  # the first optimizer step would import it, in every rank
import torch.distributed as dist
from peers import MuonWithAdamW, Training, ddp, post_local_sgd
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.optim import lr_scheduler_fn_cosine_with_warmup
from decent_optim_wrapper.utils import init_distributed

sys.path.insert(0, str(Path(__file__).parent.parent))
from train_gpt import BATCH, CONTEXT, GPT, load_data, loss_at

CPU = torch.device("cpu")
# How often parameters are copied in a run.
POINTS = 25
# Steps before the clock starts.
WARM_UP = 8


def alone(model: nn.Module, base: torch.optim.Optimizer) -> Training:
    return Training(model, base)


def gossip(model: nn.Module, base: torch.optim.Optimizer, **options: Any) -> Training:
    optimizer = DecentOptimWrapper(base, topology="ring", model=model, bucket_cap_mb=1, **options)
    return Training(model, optimizer, optimizer.synchronize)


class Method(NamedTuple):
    """A method with what was best for it.

    Args:
        build: wraps model and optimizer.
        lr: the learning rate.
        lengths: steps of the schedule, relative to DDP's.
    """

    build: Callable[[nn.Module, torch.optim.Optimizer], Training]
    lr: float
    lengths: tuple[float, ...] = (1.0,)


METHODS: dict[str, Method] = {
    "no communication": Method(alone, 0.006),
    "DDP": Method(ddp, 0.006),
    "DDP, bf16 hook": Method(partial(ddp, compress=True), 0.006),
    "PostLocalSGD, period 8": Method(partial(post_local_sgd, period=8), 0.006, (1.0, 1.3, 1.5)),
    "ours": Method(gossip, 0.006, (1.0, 1.2, 1.5)),
    "ours, int8": Method(partial(gossip, comm_dtype=torch.int8), 0.006, (1.0, 1.1, 1.2)),
    "ours, overlap=False, int8": Method(
        partial(gossip, overlap=False, comm_dtype=torch.int8), 0.008, (1.0, 1.1, 1.2)
    ),
    "ours, forward": Method(partial(gossip, overlap="forward"), 0.008, (1.0, 1.1)),
    "ours, forward, int8": Method(
        partial(gossip, overlap="forward", comm_dtype=torch.int8), 0.008, (1.0, 1.1)
    ),
    "ours, tracking, int8": Method(
        partial(gossip, gradient_tracking=True, comm_dtype=torch.int8), 0.006
    ),
    "ours, forward, tracking, int8": Method(
        partial(gossip, overlap="forward", gradient_tracking=True, comm_dtype=torch.int8), 0.006
    ),
}


def name(*settings: Any) -> str:
    """The key of a measurement."""
    return " | ".join(map(str, settings))


def adamw(model: nn.Module, lr: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=betas)


BASES: dict[str, Callable[..., torch.optim.Optimizer]] = {"AdamW": adamw, "Muon": MuonWithAdamW}


class Run(NamedTuple):
    """What is trained, and how.

    Args:
        method: the method.
        lr: its learning rate.
        betas: those of AdamW.
        steps: of the schedule.
        seed: of the model, and with the rank of the batches.
        base: the optimizer that is wrapped.
        shards: what each rank trains on, as in `train_gpt.py`.
    """

    method: str
    lr: float
    betas: tuple[float, float]
    steps: int
    seed: int
    base: str
    shards: str

    @property
    def key(self) -> str:
        """Its name in the file of results."""
        return name(*self)


class Loop:
    """Trains on one rank."""

    def __init__(self, run: Run) -> None:
        world = init_distributed()
        self._shard, _, characters = load_data(run.shards, world.rank, world.world_size, CPU)
        torch.manual_seed(run.seed)
        self._model = GPT(characters, 128, 5)
        base = BASES[run.base](self._model, lr=run.lr, betas=run.betas)
        self._network, self._optimizer, self.finish = METHODS[run.method].build(self._model, base)
        warmup = run.steps // 20
        base = getattr(self._optimizer, "optim", self._optimizer)
        self._scheduler = lr_scheduler_fn_cosine_with_warmup(base, run.steps - warmup, warmup)
        self._generator = torch.Generator().manual_seed(1000 * run.seed + world.rank)

    def step(self) -> None:
        starts = torch.randint(len(self._shard) - CONTEXT, (BATCH,), generator=self._generator)
        self._optimizer.zero_grad()
        loss_at(self._network, self._shard, starts).backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._scheduler.step()

    def copy(self) -> Tensor:
        return parameters_to_vector(self._model.parameters()).detach().clone()


def train(run: Run) -> list[tuple[int, Any]]:
    """Run in every rank: steps and parameters, now and then."""
    loop, steps = Loop(run), run.steps
    history = []
    for step in range(1, steps + 1):
        loop.step()
        if step % max(1, steps // POINTS) == 0 or step == steps:
            history.append((step, loop.copy().numpy()))
    loop.finish()
    dist.barrier()
    return history


def time_steps(steps: int, run: Run) -> float:
    """Run in every rank: seconds per step, from as many steps."""
    loop = Loop(run)
    for _ in range(WARM_UP):
        loop.step()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        loop.step()
    seconds = (time.perf_counter() - start) / steps
    loop.finish()
    dist.barrier()
    return seconds


@torch.no_grad()
def evaluate(ranks: list[list[tuple[int, Any]]]) -> list[tuple[int, float]]:
    """Steps and the loss of the averaged model at every copy."""
    _, held_out, characters = load_data("shuffled", 0, 1, CPU)
    exam = torch.arange(0, len(held_out) - CONTEXT, 8 * CONTEXT)
    model = GPT(characters, 128, 5)
    points = []
    for of_ranks in zip(*ranks, strict=True):
        rows = torch.stack([torch.from_numpy(row) for _, row in of_ranks])
        vector_to_parameters(rows.mean(0), model.parameters())
        points.append((of_ranks[0][0], loss_at(model, held_out, exam).item()))
    return points


class Results:
    """What was measured, in a file.

    Args:
        path: the file; created if need be.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Steps and losses by run; seconds per step by rate and method.
        found = json.loads(path.read_text()) if path.exists() else {}
        self.losses: dict[str, list[tuple[int, float]]] = found.get("losses", {})
        self.seconds: dict[str, float] = found.get("seconds", {})

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        found = {"losses": self.losses, "seconds": self.seconds}
        self._path.write_text(json.dumps(found, indent=1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--lrs", type=float, nargs="+", help="instead of those in METHODS")
    parser.add_argument("--lengths", type=float, nargs="+", help="instead of those in METHODS")
    parser.add_argument("--betas", type=float, nargs=2, default=[0.9, 0.999], help="of AdamW")
    parser.add_argument("--base", choices=BASES, default="AdamW")
    parser.add_argument("--shards", choices=("shuffled", "topics"), default="shuffled")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500, help="of DDP's schedule")
    parser.add_argument(
        "--timed", type=int, default=40, help="steps on the clock: a multiple of every period"
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--rates", nargs="*", default=["100mbit", "400mbit", "1gbit"], help="of each link"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/time_to_loss.json"))
    parser.add_argument("--picture", type=Path, help="the same as bars")
    return parser.parse_args()


def measure_losses(args: argparse.Namespace, results: Results) -> None:
    """Train with every method, learning rate, length and seed."""
    for seed, method in product(args.seeds, args.methods):
        for lr, steps in product(lrs_of(args, method), steps_of(args, method)):
            run = run_of(args, method, lr, steps, seed)
            if run.key in results.losses:
                continue
            with netlab.lab(args.ranks, "") as where:
                points = evaluate(netlab.run(where, args.ranks, train, run, timeout=3000))
            results.losses[run.key] = points
            results.save()
            print(f"{run.key}: loss {points[-1][1]:.4f}", flush=True)


def measure_seconds(args: argparse.Namespace, results: Results) -> None:
    """Time the steps of every method behind links of every rate."""
    for rate, method in product(args.rates, args.methods):
        if name(rate, method) in results.seconds:
            continue
        run = run_of(args, method, METHODS[method].lr, args.steps, seed=0)
        with netlab.lab(args.ranks, netlab.possible(rate)) as where:
            timed = netlab.run(where, args.ranks, time_steps, args.timed, run, timeout=600)
        results.seconds[name(rate, method)] = seconds = max(timed)
        results.save()
        print(f"{name(rate, method)}: {1000 * seconds:.0f} ms per step", flush=True)


def run_of(args: argparse.Namespace, method: str, lr: float, steps: int, seed: int) -> Run:
    """A run with the base, the betas and the shards of the command line."""
    return Run(
        method=method,
        lr=lr,
        betas=tuple(args.betas),
        steps=steps,
        seed=seed,
        base=args.base,
        shards=args.shards,
    )


def lrs_of(args: argparse.Namespace, method: str) -> Sequence[float]:
    """The learning rates that are tried for a method."""
    return args.lrs or [METHODS[method].lr]


def steps_of(args: argparse.Namespace, method: str) -> list[int]:
    """The lengths of the schedules that are tried for a method, in steps."""
    return [round(length * args.steps) for length in args.lengths or METHODS[method].lengths]


def mean_end(args: argparse.Namespace, results: Results, *settings: Any) -> float:
    """The loss at the end, in the mean of the seeds; infinite if it was not measured."""
    keys = [run_of(args, *settings, seed).key for seed in args.seeds]
    if not keys or any(key not in results.losses for key in keys):
        return math.inf
    return sum(results.losses[key][-1][1] for key in keys) / len(keys)


class Row(NamedTuple):
    """The shortest schedule of a method that ends where DDP ends.

    Args:
        method: the method.
        lr: its learning rate.
        usual: the loss after DDP's number of steps, infinite if it was not measured.
        steps: those of the schedule; None if no schedule ends there.
        end: the loss of the schedule, or of the longest one.
    """

    method: str
    lr: float
    usual: float
    steps: int | None
    end: float

    def seconds(self, results: Results, rate: str) -> float:
        """How long its schedule takes; infinite if none ends where DDP ends."""
        per_step = results.seconds.get(name(rate, self.method), math.nan)
        return math.inf if self.steps is None else self.steps * per_step


def rows_of(args: argparse.Namespace, results: Results) -> list[Row]:
    """A row for every method and learning rate."""
    goal = min(mean_end(args, results, "DDP", lr, args.steps) for lr in lrs_of(args, "DDP"))
    rows = []
    for method in args.methods:
        for lr in lrs_of(args, method):
            lengths = steps_of(args, method)
            ends = {steps: mean_end(args, results, method, lr, steps) for steps in lengths}
            steps = next((each for each in lengths if ends[each] <= goal), None)
            rows.append(
                Row(
                    method=method,
                    lr=lr,
                    usual=ends.get(args.steps, math.inf),
                    steps=steps,
                    end=ends[steps or lengths[-1]],
                )
            )
    return rows


def print_table(args: argparse.Namespace, results: Results, rows: list[Row]) -> None:
    """Print the rows."""
    columns = ["method", "lr", f"loss after {args.steps}", "steps", "loss", *args.rates]
    print("\n| " + " | ".join(columns) + " |" + "\n" + "|---" * len(columns) + "|")
    for row in rows:
        seconds = [row.seconds(results, rate) for rate in args.rates]
        cells = ["-" if math.isinf(each) else f"{each:.0f} s" for each in seconds]
        steps = row.steps or "not reached"
        print(
            f"| {row.method} | {row.lr:g} | {row.usual:.3f} | {steps} | {row.end:.3f} | "
            + " | ".join(cells)
            + " |"
        )


def draw(args: argparse.Namespace, results: Results, rows: list[Row]) -> None:
    """Draw the seconds of the methods that end where DDP ends, for every rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row.steps is not None]
    figure, axes = pyplot.subplots(
        1, len(args.rates), figsize=(10, 0.4 * len(shown) + 1), sharey=True, squeeze=False
    )
    for axis, rate in zip(axes[0], args.rates, strict=True):
        seconds = [row.seconds(results, rate) for row in shown]
        colors = ["C0" if row.method.startswith("ours") else "C7" for row in shown]
        bars = axis.barh([row.method for row in shown], seconds, color=colors)
        axis.bar_label(bars, fmt="%.0f", padding=2)
        axis.set(title=rate or "loopback", xlabel="seconds to DDP's loss")
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(args.picture, dpi=100)


def main() -> None:
    args = parse_arguments()
    os.environ.setdefault("LOGURU_LEVEL", "ERROR")
    results = Results(args.output)
    measure_seconds(args, results)
    measure_losses(args, results)
    rows = rows_of(args, results)
    print_table(args, results, rows)
    if args.picture:
        draw(args, results, rows)


if __name__ == "__main__":
    main()
