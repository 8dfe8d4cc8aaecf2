"""What gossip schedules do for shards by digit: accuracy, bytes and consensus distance.

    python examples/benchmark/schedules.py

Runs `examples/train_digits.py --non-iid --decay` and prints, as mean and range over the seeds, the
final test accuracy of the averaged model, MiB sent per rank and the final consensus distance, with
the learning rate that is best for the row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import netlab
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_digits

MIB = 1 << 20
ROWS = {
    "DDP": "--method ddp",
    "plain gossip": "",
    "mixing_rate=0.5": "--mixing-rate 0.5",
    "mixing_rate=lr/lr_max": "--mixing-power 1",
    "gossip_every=4": "--gossip-every 4",
    "global_avg_every=8": "--global-avg-every 8",
    "gossip_every=4, global_avg_every=8": "--gossip-every 4 --global-avg-every 8",
    "the same, SlowMo's outer momentum of 0.5": (
        "--gossip-every 4 --global-avg-every 8 --outer-momentum 0.5 --outer-lr 1"
    ),
    "the same, average_state='average'": (
        "--gossip-every 4 --global-avg-every 8 --average-state average"
    ),
    "QGSGD": "--optimizer qgsgd",
    "QGSGD, gossip_every=4": "--optimizer qgsgd --gossip-every 4",
    "random pairs, gossip_every=4": "--topology random --gossip-every 4",
    "the same, outer Nesterov momentum of 0.5": (
        "--topology random --gossip-every 4 --outer-momentum 0.5 --outer-nesterov"
    ),
}


class Ends(NamedTuple):
    """How the runs of a row ended with one learning rate."""

    lr: float
    epochs: list[train_digits.Epoch]

    @property
    def accuracy(self) -> float:
        return statistics.mean(epoch.averaged_accuracy for epoch in self.epochs)

    def row(self, name: str) -> str:
        hits = [epoch.averaged_accuracy for epoch in self.epochs]
        sent = statistics.mean(epoch.sent_bytes for epoch in self.epochs) / MIB
        apart = statistics.mean(epoch.consensus_distance for epoch in self.epochs)
        span = f"{min(hits):.1%} to {max(hits):.1%}"
        return f"| {name} | {self.lr:g} | {self.accuracy:.1%} ({span}) | {sent:.1f} | {apart:.3f} |"


def train(options: str) -> list[train_digits.Epoch]:
    sys.argv = ["train_digits.py", "--non-iid", "--decay", *options.split()]
    world = train_digits.start_world()
    history = train_digits.train(train_digits.parse_arguments(), world)
    dist.barrier()
    return history


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--topology", default="ring", help="of the rows that name none")
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
    with netlab.lab(1, rate="") as where:
        for name in args.rows:
            tried = []
            for lr in args.lrs:
                fixed = f"--topology {args.topology} --lr {lr} --epochs {args.epochs} "
                ends = [
                    netlab.run(
                        *(where, args.world_size, train, f"{fixed} --seed {seed} {ROWS[name]}"),
                        timeout=300,
                    )[0][-1]
                    for seed in args.seeds
                ]
                tried.append(Ends(lr, ends))
            best = max(tried, key=lambda ends: ends.accuracy)
            for ends in tried if args.all else [best]:
                print(ends.row(name), flush=True)


if __name__ == "__main__":
    main()
