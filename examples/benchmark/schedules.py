"""What gossip schedules do for shards by digit: accuracy, bytes and consensus distance.

    python examples/benchmark/schedules.py

Runs `examples/train_digits.py --non-iid --decay` and prints, as mean and range over the seeds, the
final test accuracy of the averaged model, MiB sent per rank and the final consensus distance.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

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
    "the same, slow_momentum=0.5": ("--gossip-every 4 --global-avg-every 8 --slow-momentum 0.5"),
    "the same, average_state='average'": (
        "--gossip-every 4 --global-avg-every 8 --average-state average"
    ),
    "the same, average_state='reset'": (
        "--gossip-every 4 --global-avg-every 8 --average-state reset"
    ),
    "QGSGD": "--optimizer qgsgd",
    "QGSGD, gossip_every=4": "--optimizer qgsgd --gossip-every 4",
    "random pairs, gossip_every=4": "--topology random --gossip-every 4",
    "the same, outer_momentum=0.5": "--topology random --gossip-every 4 --outer-momentum 0.5",
}


def train(options: str, fixed: str) -> list[train_digits.Epoch]:
    sys.argv = ["train_digits.py", *f"--non-iid {fixed} {options}".split()]
    world = train_digits.start_world()
    history = train_digits.train(train_digits.parse_arguments(), world)
    dist.barrier()
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--topology", default="ring", help="of the rows that name none")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()
    print("| schedule | accuracy of the averaged model | MiB sent per rank | consensus distance |")
    print("|---|---|---|---|")
    with netlab.lab(1, rate="") as where:
        for name in args.rows:
            ends = []
            for seed in args.seeds:
                fixed = (
                    f"--topology {args.topology} --decay --lr {args.lr} --epochs {args.epochs} "
                    f"--seed {seed}"
                )
                run = netlab.run(where, args.world_size, train, ROWS[name], fixed, timeout=300)
                ends.append(run[0][-1])
            hits = [end.averaged_accuracy for end in ends]
            print(
                f"| {name} | {statistics.mean(hits):.2%} ({min(hits):.2%} to {max(hits):.2%}) "
                f"| {statistics.mean(end.sent_bytes for end in ends) / MIB:.1f} "
                f"| {statistics.mean(end.consensus_distance for end in ends):.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
