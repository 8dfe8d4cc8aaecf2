"""Accuracy on shards by digit, for several world sizes and topologies.

    python examples/benchmark/non_iid.py

Trains the digits on shards by digit and prints, as mean and range over the seeds, the final
test accuracy of the averaged model and the mean consensus distance over the epochs. The defaults
are 27 runs; one with 8 ranks takes about 30 s of CPU time, of all ranks together.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import product

import netlab
import progress
from digits import Row, train

from decent_optim_wrapper import TopologyFactory


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
    rows = [
        (size, topology)
        for size, topology in product(args.world_sizes, args.topologies)
        if kinds[topology].fits(size)
    ]
    with (
        netlab.lab(1, rate="") as where,
        progress.bar(len(rows) * len(args.seeds), "run") as bar,
    ):
        for size, topology in rows:
            runs = []
            for seed in args.seeds:
                call = (train, Row(topology), args.epochs, seed)
                runs.append(netlab.run(where, size, *call, timeout=300)[0])
                bar.update()
            hits = [history[-1].averaged_accuracy for history in runs]
            apart = [statistics.mean(e.consensus_distance for e in history) for history in runs]
            progress.show(
                f"| {size} | {topology} | {statistics.mean(hits):.2%} "
                f"({min(hits):.2%} to {max(hits):.2%}) | {statistics.mean(apart):.3f} |"
            )


if __name__ == "__main__":
    main()
