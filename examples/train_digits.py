"""Train a digit classifier on real scans with gossip averaging.

    torchrun --standalone --nproc-per-node 4 examples/train_digits.py

Every rank trains on its own shard of scikit-learn's handwritten digits (1,797 scans of 8 x 8
pixels that ship with the package) and mixes its parameters with its neighbours in the topology.
After every epoch the averaged model is evaluated inside `averaged()`, and so is every single rank.
Also runs as a plain `python` process, as a world of one rank.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from decent_optim_wrapper import DecentOptimWrapper, Schedule, Topology, TopologyFactory
from decent_optim_wrapper.optim import QGSGD, mixing_rate_from_lr

TEST_SHARE = 0.2


class Alone(Topology):
    """Every rank for itself: what `--method local` trains with, and ddp, which has its own sync."""

    def assign_groups(self) -> list[list[list[int]]]:
        return [[[rank]] for rank in range(self._world_size)]


class World(NamedTuple):
    """Where this process stands."""

    rank: int
    size: int
    device: torch.device


class Data(NamedTuple):
    """Scans of shape (samples, 1, 8, 8), float32 in [0, 1], and their digits."""

    images: Tensor
    labels: Tensor


class Epoch(NamedTuple):
    """What is measured after an epoch, on average over the ranks; bytes count from the start."""

    averaged_accuracy: float
    single_accuracy: float
    consensus_distance: float
    sent_bytes: float


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--method", choices=["gossip", "ddp", "local"], default="gossip")
    parser.add_argument("--topology", choices=TopologyFactory.names(), default="complete")
    parser.add_argument("--local-world-size", type=int, help="ranks per node; default: torchrun's")
    parser.add_argument("--optimizer", choices=["sgd", "qgsgd", "adam", "adamw"], default="sgd")
    parser.add_argument("--lr", type=float, help="default: 0.02 for (qg)sgd, 0.002 otherwise")
    parser.add_argument("--decay", action="store_true", help="lower the rate linearly to 0")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank and step")
    parser.add_argument("--non-iid", action="store_true", help="shard the scans by digit")
    parser.add_argument("--no-overlap", action="store_true", help="exchange inside step()")
    parser.add_argument("--mixing-rate", type=float, default=1.0)
    parser.add_argument("--mixing-power", type=float, help="tie the mixing to the learning rate")
    parser.add_argument("--gossip-every", type=int, default=1, help="steps between rounds")
    parser.add_argument("--global-avg-every", type=int, help="steps between exact averages")
    parser.add_argument("--outer-momentum", type=float, help="of an outer SGD; default: none")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-nesterov", action="store_true")
    parser.add_argument("--average-state", choices=["keep", "average"], default="keep")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/digits.png"), help="the curves")
    parser.add_argument("--json", type=Path, help="also write the figures of every epoch here")
    return parser.parse_args()


def start_world() -> World:
    """Join the process group that torchrun describes; without one, a world of one rank."""
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if cuda:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    if "RANK" not in os.environ:
        return World(0, 1, device)
    one_gpu_each = cuda and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if one_gpu_each else "gloo")
    return World(dist.get_rank(), dist.get_world_size(), device)


def load_data(world: World, non_iid: bool) -> tuple[Data, Data]:
    """This rank's shard of the training scans, as many on every rank, and all test scans."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=world.device) / 16
    data = Data(images.unsqueeze(1), torch.tensor(digits.target, device=world.device))
    # The split is the same for every seed, so that accuracies compare.
    order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(0))
    test, train = order.split(
        [int(TEST_SHARE * len(order)), len(order) - int(TEST_SHARE * len(order))]
    )
    if non_iid:
        train = train[data.labels.cpu()[train].argsort(stable=True)]
    per_rank = len(train) // world.size
    first = world.rank * per_rank
    mine = (
        train[first : first + per_rank] if non_iid else train[world.rank :: world.size][:per_rank]
    )
    return Data(data.images[mine], data.labels[mine]), Data(data.images[test], data.labels[test])


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    if args.optimizer in ("sgd", "qgsgd"):
        momentum_sgd = QGSGD if args.optimizer == "qgsgd" else torch.optim.SGD
        lr = 0.02 if args.lr is None else args.lr
        return momentum_sgd(model.parameters(), lr=lr, momentum=0.9)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[args.optimizer]
    return kind(model.parameters(), lr=0.002 if args.lr is None else args.lr)


def batches(data: Data, size: int, generator: torch.Generator) -> Iterator[Data]:
    order = torch.randperm(len(data.labels), generator=generator).to(data.labels.device)
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        yield Data(data.images[chosen], data.labels[chosen])


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    model.eval()
    hits = (model(data.images).argmax(dim=1) == data.labels).float().mean().item()
    model.train()
    return hits


def mean_over_ranks(value: float, world: World) -> float:
    if world.size == 1:
        return value
    total = torch.tensor(value, device=world.device)
    dist.all_reduce(total)
    return total.item() / world.size


def evaluate(
    model: nn.Module, optimizer: DecentOptimWrapper, test: Data, world: World, sent_bytes: int
) -> Epoch:
    single = mean_over_ranks(accuracy(model, test), world)
    with optimizer.averaged():
        averaged = accuracy(model, test)
    sent = mean_over_ranks(float(sent_bytes), world)
    return Epoch(averaged, single, optimizer.consensus_distance(), sent)


def all_reduced_bytes(model: nn.Module, world: World) -> int:
    """What DistributedDataParallel sends per step and rank, if its all-reduce is a ring."""
    size = sum(param.nbytes for param in model.parameters())
    return int(2 * (world.size - 1) / world.size * size)


def train(args: argparse.Namespace, world: World) -> list[Epoch]:
    torch.manual_seed(args.seed)
    shard, test = load_data(world, args.non_iid)
    model = build_model().to(world.device)
    base = build_optimizer(args, model)
    optimizer = wrap(args, base, world)
    synced = args.method == "ddp" and world.size > 1
    network = DistributedDataParallel(model) if synced else model
    reduced_bytes = all_reduced_bytes(model, world) if synced else 0

    steps = args.epochs * -(-len(shard.labels) // args.batch_size)
    schedule = LambdaLR(base, lambda step: 1 - step / steps if args.decay else 1.0)
    lr_max = base.param_groups[0]["lr"]
    # Ranks shuffle their shards differently.
    generator = torch.Generator().manual_seed(1000 * args.seed + world.rank)
    history = []
    sent_bytes = 0
    with tqdm(range(args.epochs), unit="epoch", disable=world.rank > 0) as progress:
        for _ in progress:
            for batch in batches(shard, args.batch_size, generator):
                optimizer.zero_grad()
                cross_entropy(network(batch.images), batch.labels).backward()
                optimizer.step()
                schedule.step()
                if args.mixing_power is not None:
                    optimizer.mixing_rate = mixing_rate_from_lr(base, lr_max, args.mixing_power)
                sent_bytes += optimizer.stats().bytes_sent + reduced_bytes
            history.append(evaluate(model, optimizer, test, world, sent_bytes))
            progress.set_postfix_str(in_words(history[-1]))
    return history


def wrap(args: argparse.Namespace, base: torch.optim.Optimizer, world: World) -> DecentOptimWrapper:
    if args.method != "gossip":
        return DecentOptimWrapper(base, topology=Alone(world.size), overlap=not args.no_overlap)
    outer = partial(
        torch.optim.SGD,
        lr=args.outer_lr,
        momentum=args.outer_momentum or 0.0,
        nesterov=args.outer_nesterov,
    )
    return DecentOptimWrapper(
        base,
        local_world_size=args.local_world_size,
        topology=args.topology,
        overlap=not args.no_overlap,
        schedule=Schedule(
            mixing_rate=args.mixing_rate,
            gossip_every=args.gossip_every,
            global_avg_every=args.global_avg_every,
            average_state=args.average_state,
            outer=None if args.outer_momentum is None else outer,
        ),
    )


def in_words(epoch: Epoch) -> str:
    return (
        f"averaged model {epoch.averaged_accuracy:.2%}, single ranks {epoch.single_accuracy:.2%}, "
        f"consensus distance {epoch.consensus_distance:.4f}"
    )


def draw(history: list[Epoch], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    epochs = range(1, len(history) + 1)
    left.plot(epochs, [epoch.averaged_accuracy for epoch in history], label="averaged model")
    left.plot(epochs, [epoch.single_accuracy for epoch in history], label="single ranks, mean")
    left.set(xlabel="epoch", ylabel="test accuracy")
    left.legend()
    right.plot(epochs, [epoch.consensus_distance for epoch in history])
    right.set(xlabel="epoch", ylabel="consensus distance", ylim=(0, None))
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    args = parse_arguments()
    world = start_world()
    history = train(args, world)
    if world.rank == 0:
        what = f"{args.method} on {args.topology}" if args.method == "gossip" else args.method
        draw(history, f"digits: {what}, {world.size} ranks, {args.optimizer}", args.output)
        print(f"{what}, {world.size} ranks: {in_words(history[-1])}; curves in {args.output}")
        if args.json:
            args.json.write_text(json.dumps([epoch._asdict() for epoch in history], indent=1))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
