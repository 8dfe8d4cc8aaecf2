"""Accuracy on shards by digit, for several world sizes and topologies.

    python examples/benchmark/non_iid.py

Trains the digits on shards by digit and prints, as mean and range over the seeds, the final
test accuracy of the averaged model and the mean consensus distance over the epochs. The defaults
are 27 runs; one with 8 ranks takes about 30 s of CPU time.
"""

from __future__ import annotations

import statistics
from itertools import product

import progress
from digits import Row, parser_of, searching

from decent_optim_wrapper.topo.base import REGISTRY


def main() -> None:
    parser = parser_of(__doc__, seeds=[0, 1, 2])
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[6, 7, 8])
    topologies = ["ring", "greedy", "random", "one-peer-exp"]
    parser.add_argument("--topologies", nargs="+", default=topologies)
    args = parser.parse_args()
    print("| ranks | topology | accuracy of the averaged model | consensus distance |")
    print("|---|---|---|---|")
    every = product(args.world_sizes, args.topologies)
    rows = [(size, topology) for size, topology in every if REGISTRY[topology].fits(size)]
    with searching(args, len(rows)) as search:
        for size, topology in rows:
            runs = search(Row(topology), size, [0.02])
            apart = [e.consensus_distance for history in runs.histories for e in history]
            distance = statistics.mean(apart)
            progress.show(f"| {size} | {topology} | {runs.accuracy} | {distance:.3f} |")


if __name__ == "__main__":
    main()
