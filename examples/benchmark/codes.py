"""Accuracy and bytes of each code, on shuffled shards and on shards by digit.

    python examples/benchmark/codes.py

Trains the digits on `ring` with SGD with momentum and a learning rate that falls linearly to 0.
Each cell is the final test accuracy of the averaged model, the mean over the seeds, and the
distance of the ranks to it at the end. The ranks are threads of one process. The defaults are 56
runs, 7 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import progress
import torch
from digits import Epoch, Row, train_on_threads

from decent_optim_wrapper.codecs import INT4, TopKCodec

MIB = 1 << 20
CODES: dict[str, Any] = {
    "None": None,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int4": INT4,
    "TopKCodec(16)": TopKCodec(16),
    "TopKCodec(4)": TopKCodec(4),
}
SHARDS = {"shuffled": False, "by digit": True}


def run(code: str, shards: str, world_size: int, seed: int, epochs: int, lr: float) -> Epoch:
    """The end of one training."""
    row = Row(
        optimizer=partial(torch.optim.SGD, momentum=0.9),
        lr=lr,
        decay=True,
        by_digit=SHARDS[shards],
        every_epoch=False,
        options={"comm_dtype": CODES[code]},
    )
    return train_on_threads(row, world_size, epochs, seed)[-1]


def cell(ends: Sequence[Epoch]) -> str:
    """Accuracy and distance, as means over the seeds."""
    hits = statistics.mean(100 * end.averaged_accuracy for end in ends)
    return f"{hits:.1f} %, {statistics.mean(end.consensus_distance for end in ends):.3f}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--codes", nargs="+", choices=CODES, default=list(CODES))
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--workers", type=int, default=2, help="processes, one run each")
    return parser.parse_args()


def main() -> None:
    """Print the table row by row."""
    args = parse_arguments()
    columns = list(product(args.world_sizes, SHARDS))
    head = " | ".join(f"{world} ranks, {shards}" for world, shards in columns)
    print(f"| comm_dtype | MiB sent by each of {args.world_sizes[-1]} ranks | {head} |")
    print("|---" * (len(columns) + 2) + "|")
    context = get_context("forkserver")
    with (
        ProcessPoolExecutor(args.workers, context) as pool,
        progress.bar(len(args.codes) * len(columns) * len(args.seeds), "run") as bar,
    ):
        for code in args.codes:
            futures = {
                (world, shards): [
                    pool.submit(run, code, shards, world, seed, args.epochs, args.lr)
                    for seed in args.seeds
                ]
                for world, shards in columns
            }
            ends: dict[tuple[int, str], list[Epoch]] = {column: [] for column in columns}
            for column, runs in futures.items():
                for future in runs:
                    ends[column].append(future.result())
                    bar.update()
            sent = statistics.mean(end.sent_bytes for end in ends[columns[-1]]) / MIB
            cells = " | ".join(cell(ends[column]) for column in columns)
            progress.show(f"| `{code}` | {sent:.1f} | {cells} |")


if __name__ == "__main__":
    main()
