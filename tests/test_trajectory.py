"""Whole trajectories of several ranks in float64 against the dense-matrix oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from covering_arrays import OVERLAP, VIEWS, pairwise
from dense import due_matrix, mix, put, rows_of, train_densely
from problem import (
    MakeOptimizer,
    adamw,
    backward,
    flatten,
    in_one_call,
    make_params,
    nesterov,
    sgd,
    take_steps,
    wrap,
)
from ranks import run_threads
from scripted_ranks import listed
from torch import Tensor
from torch.optim import SGD, Optimizer, RMSprop

from decent_optim_wrapper import (
    Extension,
    GradientTracking,
    Group,
    Late,
    OuterOptimizer,
    Schedule,
    StateAverage,
    StateGossip,
    Topology,
    TopologyFactory,
)

STEPS = 8
DAMPING = 0.3
# What an outer step makes of the anchors and of what has been mixed; it keeps a momentum, and knows
# the mixing matrix and the learning rate.
Rule = Callable[[dict[str, Tensor], Tensor, Tensor, float], Tensor]


def rate_at(step: int) -> float:
    """A learning rate that changes, and is 0 for a while."""
    return 0.0 if step in (5, 6) else 0.05 * 0.9**step


class Plan(NamedTuple):
    """A schedule, and what takes part in its rounds, in the terms of the oracle."""

    gossip_every: int = 1
    global_avg_every: int | None = None
    mixing_rate: Callable[[int], float] = lambda step: 1.0
    lr: Callable[[int], float] = rate_at
    outer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None
    rule: Rule | None = None
    staleness: int = 1
    # Names of entries that are gossiped, or "average".
    state: Any = ()
    tracks: bool = False

    def options(self, overlap: bool) -> dict[str, Any]:
        """The arguments of the wrapper, with extensions in another order than they are called."""
        extensions: list[Extension] = []
        if self.state:
            by_name = self.state != "average"
            extensions.append(StateGossip(*self.state) if by_name else StateAverage())
        if self.outer is not None:
            extensions.append(OuterOptimizer(self.outer))
        if self.tracks:
            extensions.append(GradientTracking())
        schedule = Schedule(self.gossip_every, self.mixing_rate(0), self.global_avg_every)
        pacing = Late(self.staleness) if self.staleness > 1 else overlap
        return {"schedule": schedule, "overlap": pacing, "extensions": extensions}

    def kind(self, step: int) -> str:
        """The kind of the round that is launched at the end of a step."""
        if self.global_avg_every and (step + 1) % self.global_avg_every == 0:
            return "average"
        return "idle" if (step + 1) % self.gossip_every else "gossip"

    def matrix(self, topology: Topology, step: int) -> Tensor:
        every = self.gossip_every, self.global_avg_every
        return due_matrix(topology, *every, self.mixing_rate(step), step)

    def in_flight(self, step: int) -> bool:
        """Return whether a round is in flight during the updates of a step."""
        under_way = range(max(0, step - self.staleness + 1), step)
        return any(self.kind(launch) != "idle" for launch in under_way)


def halving(step: int) -> float:
    return 0.5 ** (step // 4)


def slowmo(beta: float, alpha: float) -> Rule:
    """SlowMo (Wang et al., 2020): u <- β u + (x_0 - x̄) / η, x <- x_0 - α η u."""

    def rule(outer: dict[str, Tensor], mixed: Tensor, matrix: Tensor, lr: float) -> Tensor:
        outer["momentum"] = beta * outer["momentum"] + (outer["anchor"] - mixed) / lr
        return outer["anchor"] - alpha * lr * outer["momentum"]

    return rule


def diloco(momentum: float, lr: float) -> Rule:
    """DiLoCo (Douillard et al., 2023): Nesterov's m <- μ m + g, φ <- φ - η (g + μ m)."""

    def rule(outer: dict[str, Tensor], mixed: Tensor, matrix: Tensor, _: float) -> Tensor:
        away = outer["anchor"] - mixed
        outer["momentum"] = momentum * outer["momentum"] + away
        return outer["anchor"] - lr * (away + momentum * outer["momentum"])

    return rule


def noloco(alpha: float, beta: float) -> Rule:
    """NoLoCo (Kolehmainen et al., 2025) with γ = β, with the means of the pair.

    δ <- α δ + β mean(θ - φ) - γ (φ - mean(φ)), φ <- φ + δ.
    """

    def rule(outer: dict[str, Tensor], mixed: Tensor, matrix: Tensor, _: float) -> Tensor:
        mean = matrix @ outer["anchor"]
        moved, apart = mixed - mean, outer["anchor"] - mean
        outer["momentum"] = alpha * outer["momentum"] + beta * moved - beta * apart
        return outer["anchor"] + outer["momentum"]

    return rule


PLAIN = Plan()
SLOWMO = Plan(
    gossip_every=2,
    global_avg_every=4,
    # The rule divides by it.
    lr=lambda step: 0.04,
    outer=partial(SGD, lr=0.7, momentum=0.4),
    rule=slowmo(beta=0.4, alpha=0.7),
)
DILOCO = Plan(
    gossip_every=100, global_avg_every=4, outer=nesterov(0.9), rule=diloco(momentum=0.9, lr=0.7)
)
NOLOCO = Plan(gossip_every=2, outer=partial(SGD, lr=0.7, momentum=0.5), rule=noloco(0.5, 0.7))
NESTEROV = Plan(mixing_rate=halving, outer=nesterov(0.6, 0.8), rule=diloco(0.6, 0.8))
PLANS = {
    "rare gossip and rarer averages": Plan(2, 6, mixing_rate=halving),
    "averages of state, too": Plan(global_avg_every=3, state="average"),
    "SlowMo": SLOWMO,
    "DiLoCo": DILOCO,
    "NoLoCo": NOLOCO,
    "Nesterov and slower mixing": NESTEROV,
    # Rounds that travel under several steps.
    "late": Plan(gossip_every=3, staleness=2, mixing_rate=halving),
    "late averages in between": Plan(gossip_every=4, global_avg_every=6, staleness=2),
    "late NoLoCo": NOLOCO._replace(staleness=2),
}
TRACKED = {
    "tracking, slower mixing": Plan(mixing_rate=lambda step: 0.4, tracks=True),
    "tracking, rare": Plan(gossip_every=3, tracks=True),
    "tracking, late": Plan(gossip_every=3, staleness=2, tracks=True),
    "tracking, averages": Plan(global_avg_every=3, tracks=True),
}
MOMENTS = ("exp_avg", "exp_avg_sq")
STATES = {"state": Plan(state=MOMENTS), "rare state": Plan(gossip_every=2, state=MOMENTS)}


# A round that is finished with the weight of another phase moves the mean.
LOPSIDED = [
    [Group([0, 1], 0.9), Group([2, 3], 0.2)],
    [Group([1, 2, 3], 0.6)],
    [Group([0, 1, 2, 3], 0.4)],
]
MIXED = {
    "other weights in every phase": listed(4, LOPSIDED),
    "greedy": TopologyFactory.create("greedy", 5),
}


def adamw_in_one_call(params: Sequence[Tensor]) -> Optimizer:
    return in_one_call(adamw(params))


def descending_nesterov(params: Sequence[Tensor]) -> Optimizer:
    return in_one_call(SGD(params, lr=0.05, momentum=0.9, nesterov=True, maximize=True))


def rmsprop(params: Sequence[Tensor]) -> Optimizer:
    return RMSprop(params, lr=0.01)


ADAMW = {"adamw": adamw, "adamw in one call": adamw_in_one_call}
BASES = {"sgd": sgd, "adamw in one call": adamw_in_one_call}
TRACKED_BASES = {"adamw": adamw, "nesterov in one call": descending_nesterov, "rmsprop": rmsprop}


def state_of(base: Optimizer, params: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """What the base keeps of every element, by name; counters are of another dtype."""
    names = [name for name, value in base.state[params[0]].items() if value.dtype == torch.float64]
    return {name: [base.state[param][name] for param in params] for name in names}


def row_of(base: Optimizer, params: Sequence[Tensor]) -> Tensor:
    """The parameters of a rank, and the state of its base."""
    return torch.cat([flatten(params), *map(flatten, state_of(base, params).values())])


class Tracking:
    """The tracking of all ranks at once: a row for each."""

    def __init__(self, bases: Sequence[Optimizer], zeros: Tensor) -> None:
        # Optimizers with a mean of gradients read ours in place of it.
        self.replaces = "betas" in bases[0].param_groups[0]
        for base in bases if self.replaces else ():
            base.param_groups[0]["betas"] = (0.0, 0.999)
        self.means, self.corrections = zeros.clone(), zeros.clone()
        self.counts = [0] * len(bases)
        self.sent: dict[int, Tensor] = {}

    def correct(self, rank: int, params: Sequence[Tensor], step: int, in_flight: bool) -> None:
        """A base reads g + c, or y = m + c, which is what is sent."""
        present = [param.grad for param in params if param.grad is not None]
        grads = flatten(present)
        if not in_flight:
            self.counts[rank] += 1
            weight = max(0.1, self.replaces / self.counts[rank])
            self.means[rank] += weight * (grads - self.means[rank])
        own = self.means[rank] if self.replaces else grads
        put([present], (own + self.corrections[rank]).unsqueeze(0))
        self.sent[step] = self.means + self.corrections

    def mix(self, matrix: Tensor, step: int) -> None:
        """c <- c + 0.3 (W y - y)."""
        self.corrections += DAMPING * (matrix @ self.sent[step] - self.sent[step])


@cache
def simulate(
    topology: Topology, plan: Plan, overlap: bool, make_optimizer: MakeOptimizer
) -> Tensor:
    """Train all ranks in one place; as `row_of`, with a row for each."""
    worlds = [make_params() for _ in range(topology.world_size)]
    bases = [make_optimizer(params) for params in worlds]
    start = rows_of(worlds)
    outer = {"anchor": start, "momentum": torch.zeros_like(start)}
    tracking = Tracking(bases, torch.zeros_like(start)) if plan.tracks else None

    def update(rank: int, step: int) -> None:
        if tracking is not None:
            tracking.correct(rank, worlds[rank], step, plan.in_flight(step))
        bases[rank].param_groups[0]["lr"] = plan.lr(step)
        bases[rank].step()

    def land(step: int) -> None:
        matrix, kind = plan.matrix(topology, step), plan.kind(step)
        mix(worlds, matrix)
        if tracking is not None:
            tracking.mix(matrix, step)
        states = [state_of(*each) for each in zip(bases, worlds, strict=True)]
        whole = kind == "average" and plan.state == "average"
        for name in states[0] if whole else set(states[0]) & set(plan.state):
            mix([state[name] for state in states], matrix)
        outer_kind = "gossip" if plan.global_avg_every is None else "average"
        if plan.rule is not None and kind == outer_kind:
            lr = plan.lr(min(step + overlap, STEPS - 1))
            outer["anchor"] = plan.rule(outer, rows_of(worlds), matrix, lr)
            put(worlds, outer["anchor"])

    train_densely(
        worlds,
        STEPS,
        overlap,
        compute=lambda rank, step: backward(worlds[rank], rank, step),
        update=update,
        land=land,
        staleness=plan.staleness,
    )
    return torch.stack([row_of(*each) for each in zip(bases, worlds, strict=True)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:GradientTracking")
@pytest.mark.parametrize(
    ("plan", "topology", "make_optimizer", "overlap", "views"),
    [
        *pairwise(PLANS, MIXED, BASES, OVERLAP, VIEWS),
        *pairwise(TRACKED, MIXED, TRACKED_BASES, OVERLAP, VIEWS),
        *pairwise(STATES, MIXED, ADAMW, OVERLAP, VIEWS),
    ],
)
def test_schedules_and_what_takes_part_in_rounds_follow_the_oracle(
    plan: Plan, topology: Topology, make_optimizer: MakeOptimizer, overlap: bool, views: bool
) -> None:
    """As rounds alone do in the properties, where topologies and weights are drawn."""
    overlap = overlap or plan.staleness > 1

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params()
        options: Any = {"topology": topology, "param_as_bucket_view": views}
        options |= plan.options(overlap)
        optimizer = wrap(params, group, make_optimizer(params), **options)
        assert len(optimizer.buckets) >= 2
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = plan.lr(step)
            optimizer.mixing_rate = plan.mixing_rate(step)
            take_steps(optimizer, params, rank, [step])
        assert optimizer.round == STEPS
        optimizer.synchronize()
        return row_of(optimizer, params)

    rows = torch.stack(run_threads(topology.world_size, main))
    expected = simulate(topology, plan, overlap, make_optimizer)
    torch.testing.assert_close(rows, expected, rtol=1e-11, atol=1e-11)
    # The same rounds without what takes part in them, or else other rounds.
    plain = plan._replace(outer=None, rule=None, state=(), tracks=False)
    other = simulate(topology, plain if plain != plan else PLAIN, overlap, make_optimizer)
    assert (other - expected).abs().max() > 1e-3
