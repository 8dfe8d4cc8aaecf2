"""A model follows dense matrices in float64, however its ranks train, and whenever they mix."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from covering_arrays import VIEWS, named, pairwise
from dense import due_matrix, mix, train_densely
from modules import Odd, Training, accum_adam, adamw, backward, loss_of
from ranks import run_threads
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from decent_optim_wrapper import Schedule, Topology, TopologyFactory

RANKS, STEPS = 4, 6
CLIP = 0.3
# The rank and the step with an overflow, in the second of two accumulated batches.
OVERFLOW = (1, 2)
# The gradient of a key's bias is zero up to rounding, which Adam would blow up to a whole step.
EPS = 1e-3


BASES = {
    # The update of SGD, unlike that of Adam, depends on the scale of a gradient.
    "fused sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "adamw": partial(adamw, eps=EPS),
    "accumulating": partial(accum_adam, eps=EPS),
}
# Pairs, groups of all ranks, and both in turn.
TOPOLOGIES = {
    name: TopologyFactory.create(name, RANKS, local)
    for name, local in (("ring", 1), ("complete", 1), ("alternating-exp-ring", 2))
}
SCHEDULES = {
    "every step": Schedule(),
    "rare": Schedule(gossip_every=2, mixing_rate=0.8),
    "averages": Schedule(global_avg_every=3),
}


class Case(NamedTuple):
    """How the ranks train.

    Args:
        way: "step", "backward" or "at end" of the backward pass.
        overlap: mixes before the forward pass, with the next update, or at once.
        topology: who mixes with whom.
        base: makes the optimizer.
        schedule: of the rounds.
        views: whether the parameters are views of the buckets.
        clips: by the norm of the model, in the backward pass by that of a bucket.
        scales: with a GradScaler, and an overflow on one rank.
        batches: whose gradients are accumulated.
    """

    way: str
    overlap: Any
    topology: Topology
    base: Any
    schedule: Schedule
    views: bool
    clips: bool
    scales: bool
    batches: int

    @property
    def kind(self) -> str:
        """The way; a module does not train without overlap."""
        return self.way if self.overlap else "step"


def train(case: Case, rank: int, group: dist.ProcessGroup) -> tuple[Tensor, list[list[int]]]:
    """The parameters at the end, and the numbers of the parameters of each bucket."""
    scaler = GradScaler("cpu", init_scale=64.0, enabled=case.scales)
    options: dict[str, Any] = {
        "topology": case.topology,
        "schedule": case.schedule,
        "param_as_bucket_view": case.views,
        "overlap": case.overlap,
    }
    if case.kind != "step":
        options |= {"scaler": scaler, "grad_clip_norm": CLIP if case.clips else 0.0}
        options["update_in_backward"] = None if case.kind == "backward" else False
    way = "step" if case.kind == "step" else "backward"
    training = Training(rank, group, way, Odd(), case.base, **options)
    model, wrapped, optimizer = training.model, training.called, training.optimizer
    for step in range(STEPS):
        for part in range(case.batches):
            last = part == case.batches - 1
            loss = loss_of(wrapped, rank, case.batches * step + part)
            if case.scales and last and (rank, step) == OVERFLOW:
                loss = loss * torch.inf
            if wrapped is not model:
                wrapped.set_accumulate_grad(not last)
            backward(scaler.scale(loss))
            assert wrapped is model or optimizer.round == step + last
        if wrapped is model:
            if case.clips:
                scaler.unscale_(optimizer)
                optimizer.clip_grad_norm_(CLIP)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert bool(optimizer.stats().skipped) == (case.scales and (rank, step) == OVERFLOW)
    assert not hasattr(optimizer.optimizer, "found_inf")
    overflows = case.scales and rank == OVERFLOW[0]
    assert scaler.get_scale() == (64.0 / (1 + overflows) if case.scales else 1.0)
    result = training.end()
    numbers = {id(param): number for number, param in enumerate(model.parameters())}
    buckets = [[numbers[id(member)] for member in each.members] for each in optimizer.buckets]
    return result, buckets


def train_in_one_place(case: Case, buckets: list[list[int]]) -> Tensor:
    """As all ranks together; see `train`."""
    models = [Odd() for _ in range(RANKS)]
    worlds = [list(model.parameters()) for model in models]
    bases = [case.base(list(model.named_parameters())) for model in models]
    schedule = case.schedule

    def compute(rank: int, step: int) -> None:
        models[rank].zero_grad()
        for part in range(case.batches):
            backward(loss_of(models[rank], rank, case.batches * step + part))
        if case.clips:
            clipped = buckets if case.kind == "backward" else [[*range(len(worlds[rank]))]]
            for each in clipped:
                nn.utils.clip_grad_norm_([worlds[rank][number] for number in each], CLIP)

    def update(rank: int, step: int) -> None:
        if not case.scales or (rank, step) != OVERFLOW:
            bases[rank].step()

    def land(step: int) -> None:
        assert isinstance(schedule.gossip_every, int)
        every, averages = schedule.gossip_every, schedule.global_avg_every
        mix(worlds, due_matrix(case.topology, every, averages, schedule.mixing_rate, step))

    return train_densely(worlds, STEPS, case.overlap is True, compute, update, land)


CASES = pairwise(
    named("step", "backward", "at end"),
    {"early": "forward", "late": True, "none": False},
    TOPOLOGIES,
    BASES,
    SCHEDULES,
    VIEWS,
    {"clipped": True, "unclipped": False},
    {"scaled": True, "unscaled": False},
    {"one batch": 1, "two batches": 2},
)


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(Case(*each.values), id=each.id) for each in CASES])
def test_ranks_follow_the_oracle_whenever_they_mix(case: Case) -> None:
    """Over frozen, unused and tied parameters, and checkpoints of activations."""
    results = run_threads(RANKS, lambda rank, group: train(case, rank, group))
    found = torch.stack([params for params, _ in results])
    expected = train_in_one_place(case, results[0][1])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
