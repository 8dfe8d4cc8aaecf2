"""Rounds that travel under several steps, in float64 against dense matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from covering import VIEWS, named, pairwise
from dense import put
from problem import (
    TINY_CAP_MB,
    MakeOptimizer,
    adamw,
    backward,
    flatten,
    in_one_call,
    make_params,
    nesterov,
    sgd,
)
from ranks import run_threads
from torch import Tensor
from torch.optim import Optimizer

from decent_optim_wrapper import DecentOptimWrapper, Schedule, Topology, TopologyFactory

STEPS = 14


class Stale(NamedTuple):
    """A schedule, in the terms of the oracle."""

    gossip_every: int
    staleness: int
    global_avg_every: int | None = None
    mixing_rate: float = 1.0
    outer: float | None = None

    def schedule(self) -> Schedule:
        return Schedule(
            gossip_every=self.gossip_every,
            staleness=self.staleness,
            global_avg_every=self.global_avg_every,
            mixing_rate=self.mixing_rate,
            outer=None if self.outer is None else nesterov(self.outer),
        )

    def matrix(self, topology: Topology, step: int) -> Tensor | None:
        """What is launched at the end of a step; None if nothing is."""
        n, steps = topology.world_size, step + 1
        if self.global_avg_every is not None and steps % self.global_avg_every == 0:
            return torch.full((n, n), 1 / n, dtype=torch.float64)
        if steps % self.gossip_every:
            return None
        mixing = topology.mixing_matrix(step // self.gossip_every)
        identity = torch.eye(n, dtype=torch.float64)
        return (1 - self.mixing_rate) * identity + self.mixing_rate * mixing


class Flying(NamedTuple):
    """A round in flight: its matrix, and the parameters of its launch."""

    step: int
    matrix: Tensor
    start: Tensor


def dense(topology: Topology, plan: Stale, make: MakeOptimizer, steps: int = STEPS) -> list[Tensor]:
    """x <- x + (W s - s) for what was launched `staleness` steps ago; rows after every step."""
    worlds = [make_params() for _ in range(topology.world_size)]
    bases = [make(params) for params in worlds]
    flying: Flying | None = None
    anchor = rows_of(worlds)
    momentum = torch.zeros_like(anchor)
    rows = []
    for step in range(steps):
        for rank, params in enumerate(worlds):
            backward(params, rank, step)
        if flying is not None and step - flying.step == plan.staleness:
            now = rows_of(worlds)
            mixed = flying.matrix @ flying.start
            if plan.outer is not None:
                away = anchor - mixed
                momentum = plan.outer * momentum + away
                anchor = mixed = anchor - 0.7 * (away + plan.outer * momentum)
            put(worlds, now + mixed - flying.start)
            flying = None
        for base in bases:
            base.step()
        matrix = plan.matrix(topology, step)
        if matrix is not None:
            assert flying is None, "one round in flight at a time"
            flying = Flying(step, matrix, rows_of(worlds))
        rows.append(rows_of(worlds))
    return rows


def rows_of(worlds: Sequence[Sequence[Tensor]]) -> Tensor:
    return torch.stack([flatten(params) for params in worlds])


def train(
    topology: str,
    plan: Stale,
    make: MakeOptimizer,
    world_size: int = 4,
    steps: int = STEPS,
    **options: Any,
) -> list[Tensor]:
    """The same by the library: rows of all ranks after every step."""

    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        params = make_params()
        optimizer = DecentOptimWrapper(
            make(params),
            process_group=group,
            topology=topology,
            bucket_cap_mb=TINY_CAP_MB,
            schedule=plan.schedule(),
            **options,
        )
        assert len(optimizer.buckets) > 1
        rows = []
        for step in range(steps):
            backward(params, rank, step)
            optimizer.step()
            rows.append(flatten(params))
        return rows

    return [torch.stack(rows) for rows in zip(*run_threads(world_size, main), strict=True)]


PLANS = {
    "every 3, 3 steps late": Stale(3, 3),
    "every 3, 2 steps late": Stale(3, 2),
    "every 4, 4 steps late, slowed down": Stale(4, 4, mixing_rate=0.5),
    "with exact averages": Stale(2, 2, global_avg_every=6),
    "exact averages between the rounds": Stale(4, 2, global_avg_every=6),
    "with an outer optimizer": Stale(3, 3, outer=0.6),
    "with an outer optimizer, 2 steps late": Stale(4, 2, outer=0.5),
}
BASES: dict[str, Callable[[Sequence[Tensor]], Optimizer]] = {
    "SGD": sgd,
    "AdamW": adamw,
    "in one call": lambda params: in_one_call(sgd(params)),
}
TOPOLOGIES = named("ring", "alternating-exp-ring", "complete")


@pytest.mark.parametrize(
    ("plan", "topology", "base", "views"), pairwise(PLANS, TOPOLOGIES, BASES, VIEWS)
)
def test_a_late_round_is_mixed_as_by_dense_matrices(
    plan: Stale, topology: str, base: MakeOptimizer, views: bool
) -> None:
    expected = dense(TopologyFactory.create(topology, 4, 2), plan, base)
    rows = train(topology, plan, base, param_as_bucket_view=views, local_world_size=2)
    for ours, theirs in zip(rows, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert (rows[-1] - rows[0]).abs().max() > 0.1
    assert (rows[-1] - rows[-1].mean(0)).abs().max() > 1e-3
