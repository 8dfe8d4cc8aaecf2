"""Train a digit classifier on real scans with gossip averaging.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 examples/train_digits.py

Every rank trains on its own shard of scikit-learn's digits (1,797 scans that ship with the package)
and mixes its parameters with those of all others, or as --topology says. After every epoch the
average of the models of all ranks is evaluated. The script also runs as a plain `python` process
with a single rank. With the defaults the four ranks take 52 s of CPU time together, about half a
minute on 2 cores.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from decent_optim_wrapper import DecentOptimWrapper, Schedule, TopologyFactory
from decent_optim_wrapper.utils import DistInfo, init_distributed


class Data(NamedTuple):
    """Scans of shape (samples, 1, 8, 8), float32 in [0, 1], and their digits."""

    images: Tensor
    labels: Tensor


# Ranks that are threads of one process read them once.
read_digits = cache(load_digits)
# The test accuracy, and the MiB that this rank has sent since the start, for each epoch.
History = list[tuple[float, float]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--topology", choices=TopologyFactory.names())
    parser.add_argument("--gossip-every", type=int, nargs="+", default=[1], help="one run for each")
    parser.add_argument("--ddp", action="store_true", help="compare with DistributedDataParallel")
    parser.add_argument("--non-iid", action="store_true", help="shard the scans by digit")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/digits.png"), help="the curves")
    return parser.parse_args()


def start_world() -> DistInfo:
    """Join the other ranks; without torchrun, mpirun or srun there is only this one."""
    if {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}.isdisjoint(os.environ):
        return DistInfo(0, 1, 0, torch.device("cpu"), 1)
    return init_distributed()


def load_data(rank: int, size: int, device: torch.device, by_digit: bool) -> tuple[Data, Data]:
    """The training scans of one of `size` ranks (equally many on each), and all test scans."""
    digits = read_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, device=device)
    # The split is the same for every seed, so that accuracies can be compared.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(device)
    test, train = order.tensor_split([359])
    if by_digit:
        train = train[labels[train].argsort(stable=True)]
    count = len(train) // size
    mine = train[rank * count :] if by_digit else train[rank::size]
    return Data(images[mine[:count]], labels[mine[:count]]), Data(images[test], labels[test])


def build_model() -> nn.Module:
    first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
    features = first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*features, nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


def batches(data: Data, size: int, generator: torch.Generator) -> Iterator[Data]:
    for chosen in torch.randperm(len(data.labels), generator=generator).split(size):
        yield Data(data.images[chosen], data.labels[chosen])


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    return (model(data.images).argmax(dim=1) == data.labels).float().mean().item()


def name_of(args: argparse.Namespace, gossip_every: int | None) -> str:
    topology = f"{args.topology}, " if args.topology else ""
    return "DDP" if gossip_every is None else f"{topology}gossip_every={gossip_every}"


def train(args: argparse.Namespace, world: DistInfo, gossip_every: int | None) -> History:
    """A usual training loop, with gossip or (None) with DistributedDataParallel."""
    torch.manual_seed(args.seed)
    shard, test = load_data(world.rank, world.world_size, world.device, args.non_iid)
    model = network = build_model().to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    if gossip_every is None:
        network = DistributedDataParallel(model)
    else:
        schedule = Schedule(gossip_every=gossip_every)
        optimizer = DecentOptimWrapper(
            optimizer, topology=args.topology, schedule=schedule, model=model
        )
    # The bytes that a ring all-reduce of the gradients sends in a step.
    reduced = 2 * (1 - 1 / world.world_size) * sum(param.nbytes for param in model.parameters())
    # Ranks shuffle their shards differently.
    generator = torch.Generator().manual_seed(1000 * args.seed + world.rank)
    history, sent = [], 0.0
    epochs = tqdm(range(args.epochs), name_of(args, gossip_every), disable=world.rank > 0)
    for _ in epochs:
        for images, labels in batches(shard, 16, generator):
            optimizer.zero_grad()
            cross_entropy(network(images), labels).backward()
            optimizer.step()
            sent += reduced if gossip_every is None else optimizer.stats().bytes_sent
        with nullcontext() if gossip_every is None else optimizer.averaged():
            history.append((accuracy(model, test), sent / 2**20))
        epochs.set_postfix_str(f"test accuracy {history[-1][0]:.1%}")
    return history


def draw(runs: dict[str, History], path: Path) -> None:
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    labels = ("test accuracy", "MiB sent per rank since the start")
    for axes, label, column in zip(panels, labels, (0, 1), strict=True):
        for name, history in runs.items():
            values = [epoch[column] for epoch in history]
            axes.plot(range(1, len(values) + 1), values, label=name)
        axes.set(xlabel="epoch", ylabel=label, ylim=(0, None))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def main() -> None:
    args = parse_arguments()
    world = start_world()
    methods = [*args.gossip_every, *([None] if args.ddp else [])]
    runs = {name_of(args, method): train(args, world, method) for method in methods}
    if world.rank == 0:
        draw(runs, args.output)
        for name, history in runs.items():
            print("{}: test accuracy {:.1%}, {:.1f} MiB sent".format(name, *history[-1]))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
