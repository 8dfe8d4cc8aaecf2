"""Train a ResNet-18 on CIFAR-10 with gossip averaging, mixed precision and checkpoints.

    torchrun --standalone --nproc-per-node 4 examples/train_cifar10.py --topology one-peer-exp
    torchrun --standalone --nproc-per-node 4 examples/train_cifar10.py --resume

`--fake-data` runs the same code on random images, without a download.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import CIFAR10, FakeData
from torchvision.models import resnet18
from tqdm import tqdm

from decent_optim_wrapper import DecentOptimWrapper, TopologyFactory

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class World(NamedTuple):
    """Where this process stands."""

    rank: int
    size: int
    device: torch.device


class Training(NamedTuple):
    """All that a checkpoint holds."""

    model: nn.Module
    optimizer: DecentOptimWrapper
    scheduler: LambdaLR
    scaler: torch.amp.GradScaler


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--topology", choices=TopologyFactory.names(), default="complete")
    parser.add_argument("--local-world-size", type=int, help="ranks per node; default: torchrun's")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=128, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--warmup-epochs", type=int, default=3)
    parser.add_argument("--no-amp", action="store_true", help="train in float32")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument(
        "--fake-data", action="store_true", help="random images and labels: nothing to learn"
    )
    parser.add_argument("--fake-samples", type=int, default=512)
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/cifar10"))
    parser.add_argument("--resume", action="store_true", help="from the newest complete set")
    return parser.parse_args()


def start_world() -> World:
    """Join the process group that torchrun describes; without one, a world of one rank."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    if "RANK" not in os.environ:
        return World(0, 1, device)
    one_gpu_each = cuda and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if one_gpu_each else "gloo")
    return World(dist.get_rank(), dist.get_world_size(), device)


def load_data(args: argparse.Namespace, world: World) -> tuple[Dataset, Dataset]:
    plain = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    augmented = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), *plain]
    for_training, for_test = transforms.Compose(augmented), transforms.Compose(plain)
    if args.fake_data:
        count = args.fake_samples
        return (
            FakeData(count, (3, 32, 32), 10, for_training),
            FakeData(count // 4, (3, 32, 32), 10, for_test, random_offset=count),
        )
    if world.rank == 0:
        CIFAR10(args.data, download=True)
    barrier(world)
    return CIFAR10(args.data, True, for_training), CIFAR10(args.data, False, for_test)


def barrier(world: World) -> None:
    if world.size > 1:
        dist.barrier()


def build_model() -> nn.Module:
    """ResNet-18 with the stem for small images: a 3 x 3 convolution and no pooling."""
    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def build_training(args: argparse.Namespace, world: World, steps_per_epoch: int) -> Training:
    model = build_model().to(world.device, memory_format=torch.channels_last)
    base = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    optimizer = DecentOptimWrapper(
        base,
        local_world_size=args.local_world_size,
        topology=args.topology,
        buffers=model.buffers(),
    )
    warmup, total = args.warmup_epochs * steps_per_epoch, args.epochs * steps_per_epoch

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

    half = world.device.type == "cuda" and not args.no_amp
    scaler = torch.amp.GradScaler(world.device.type, enabled=half)
    return Training(model, optimizer, LambdaLR(optimizer, factor), scaler)


def file_name(rank: int, world: World) -> str:
    return f"rank_{rank}_of_{world.size}.pt"


def save(training: Training, folder: Path, epoch: int, world: World) -> None:
    """Every rank writes its own file; a file has its name only once it is complete."""
    target = folder / f"epoch_{epoch:04d}" / file_name(world.rank, world)
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {name: part.state_dict() for name, part in training._asdict().items()},
        target.with_suffix(".part"),
    )
    target.with_suffix(".part").rename(target)


def resume(training: Training, folder: Path, world: World) -> int:
    """Load the newest set of this world size that is complete; returns the epochs done."""
    names = [file_name(rank, world) for rank in range(world.size)]
    complete = [
        int(path.name.removeprefix("epoch_"))
        for path in folder.glob("epoch_*")
        if all((path / name).exists() for name in names)
    ]
    barrier(world)
    if not complete:
        raise SystemExit(f"--resume: no complete set of {world.size} ranks in {folder}")
    path = folder / f"epoch_{max(complete):04d}" / names[world.rank]
    saved = torch.load(path, map_location=world.device, weights_only=True)
    for name, part in training._asdict().items():
        part.load_state_dict(saved[name])
    return max(complete)


def train_epoch(
    training: Training, loader: DataLoader, args: argparse.Namespace, world: World
) -> float:
    model, optimizer, scheduler, scaler = training
    model.train()
    losses = []
    for images, labels in tqdm(loader, leave=False, disable=world.rank > 0):
        images, labels = to_device(images, labels, world)
        optimizer.zero_grad()
        with autocast(args, world):
            loss = cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader, args: argparse.Namespace, world: World) -> float:
    """Share of hits over the test images of all ranks."""
    model.eval()
    counts = torch.zeros(2, device=world.device)
    for images, labels in loader:
        images, labels = to_device(images, labels, world)
        with autocast(args, world):
            hits = model(images).argmax(dim=1) == labels
        counts += torch.stack([hits.sum(), torch.tensor(len(hits), device=world.device)])
    if world.size > 1:
        dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def to_device(images: Tensor, labels: Tensor, world: World) -> tuple[Tensor, Tensor]:
    images = images.to(world.device, memory_format=torch.channels_last, non_blocking=True)
    return images, labels.to(world.device, non_blocking=True)


def autocast(args: argparse.Namespace, world: World) -> torch.autocast:
    dtype = torch.float16 if world.device.type == "cuda" else torch.bfloat16
    return torch.autocast(world.device.type, dtype, enabled=not args.no_amp)


def main() -> None:
    args = parse_arguments()
    world = start_world()
    torch.manual_seed(world.rank)
    train_set, test_set = load_data(args, world)
    sampler = DistributedSampler(train_set, world.size, world.rank, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    test_sampler = DistributedSampler(test_set, world.size, world.rank, shuffle=False)
    test_loader = DataLoader(test_set, args.batch_size, sampler=test_sampler)
    if not len(train_loader):
        raise SystemExit("fewer samples than one batch per rank: take smaller batches or more data")
    training = build_training(args, world, len(train_loader))
    done = resume(training, args.checkpoints, world) if args.resume else 0
    if done and world.rank == 0:
        print(f"resumed after epoch {done}, round {training.optimizer.round}")
    for epoch in range(done + 1, args.epochs + 1):
        sampler.set_epoch(epoch)
        loss = train_epoch(training, train_loader, args, world)
        save(training, args.checkpoints, epoch, world)
        with training.optimizer.averaged():
            hits = accuracy(training.model, test_loader, args, world)
        if world.rank == 0:
            rate = training.scheduler.get_last_lr()[0]
            print(f"epoch {epoch}: loss {loss:.4f}, averaged model {hits:.2%}, next lr {rate:.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
