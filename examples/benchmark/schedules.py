"""Gossip schedules on shards by digit: accuracy, bytes and consensus distance.

    python examples/benchmark/schedules.py

Trains the digits on shards by digit, with a learning rate that falls linearly to 0. For the best
learning rate of each row it prints the final test accuracy of the averaged model (mean and range
over the seeds), the MiB sent per rank and the final consensus distance. The defaults are 156 runs,
each of which takes about 30 s of CPU time, of all ranks together.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import NamedTuple

import netlab
import progress
import torch
from digits import Epoch, Row, train

from decent_optim_wrapper import OuterOptimizer, Schedule, StateAverage
from decent_optim_wrapper.optim import QGSGD

MIB = 1 << 20
SGD = torch.optim.SGD
SLOW_MOMENTUM = partial(SGD, lr=1.0, momentum=0.5)
OUTER_NESTEROV = partial(SGD, lr=0.7, momentum=0.5, nesterov=True)
EVERY_4 = Schedule(gossip_every=4)
PGA = Schedule(gossip_every=4, global_avg_every=8)
ROWS = {
    "DDP": Row(topology=None),
    "plain gossip": Row(),
    "mixing_rate=0.5": Row(schedule=Schedule(mixing_rate=0.5)),
    "mixing_rate=lr/lr_max": Row(mixing_power=1.0),
    "gossip_every=4": Row(schedule=EVERY_4),
    "global_avg_every=8": Row(schedule=Schedule(global_avg_every=8)),
    "gossip_every=4, global_avg_every=8": Row(schedule=PGA),
    "the same, outer SGD(lr=1, momentum=0.5)": Row(
        schedule=PGA, options={"extensions": [OuterOptimizer(SLOW_MOMENTUM)]}
    ),
    "the same, StateAverage": Row(schedule=PGA, options={"extensions": [StateAverage()]}),
    "QGSGD": Row(optimizer=QGSGD),
    "QGSGD, gossip_every=4": Row(optimizer=QGSGD, schedule=EVERY_4),
    "random pairs, gossip_every=4": Row(topology="random", schedule=EVERY_4),
    "the same, outer SGD(lr=0.7, momentum=0.5, nesterov=True)": Row(
        topology="random",
        schedule=EVERY_4,
        options={"extensions": [OuterOptimizer(OUTER_NESTEROV)]},
    ),
}


class Ends(NamedTuple):
    """The last epochs of the runs of a row with one learning rate."""

    lr: float
    epochs: list[Epoch]

    @property
    def accuracy(self) -> float:
        return statistics.mean(epoch.averaged_accuracy for epoch in self.epochs)

    def row(self, name: str) -> str:
        hits = [epoch.averaged_accuracy for epoch in self.epochs]
        sent = statistics.mean(epoch.sent_bytes for epoch in self.epochs) / MIB
        apart = statistics.mean(epoch.consensus_distance for epoch in self.epochs)
        span = f"{min(hits):.1%} to {max(hits):.1%}"
        return f"| {name} | {self.lr:g} | {self.accuracy:.1%} ({span}) | {sent:.1f} | {apart:.3f} |"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--topology", default="ring", help="of the rows that do not name one")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--all", action="store_true", help="print every rate, not the best")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    print("| schedule | lr | accuracy of the averaged model | MiB sent | consensus distance |")
    print("|---|---|---|---|---|")
    count = len(args.rows) * len(args.lrs) * len(args.seeds)
    with netlab.lab(1, rate="") as where, progress.bar(count, "run") as bar:
        for name in args.rows:
            tried = []
            for lr in args.lrs:
                row = ROWS[name]._replace(lr=lr, decay=True)
                if row.topology == "ring":
                    row = row._replace(topology=args.topology)
                ends = []
                for seed in args.seeds:
                    call = (train, row, args.epochs, seed)
                    ends.append(netlab.run(where, args.world_size, *call, timeout=300)[0][-1])
                    bar.update()
                tried.append(Ends(lr, ends))
            best = max(tried, key=lambda ends: ends.accuracy)
            for ends in tried if args.all else [best]:
                progress.show(ends.row(name))


if __name__ == "__main__":
    main()
