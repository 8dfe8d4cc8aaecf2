"""Accuracy and bytes of gradient tracking and of few bits, on shards by digit.

    python examples/benchmark/tracking.py

Trains the digits with a learning rate that falls linearly to 0. Each row is the final test accuracy
of the averaged model (mean and range over the seeds), at that of four learning rates which is best
for the first seed, and the MiB that a rank has sent. The ranks are threads of one process. The
defaults are 420 runs; one with 8 ranks takes about 20 s of CPU time.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import NamedTuple

import progress
import torch
from digits import Epoch, Row, train_on_threads
from schedulefree import SGDScheduleFree
from torch.optim import AdamW

from decent_optim_wrapper import Extension, GradientTracking, StateGossip
from decent_optim_wrapper.optim import QGSGD

MIB = 1 << 20
ITERATE = StateGossip("z")


class Base(NamedTuple):
    """A base optimizer, and what is measured with it.

    Args:
        optimizer: makes it.
        lrs: the learning rates to try.
        decay: lower the learning rate linearly to 0.
        extensions: of the rows with tracking, in addition.
        others: further rows.
    """

    optimizer: Callable[..., torch.optim.Optimizer]
    lrs: tuple[float, ...]
    decay: bool = True
    extensions: tuple[Extension, ...] = ()
    others: tuple[tuple[str, Row], ...] = ()

    def rows(self) -> dict[str, Row]:
        plain = Row(optimizer=self.optimizer, decay=self.decay, every_epoch=False)
        extensions = [GradientTracking(), *self.extensions]
        tracking = plain._replace(options={"extensions": extensions})
        return {
            "DDP": plain._replace(topology=None),
            "plain gossip": plain,
            **{
                name: row._replace(decay=self.decay, every_epoch=False) for name, row in self.others
            },
            "tracking": tracking,
            "tracking, int8": _with_dtype(tracking, torch.int8),
            "tracking, int4": _with_dtype(tracking, torch.int4),
        }


def _with_dtype(row: Row, dtype: torch.dtype) -> Row:
    return row._replace(options={**(row.options or {}), "comm_dtype": dtype})


BASES = {
    "SGD": Base(
        optimizer=partial(torch.optim.SGD, momentum=0.9),
        lrs=(0.02, 0.05, 0.1, 0.2),
        others=(
            ("QGSGD", Row(optimizer=QGSGD)),
            ("QGSGD, int8", _with_dtype(Row(optimizer=QGSGD), torch.int8)),
        ),
    ),
    "AdamW": Base(
        optimizer=AdamW,
        lrs=(0.002, 0.005, 0.01, 0.02),
        others=(
            (
                "StateGossip('exp_avg_sq')",
                Row(optimizer=AdamW, options={"extensions": [StateGossip("exp_avg_sq")]}),
            ),
        ),
    ),
    "Schedule-Free": Base(
        optimizer=SGDScheduleFree,
        lrs=(0.2, 0.5, 1.0, 2.0),
        decay=False,
        extensions=(ITERATE,),
        others=(
            (
                "StateGossip('z')",
                Row(optimizer=SGDScheduleFree, options={"extensions": [ITERATE]}),
            ),
        ),
    ),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--topologies", nargs="+", default=["ring", "one-peer-exp"])
    parser.add_argument("--bases", nargs="+", choices=list(BASES), default=list(BASES))
    rows = sorted({name for base in BASES.values() for name in base.rows()})
    text = f"all by default, of: {'; '.join(rows)}"
    parser.add_argument("--methods", nargs="+", choices=rows, metavar="ROW", help=text)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lrs", type=float, nargs="+", help="in place of four for each base")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=128, help="images of all ranks in a step")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    return parser.parse_args()


class Cell(NamedTuple):
    """A row of the table.

    Args:
        label: its first columns.
        row: what to train with.
        lrs: the learning rates to try with the first seed.
        world_size: number of ranks.
    """

    label: str
    row: Row
    lrs: Sequence[float]
    world_size: int


def main() -> None:
    args = parse_arguments()
    warnings.simplefilter("ignore")
    print("| base | ranks | topology | method | lr | accuracy of the averaged model | MiB sent |")
    print("|---|---|---|---|---|---|---|")
    cells = list(_cells(args))
    first, *others = args.seeds
    count = sum(len(cell.lrs) + len(others) for cell in cells)
    # Forked before any thread runs: importing torch takes longer than a run.
    with (
        ProcessPoolExecutor(args.jobs, get_context("fork")) as pool,
        progress.bar(count, "run") as bar,
    ):

        def run(cell: Cell, lr: float, seed: int) -> Future[list[Epoch]]:
            row = cell.row._replace(lr=lr)
            future = pool.submit(train_on_threads, row, cell.world_size, args.epochs, seed)
            future.add_done_callback(lambda _: bar.update())
            return future

        tried = [{lr: run(cell, lr, first) for lr in cell.lrs} for cell in cells]
        best = [max(runs, key=lambda lr: _accuracy(runs[lr])) for runs in map(_ended, tried)]
        rest = [
            [run(cell, lr, seed) for seed in others] for cell, lr in zip(cells, best, strict=True)
        ]
        for cell, lr, runs, more in zip(cells, best, tried, rest, strict=True):
            progress.show(_line(cell, lr, [run.result()[-1] for run in (runs[lr], *more)]))


def _ended(runs: dict[float, Future[list[Epoch]]]) -> dict[float, list[Epoch]]:
    return {lr: run.result() for lr, run in runs.items()}


def _accuracy(epochs: list[Epoch]) -> float:
    return epochs[-1].averaged_accuracy


def _cells(args: argparse.Namespace) -> Iterator[Cell]:
    for name, size in product(args.bases, args.world_sizes):
        base = BASES[name]
        for method, row in base.rows().items():
            if args.methods and method not in args.methods:
                continue
            for topology in args.topologies if row.topology else [None]:
                yield Cell(
                    label=f"| {name} | {size} | {topology or 'all'} | {method} |",
                    row=row._replace(topology=topology, batch=max(1, args.batch // size)),
                    lrs=args.lrs or base.lrs,
                    world_size=size,
                )


def _line(cell: Cell, lr: float, ends: list[Epoch]) -> str:
    hits = [end.averaged_accuracy for end in ends]
    sent = statistics.mean(end.sent_bytes for end in ends) / MIB
    span = f"{min(hits):.1%} to {max(hits):.1%}"
    return f"{cell.label} {lr:g} | {statistics.mean(hits):.1%} ({span}) | {sent:.2f} |"


if __name__ == "__main__":
    main()
