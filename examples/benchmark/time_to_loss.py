"""The loss of a small GPT after equally many steps, by method and number of ranks.

    python examples/benchmark/time_to_loss.py --table

A GPT of 98,304 parameters sees 20 tokens per parameter of Python's own sources. The ranks are
simulated in one process (`simulated_ranks.py`). For each row, learning rates that are a factor of
1.5 apart are tried until the best one is at no end: first with one seed, then with three. What is
in the file of results is not measured again, so the script can be stopped at any time. A training
takes half a minute on one core, all of them hours.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from simulated_ranks import OPTIMIZERS, Method, train
from stacked_gpt import STEPS, validation_loss
from torch.optim import SGD

from decent_optim_wrapper.codecs import Int8Codec

RESULTS = Path(__file__).with_suffix(".json")
INT8 = Int8Codec()


def diloco(every: int, lr: float, momentum: float) -> Method:
    outer = partial(SGD, lr=lr, momentum=momentum, nesterov=True)
    return Method(topology="complete", every=every, outer=outer)


def slow_momentum(lr: float, momentum: float) -> Method:
    return Method(outer=partial(SGD, lr=lr, momentum=momentum, nesterov=True))


OUTER = ((0.7, 0.5), (0.7, 0.9), (1.0, 0.2), (1.0, 0.5), (1.0, 0.8))
# The methods of each row; of several, those with the best loss at the first learning rate.
METHODS: dict[str, dict[str, Method]] = {
    name: {name: method}
    for name, method in {
        "DDP": Method(topology=None, reduce_dtype=torch.float32),
        "DDP, bf16 hook": Method(topology=None, reduce_dtype=torch.bfloat16),
        "PostLocalSGD 8": Method(topology="complete", every=8),
        "decent-dp": Method(topology="complete", late=1),
        "ours": Method(),
        "ours, complete": Method(topology="complete"),
        "ours, int8": Method(codec=INT8),
        "ours, delayed": Method(late=1),
        "ours, delayed, int8": Method(late=1, codec=INT8),
        "ours, 2 steps late, int8": Method(every=2, late=2, codec=INT8),
        "ours, 4 steps late, int8": Method(every=4, late=4, codec=INT8),
    }.items()
}
METHODS |= {
    f"DiLoCo {every}": {
        f"DiLoCo {every}, outer {lr}, {momentum}": diloco(every, lr, momentum)
        for lr, momentum in OUTER
    }
    for every in (8, 30)
}
METHODS["ours, outer"] = {
    f"ours, outer {lr}, {momentum}": slow_momentum(lr, momentum)
    for lr, momentum in ((1.0, 0.2), (1.0, 0.5), (0.7, 0.5))
}


class Row(NamedTuple):
    """What a row of the table compares.

    Args:
        name: a key of METHODS.
        ranks: number of ranks.
        optimizer: a key of OPTIMIZERS.
        start: the exponent of the first learning rate, of `rate`.
    """

    name: str
    ranks: int = 4
    optimizer: str = "AdamW"
    start: int = 1


# In the order in which they are measured; all rows of a line with one seed first.
ROWS = [
    [Row("DDP", start=0), Row("ours"), Row("ours, int8"), Row("ours, delayed")],
    [Row("DiLoCo 8"), Row("DiLoCo 30"), Row("decent-dp", optimizer="AccumAdamW"), Row("decent-dp")],
    [Row("ours, 2 steps late, int8"), Row("PostLocalSGD 8"), Row("ours, delayed, int8")],
    [Row("ours", ranks=16, start=3), Row("ours, int8", ranks=16, start=3)],
    [Row("DDP", optimizer="SGD", start=9), Row("ours", optimizer="SGD", start=9)],
    [Row("DDP", optimizer="Muon", start=0), Row("ours", optimizer="Muon", start=0)],
    [Row("ours, outer"), Row("DDP, bf16 hook", start=0), Row("ours, 4 steps late, int8")],
    [Row("DiLoCo 8", optimizer="Muon"), Row("DiLoCo 30", optimizer="Muon")],
    [Row(name, optimizer="AccumAdamW") for name in ("DDP", "ours", "ours, int8", "ours, delayed")],
    [Row("ours", ranks=16, optimizer="AccumAdamW", start=2)],
    [Row("ours", ranks=8, start=2), Row("ours, int8", ranks=8, start=2)],
    [Row("ours", 16, "SGD", start=9), Row("ours", 16, "Muon", start=1)],
    [Row("ours", 8, "SGD", start=9), Row("ours", 8, "Muon", start=1)],
    [Row("ours, complete"), Row("ours, complete", ranks=16, start=3)],
    [Row("ours, delayed", ranks=16, start=3), Row("ours, delayed", ranks=8, start=2)],
]
SEEDS = (0, 1, 2)
EXPONENTS = range(-12, 24)


def rate(exponent: int) -> float:
    return 0.01 * 1.5**exponent


class Results:
    """The losses that were measured, in a file.

    Args:
        path: the file; created by the first loss.
        steps: steps of the schedule.
    """

    def __init__(self, path: Path, steps: int) -> None:
        self._path, self._steps = path, steps
        self._losses: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def key(self, row: Row, variant: str, exponent: int, seed: int) -> str:
        """The name of a training in the file."""
        replicas = METHODS[row.name][variant].replicas(row.ranks)
        settings = f"{replicas} replicas | {self._steps} steps | lr {rate(exponent):.3g}"
        return f"{variant} | {row.optimizer} | {settings} | seed {seed}"

    def known(self, row: Row, variant: str, exponent: int, seed: int) -> float | None:
        """The loss of a training, if it was measured."""
        return self._losses.get(self.key(row, variant, exponent, seed))

    def loss(self, row: Row, variant: str, exponent: int, seed: int) -> float:
        """The loss of a training, which is measured if it was not before."""
        found = self.known(row, variant, exponent, seed)
        if found is None:
            method = METHODS[row.name][variant]
            x = train(method, row.optimizer, row.ranks, rate(exponent), seed, self._steps)
            found = round(validation_loss(x.mean(0)), 5)
            # Diverged; JSON knows no infinity.
            found = found if math.isfinite(found) else 99.0
            key = self.key(row, variant, exponent, seed)
            self._losses[key] = found
            self._path.write_text(json.dumps(self._losses, indent=0, sort_keys=True) + "\n")
            print(f"{key}: {found:.4f}", flush=True)
        return found

    def mean(self, row: Row, variant: str, exponent: int, seeds: Sequence[int]) -> float:
        """The mean loss of several seeds."""
        return statistics.mean(self.loss(row, variant, exponent, seed) for seed in seeds)


def settle(results: Results, row: Row, variant: str, start: int, seeds: Sequence[int]) -> int:
    """The exponent of the best learning rate, both of whose neighbours are worse."""
    best = start
    while True:
        near = {k: results.mean(row, variant, k, seeds) for k in (best, best + 1, best - 1)}
        better = min(near, key=near.__getitem__)
        if better == best:
            return best
        best = better


def measure(results: Results, rows: Sequence[Row], seeds: Sequence[int]) -> None:
    """Search with one seed in each row, and then with all."""
    found = {}
    for row in rows:
        variants = METHODS[row.name]
        variant = min(variants, key=lambda v: results.mean(row, v, row.start, seeds[:1]))
        found[row] = variant, settle(results, row, variant, row.start, seeds[:1])
    for row, (variant, best) in found.items():
        results.mean(row, variant, best, seeds)
    for row, (variant, best) in found.items():
        settle(results, row, variant, best, seeds)


def best(results: Results, row: Row, seeds: Sequence[int]) -> tuple[int, list[float]] | None:
    """The exponent of the best learning rate that was measured with all seeds, and their losses."""
    found = {}
    for variant, exponent in product(METHODS[row.name], EXPONENTS):
        losses = [results.known(row, variant, exponent, seed) for seed in seeds]
        if None not in losses:
            found[variant, exponent] = [loss for loss in losses if loss is not None]
    if not found:
        return None
    variant, exponent = min(found, key=lambda key: statistics.mean(found[key]))
    return exponent, found[variant, exponent]


def table(results: Results, seeds: Sequence[int]) -> str:
    """The rows that were measured with all seeds, each with its best learning rate."""
    head = ["method", "ranks", "optimizer", "lr", "loss", "above DDP"]
    lines = [head]
    goals = {row.optimizer: best(results, row, seeds) for row in flat_rows() if row.name == "DDP"}
    for row in flat_rows():
        found, goal = best(results, row, seeds), goals.get(row.optimizer.removeprefix("Accum"))
        if found is None or goal is None:
            continue
        above = [100 * (a / b - 1) for a, b in zip(found[1], goal[1], strict=True)]
        ranks = "any" if row.name == "DDP" else str(row.ranks)
        cells = [spread(found[1], 3), "-" if row.name == "DDP" else f"{spread(above, 1)} %"]
        lines.append([row.name, ranks, row.optimizer, f"{rate(found[0]):.3g}", *cells])
    first, *others = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([first, "|---" * len(head) + "|", *others])


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}"


def flat_rows() -> list[Row]:
    return [row for rows in ROWS for row in rows]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS])
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the schedule")
    parser.add_argument("--results", type=Path, default=RESULTS, help="read, and written")
    parser.add_argument("--table", action="store_true", help="print what is there, and stop")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    torch.set_num_threads(1)
    results = Results(args.results, args.steps)
    for rows in [] if args.table else ROWS:
        chosen = [row for row in rows if row.name in args.methods and row.ranks in args.ranks]
        measure(results, [row for row in chosen if row.optimizer in args.optimizers], args.seeds)
    print(table(results, args.seeds))


if __name__ == "__main__":
    main()
