"""What it costs to go on with other numbers of ranks, each time from a checkpoint.

    python examples/benchmark/resize.py

Trains the digits on shuffled shards, with a learning rate that falls linearly to 0: with four ranks
from start to end, and with 4, 3, 6 ranks and one, each for a quarter of the epochs. All ranks
together take 48 images in a step. Each cell is the final test accuracy of the averaged model (mean
and range over the seeds). The defaults are 18 runs, each of which takes about 15 s of CPU time.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import progress
import torch
from digits import on_threads, spread
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from train_digits import accuracy, batches, load_data

from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.checkpoint import Checkpoints

TOTAL_BATCH = 48
RUNS = {"4 ranks": (4,), "4, 3, 6 ranks and one": (4, 3, 6, 1)}


class Base(NamedTuple):
    """A base optimizer, and options of the wrapper."""

    make: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]


BASES = {
    "SGD": Base(partial(torch.optim.SGD, lr=0.05, momentum=0.9), {}),
    "AdamW": Base(partial(torch.optim.AdamW, lr=0.005), {}),
    "AdamW, int8": Base(partial(torch.optim.AdamW, lr=0.005), {"comm_dtype": torch.int8}),
}


class Part(NamedTuple):
    """One part of a run.

    Args:
        base: of `BASES`.
        size: number of ranks.
        until: the epoch at which it ends.
        epochs: of the whole run.
        seed: of the model and the batches.
        folder: for the checkpoints.
    """

    base: Base
    size: int
    until: int
    epochs: int
    seed: int
    folder: Path


def train(part: Part, model: torch.nn.Module, group: Any) -> float:
    """Go on from the last part as one rank; the accuracy of the averaged model at the end."""
    rank, device = group.rank(), torch.device("cpu")
    shard, test = load_data(rank, part.size, device, by_digit=False)
    base = part.base.make(model.parameters())
    topology = "complete" if part.size % 2 else "ring"
    optimizer = DecentOptimWrapper(
        base, topology=topology, process_group=group, **part.base.options
    )
    each_epoch = 1438 // TOTAL_BATCH
    decay = LambdaLR(base, lambda step: 1 - step / (part.epochs * each_epoch))
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "decay": decay}
    checkpoints = Checkpoints(part.folder, optimizer)
    saved = checkpoints.load()
    step = 0
    if saved is not None:
        step = saved.step
        for name, each in parts.items():
            each.load_state_dict(saved.state[name])
    for epoch in range(step // each_epoch, part.until):
        draw = torch.Generator().manual_seed(10_000 * part.seed + 100 * epoch + rank)
        dealt = batches(shard, TOTAL_BATCH // part.size, draw)
        for _, (images, labels) in zip(range(each_epoch), dealt, strict=False):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            decay.step()
    checkpoints.save(
        part.until * each_epoch, {name: each.state_dict() for name, each in parts.items()}
    )
    with optimizer.averaged():
        return accuracy(model, test)


def run_once(base: Base, sizes: tuple[int, ...], epochs: int, seed: int) -> float:
    """The accuracy at the end of a run with these numbers of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        for number, size in enumerate(sizes, start=1):
            until = epochs * number // len(sizes)
            part = Part(base, size, until, epochs, seed, Path(folder))
            end = on_threads(partial(train, part), size, seed)
    return end


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bases", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=20)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    print(f"| base | {' | '.join(RUNS)} |")
    print("|---" * (len(RUNS) + 1) + "|")
    with progress.bar(len(args.bases) * len(RUNS) * len(args.seeds), "run") as bar:
        for name in args.bases:
            cells = []
            for sizes in RUNS.values():
                hits = []
                for seed in args.seeds:
                    hits.append(run_once(BASES[name], sizes, args.epochs, seed))
                    bar.update()
                cells.append(spread(hits))
            progress.show(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
