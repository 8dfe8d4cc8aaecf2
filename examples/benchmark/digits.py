"""Training on handwritten digits for the benchmarks, with model and data of `train_digits.py`."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import progress
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from decent_optim_wrapper import DecentOptimWrapper, Schedule
from decent_optim_wrapper.topo import RandomMatching

sys.path.insert(0, str(Path(__file__).parent.parent))
from train_digits import Data, accuracy, batches, build_model, load_data

Result = TypeVar("Result")
SHARDS = {"shuffled": False, "by digit": True}


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


class Ends(NamedTuple):
    """Runs that differ only in their seeds.

    Args:
        lr: their learning rate.
        histories: the figures of each run by epoch.
    """

    lr: float
    histories: list[list[Epoch]]

    def mean(self, figure: str) -> float:
        """The mean of a figure at the end of the runs."""
        return statistics.mean(getattr(history[-1], figure) for history in self.histories)

    @property
    def accuracy(self) -> str:
        """The accuracy of the averaged model at the end, with its range."""
        return spread([history[-1].averaged_accuracy for history in self.histories])

    @property
    def mib_sent(self) -> float:
        """MiB sent per rank."""
        return self.mean("sent_bytes") / 2**20


def spread(hits: Sequence[float]) -> str:
    """The mean and the range of accuracies, in percent."""
    return f"{100 * statistics.mean(hits):.1f} % ({100 * min(hits):.1f} to {100 * max(hits):.1f})"


# Trains a setting on a number of ranks, with the best of some learning rates.
Search = Callable[[Row, int, Sequence[float]], Ends]


def parser_of(text: str, seeds: Sequence[int]) -> argparse.ArgumentParser:
    """A parser of the options that all benchmarks on digits have."""
    parser = argparse.ArgumentParser(description=text.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=seeds)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    return parser


@contextmanager
def searching(args: argparse.Namespace, cells: int) -> Iterator[Search]:
    """Train in processes, each with its ranks as threads, and show how many cells are done.

    The first seed chooses the learning rate. Yields the function that trains a cell.
    """
    # Forked before any thread runs: importing torch takes longer than a run.
    with (
        ProcessPoolExecutor(args.jobs, get_context("fork")) as pool,
        progress.bar(cells, "cell") as bar,
    ):

        def search(row: Row, world_size: int, lrs: Sequence[float]) -> Ends:
            def run(lr: float, seed: int) -> Future[list[Epoch]]:
                setting = row._replace(lr=lr)
                return pool.submit(train_on_threads, setting, world_size, args.epochs, seed)

            first, *others = args.seeds
            tried = {lr: run(lr, first) for lr in lrs}
            best = max(lrs, key=lambda lr: tried[lr].result()[-1].averaged_accuracy)
            runs = [tried[best], *(run(best, seed) for seed in others)]
            ends = Ends(best, [each.result() for each in runs])
            bar.update()
            return ends

        yield search


def train_on_threads(row: Row, world_size: int, epochs: int, seed: int) -> list[Epoch]:
    """Train with ranks that are threads of this process; the figures by epoch."""
    return on_threads(partial(_train, row, epochs, seed), world_size, seed)


def on_threads(main: Callable[[nn.Module, Any], Result], world_size: int, seed: int) -> Result:
    """Call a function of a model and a process group on threads; the result of rank 0.

    All ranks have the same model. No process has to be started.
    """
    # Before any thread computes. In a process that was forked torch replaces its pool of threads at
    # the first computation, and fails ("Invalid thread pool") if that comes on several threads.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, store = build_model(), dist.HashStore()

    def run(rank: int) -> Result:
        group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(minutes=2))
        return main(deepcopy(model), group)

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
    if row.topology is not None:
        # Other pairs with each seed: the pairs of one schedule may suit the shards.
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
            cross_entropy(model(images), labels).backward()
            if row.topology is None:
                _reduce_gradients(model, group)
            optimizer.step()
            decay.step()
            if row.mixing_power is not None:
                falling = (base.param_groups[0]["lr"] / row.lr) ** row.mixing_power
                optimizer.mixing_rate = max(1e-3, falling)
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

    The bytes of DDP are computed for a ring all-reduce.
    """
    if isinstance(optimizer, DecentOptimWrapper):
        stats = optimizer.stats()
        return torch.tensor([stats.bytes_sent, stats.staleness > 0, stats.staleness])
    copies = 2 * (1 - 1 / world_size)
    return torch.tensor([copies * sum(param.nbytes for param in model.parameters()), 0, 0])


@contextmanager
def evaluating(optimizer: Any) -> Iterator[None]:
    """Put the parameters in place that the optimizer evaluates, if it trains others."""
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
