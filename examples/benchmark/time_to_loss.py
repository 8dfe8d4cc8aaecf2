"""The loss of a small GPT after equally many steps, and the time until it has DDP's loss.

    python examples/benchmark/time_to_loss.py --table

A GPT of 98,304 parameters sees 20 tokens per parameter of Python's own sources, and larger ones of
torch's. The ranks are simulated in one process (`simulated_ranks.py`), for all seeds at once. For
each row, learning rates that are a factor of 1.5 apart are tried until the best one is at no end.
With its best rate a method of the small model then trains longer, until it has DDP's loss:
`regret.py` multiplies these steps by the seconds of a step that `step_time.py` measured. What is in
the file of results is not measured again, so the script can be stopped at any time. A training of
the small model takes half a minute on one core, all of them hours; with --device cuda --jobs 14
they take minutes.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from simulated_ranks import OPTIMIZERS, Method, train
from stacked_gpt import SIZES, SMALL, StackedGPT
from stacked_hooks import PowerSGD, bfloat16, eight_bits, eight_bits_of_channels
from torch.optim import SGD

from decent_optim_wrapper.codecs import Codec, Int2Codec, Int3Codec, Int4Codec, Int8Codec, TopKCodec
from decent_optim_wrapper.topo import Hierarchical

RESULTS = Path(__file__).with_suffix(".csv")
INT8, INT4, INT3, INT2 = Int8Codec(), Int4Codec(), Int3Codec(), Int2Codec()
TOP_K, TOP_K_4 = TopKCodec(), TopKCodec(4)


def fours(ranks: int) -> Hierarchical:
    """Groups of four, in which 16 ranks average exactly after two rounds, and 64 after three."""
    is_nested = ranks > 16 and Hierarchical.fits(ranks // 4, 4)
    return Hierarchical(ranks, 4, inner=fours(ranks // 4) if is_nested else "complete")


class MeansInInt3(Int2Codec):
    """Codes the values of ranks in int2 and the means of larger groups in int3, in equal blocks."""

    block = 360

    def of_means(self, size: int) -> Codec:
        """An int3 codec with these blocks."""
        means = Int3Codec().of_means(size)
        means.block = self.block
        return means


def diloco(every: int, lr: float, momentum: float, **options: Any) -> Method:
    outer = partial(SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)
    return Method("complete", every=every, outer=outer, **options)


def slow_momentum(lr: float, momentum: float) -> Method:
    return Method(outer=partial(SGD, lr=lr, momentum=momentum, nesterov=True))


OUTER = ((0.7, 0.5), (0.7, 0.9), (1.0, 0.2), (1.0, 0.5), (1.0, 0.8))
# The methods of each row; of several, those with the best loss at the first learning rate.
METHODS: dict[str, dict[str, Method]] = {
    name: {name: method}
    for name, method in {
        "DDP": Method(topology=None),
        "DDP, bf16 hook": Method(topology=None, hook=lambda gpt: bfloat16),
        "DDP, 8 bits": Method(topology=None, hook=lambda gpt: eight_bits),
        "DDP, 8 bits a channel": Method(topology=None, hook=lambda gpt: eight_bits_of_channels),
        **{
            f"DDP, PowerSGD {rank}": Method(topology=None, hook=partial(PowerSGD, rank))
            for rank in (1, 4)
        },
        "PostLocalSGD 8": Method(topology="complete", every=8),
        "decent-dp": Method(topology="complete", late=1),
        "ours": Method(),
        "ours, complete": Method(topology="complete"),
        "ours, int8": Method(codec=INT8),
        "ours, int4": Method(codec=INT4),
        "ours, int3": Method(codec=INT3),
        "ours, int2": Method(codec=INT2),
        "ours, top-k": Method(codec=TOP_K),
        "ours, top-k 4": Method(codec=TOP_K_4),
        "ours, delayed, top-k": Method(late=1, codec=TOP_K),
        "ours, complete, int8": Method(topology="complete", codec=INT8),
        "ours, complete, int4": Method(topology="complete", codec=INT4),
        "ours, complete, int3": Method(topology="complete", codec=INT3),
        "ours, complete, int2": Method(topology="complete", codec=INT2),
        "ours, complete, int2, means in int3": Method(topology="complete", codec=MeansInInt3()),
        "ours, complete, top-k": Method(topology="complete", codec=TOP_K),
        "ours, complete, delayed, int4": Method(topology="complete", late=1, codec=INT4),
        "ours, groups of 4, int8": Method(topology=fours, codec=INT8),
        "ours, groups of 4, int4": Method(topology=fours, codec=INT4),
        "ours, groups of 4, int3": Method(topology=fours, codec=INT3),
        "ours, delayed": Method(late=1),
        "ours, delayed, int8": Method(late=1, codec=INT8),
        "ours, delayed, int4": Method(late=1, codec=INT4),
        "ours, 2 steps late, int8": Method(every=2, late=2, codec=INT8),
        "ours, 4 steps late, int8": Method(every=4, late=4, codec=INT8),
        "ours, moments": Method(moments=(("exp_avg", 3), ("exp_avg_sq", 6))),
        "DES-LOC 8": Method("complete", every=8, moments=(("exp_avg", 24), ("exp_avg_sq", 48))),
    }.items()
}
METHODS |= {
    f"GASLoC {every}": {
        f"GASLoC {every}, momentum {momentum}": Method(every=every, momentum=momentum)
        for momentum in (0.2, 0.5, 0.8)
    }
    for every in (1, 8)
}
METHODS |= {
    f"DiLoCo {every}": {
        f"DiLoCo {every}, outer {lr}, {momentum}": diloco(every, lr, momentum)
        for lr, momentum in OUTER
    }
    for every in (8, 30, 100)
}
METHODS |= {
    f"{name}, {label}": {
        f"{name}, {label}, outer {lr}, {momentum}": diloco(
            30, lr, momentum, codec=codec, streams=streams
        )
        for lr, momentum in OUTER
    }
    for name, streams in (("DiLoCo 30", None), ("Streaming DiLoCo 30", 5))
    for label, codec in (("int8", INT8), ("int4", INT4))
}
# For links that are slower: rounds every k steps, mixed k steps later or before the next pass.
METHODS |= {
    (name := f"ours, {where}{when}, {label}"): {name: Method(topology, every, late, codec)}
    for where, topology in (("", "one-peer-exp"), ("complete, ", "complete"))
    for label, codec in (("int4", INT4), ("top-k", TOP_K), ("top-k 4", TOP_K_4))
    for when, every, late in (
        *((f"{k} steps late", k, k) for k in (2, 4, 8, 16)),
        *((f"every {k} steps", k, 0) for k in (2, 4, 8, 16)),
    )
}
METHODS |= {
    f"DiLoCo {every}, {label}": {
        f"DiLoCo {every}, {label}, outer {lr}, {momentum}": diloco(every, lr, momentum, codec=codec)
        for lr, momentum in OUTER
    }
    for every, label, codec in ((8, "int4", INT4), (100, "int8", INT8))
}
# Bytes and settings of Sarfi et al. (2025): 1 of 64 values in two bits, and no momentum.
METHODS |= {
    f"SparseLoCo {every}": {
        f"SparseLoCo {every}, outer {lr}": diloco(every, lr, 0.0, codec=TOP_K_4, feedback=0.95)
        for lr in (1.0, 0.7)
    }
    for every in (8, 30, 100)
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
        size: a key of SIZES.
    """

    name: str
    ranks: int = 4
    optimizer: str = "AdamW"
    start: int = 1
    size: str = "0.1M"

    @property
    def gpt(self) -> StackedGPT:
        """The model."""
        return SIZES[self.size]


LATE = "ours, 2 steps late, int8", "ours, 4 steps late, int8"
COMPLETE = "ours, complete", "ours, complete, int8", "ours, complete, int4"
TRIED = "ours, outer", "ours, moments", "GASLoC 1", "DES-LOC 8", "GASLoC 8"
PAIRS = "ours", "ours, int8", "ours, delayed"
CODED_PAIRS = "ours, int8", "ours, int4"
CODED_COMPLETE = "ours, complete, int8", "ours, complete, int4"
COARSE_COMPLETE = "ours, complete, int4", "ours, complete, int3", "ours, complete, int2"
CODED_FOURS = "ours, groups of 4, int8", "ours, groups of 4, int4"
HOOKS = "DDP, 8 bits", "DDP, 8 bits a channel", "DDP, PowerSGD 1", "DDP, PowerSGD 4"
CODED_DILOCO = (
    *("DiLoCo 30, int8", "DiLoCo 30, int4"),
    *("Streaming DiLoCo 30, int8", "Streaming DiLoCo 30, int4"),
)
FAR = (
    *("ours, complete, 2 steps late, int4", "ours, complete, 4 steps late, int4"),
    *("ours, delayed, top-k", "ours, 2 steps late, top-k", "ours, every 2 steps, top-k"),
    "ours, top-k 4",
)
FAR_PEERS = "DiLoCo 100", "SparseLoCo 8", "SparseLoCo 30"
# Optimizer, ranks, the exponent of the first learning rate, and names of METHODS.
ROWS = [
    Row(name, ranks, optimizer, start)
    for optimizer, ranks, start, names in (
        ("AdamW", 4, 0, ("DDP", "DDP, bf16 hook")),
        ("AdamW", 4, 1, ("PostLocalSGD 8", "DiLoCo 8", "DiLoCo 30", "decent-dp")),
        ("AdamW", 4, 2, (*PAIRS, "ours, int4", "ours, delayed, int8", *LATE, *COMPLETE)),
        ("AdamW", 4, 1, HOOKS),
        ("AdamW", 4, 1, CODED_DILOCO),
        ("AdamW", 4, 2, ("ours, complete, delayed, int4", "ours, top-k", "ours, complete, top-k")),
        ("AdamW", 4, 2, ("ours, delayed, int4",)),
        ("AdamW", 4, 1, TRIED),
        ("AdamW", 4, 2, FAR),
        ("AdamW", 4, 1, FAR_PEERS),
        ("AdamW", 8, 3, (*PAIRS, "ours, int4")),
        ("AdamW", 8, 3, (*CODED_COMPLETE, *CODED_FOURS)),
        ("AdamW", 16, 3, (*PAIRS, "ours, int4", "ours, complete")),
        ("AdamW", 16, 4, (*CODED_COMPLETE, *CODED_FOURS)),
        ("AdamW", 16, 1, ("DDP, PowerSGD 1", "DDP, PowerSGD 4", "DDP, 8 bits a channel")),
        ("AdamW", 16, 1, ("DiLoCo 30", "Streaming DiLoCo 30, int4")),
        *(("AdamW", ranks, 0, ("DDP, bf16 hook",)) for ranks in (8, 16)),
        ("AdamW", 8, 1, ("PostLocalSGD 8", "DDP, PowerSGD 4", "DiLoCo 30")),
        ("AccumAdamW", 4, 1, ("DDP", "decent-dp", *PAIRS)),
        ("AccumAdamW", 16, 2, ("ours",)),
        ("SGD", 4, 9, ("DDP",)),
        *(("SGD", ranks, 8, ("ours",)) for ranks in (4, 8, 16)),
        *(("SGD", ranks, 9, ("ours, complete, int4",)) for ranks in (4, 8, 16)),
        ("Muon", 4, 2, ("DDP", "DiLoCo 8", "DiLoCo 30")),
        ("Muon", 4, 3, ("PostLocalSGD 8", *PAIRS, "ours, int4")),
        ("Muon", 4, 2, ("DiLoCo 30, int8",)),
        ("Muon, noise of 4", 4, 3, ("ours, top-k",)),
        ("Muon, noise of 4", 4, 2, ("ours, 2 steps late, top-k",)),
        ("Muon", 8, 4, ("ours",)),
        ("Muon", 16, 4, ("ours", "ours, int8", "ours, groups of 4, int8")),
        *(
            ("Muon", ranks, exponent, ("ours, complete, int4",))
            for ranks, exponent in ((4, 3), (8, 4), (16, 4))
        ),
        *(
            (f"Muon, noise of {ranks}", ranks, 3, ("ours, int4", "ours, complete, int4"))
            for ranks in (4, 8, 16)
        ),
        ("AdamW, noise of 4", 4, 1, (*PAIRS, "ours, int4", *CODED_COMPLETE)),
        ("AdamW, noise of 4", 4, 1, ("ours, complete, delayed, int4", "ours, complete, top-k")),
        ("AdamW, noise of 4", 4, 0, ("ours, delayed, int4", "ours, top-k")),
        ("AdamW, noise of 4", 4, 1, ("ours, int3", "ours, int2", *COARSE_COMPLETE[1:])),
        *(
            (f"Muon, noise of {ranks}", ranks, exponent, ("ours, complete, int3",))
            for ranks, exponent in ((4, 3), (8, 4), (16, 5))
        ),
        ("Muon, noise of 4", 4, 4, ("ours, complete, int2",)),
        *(("SGD", ranks, 11, ("ours, complete, int3",)) for ranks in (4, 8, 16)),
        ("SGD", 4, 9, ("ours, complete, int2",)),
        *((f"AdamW, noise of {ranks}", ranks, 1, COARSE_COMPLETE[1:]) for ranks in (8, 16)),
        ("AdamW, noise of 4", 4, 1, ("ours, complete, int2, means in int3",)),
        ("AdamW, noise of 8", 8, 0, ("ours", *CODED_PAIRS)),
        *((f"AdamW, noise of {ranks}", ranks, 0, ("ours, int3",)) for ranks in (8, 16)),
        *(
            (f"AdamW, noise of {ranks}", ranks, 1, ("ours, groups of 4, int3",))
            for ranks in (8, 16)
        ),
        ("AdamW, noise of 8", 8, 1, (*CODED_FOURS, *CODED_COMPLETE)),
        ("AdamW, noise of 16", 16, 0, ("ours", *CODED_PAIRS)),
        ("AdamW, noise of 16", 16, -1, ("ours, top-k",)),
        ("AdamW, noise of 16", 16, 1, (*CODED_FOURS, "ours, complete", *CODED_COMPLETE)),
        *(
            ("AdamW, noise by the first moment", ranks, 1, ("ours, complete, int4",))
            for ranks in (8, 16)
        ),
        ("AdamW .999", 4, 0, ("DDP",)),
        *((f"AdamW .999, noise of {ranks}", ranks, 0, COARSE_COMPLETE) for ranks in (4, 8, 16)),
    )
    for name in names
]
# The models that are larger, with the exponent of the first rate of DDP.
ROWS += [
    Row(name, optimizer=optimizer, start=start + more, size=size)
    for size, start in (("0.4M", 0), ("1.5M", -1))
    for name, optimizer, more in (
        ("DDP", "AdamW", 0),
        ("ours, int8", "AdamW", 1),
        ("ours, complete, int4", "AdamW", 1),
        ("ours, complete, int4", "AdamW, noise of 4", 0),
        ("ours, complete, int3", "AdamW, noise of 4", 0),
        ("ours, complete, int2", "AdamW, noise of 4", 0),
        ("DiLoCo 30", "AdamW", 0),
        ("DDP", "AdamW .999", 0),
        ("ours, complete, int4", "AdamW .999, noise of 4", 0),
        ("ours, complete, int3", "AdamW .999, noise of 4", 0),
    )
]
SEEDS = (0, 1, 2)
# In steps of the schedule that all rows share.
LENGTHS = (0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.6, 2.0, 2.5, 3.2)
EXPONENTS = range(-12, 24)


def rate(exponent: int) -> float:
    return 0.01 * 1.5**exponent


class Results:
    """The losses that were measured, in a file to which several processes may append.

    Args:
        path: the file; created by the first loss.
        steps: most steps of the schedule; None for the model's own number.
    """

    def __init__(self, path: Path, steps: int | None = None) -> None:
        self._path, self._steps = path, steps
        self._losses: dict[str, float] = {}
        if path.exists():
            with path.open(newline="") as file:
                self._losses = {key: float(loss) for key, loss in csv.reader(file)}

    def key(self, row: Row, variant: str, exponent: int, seed: int, length: float = 1.0) -> str:
        """The name of a training in the file; `length` as in LENGTHS."""
        replicas = METHODS[row.name][variant].replicas(row.ranks)
        steps = f"{self.steps_of(row, length)} steps"
        settings = f"{replicas} replicas | {steps} | lr {rate(exponent):.3g} | seed {seed}"
        size = "" if row.gpt == SMALL else f"{row.size} | "
        return f"{size}{variant} | {row.optimizer} | {settings}"

    def steps_of(self, row: Row, length: float = 1.0) -> int:
        """The steps of a training; `length` as in LENGTHS."""
        return int(length * min(self._steps or row.gpt.steps, row.gpt.steps))

    def known(
        self, row: Row, variant: str, exponent: int, seeds: Sequence[int], length: float = 1.0
    ) -> list[float] | None:
        """The loss of each seed, if all were measured."""
        keys = [self.key(row, variant, exponent, seed, length) for seed in seeds]
        found = [self._losses.get(key) for key in keys]
        return None if None in found else [loss for loss in found if loss is not None]

    def means(
        self,
        row: Row,
        variant: str,
        exponents: Sequence[int],
        seeds: Sequence[int],
        length: float = 1.0,
    ) -> dict[int, float]:
        """The mean loss of several seeds by exponent, which are trained if they were not before."""
        new = [k for k in exponents if self.known(row, variant, k, seeds, length) is None]
        if new:
            method, lrs = METHODS[row.name][variant], [rate(k) for k in new]
            steps = self.steps_of(row, length)
            stacked = train(method, row.optimizer, row.ranks, lrs, seeds, steps, row.gpt)
            for (k, seed), x in zip(product(new, seeds), stacked.flatten(0, 1), strict=True):
                key = self.key(row, variant, k, seed, length)
                self.add(key, round(row.gpt.validation_loss(x.mean(0)), 5))
        known = {k: self.known(row, variant, k, seeds, length) for k in exponents}
        return {k: statistics.mean(losses) for k, losses in known.items() if losses}

    def add(self, key: str, loss: float) -> None:
        """Append the loss of a training to the file."""
        # A training that diverged is worse than any other.
        self._losses[key] = loss if math.isfinite(loss) else 99.0
        with self._path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow((key, self._losses[key]))
        print(f"{key}: {self._losses[key]:.4f}", flush=True)


def measure(path: Path, steps: int | None, seeds: Sequence[int], device: str, row: Row) -> None:
    """Search the best learning rate of a row, both of whose neighbours are worse."""
    torch.set_num_threads(1)
    torch.set_default_device(device)
    results, variants = Results(path, steps), METHODS[row.name]
    best = row.start
    variant = min(variants, key=lambda v: results.means(row, v, [best], seeds)[best])
    while True:
        near = results.means(row, variant, [best - 1, best, best + 1], seeds)
        better = min(near, key=near.__getitem__)
        if better == best:
            return
        best = better


class Best(NamedTuple):
    """The best learning rate of a row.

    Args:
        variant: the method of the row.
        exponent: of `rate`.
        losses: the loss of each seed.
    """

    variant: str
    exponent: int
    losses: list[float]


def best(results: Results, row: Row, seeds: Sequence[int]) -> Best | None:
    """The best learning rate that was measured with all seeds; None if it may be another one.

    Of its neighbours the first seed is enough, if they are worse with it.
    """
    found = {
        (variant, exponent): losses
        for variant, exponent in product(METHODS[row.name], EXPONENTS)
        if (losses := results.known(row, variant, exponent, seeds))
    }
    if not found:
        return None
    variant, exponent = min(found, key=lambda key: statistics.mean(found[key]))
    losses = found[variant, exponent]
    for near in (exponent - 1, exponent + 1):
        first = results.known(row, variant, near, seeds[:1])
        if (variant, near) not in found and (first is None or first[0] < losses[0]):
            return None
    return Best(variant, exponent, losses)


def goal(results: Results, row: Row, seeds: Sequence[int]) -> Best | None:
    """DDP's best with the optimizer of a row, or with AdamW."""
    ddp = [each for each in ROWS if each.name == "DDP" and each.size == row.size]
    found = {each.optimizer: best(results, each, seeds) for each in ddp}
    optimizer = row.optimizer.split(",")[0]  # without "noise of n"
    return found.get(optimizer) or found["AdamW"]


def lengthen(path: Path, steps: int | None, seeds: Sequence[int], device: str, row: Row) -> None:
    """Train longer or shorter with the best learning rate of a row, until the loss is DDP's."""
    torch.set_num_threads(1)
    torch.set_default_device(device)
    results = Results(path, steps)
    found, wanted = best(results, row, seeds), goal(results, row, seeds)
    if found is None or wanted is None:
        return
    is_better = statistics.mean(found.losses) < statistics.mean(wanted.losses)
    lengths = [each for each in LENGTHS if (each < 1) == is_better]
    for length in reversed(lengths) if is_better else lengths:
        if steps_needed(results, row, seeds) is not None:
            return
        results.means(row, found.variant, [found.exponent], seeds, length)


def steps_needed(results: Results, row: Row, seeds: Sequence[int]) -> float | None:
    """The steps until a method has DDP's loss, in DDP's steps; None if they were not measured."""
    ddp, found = goal(results, row, seeds), best(results, row, seeds)
    if ddp is None or found is None:
        return None
    wanted, points = statistics.mean(ddp.losses), []
    for length in LENGTHS:
        losses = results.known(row, found.variant, found.exponent, seeds, length)
        points += [(length, statistics.mean(losses))] if losses else []
    for (start, above), (end, below) in pairwise(points):
        if above == wanted:
            return start
        if below <= wanted < above:
            return start + (end - start) * (above - wanted) / (above - below)
    return None


def table(results: Results, seeds: Sequence[int]) -> str:
    """The rows that were measured with all seeds, each with its best learning rate."""
    head = ["method", "ranks", "optimizer", "lr", "loss", "above DDP", "steps to DDP's loss"]
    lines = []
    for row in ROWS:
        found, ddp = best(results, row, seeds), goal(results, row, seeds)
        if found is None or ddp is None:
            continue
        above = [100 * (a / b - 1) for a, b in zip(found.losses, ddp.losses, strict=True)]
        ranks = "any" if row.name == "DDP" else str(row.ranks)
        cells = [spread(found.losses, 3), "-" if row.name == "DDP" else f"{spread(above, 1)} %"]
        needed = steps_needed(results, row, seeds)
        cells.append("-" if needed is None else f"{needed:.2f}")
        name = row.name if row.gpt == SMALL else f"{row.name}, {row.size}"
        lines.append([name, ranks, row.optimizer, f"{rate(found.exponent):.3g}", *cells])
    return page(head, lines)


def above_ddp(results: Results, row: Row) -> float | None:
    """How far a row ends above DDP, in percent; None if it was not measured.

    Each counts with the best of the rates that were tried with all seeds, or with the first one.
    """
    ddp = row._replace(name="DDP", optimizer=row.optimizer.split(",")[0])
    for seeds in (SEEDS, SEEDS[:1]):
        lowest = []
        for each in (row, ddp):
            tried = product(METHODS[each.name], EXPONENTS)
            known = [found for place in tried if (found := results.known(each, *place, seeds))]
            lowest += [min(known, key=statistics.mean)] if known else []
        if len(lowest) == 2:
            return statistics.mean(
                100 * (own / other - 1) for own, other in zip(*lowest, strict=True)
            )
    return None


OF_SIZES = (
    ("ours, int8", "AdamW"),
    ("ours, complete, int4", "AdamW"),
    ("ours, complete, int4", "AdamW, noise of 4"),
    ("ours, complete, int3", "AdamW, noise of 4"),
    ("ours, complete, int2", "AdamW, noise of 4"),
    ("ours, complete, int4", "AdamW .999, noise of 4"),
    ("ours, complete, int3", "AdamW .999, noise of 4"),
    ("DiLoCo 30", "AdamW"),
)


def by_size(results: Results) -> dict[tuple[str, str], list[float | None]]:
    """How far rows end above DDP, in percent, by the size of the model, on 4 ranks."""
    return {
        row: [above_ddp(results, Row(row[0], 4, row[1], size=size)) for size in SIZES]
        for row in OF_SIZES
    }


def size_table(results: Results) -> str:
    """The same as a table."""
    rows = [
        [*row, *("-" if above is None else f"{above:.1f} %" for above in found)]
        for row, found in by_size(results).items()
    ]
    return page(["above DDP", "optimizer", *SIZES], rows)


def draw_sizes(results: Results, path: Path) -> None:
    """The same as a picture, of rows with more than one size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    places = [gpt.parameters for gpt in SIZES.values()]
    for (name, optimizer), found in by_size(results).items():
        if len(found) - found.count(None) > 1:
            # No line leads over a size that was not measured.
            points = [math.nan if above is None else above for above in found]
            axis.plot(places, points, marker="o", markersize=4, label=f"{name}; {optimizer}")
    axis.axhline(0, color="0.6", linewidth=1)
    axis.set_xscale("log")
    axis.set_xticks(places, [*SIZES])
    axis.minorticks_off()
    axis.set_yscale("symlog", linthresh=2)
    axis.set_yticks([-1, 0, 1, 2, 4, 8], ["-1", "0", "1", "2", "4", "8"])
    axis.set(xlabel="parameters", ylabel="% above DDP at equal steps")
    axis.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def page(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of a page."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS])
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--steps", type=int, help="at most so many of the schedule")
    parser.add_argument("--results", type=Path, default=RESULTS, help="read, and written")
    parser.add_argument("--table", action="store_true", help="print what is there, and stop")
    parser.add_argument("--picture", type=Path, help="file for the gap over the size")
    parser.add_argument("--device", default="cpu", help="of the trainings")
    parser.add_argument("--jobs", type=int, default=1, help="rows that are measured at a time")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    named = [row for row in ROWS if row.name in args.methods and row.size in args.sizes]
    chosen = [row for row in named if row.ranks in args.ranks]
    rows = [row for row in chosen if row.optimizer in args.optimizers and not args.table]
    common = args.results, args.steps, args.seeds, args.device
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        each = pool.map if args.jobs > 1 else map
        list(each(partial(measure, *common), rows))
        timed = [row for row in rows if row.gpt == SMALL and args.steps is None]
        list(each(partial(lengthen, *common), timed))
    results = Results(args.results, args.steps)
    print(table(results, args.seeds), size_table(results), sep="\n\n")
    if args.picture:
        draw_sizes(results, args.picture)


if __name__ == "__main__":
    main()
