"""Accuracy on shards by digit, for several world sizes and topologies.

    python examples/benchmark/non_iid.py

Runs `examples/train_digits.py --non-iid` and prints, as mean and range over the seeds, the final
test accuracy of the averaged model and the mean consensus distance over the epochs.
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

from decent_optim_wrapper import TopologyFactory


def train(topology: str, seed: int, epochs: int) -> list[train_digits.Epoch]:
    sys.argv = [
        "train_digits.py",
        *("--non-iid", "--topology", topology, "--seed", str(seed), "--epochs", str(epochs)),
    ]
    world = train_digits.start_world()
    history = train_digits.train(train_digits.parse_arguments(), world)
    dist.barrier()
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[6, 7, 8])
    parser.add_argument(
        "--topologies", nargs="+", default=["ring", "greedy", "random", "one-peer-exp"]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    kinds = dict(TopologyFactory.registered())
    print("| ranks | topology | accuracy of the averaged model | consensus distance |")
    print("|---|---|---|---|")
    with netlab.lab(1, rate="") as where:
        for size in args.world_sizes:
            for topology in filter(lambda name, size=size: kinds[name].fits(size), args.topologies):
                runs = [
                    netlab.run(where, size, train, topology, seed, args.epochs, timeout=300)[0]
                    for seed in args.seeds
                ]
                hits = [history[-1].averaged_accuracy for history in runs]
                apart = [statistics.mean(e.consensus_distance for e in history) for history in runs]
                print(
                    f"| {size} | {topology} | {statistics.mean(hits):.2%} "
                    f"({min(hits):.2%} to {max(hits):.2%}) | {statistics.mean(apart):.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
