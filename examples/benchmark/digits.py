"""Training on handwritten digits for the benchmarks, with model and data of `train_digits.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from decent_optim_wrapper import DecentOptimWrapper, Schedule
from decent_optim_wrapper.optim import mixing_rate_from_lr
from decent_optim_wrapper.topo import RandomMatching
from decent_optim_wrapper.utils import init_distributed

sys.path.insert(0, str(Path(__file__).parent.parent))
from train_digits import Data, accuracy, batches, build_model, load_data


class Row(NamedTuple):
    """One setting to train with.

    Args:
        topology: name of the topology; None trains with DistributedDataParallel.
        schedule: schedule of the gossip.
        optimizer: makes the base optimizer.
        lr: learning rate at the start.
        decay: lower the learning rate linearly to 0.
        mixing_power: the power with which the mixing rate follows the learning rate; None for a
            constant one.
        options: further options of the wrapper.
        batch: images in a batch of one rank.
        by_digit: shards by digit, or shuffled ones.
        every_epoch: evaluate after each epoch, or only after the last one. An evaluation brings the
            ranks to the same round.
    """

    topology: str | None = "ring"
    schedule: Schedule = Schedule()
    optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, momentum=0.9)
    lr: float = 0.02
    decay: bool = False
    mixing_power: float | None = None
    options: dict[str, Any] | None = None
    batch: int = 16
    by_digit: bool = True
    every_epoch: bool = True


class Epoch(NamedTuple):
    """Figures after an epoch.

    Args:
        averaged_accuracy: test accuracy of the averaged model.
        consensus_distance: between the ranks.
        sent_bytes: since the start, as the mean over the ranks.
        staleness: mean number of steps from the launch of a round to its mixing, over all rounds
            since the start and all ranks; 0 without rounds.
    """

    averaged_accuracy: float
    consensus_distance: float
    sent_bytes: float
    staleness: float = 0.0


def train(row: Row, epochs: int, seed: int) -> list[Epoch]:
    """Train as one rank of `netlab.run`."""
    world = init_distributed()
    torch.manual_seed(seed)
    model = build_model().to(world.device)
    group = dist.group.WORLD
    assert group is not None
    history = _train(row, epochs, seed, model, group)
    dist.barrier()
    return history


def train_on_threads(row: Row, world_size: int, epochs: int, seed: int) -> list[Epoch]:
    """Train with ranks that are threads of this process: no process has to be started."""
    # Before any thread computes. In a process that was forked torch replaces its pool of threads at
    # the first computation, and fails ("Invalid thread pool") if that comes on several threads.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, store = build_model(), dist.HashStore()

    def run(rank: int) -> list[Epoch]:
        group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(minutes=1))
        return _train(row, epochs, seed, deepcopy(model), group)

    with ThreadPoolExecutor(world_size) as pool:
        first, *_ = pool.map(run, range(world_size))
        return first


def _train(row: Row, epochs: int, seed: int, model: nn.Module, group: Any) -> list[Epoch]:
    device = next(model.parameters()).device
    shard, test = load_data(group.rank(), group.size(), device, row.by_digit)
    base = optimizer = row.optimizer(model.parameters(), lr=row.lr)
    if hasattr(base, "train"):
        # Schedule-Free trains other parameters than it evaluates.
        base.train()
    network = model
    if row.topology is None and group is dist.group.WORLD:
        network = DistributedDataParallel(model)
    elif row.topology is not None:
        # Other pairs with each seed: those of one schedule may suit the shards.
        is_random = row.topology == "random"
        optimizer = DecentOptimWrapper(
            base,
            topology=RandomMatching(group.size(), seed=seed) if is_random else row.topology,
            schedule=row.schedule,
            process_group=group,
            **(row.options or {}),
        )
    steps = epochs * -(-len(shard.labels) // row.batch)
    decay = LambdaLR(base, lambda step: 1 - step / steps if row.decay else 1.0)
    generator = torch.Generator().manual_seed(1000 * seed + group.rank())
    history, traffic = [], torch.zeros(3, dtype=torch.float64)
    for epoch in range(1, epochs + 1):
        for images, labels in batches(shard, row.batch, generator):
            optimizer.zero_grad()
            cross_entropy(network(images), labels).backward()
            if row.topology is None and network is model:
                _reduce_gradients(model, group)
            optimizer.step()
            decay.step()
            if row.mixing_power is not None:
                optimizer.mixing_rate = mixing_rate_from_lr(base, row.lr, row.mixing_power)
            traffic += step_traffic(model, optimizer, group.size())
        if row.every_epoch or epoch == epochs:
            history.append(evaluate(model, optimizer, test, traffic, group))
    if isinstance(optimizer, DecentOptimWrapper):
        optimizer.synchronize()
    return history


def _reduce_gradients(model: nn.Module, group: Any) -> None:
    """What DistributedDataParallel does, which does not take ranks that are threads."""
    for param in model.parameters():
        if param.grad is not None:
            group.allreduce([param.grad]).wait()
            param.grad /= group.size()


def step_traffic(model: nn.Module, optimizer: torch.optim.Optimizer, world_size: int) -> Tensor:
    """Bytes that this rank sent in the last step, rounds that it mixed, and their staleness.

    The bytes of DDP are those of a ring all-reduce.
    """
    if isinstance(optimizer, DecentOptimWrapper):
        stats = optimizer.stats()
        return torch.tensor([stats.bytes_sent, stats.staleness > 0, stats.staleness])
    copies = 2 * (1 - 1 / world_size)
    return torch.tensor([copies * sum(param.nbytes for param in model.parameters()), 0, 0])


@contextmanager
def evaluating(optimizer: Any) -> Iterator[None]:
    """Let an optimizer that evaluates other parameters than it trains put these in place."""
    base = optimizer.optimizer if isinstance(optimizer, DecentOptimWrapper) else optimizer
    if not hasattr(base, "eval"):
        yield
        return
    base.eval()
    yield
    base.train()


def evaluate(
    model: nn.Module, optimizer: torch.optim.Optimizer, test: Data, traffic: Tensor, group: Any
) -> Epoch:
    """Figures of all ranks; collective."""
    apart = 0.0
    if isinstance(optimizer, DecentOptimWrapper):
        # First: it brings all ranks to the same round, for which an all-reduce would wait.
        with optimizer.averaged(), evaluating(optimizer):
            hits = accuracy(model, test)
        apart = optimizer.consensus_distance()
    else:
        with evaluating(optimizer):
            hits = accuracy(model, test)
    of_all = traffic.clone()
    group.allreduce([of_all]).wait()
    sent, mixed, staleness = of_all.tolist()
    return Epoch(
        averaged_accuracy=hits,
        consensus_distance=apart,
        sent_bytes=sent / group.size(),
        staleness=staleness / mixed if mixed else 0.0,
    )
