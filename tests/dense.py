"""The oracle: all ranks in one place, mixed by dense matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from problem import MakeOptimizer, backward, flatten, make_params
from scripted_ranks import LR, MOMENTUM, ScriptRunner, World, listed, wide
from torch import Tensor

from decent_optim_wrapper import Topology

# The parameters of every rank.
Worlds = Sequence[Sequence[Tensor]]


def oracle(
    topology: Topology, steps: int, overlap: bool, make_optimizer: MakeOptimizer, seed: int = 0
) -> Tensor:
    """Train the regression on all ranks; as `train_densely`."""
    worlds = [make_params(seed) for _ in range(topology.world_size)]
    bases = [make_optimizer(params) for params in worlds]
    return train_densely(
        worlds,
        steps,
        overlap,
        compute=lambda rank, step: backward(worlds[rank], rank, step),
        update=lambda rank, step: bases[rank].step(),
        land=lambda step: mix(worlds, topology.mixing_matrix(step)),
    )


def train_densely(
    worlds: Worlds,
    steps: int,
    overlap: bool,
    compute: Callable[[int, int], Any],
    update: Callable[[int, int], Any],
    land: Callable[[int], None],
    staleness: int = 1,
    change: Callable[[int, int], Any] = lambda rank, step: None,
) -> Tensor:
    """Train all ranks in one place: x <- W x - u(x) with overlap, else x <- W (x - u(x)).

    If they may change after the launch of s, x <- x + (W s - s) - u(x).

    Args:
        worlds: the parameters of every rank.
        steps: how many.
        overlap: whether a round is mixed in a later step than the one that launches it.
        compute: sets the gradients of a rank in a step.
        update: makes the update of a rank in a step.
        land: mixes what was launched at the end of a step.
        staleness: steps from the launch to the mixing, with overlap.
        change: changes the parameters of a rank after a step, with overlap.

    Returns:
        float64 of shape (world_size, number of parameters), nothing left in flight.
    """
    starts: list[Tensor] = []

    def land_late(step: int) -> None:
        away = rows_of(worlds) - starts[step]
        put(worlds, starts[step])
        land(step)
        put(worlds, rows_of(worlds) + away)

    for step in range(steps):
        for rank in range(len(worlds)):
            compute(rank, step)
        if overlap and step >= staleness:
            land_late(step - staleness)
        for rank in range(len(worlds)):
            update(rank, step)
        starts.append(rows_of(worlds))
        for rank in range(len(worlds)):
            change(rank, step)
        if not overlap:
            land(step)
    if overlap:
        for step in range(steps - staleness, steps):
            land_late(step)
    return rows_of(worlds)


def rows_of(worlds: Worlds) -> Tensor:
    """The parameters of every rank as a row of one matrix."""
    return torch.stack([flatten(params) for params in worlds])


def mix(worlds: Worlds, matrix: Tensor) -> None:
    """x <- W x."""
    put(worlds, matrix @ rows_of(worlds))


@torch.no_grad()
def put(worlds: Worlds, rows: Tensor) -> None:
    """Set the parameters of every rank, in place: an optimizer's state belongs to them."""
    for row, params in zip(rows, worlds, strict=True):
        parts = row.split([param.numel() for param in params])
        for param, part in zip(params, parts, strict=True):
            param.copy_(part.view(param.shape))


def due_matrix(
    topology: Topology, gossip_every: int, global_avg_every: int | None, rate: float, step: int
) -> Tensor:
    """What the schedule mixes with at the end of a step; the identity where nothing is due."""
    n, done = topology.world_size, step + 1
    if global_avg_every and done % global_avg_every == 0:
        return torch.full((n, n), 1 / n, dtype=torch.float64)
    identity = torch.eye(n, dtype=torch.float64)
    if done % gossip_every:
        return identity
    return (1 - rate) * identity + rate * topology.mixing_matrix(done // gossip_every - 1)


class Oracle(ScriptRunner):
    """Performs a script of calls, in float64 or complex128; every value has the ranks in front."""

    def __init__(self, world: World) -> None:
        self.world, self.topology = world, listed(world.size, world.phases)
        self.round = self.steps = 0
        self.values = [self.stack(index, range(world.size)) for index in range(len(world.specs))]
        self.velocity = [torch.zeros_like(value) for value in self.values]
        self.live = [index for index, spec in enumerate(world.specs) if not spec.frozen]
        self.in_flight: list[int] = []
        self.relaunch = False
        self.snapshot: list[Tensor] | None = None

    def stack(self, index: int, ranks: range, *key: int) -> Tensor:
        spec = self.world.spec(index)
        return torch.stack([wide(spec.draw(index, rank, *key)) for rank in ranks])

    def copies(self) -> list[Tensor]:
        return list(self.values)

    def step(self, lr: float = LR) -> None:
        self.steps += 1
        ranks = range(self.world.size)
        grads = {i: self.values[i] - self.stack(i, ranks, self.steps) for i in self.live}
        if self.snapshot is not None:
            self.snapshot, self.in_flight, self.relaunch = None, [], False
        self.synchronize()
        for index, grad in grads.items():
            self.velocity[index] = MOMENTUM * self.velocity[index] + grad
            self.values[index] = self.values[index] - lr * self.velocity[index]
        self.in_flight = list(self.live)
        self.round += 1
        if not self.world.options["overlap"]:
            self.land()

    def step_at_lr_zero(self) -> None:
        self.step(0.0)

    def land(self) -> None:
        """x <- W x for what was launched last."""
        options = self.world.options
        every = options.get("gossip_every", 1), options.get("global_avg_every")
        rate = options.get("mixing_rate", 1.0)
        matrix = due_matrix(self.topology, *every, rate, self.round - 1)
        for index in self.in_flight:
            value = self.values[index]
            self.values[index] = torch.tensordot(matrix.to(value.dtype), value, dims=1)
        self.in_flight, self.relaunch = [], False

    def synchronize(self) -> None:
        if self.snapshot is not None:
            raise RuntimeError("an average is in place")
        if self.relaunch:
            # What was in flight when the state was saved; it takes in what has grown since.
            self.in_flight = list(self.live)
        self.land()

    def grow(self) -> None:
        self.live.append(len(self.values))
        self.values.append(self.stack(len(self.values), range(self.world.size)))
        self.velocity.append(torch.zeros_like(self.values[-1]))

    def thaw(self) -> None:
        self.live = list(range(len(self.values)))

    def reload(self) -> None:
        if self.snapshot is not None:
            self.snapshot, self.in_flight, self.relaunch = None, [], False
        self.relaunch |= any(self.values[index].numel() for index in self.in_flight)
        self.in_flight = []

    resume = reload

    def average(self) -> None:
        # What has grown inside an average joins the next one, and is restored as well.
        kept = self.snapshot or []
        self.snapshot = [*kept, *self.values[len(kept) :]]
        self.values = [value.mean(0, keepdim=True).expand_as(value) for value in self.values]

    def average_for_good(self) -> None:
        self.average()
        self.snapshot, self.in_flight, self.relaunch = None, [], False

    def revert(self) -> None:
        if self.snapshot is None:
            raise RuntimeError("no average is in place")
        self.values[: len(self.snapshot)] = self.snapshot
        self.snapshot = None

    def averaged(self) -> float:
        return 0.0 if self.snapshot is None else self.look()

    def look(self) -> float:
        away = [self.values[i] - self.values[i].mean(0, keepdim=True) for i in self.live]
        return math.sqrt(sum(a.abs().square().sum().item() for a in away) / self.world.size)
