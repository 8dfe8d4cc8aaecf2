"""What it costs that rounds are mixed several steps after their launch.

    python examples/benchmark/staleness.py

Trains the digits on shuffled shards and on shards by digit, with SGD with momentum and with Adam,
with a learning rate that falls linearly to 0. Each cell is the final test accuracy of the
averaged model (mean and range over the seeds), with the learning rate that is best for the first
seed. The rows "auto" depend on how busy the machine is. Where the ranks do not meet, they may be at
different steps, and those that have made theirs wait for the others. The defaults are 132 runs,
each of which takes about 25 s of CPU time, of all ranks together.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import netlab
import progress
import torch
from digits import Epoch, Row, train

from decent_optim_wrapper import AsItArrives, Late, Schedule

AUTO = {"overlap": AsItArrives()}
ONCE = Row(every_epoch=False)
ROWS = {
    "DDP": ONCE._replace(topology=None),
    "every step": ONCE,
    "every 3 steps, 3 late": ONCE._replace(
        schedule=Schedule(gossip_every=3), options={"overlap": Late(3)}
    ),
    "every 8 steps, 8 late": ONCE._replace(
        schedule=Schedule(gossip_every=8), options={"overlap": Late(8)}
    ),
    "auto": ONCE._replace(options=AUTO),
    "auto, meeting every epoch": Row(options=AUTO),
}
SHARDS = {"shuffled": False, "by digit": True}


class Base(NamedTuple):
    """A base optimizer, and the learning rates to try."""

    optimizer: Callable[..., torch.optim.Optimizer]
    lrs: tuple[float, ...]


BASES = {
    "SGD": Base(partial(torch.optim.SGD, momentum=0.9), (0.02, 0.05, 0.1, 0.2)),
    "Adam": Base(torch.optim.Adam, (0.005, 0.01, 0.02)),
}


class Cell(NamedTuple):
    """The ends of the runs that differ only in their seeds."""

    lr: float
    ends: list[Epoch]

    def __str__(self) -> str:
        hits = [100 * end.averaged_accuracy for end in self.ends]
        return f"{statistics.mean(hits):.1f} % ({min(hits):.1f} to {max(hits):.1f}), lr {self.lr:g}"


def run_once(
    where: netlab.Lab,
    args: argparse.Namespace,
    row: str,
    shards: str,
    base: str,
    lr: float,
    seed: int,
) -> Epoch:
    setting = ROWS[row]._replace(
        optimizer=BASES[base].optimizer, lr=lr, decay=True, by_digit=SHARDS[shards]
    )
    ranks = netlab.run(where, args.world_size, train, setting, args.epochs, seed, timeout=300)
    return ranks[0][-1]


def run_cell(
    run: Callable[[float, int], Epoch], lrs: Sequence[float], seeds: Sequence[int]
) -> Cell:
    """Choose the learning rate with the first seed, and train with it and the other seeds."""
    first, *others = seeds
    tried = {lr: run(lr, first) for lr in lrs}
    best = max(tried, key=lambda lr: tried[lr].averaged_accuracy)
    return Cell(best, [tried[best], *(run(best, seed) for seed in others)])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--shards", nargs="+", choices=SHARDS, default=list(SHARDS))
    parser.add_argument("--bases", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument("--lrs", type=float, nargs="+", help="instead of those of each base")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=20)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    columns = list(product(args.shards, args.bases))
    head = " | ".join(f"{shards}, {base}" for shards, base in columns)
    print(f"| a round | mean staleness | {head} |")
    print("|---" * (len(columns) + 2) + "|")
    count = len(args.rows) * len(columns)
    with netlab.lab(1, rate="") as where, progress.bar(count, "cell") as bar:
        for row in args.rows:
            cells = []
            for shards, base in columns:
                run = partial(run_once, where, args, row, shards, base)
                cells.append(run_cell(run, args.lrs or BASES[base].lrs, args.seeds))
                bar.update()
            late = statistics.mean(end.staleness for cell in cells for end in cell.ends)
            progress.show(f"| {row} | {late:.1f} | {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
