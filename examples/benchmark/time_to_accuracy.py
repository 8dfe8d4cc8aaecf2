"""Seconds until the averaged model reaches 97 % on handwritten digits, over slow links.

    sudo python examples/benchmark/time_to_accuracy.py

Four ranks, each in its own network namespace behind a 20 Mbit/s link (root and iproute2 needed;
without them, plain loopback), with model and data of `train_digits.py` and SGD with momentum. Every
method trains with each of the learning rates, and its best one counts. Nothing is evaluated while
the clock runs: at the end of every epoch each rank keeps a copy of its parameters, which are
averaged and evaluated afterwards. The time of an epoch is that of the rank that ends it last. One
run of DDP took 55 s on 2 busy cores, and one of "ours, auto" 35 s; the defaults are three of each
method.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import netlab
import torch
import torch._dynamo  # the first optimizer step would import it, in every rank
import torch.distributed as dist
from peers import Training, ddp, post_local_sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from decent_optim_wrapper import DecentOptimWrapper, Schedule
from decent_optim_wrapper.codecs import INT4
from decent_optim_wrapper.utils import init_distributed

sys.path.insert(0, str(Path(__file__).parent.parent))
from train_digits import accuracy, batches, build_model, load_data


class Epoch(NamedTuple):
    """Seconds since the start at the end of an epoch, and the accuracy of the averaged model."""

    seconds: float
    accuracy: float


def sgd(params: Any, lr: float) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def decent_dp(model: nn.Module, base: torch.optim.Optimizer) -> Training:
    from decent_dp.ddp import DecentralizedDataParallel

    # It makes an optimizer for each of its buckets.
    lr = base.defaults["lr"]
    network = DecentralizedDataParallel(
        model, lambda named: sgd([tensor for _, tensor in named], lr), topology="ring"
    )
    return Training(network, None)


def gossip(model: nn.Module, base: torch.optim.Optimizer, **options: Any) -> Training:
    optimizer = DecentOptimWrapper(base, topology="ring", **options)
    return Training(model, optimizer, optimizer.synchronize)


METHODS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Training]] = {
    "DDP": ddp,
    "DDP, bf16 hook": partial(ddp, compress=True),
    "PostLocalSGD, period 8": partial(post_local_sgd, period=8),
    "decent-dp": decent_dp,
    "ours": gossip,
    "ours, every 8 steps, 8 late": partial(gossip, schedule=Schedule(gossip_every=8, staleness=8)),
    "ours, auto": partial(gossip, schedule=Schedule(gossip_every="auto")),
    "ours, auto, bf16": partial(
        gossip, schedule=Schedule(gossip_every="auto"), comm_dtype=torch.bfloat16
    ),
    "ours, auto, int8": partial(
        gossip, schedule=Schedule(gossip_every="auto"), comm_dtype=torch.int8
    ),
    "ours, auto, int4": partial(gossip, schedule=Schedule(gossip_every="auto"), comm_dtype=INT4),
    "ours, tracking, int8": partial(gossip, gradient_tracking=True, comm_dtype=torch.int8),
}


def train(
    method: str, lr: float, epochs: int, seed: int, by_digit: bool
) -> list[tuple[float, Tensor]]:
    """Run in every rank: seconds and parameters at the end of every epoch."""
    world = init_distributed()
    torch.manual_seed(seed)
    shard, _ = load_data(world.rank, world.world_size, world.device, by_digit)
    model = build_model()
    network, optimizer, finish = METHODS[method](model, sgd(model.parameters(), lr))
    generator = torch.Generator().manual_seed(1000 * seed + world.rank)
    history = []
    dist.barrier()
    start = time.perf_counter()
    for _ in range(epochs):
        for images, labels in batches(shard, 16, generator):
            if optimizer is not None:
                optimizer.zero_grad()
            cross_entropy(network(images), labels).backward()
            if optimizer is not None:
                optimizer.step()
        copy = parameters_to_vector(model.parameters()).detach().clone()
        history.append((time.perf_counter() - start, copy))
    finish()
    dist.barrier()
    return [(seconds, copy.numpy()) for seconds, copy in history]  # type: ignore[misc]


def evaluate(ranks: list[list[tuple[float, Any]]]) -> list[Epoch]:
    """The averaged model after every epoch."""
    _, test = load_data(0, 1, torch.device("cpu"), by_digit=False)
    model = build_model()
    epochs = []
    for of_ranks in zip(*ranks, strict=True):
        rows = torch.stack([torch.from_numpy(row) for _, row in of_ranks])
        vector_to_parameters(rows.mean(0), model.parameters())
        epochs.append(Epoch(max(seconds for seconds, _ in of_ranks), accuracy(model, test)))
    return epochs


def seconds_to(target: float, epochs: list[Epoch]) -> float:
    return next((epoch.seconds for epoch in epochs if epoch.accuracy >= target), math.inf)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.02, 0.05, 0.1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", default="20mbit", help="of each link; empty for no limit")
    parser.add_argument("--target", type=float, default=0.97)
    parser.add_argument("--by-digit", action="store_true", help="shards by digit")
    parser.add_argument("--output", type=Path, default=Path("runs/time_to_accuracy.json"))
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    args.rate = netlab.possible(args.rate)
    if importlib.util.find_spec("decent_dp") is None and "decent-dp" in args.methods:
        print("decent-dp is not installed (pip install decent-dp): left out")
        args.methods.remove("decent-dp")
    os.environ.setdefault("LOGURU_LEVEL", "ERROR")
    runs: dict[str, dict[float, list[list[Epoch]]]] = {}
    with netlab.lab(args.ranks, args.rate) as where:
        for seed, lr, method in product(args.seeds, args.lrs, args.methods):
            call = (train, method, lr, args.epochs, seed, args.by_digit)
            epochs = evaluate(netlab.run(where, args.ranks, *call, timeout=600))
            runs.setdefault(method, {}).setdefault(lr, []).append(epochs)
            print(
                f"{method}, lr {lr:g}, seed {seed}: {seconds_to(args.target, epochs):.1f} s, "
                f"{epochs[-1].seconds / args.epochs:.2f} s per epoch, "
                f"{epochs[-1].accuracy:.1%} at the end",
                flush=True,
            )
    print(
        f"\n| method | lr | seconds to {args.target:.0%} | accuracy at the end |\n|---|---|---|---|"
    )
    for method, by_lr in runs.items():
        # Over the seeds: the rate of the smallest median, and of the highest end if none arrives.
        def merit(lr: float, by_lr: dict[float, list[list[Epoch]]] = by_lr) -> tuple[float, float]:
            seconds = statistics.median(seconds_to(args.target, epochs) for epochs in by_lr[lr])
            return seconds, -statistics.median(epochs[-1].accuracy for epochs in by_lr[lr])

        best = min(by_lr, key=merit)
        seconds, end = merit(best)
        time_taken = "not reached" if math.isinf(seconds) else f"{seconds:.1f}"
        print(f"| {method} | {best:g} | {time_taken} | {-end:.1%} |")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
