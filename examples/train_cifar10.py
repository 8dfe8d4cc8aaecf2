"""Train a ResNet-18 on CIFAR-10 with gossip averaging, mixed precision and checkpoints.

    export OMP_NUM_THREADS=1
    torchrun --standalone --nproc-per-node 4 examples/train_cifar10.py --topology one-peer-exp
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/train_cifar10.py
    torchrun --standalone --nproc-per-node 4 examples/train_cifar10.py --resume

After a restart by torchrun, training continues from the newest complete checkpoints of the launch.
`--resume` continues from an earlier launch. `--fake-data` runs the same code on random images,
without a download. It is slow on a CPU: an epoch of `--fake-data` on four ranks takes more
than four minutes of CPU time.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

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
from decent_optim_wrapper.checkpoint import Checkpoints
from decent_optim_wrapper.utils import DistInfo, init_distributed

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Training(NamedTuple):
    """The objects whose states go into a checkpoint."""

    model: nn.Module
    optimizer: DecentOptimWrapper
    scheduler: LambdaLR
    scaler: torch.amp.GradScaler


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--topology", choices=TopologyFactory.names(), default="complete")
    parser.add_argument(
        "--local-world-size", type=int, help="ranks per node; default: as torchrun says"
    )
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
    parser.add_argument("--save-every", type=int, help="in steps; default: once per epoch")
    parser.add_argument("--resume", action="store_true", help="continue an earlier launch")
    return parser.parse_args()


def start_world() -> DistInfo:
    """Join the other ranks; without torchrun, mpirun or srun there is only this one."""
    if {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}.isdisjoint(os.environ):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return DistInfo(0, 1, 0, torch.device(device), 1)
    return init_distributed()


def load_data(args: argparse.Namespace, world: DistInfo) -> tuple[Dataset, Dataset]:
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
    if world.world_size > 1:
        dist.barrier()
    return CIFAR10(args.data, True, for_training), CIFAR10(args.data, False, for_test)


def build_model() -> nn.Module:
    """ResNet-18 with the stem for small images: a 3 x 3 convolution and no pooling."""
    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def build_training(args: argparse.Namespace, world: DistInfo, steps_per_epoch: int) -> Training:
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


def this_launch() -> str | None:
    """An identifier that is the same for all restarts by torchrun, and differs between launches."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def state_to_save(training: Training) -> dict[str, Any]:
    """All that the next steps depend on; the order of the data follows from the step."""
    parts = {name: part.state_dict() for name, part in training._asdict().items()}
    return {**parts, "augmentation": torch.get_rng_state(), "launch": this_launch()}


def resume(training: Training, checkpoints: Checkpoints, args: argparse.Namespace) -> int:
    """Load the newest complete set, if there is one; return the number of steps done."""
    saved = checkpoints.load(map_location="cpu")
    if saved is None:
        return 0
    if not args.resume and (this_launch() is None or saved.state["launch"] != this_launch()):
        raise SystemExit(
            f"{args.checkpoints} has the checkpoints of another launch, up to step {saved.step}: "
            f"go on from there with --resume, or choose another folder with --checkpoints"
        )
    for name, part in training._asdict().items():
        part.load_state_dict(saved.state[name])
    torch.set_rng_state(saved.state["augmentation"])
    return saved.step


def train_step(
    training: Training, images: Tensor, labels: Tensor, args: argparse.Namespace, world: DistInfo
) -> Tensor:
    model, optimizer, scheduler, scaler = training
    model.train()
    optimizer.zero_grad()
    with autocast(args, world):
        loss = cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    return loss.detach()


@torch.no_grad()
def accuracy(
    model: nn.Module, loader: DataLoader, args: argparse.Namespace, world: DistInfo
) -> float:
    """Accuracy over the test images of all ranks, in [0, 1]."""
    model.eval()
    counts = torch.zeros(2, device=world.device)
    for images, labels in loader:
        images, labels = to_device(images, labels, world)
        with autocast(args, world):
            hits = model(images).argmax(dim=1) == labels
        counts += torch.stack([hits.sum(), torch.tensor(len(hits), device=world.device)])
    if world.world_size > 1:
        dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def to_device(images: Tensor, labels: Tensor, world: DistInfo) -> tuple[Tensor, Tensor]:
    images = images.to(world.device, memory_format=torch.channels_last, non_blocking=True)
    return images, labels.to(world.device, non_blocking=True)


def autocast(args: argparse.Namespace, world: DistInfo) -> torch.autocast:
    dtype = torch.float16 if world.device.type == "cuda" else torch.bfloat16
    return torch.autocast(world.device.type, dtype, enabled=not args.no_amp)


def load_batches(
    data: Dataset, order: list[int], args: argparse.Namespace, drop_last: bool = False
) -> DataLoader:
    # Its own generator, so that the loader does not draw from the augmentation's: a resumed
    # run then augments in the same way as one that was never stopped.
    return DataLoader(
        data, args.batch_size, sampler=order, drop_last=drop_last, generator=torch.Generator()
    )


def print_once(text: str, world: DistInfo) -> None:
    if world.rank == 0:
        print(text, flush=True)


def main() -> None:
    args = parse_arguments()
    world = start_world()
    train_set, test_set = load_data(args, world)
    sampler = DistributedSampler(train_set, world.world_size, world.rank, drop_last=True)
    test_order = list(DistributedSampler(test_set, world.world_size, world.rank, shuffle=False))
    steps_per_epoch = len(sampler) // args.batch_size
    if not steps_per_epoch:
        raise SystemExit("expected one batch per rank or more: use smaller batches or more data")
    torch.manual_seed(0)  # the same model on all ranks
    training = build_training(args, world, steps_per_epoch)
    torch.manual_seed(world.rank)  # other augmentations on each of them
    checkpoints = Checkpoints(args.checkpoints, training.optimizer)
    step = resume(training, checkpoints, args)
    if step:
        print_once(f"resumed after step {step}, round {training.optimizer.round}", world)
    for epoch in range(step // steps_per_epoch, args.epochs):
        sampler.set_epoch(epoch)
        order = list(sampler)[step % steps_per_epoch * args.batch_size :]
        batches = load_batches(train_set, order, args, drop_last=True)
        losses = []
        for images, labels in tqdm(batches, leave=False, disable=world.rank > 0):
            images, labels = to_device(images, labels, world)
            losses.append(train_step(training, images, labels, args, world))
            step += 1
            last = step == args.epochs * steps_per_epoch
            if last or step % (args.save_every or steps_per_epoch) == 0:
                checkpoints.save(step, state_to_save(training))
        with training.optimizer.averaged():
            hits = accuracy(training.model, load_batches(test_set, test_order, args), args, world)
        loss, rate = torch.stack(losses).mean(), training.scheduler.get_last_lr()[0]
        result = f"loss {loss:.4f}, averaged model {hits:.2%}, next lr {rate:.4f}"
        print_once(f"epoch {epoch + 1}: {result}", world)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
