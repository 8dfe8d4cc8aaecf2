"""What it costs that rounds are mixed several steps after their launch.

    python examples/benchmark/staleness.py

Trains the digits on shuffled shards and on shards by digit, with SGD with momentum and with Adam,
with a learning rate that falls linearly to 0. Each cell is the final test accuracy of the
averaged model (mean and range over the seeds), with the learning rate that is best for the first
seed. The rows "auto" depend on how busy the machine is. Where the ranks do not meet, they may be at
different steps, and those that have made theirs wait for the others. The defaults are 132 runs,
each of which takes about 25 s of CPU time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import progress
import torch
from digits import SHARDS, Row, parser_of, searching

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


class Base(NamedTuple):
    """A base optimizer, and the learning rates to try."""

    optimizer: Callable[..., torch.optim.Optimizer]
    lrs: tuple[float, ...]


BASES = {
    "SGD": Base(partial(torch.optim.SGD, momentum=0.9), (0.02, 0.05, 0.1, 0.2)),
    "Adam": Base(torch.optim.Adam, (0.005, 0.01, 0.02)),
}


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seeds=[0, 1, 2])
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--shards", nargs="+", choices=SHARDS, default=list(SHARDS))
    parser.add_argument("--bases", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument("--lrs", type=float, nargs="+", help="instead of the rates of each base")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    columns = list(product(args.shards, args.bases))
    head = " | ".join(f"{shards}, {base}" for shards, base in columns)
    print(f"| a round | mean staleness | {head} |")
    print("|---" * (len(columns) + 2) + "|")
    with searching(args, len(args.rows) * len(columns)) as search:
        for name in args.rows:
            found = []
            for shards, base in columns:
                optimizer, lrs = BASES[base]
                row = ROWS[name]._replace(optimizer=optimizer, decay=True, by_digit=SHARDS[shards])
                found.append(search(row, args.world_size, args.lrs or lrs))
            late = statistics.mean(ends.mean("staleness") for ends in found)
            cells = " | ".join(f"{ends.accuracy}, lr {ends.lr:g}" for ends in found)
            progress.show(f"| {name} | {late:.1f} | {cells} |")


if __name__ == "__main__":
    main()
