"""Accuracy on shards by digit, for several world sizes and topologies.

    python examples/benchmark/non_iid.py

Trains the digits on shards by digit and prints, as mean and range over the seeds, the final
test accuracy of the averaged model and the mean consensus distance over the epochs.
"""

from __future__ import annotations

import argparse
import statistics

import netlab
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
    with netlab.lab(1, rate="") as where:
        for size in args.world_sizes:
            for topology in filter(lambda name, size=size: kinds[name].fits(size), args.topologies):
                runs = [
                    netlab.run(where, size, train, Row(topology), args.epochs, seed, timeout=300)[0]
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
