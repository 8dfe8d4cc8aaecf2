"""Gossip schedules on shards by digit: accuracy, bytes and consensus distance.

    python examples/benchmark/schedules.py

Trains the digits on shards by digit, with a learning rate that falls linearly to 0. At the learning
rate that is best for the first seed it prints the final test accuracy of the averaged model (mean
and range over the seeds), the MiB sent per rank and the final consensus distance. The defaults are
78 runs, each of which takes about 30 s of CPU time.
"""

from __future__ import annotations

import argparse
from functools import partial

import progress
import torch
from digits import Row, parser_of, searching

from decent_optim_wrapper import OuterOptimizer, Schedule, StateAverage

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
    "random pairs, gossip_every=4": Row(topology="random", schedule=EVERY_4),
    "the same, outer SGD(lr=0.7, momentum=0.5, nesterov=True)": Row(
        topology="random",
        schedule=EVERY_4,
        options={"extensions": [OuterOptimizer(OUTER_NESTEROV)]},
    ),
}


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seeds=[0, 1, 2])
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--topology", default="ring", help="of the rows that do not name one")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.2])
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    print("| schedule | lr | accuracy of the averaged model | MiB sent | consensus distance |")
    print("|---|---|---|---|---|")
    with searching(args, len(args.rows)) as search:
        for name in args.rows:
            row = ROWS[name]._replace(decay=True)
            if row.topology == "ring":
                row = row._replace(topology=args.topology)
            ends = search(row, args.world_size, args.lrs)
            figures = f"{ends.mib_sent:.1f} | {ends.mean('consensus_distance'):.3f}"
            progress.show(f"| {name} | {ends.lr:g} | {ends.accuracy} | {figures} |")


if __name__ == "__main__":
    main()
