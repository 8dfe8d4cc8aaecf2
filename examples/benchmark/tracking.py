"""Accuracy and bytes of gradient tracking and of few bits, on shards by digit.

    python examples/benchmark/tracking.py

Trains the digits with a learning rate that falls linearly to 0. Each row is the final test accuracy
of the averaged model (mean and range over the seeds), with the one of four learning rates that is
best for the first seed, and the MiB that a rank has sent. The ranks are threads of one process. The
defaults are 420 runs; one with 8 ranks takes about 20 s of CPU time.
"""

from __future__ import annotations

import argparse
import warnings
from itertools import product
from typing import Any, NamedTuple

import progress
import torch
from digits import Row, parser_of, searching
from schedulefree import SGDScheduleFree
from torch.optim import AdamW

from decent_optim_wrapper import Extension, GradientTracking, StateGossip

ONCE = Row(decay=True, every_epoch=False)
ITERATE = StateGossip("z")


class Base(NamedTuple):
    """A base optimizer, and what is measured with it.

    Args:
        row: plain gossip.
        lrs: the learning rates to try.
        others: further rows.
        extensions: of the rows with tracking, in addition.
    """

    row: Row
    lrs: tuple[float, ...]
    others: dict[str, Row]
    extensions: tuple[Extension, ...] = ()

    def rows(self) -> dict[str, Row]:
        extensions = [GradientTracking(), *self.extensions]
        return {
            "DDP": self.row._replace(topology=None),
            "plain gossip": self.row,
            **self.others,
            "tracking": _with(self.row, extensions=extensions),
            "tracking, int8": _with(self.row, extensions=extensions, comm_dtype=torch.int8),
            "tracking, int4": _with(self.row, extensions=extensions, comm_dtype=torch.int4),
        }


def _with(row: Row, **options: Any) -> Row:
    return row._replace(options=options)


ADAMW = ONCE._replace(optimizer=AdamW)
FREE = ONCE._replace(optimizer=SGDScheduleFree, decay=False)
SECOND_MOMENTS = _with(ADAMW, extensions=[StateGossip("exp_avg_sq")])
BASES = {
    "SGD": Base(
        row=ONCE,
        lrs=(0.02, 0.05, 0.1, 0.2),
        others={
            "int4": _with(ONCE, comm_dtype=torch.int4),
            "int3": _with(ONCE, comm_dtype=torch.int3),
        },
    ),
    "AdamW": Base(
        row=ADAMW,
        lrs=(0.002, 0.005, 0.01, 0.02),
        others={
            "StateGossip('exp_avg_sq')": SECOND_MOMENTS,
            "int4": _with(ADAMW, comm_dtype=torch.int4),
            "int3": _with(ADAMW, comm_dtype=torch.int3),
        },
    ),
    "Schedule-Free": Base(
        row=FREE,
        lrs=(0.2, 0.5, 1.0, 2.0),
        others={"StateGossip('z')": _with(FREE, extensions=[ITERATE])},
        extensions=(ITERATE,),
    ),
}


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seeds=[0, 1, 2])
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--topologies", nargs="+", default=["ring", "one-peer-exp"])
    parser.add_argument("--bases", nargs="+", choices=list(BASES), default=list(BASES))
    rows = sorted({name for base in BASES.values() for name in base.rows()})
    text = f"all by default, of: {'; '.join(rows)}"
    parser.add_argument("--methods", nargs="+", choices=rows, metavar="ROW", help=text)
    parser.add_argument("--lrs", type=float, nargs="+", help="in place of four for each base")
    parser.add_argument("--batch", type=int, default=128, help="images of all ranks in a step")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    warnings.simplefilter("ignore")
    print("| base | ranks | topology | method | lr | accuracy of the averaged model | MiB sent |")
    print("|---|---|---|---|---|---|---|")
    cells = [
        (name, size, method, row._replace(topology=topology, batch=max(1, args.batch // size)))
        for name, size in product(args.bases, args.world_sizes)
        for method, row in BASES[name].rows().items()
        if not args.methods or method in args.methods
        for topology in (args.topologies if row.topology else [None])
    ]
    with searching(args, len(cells)) as search:
        for name, size, method, row in cells:
            ends = search(row, size, args.lrs or BASES[name].lrs)
            label = f"| {name} | {size} | {row.topology or 'all'} | {method} |"
            progress.show(f"{label} {ends.lr:g} | {ends.accuracy} | {ends.mib_sent:.2f} |")


if __name__ == "__main__":
    main()
