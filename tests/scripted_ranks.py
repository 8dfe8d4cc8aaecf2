"""Ranks that perform a script of calls: what they train, and what there is to see of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from problem import in_one_call
from ranks import run_threads
from torch import Tensor, nn
from torch.optim import Optimizer

from decent_optim_wrapper import DecentOptimWrapper, Group, Schedule, Topology

LR, MOMENTUM = 0.1, 0.5
REFUSED = -1.0
# Options that say what the base is like.
OF_BASE = {"in_one_call", "adam"}


class Spec(NamedTuple):
    """A parameter to be made."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    frozen: bool

    def draw(self, *key: int) -> Tensor:
        """Values with real and imaginary part in [-1, 1], others for every key."""
        seed = sum(part * 1009**power for power, part in enumerate(key))
        generator = torch.Generator().manual_seed(seed)
        draw = 2 * torch.rand((*self.shape, 2), generator=generator, dtype=torch.float64) - 1
        value = torch.view_as_complex(draw) if self.dtype.is_complex else draw[..., 0]
        return value.to(self.dtype).contiguous()


class World(NamedTuple):
    """Ranks, a partition of them for every phase, and what they train."""

    size: int
    phases: list[list[Group]]
    specs: list[Spec]
    options: dict[str, Any]

    def spec(self, index: int) -> Spec:
        """What grows later is like the first parameter."""
        return self.specs[index] if index < len(self.specs) else self.specs[0]

    def slack(self, index: int, calls: int) -> float:
        """How far rounding leads away: four times a call, each by eps / 2 of a value below 2.

        Mixing is an average and adds nothing to the errors that are there.
        """
        dtypes = [self.spec(index).dtype]
        if self.options["comm_dtype"] is not None:
            dtypes.append(self.options["comm_dtype"])
        return 4 * max(torch.finfo(dtype).eps for dtype in dtypes) * (1 + calls)


class Seen(NamedTuple):
    """The values after a call, and the number that it gave: bytes of a step, a distance, or 0."""

    values: list[Tensor]
    number: Any


class ScriptRunner:
    """Performs calls by name and notes what there is to see after each."""

    def perform(self, calls: list[str]) -> list[Seen]:
        seen = [Seen(self.copies(), 0.0)]
        for call in calls:
            try:
                number = getattr(self, call)()
            except RuntimeError as error:
                if "average" not in str(error):
                    raise
                number = REFUSED
            seen.append(Seen(self.copies(), 0.0 if number is None else number))
        return seen

    def copies(self) -> list[Tensor]:
        raise NotImplementedError


class Trainer(ScriptRunner):
    """One rank with its optimizer."""

    def __init__(self, world: World, rank: int, group: dist.ProcessGroup | None) -> None:
        self.world, self.rank, self.group, self.steps = world, rank, group, 0
        self.groups = [[self.make(index) for index in range(len(world.specs))]]
        self.optimizer = self.wrap()

    def make(self, index: int) -> nn.Parameter:
        spec = self.world.spec(index)
        frozen = spec.frozen and index < len(self.world.specs)
        return nn.Parameter(spec.draw(index, self.rank), not frozen)

    def base(self) -> Optimizer:
        return torch.optim.SGD([{"params": g} for g in self.groups], lr=LR, momentum=MOMENTUM)

    def wrap(self, **options: Any) -> DecentOptimWrapper:
        base = self.base()
        if self.world.options.get("in_one_call"):
            in_one_call(base)
        return DecentOptimWrapper(
            base,
            topology=listed(self.world.size, self.world.phases),
            process_group=self.group,
            sync_at_start=False,
            **arguments(self.world.options),
            **options,
        )

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for group in self.groups for param in group]

    def copies(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.params]

    def step(self, lr: float = LR) -> float:
        self.steps += 1
        for index, param in enumerate(self.params):
            if param.requires_grad:
                target = self.world.spec(index).draw(index, self.rank, self.steps)
                param.grad = param.detach() - target
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return self.optimizer.stats().bytes_sent

    def step_at_lr_zero(self) -> float:
        return self.step(0.0)

    def synchronize(self) -> None:
        self.optimizer.synchronize()

    def grow(self) -> None:
        self.groups.append([self.make(len(self.params))])
        self.optimizer.add_param_group({"params": self.groups[-1]})

    def thaw(self) -> None:
        for param in self.params:
            param.requires_grad_(True)
        self.optimizer.rebuild_buckets()

    def reload(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def resume(self) -> None:
        """Go on with new parameters and a new wrapper, from the state of a checkpoint."""
        state = copy.deepcopy(self.optimizer.state_dict())
        self.groups = [
            [nn.Parameter(param.detach().clone(), param.requires_grad) for param in group]
            for group in self.groups
        ]
        self.optimizer = self.wrap()
        self.optimizer.load_state_dict(state)

    def average(self) -> None:
        self.optimizer.global_avg()

    def average_for_good(self) -> None:
        self.optimizer.global_avg(may_revert=False)

    def revert(self) -> None:
        self.optimizer.revert_global_avg()

    def averaged(self) -> float:
        with self.optimizer.averaged():
            return self.look()

    def look(self) -> float:
        return self.optimizer.consensus_distance()


def perform(
    world: World, calls: list[str], kind: type[Trainer] = Trainer
) -> list[tuple[Seen, ...]]:
    """What the ranks see at the start and after each call."""
    # Until all ranks have ended: one that is late may still connect to those that have.
    trainers = []

    def main(rank: int, group: dist.ProcessGroup) -> list[Seen]:
        trainers.append(trainer := kind(world, rank, group))
        return trainer.perform(calls)

    return list(zip(*run_threads(world.size, main), strict=True))


def arguments(options: dict[str, Any]) -> dict[str, Any]:
    """What a constructor takes, of options with fields of its schedule, and of the base."""
    of_schedule = {field.name for field in fields(Schedule)} & options.keys()
    given = {name: options[name] for name in options.keys() - of_schedule - OF_BASE}
    schedule = Schedule(**{name: options[name] for name in of_schedule})
    # A new wrapper has new ones.
    extensions = copy.deepcopy(options.get("extensions", ()))
    return {**given, "schedule": schedule, "extensions": extensions}


def listed(world_size: int, value: object, method: str = "phases") -> Topology:
    """A topology whose `phases`, or whose other method, returns this."""
    kind: type[Topology] = type("Listed", (Topology,), {method: lambda self: value})
    return kind(world_size)


def stack(ranks: Sequence[Seen], index: int) -> Tensor:
    """The ranks' values of one parameter, in the oracle's form."""
    return torch.stack([wide(rank.values[index]) for rank in ranks])


def wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
