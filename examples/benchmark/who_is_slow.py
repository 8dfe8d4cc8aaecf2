"""One rank and one link are made slow, drawn by a seed; does the report name both?

    python examples/benchmark/who_is_slow.py --seeds 20

Needs root and iproute2: the link is slow in the network lab, the rank sleeps in its computing.
20 seeds take 23 s of CPU time, of all ranks together, in a minute and a half.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
import torch.distributed as dist
from netlab import Lab, available, lab, run, slow_link

from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.report import Report

RANKS = 4
MIB = 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--computing", type=float, default=0.03, help="seconds of the other ranks")
    parser.add_argument("--slow-computing", type=float, default=0.06, help="of the slow rank")
    parser.add_argument("--rate", default="800mbit", help="of the other links")
    parser.add_argument("--slow-rate", default="200mbit", help="of the slow link")
    return parser.parse_args()


def draw(seed: int) -> tuple[int, tuple[int, int]]:
    """A slow rank, and a slow link of the ring between two others."""
    chance = random.Random(seed)
    rank = chance.randrange(RANKS)
    links = [(i, (i + 1) % RANKS) for i in range(RANKS)]
    return rank, chance.choice([link for link in links if rank not in link])


def train(slow: int, args: argparse.Namespace) -> Report:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    params = [torch.nn.Parameter(torch.zeros(MIB * 2**20 // 8)) for _ in range(2)]
    optimizer = DecentOptimWrapper(
        torch.optim.SGD(params, lr=0.1), topology="ring", bucket_cap_mb=MIB / 2
    )
    for _ in range(args.steps):
        for param in params:
            param.grad = torch.full_like(param, float(rank + 1))
        # A forward and a backward pass.
        time.sleep(args.slow_computing if rank == slow else args.computing)
        optimizer.step()
    return optimizer.report()


def main() -> None:
    args = parse_arguments()
    if not available():
        raise SystemExit("expected root and iproute2 (ip, tc)")
    right = 0
    for seed in range(args.seeds):
        rank, link = draw(seed)
        where: Lab
        with lab(RANKS, args.rate) as where:
            slow_link(where, *link, args.slow_rate)
            report: Report = run(where, RANKS, train, rank, args, timeout=120)[0]
        found = report.slow_link and report.slow_link.ranks
        named = report.slow_rank == rank and found == tuple(sorted(link))
        right += named
        print(
            f"seed {seed}: rank {rank}, link {link}: {'named' if named else 'not named'}",
            flush=True,
        )
        if seed == 0 or not named:
            print(report, flush=True)
    print(f"both named with {right} of {args.seeds} seeds")
    if right < args.seeds:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
