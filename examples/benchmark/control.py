"""The time to DDP's loss with real ranks that compute: a control of `time_to_loss.py`.

    sudo python examples/benchmark/control.py --ratios 0.5 4

Four processes train the GPT of `time_to_loss.py` behind rate-limited links. A method trains at its
best learning rate for as many steps as it needs to have DDP's loss, both from `time_to_loss.csv`.
So the losses should be the same, and the seconds compare. The rate of the links is such that an
all-reduce of the gradients takes so many times the step without communication, which the script
measures first. "Faster" is relative to the first method. The ranks share the cores of this machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import netlab
import torch
import torch._dynamo  # the first optimizer step would import it, in every rank
import torch.distributed as dist
from methods import METHODS, Recipe
from regret import SETTINGS
from simulated_ranks import BETAS
from stacked_gpt import SMALL
from step_time import HEADERS
from time_to_loss import RESULTS, SEEDS, Results, Row, best, rate, steps_needed
from torch import Tensor, nn
from torch.optim import Optimizer

from decent_optim_wrapper.optim import AdamW, lr_scheduler_fn_cosine_with_warmup
from decent_optim_wrapper.topo import Group
from decent_optim_wrapper.utils import init_distributed

# By the optimizer of a row, the base of the ranks; the first one with which a method was trained.
BASES: dict[str, type[Optimizer]] = {"AdamW": torch.optim.AdamW, "AdamW, noise of 4": AdamW}


class Part(nn.Module):
    """One matrix, which a module reads when it is called."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self) -> Tensor:
        return self.weight.unsqueeze(0)


class Called(Sequence[Tensor]):
    """What modules return, each called when it is read."""

    def __init__(self, modules: nn.ModuleList) -> None:
        self._modules = modules

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, place: Any) -> Any:
        return self._modules[place]()


class GPT(nn.Module):
    """The model of one rank; its loss."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        parts = SMALL.split(SMALL.initial_weights(seed).unsqueeze(0))
        self.parts = nn.ModuleList(Part(part[0]) for part in parts)

    def forward(self, pieces: Tensor) -> Tensor:
        return SMALL.stacked_loss(Called(self.parts), pieces.unsqueeze(0))


class Plan(NamedTuple):
    """How a method trains.

    Args:
        base: the optimizer.
        lr: its best learning rate.
        steps: of the schedule, and of the training.
    """

    base: type[Optimizer]
    lr: float
    steps: int

    def recipe(self) -> Recipe:
        warmup = self.steps // 10
        return Recipe(
            partial(self.base, lr=self.lr, betas=BETAS),
            partial(lr_scheduler_fn_cosine_with_warmup, t_max=self.steps - warmup, t_warmup=warmup),
        )


class Trained(NamedTuple):
    """The seconds of a training, and the loss of the average of the ranks."""

    seconds: float
    loss: float


def train(method: str, plan: Plan, seed: int, steps: int) -> Trained:
    """Run in every rank: the first `steps` steps of a plan."""
    init_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = GPT(seed)
    training = METHODS[method](model, plan.recipe())
    generator = torch.Generator().manual_seed(seed)
    SMALL.batch(torch.Generator(), ranks)  # reads the text
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        training.step(SMALL.batch(generator, ranks)[rank])
    training.finish()
    dist.barrier()
    seconds = time.perf_counter() - start
    flat = torch.cat([part.weight.detach().flatten() for part in model.parts])
    dist.all_reduce(flat)
    loss = SMALL.validation_loss(flat / ranks) if rank == 0 else 0.0
    return Trained(seconds, loss)


def plan_of(method: str, seeds: Sequence[int] = SEEDS) -> Plan | None:
    """The best learning rate of a method, and its steps until DDP's loss; None if not measured."""
    results, name = Results(RESULTS), SETTINGS.get(method, ("", "DDP"))[1]
    for optimizer, base in BASES.items():
        row = Row(name, optimizer=optimizer)
        found, needed = best(results, row, seeds), steps_needed(results, row, seeds)
        if found is not None and needed is not None:
            return Plan(base, rate(found.exponent), round(needed * SMALL.steps))
    return None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 4], metavar="RATIO")
    default = [name for name in SETTINGS if name in METHODS]
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=default)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=float, default=1.0, help="of the steps that are made")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    bare = plan_of("no communication")
    with netlab.lab(args.ranks, "") as where:
        steps = max(1, int(100 * args.part))
        alone = netlab.run(
            where, args.ranks, train, "no communication", bare, args.seed, steps, timeout=600
        )
    computing = max(each.seconds for each in alone) / steps
    print(f"a step without communication takes {1000 * computing:.1f} ms")
    print("| all-reduce / computing | method | steps | s | faster | loss |")
    print("|---" * 6 + "|")
    sent = Group(range(args.ranks)).copies_sent * 4 * SMALL.parameters * 8 * HEADERS
    for ratio in args.ratios:
        link = netlab.possible(f"{sent / (ratio * computing) / 1e3:.0f}kbit")
        base = None
        with netlab.lab(args.ranks, link) as where:
            for method in args.methods:
                plan = plan_of(method)
                if plan is None:
                    continue
                steps = max(1, int(plan.steps * args.part))
                call = (train, method, plan, args.seed, steps)
                seconds, loss = netlab.run(where, args.ranks, *call, timeout=1200)[0]
                base = base or seconds
                cells = (f"{ratio:g}", method, steps, f"{seconds:.1f}", f"{base / seconds:.2f}")
                print(f"| {' | '.join(map(str, cells))} | {loss:.3f} |", flush=True)


if __name__ == "__main__":
    main()
