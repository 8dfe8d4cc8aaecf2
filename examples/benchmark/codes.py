"""Accuracy and bytes of each code, on shuffled shards and on shards by digit.

    python examples/benchmark/codes.py

Trains the digits on `ring` with SGD with momentum and a learning rate that falls linearly to 0.
Each cell is the final test accuracy of the averaged model, the mean over the seeds, and the
distance of the ranks to it at the end. The ranks are threads of one process. The defaults are 56
runs, 7 minutes on 2 cores.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import progress
import torch
from digits import SHARDS, Row, parser_of, searching

from decent_optim_wrapper.codecs import INT2, INT3, INT4, TopKCodec

CODES: dict[str, Any] = {
    "None": None,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int4": INT4,
    "int3": INT3,
    "int2": INT2,
    "TopKCodec(16)": TopKCodec(16),
    "TopKCodec(4)": TopKCodec(4),
}


def main() -> None:
    """Print the table row by row."""
    parser = parser_of(__doc__, seeds=[0, 1])
    parser.add_argument("--codes", nargs="+", choices=CODES, default=list(CODES))
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    columns = list(product(args.world_sizes, SHARDS))
    head = " | ".join(f"{world} ranks, {shards}" for world, shards in columns)
    print(f"| comm_dtype | MiB sent by each of {args.world_sizes[-1]} ranks | {head} |")
    print("|---" * (len(columns) + 2) + "|")
    with searching(args, len(args.codes) * len(columns)) as search:
        for code in args.codes:
            row = Row(decay=True, every_epoch=False, options={"comm_dtype": CODES[code]})
            found = [
                search(row._replace(by_digit=SHARDS[shards]), world, [args.lr])
                for world, shards in columns
            ]
            cells = (
                f"{100 * ends.mean('averaged_accuracy'):.1f} %, "
                f"{ends.mean('consensus_distance'):.3f}"
                for ends in found
            )
            progress.show(f"| `{code}` | {found[-1].mib_sent:.1f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
