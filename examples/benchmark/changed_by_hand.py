"""What mixing makes of values that are changed by hand while a round is in flight.

    python examples/benchmark/changed_by_hand.py                    # 2 ranks on loopback, a minute
    python examples/benchmark/changed_by_hand.py --rate 400mbit     # needs root and iproute2

Two ranks of 20 M float32 parameters, learning rate 0, each change through `.data` right after
`step()`. "swap" puts other values in place, 0.9 x, for 50 ms, as an evaluation of averaged weights
does, and then x again: the mean over the ranks should not move. "clamp" clamps to [-1, 1] for good:
the mean should move to that of the clamped values. The table has the distance of the mean from
where it should be, as a share of the change.
"""

from __future__ import annotations

import argparse
import os
import time

import netlab
import torch
import torch._dynamo  # the first optimizer step would import it, in every rank
import torch.distributed as dist
from torch import Tensor, nn

from decent_optim_wrapper import DecentOptimWrapper

COUNT, WIDTH, TRIALS = 20, 1000, 5


def mean_of(params: list[nn.Parameter]) -> Tensor:
    """The mean over the ranks, as one vector."""
    flat = torch.cat([param.detach().double().reshape(-1) for param in params])
    dist.all_reduce(flat)
    return flat / dist.get_world_size()


@torch.no_grad()
def draw(params: list[nn.Parameter], trial: int) -> None:
    generator = torch.Generator().manual_seed(2 * trial + dist.get_rank())
    for param in params:
        param.copy_(torch.randn(param.shape, generator=generator))


def swap(params: list[nn.Parameter]) -> None:
    own = [param.detach().clone() for param in params]
    for param in params:
        param.data.mul_(0.9)
    time.sleep(0.05)
    for param, value in zip(params, own, strict=True):
        param.data.copy_(value)


def clamp(params: list[nn.Parameter]) -> None:
    for param in params:
        param.data.clamp_(-1, 1)


CHANGES = {"swap": swap, "clamp": clamp}


def measure(change: str, views: bool) -> list[float]:
    """Run in every rank."""
    dist.init_process_group("gloo")
    params = [nn.Parameter(torch.zeros(WIDTH, WIDTH)) for _ in range(COUNT)]
    optimizer = DecentOptimWrapper(
        torch.optim.SGD(params, lr=0.0), topology="ring", param_as_bucket_view=views
    )
    found = []
    for trial in range(TRIALS):
        draw(params, trial)
        before = mean_of(params)
        optimizer.step()
        CHANGES[change](params)
        own = [param.detach().clone() for param in params]
        optimizer.synchronize()
        after = mean_of(params)
        for param, value in zip(params, own, strict=True):
            param.data.copy_(value)
        expected = mean_of(params)
        size = 0.1 * before.norm() if change == "swap" else (expected - before).norm()
        found.append(float((after - expected).norm() / size))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rate", default="", help="of each link, in the notation of tc")
    args = parser.parse_args()
    os.environ.setdefault("LOGURU_LEVEL", "ERROR")
    rate = netlab.possible(args.rate)
    print(f"links: {rate or 'loopback'}; least and most of {TRIALS} trials")
    print("| change | copies | views |")
    print("|---|---|---|")
    for change in CHANGES:
        cells = []
        for views in (False, True):
            with netlab.lab(2, rate) as where:
                found, _ = netlab.run(where, 2, measure, change, views, timeout=300)
            cells.append(f"{100 * min(found):.1f} to {100 * max(found):.1f} %")
        print(f"| {change} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
