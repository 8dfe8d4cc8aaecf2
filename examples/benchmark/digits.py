"""Training on handwritten digits for the benchmarks, with model and data of `train_digits.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from decent_optim_wrapper import DecentOptimWrapper, Schedule
from decent_optim_wrapper.optim import QGSGD, mixing_rate_from_lr
from decent_optim_wrapper.utils import init_distributed

sys.path.insert(0, str(Path(__file__).parent.parent))
from train_digits import Data, accuracy, batches, build_model, load_data


class Row(NamedTuple):
    """One setting to train with, on shards by digit.

    Args:
        topology: name of the topology; None trains with DistributedDataParallel.
        schedule: schedule of the gossip.
        optimizer: SGD with momentum, or QGSGD.
        lr: learning rate at the start.
        decay: lower the learning rate linearly to 0.
        mixing_power: the power with which the mixing rate follows the learning rate; None for a
            constant one.
    """

    topology: str | None = "ring"
    schedule: Schedule = Schedule()
    optimizer: type[torch.optim.SGD] | type[QGSGD] = torch.optim.SGD
    lr: float = 0.02
    decay: bool = False
    mixing_power: float | None = None


class Epoch(NamedTuple):
    """Figures after an epoch; bytes since the start, as the mean over the ranks."""

    averaged_accuracy: float
    consensus_distance: float
    sent_bytes: float


def train(row: Row, epochs: int, seed: int) -> list[Epoch]:
    """Train as one rank of `netlab.run`."""
    world = init_distributed()
    torch.manual_seed(seed)
    shard, test = load_data(world.rank, world.world_size, world.device, by_digit=True)
    model = network = build_model().to(world.device)
    base = optimizer = row.optimizer(model.parameters(), lr=row.lr, momentum=0.9)
    if row.topology is None:
        network = DistributedDataParallel(model)
    else:
        optimizer = DecentOptimWrapper(base, topology=row.topology, schedule=row.schedule)
    steps = epochs * -(-len(shard.labels) // 16)
    decay = LambdaLR(base, lambda step: 1 - step / steps if row.decay else 1.0)
    generator = torch.Generator().manual_seed(1000 * seed + world.rank)
    history, sent = [], 0.0
    for _ in range(epochs):
        for images, labels in batches(shard, 16, generator):
            optimizer.zero_grad()
            cross_entropy(network(images), labels).backward()
            optimizer.step()
            decay.step()
            if row.mixing_power is not None:
                optimizer.mixing_rate = mixing_rate_from_lr(base, row.lr, row.mixing_power)
            sent += sent_bytes(model, optimizer, world.world_size)
        history.append(evaluate(model, optimizer, test, sent))
    dist.barrier()
    return history


def sent_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, world_size: int) -> float:
    """Bytes that this rank sent in the last step; those of a ring all-reduce for DDP."""
    if isinstance(optimizer, DecentOptimWrapper):
        return optimizer.stats().bytes_sent
    return 2 * (1 - 1 / world_size) * sum(param.nbytes for param in model.parameters())


def evaluate(model: nn.Module, optimizer: torch.optim.Optimizer, test: Data, sent: float) -> Epoch:
    mean_sent = torch.tensor(sent)
    dist.all_reduce(mean_sent)
    mean_sent /= dist.get_world_size()
    if not isinstance(optimizer, DecentOptimWrapper):
        return Epoch(accuracy(model, test), 0.0, mean_sent.item())
    with optimizer.averaged():
        averaged = accuracy(model, test)
    return Epoch(averaged, optimizer.consensus_distance(), mean_sent.item())
