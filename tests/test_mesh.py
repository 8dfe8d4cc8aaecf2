"""Gossip on one dimension of a mesh: the trajectory is that of the unsharded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from meshes import (
    CAP_MB,
    LAYOUTS,
    STEPS,
    Replica,
    difference,
    run_spread,
    run_whole,
    start,
)
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from decent_optim_wrapper import DecentOptimWrapper, Late, OuterOptimizer, Schedule
from decent_optim_wrapper.codecs import INT4
from decent_optim_wrapper.ddp import DecentralizedDataParallel
from decent_optim_wrapper.optim import AccumAdamW

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("ranks_on_a_mesh"),
]

Make = Callable[[Sequence[Tensor]], Optimizer]
# Whatever the layout, the rounding of a sum may differ.
EXACT = 1e-12
# Gossip follows the first average.
AVERAGE_EVERY = 3
CLIP = 0.05
NORMS = (2.0, float("inf"), 1.0)


def nesterov(params: Sequence[Tensor]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
adamw = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)
BASES: dict[str, Make] = {
    "fused adamw": partial(adamw, fused=True),
    "sgd": sgd,
    "accumulating": partial(AccumAdamW, lr=0.02, accum_iter=2),
    "foreach sgd": partial(sgd, foreach=True),
    "foreach adamw": partial(adamw, foreach=True),
}
AVERAGES = Schedule(global_avg_every=AVERAGE_EVERY)
SCHEDULES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "outer": lambda: {"schedule": AVERAGES, "extensions": [OuterOptimizer(nesterov)]},
    "averages": lambda: {"schedule": AVERAGES},
    "late": lambda: {"schedule": Schedule(gossip_every=2), "overlap": Late(2)},
}
# Mixing before a forward pass has the trajectory of mixing within the step.
OVERLAPS = (True, "forward", False)


class Case(NamedTuple):
    """How a replica is spread, and how it trains."""

    layout: str
    base: str
    schedule: str
    # Unless the round travels under several steps, which it always overlaps.
    overlap: Any
    # Of the gradients, which are clipped.
    norm_type: float


# Each way to spread a replica once; FSDP and tensor parallelism by themselves are in `WAYS`.
ONCE = LAYOUTS.keys() - {"tp inside", "fsdp inside", "only blocks"}
ROTATING = (cycle(each) for each in (BASES, SCHEDULES, OVERLAPS, NORMS))
CASES = [Case(*row) for row in zip(sorted(ONCE), *ROTATING, strict=False)]


class Trained(NamedTuple):
    """What became of a case on one rank."""

    replica: int
    params: dict[str, Any]
    # Of the gradients in each step.
    norms: list[float]
    # To the mean of the replicas, with the last round in flight and without it.
    distances: tuple[float, float]


def train(spread: Replica, case: Case) -> Trained:
    optimizer = spread.wrap(
        BASES[case.base], **{"overlap": case.overlap, **SCHEDULES[case.schedule]()}
    )
    assert len(optimizer.buckets) >= 2
    norms = []
    for step in range(STEPS):
        spread.backward(step)
        norms.append(optimizer.clip_grad_norm_(CLIP, case.norm_type).item())
        optimizer.step()
        if step == 1:
            # FSDP gathers parameters in this forward pass, and would go on with them.
            with optimizer.averaged(), torch.no_grad():
                spread.forward(step)
    with_round = optimizer.consensus_distance()
    optimizer.synchronize()
    distances = with_round, optimizer.consensus_distance()
    return Trained(spread.replica, spread.full(), norms, distances)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.layout)
def test_a_replica_trains_as_an_unsharded_one_however_it_is_spread(case: Case) -> None:
    """Its gradients are clipped by the norm of the whole replica; evaluating changes nothing."""
    layout = LAYOUTS[case.layout]
    whole = run_whole(layout.replicas, train, case)
    for found in run_spread(layout, train, case):
        expected = whole[found.replica]
        assert difference(found.params, expected.params) < EXACT
        assert difference(found.params, start()) > 1e-4
        assert found.norms == pytest.approx(expected.norms, rel=1e-10)
        assert min(found.norms) > CLIP
        assert found.distances == pytest.approx(expected.distances, rel=1e-10)
        # A round that has been in flight since the last step brings the replicas closer.
        with_round, distance = found.distances
        assert distance < with_round or case.overlap is not True or case.schedule == "late"


# The replica, and its parameters after the last round.
Ended = tuple[int, dict[str, Any]]


def ended(spread: Replica, optimizer: DecentOptimWrapper) -> Ended:
    assert len(optimizer.buckets) >= 2
    assert optimizer.round == STEPS
    optimizer.synchronize()
    return spread.replica, spread.full()


def end_early(spread: Replica) -> DecentOptimWrapper:
    optimizer = spread.wrap(sgd)

    def closure(step: int) -> float:
        spread.backward(step)
        with torch.no_grad():
            # It gathers what is updated.
            return spread.forward(step).sum().item()

    with Join([optimizer]):
        for step in range(STEPS - 2 * (spread.replica == 1)):
            optimizer.step(partial(closure, step))
    return optimizer


def idle_early(replica: Replica) -> DecentOptimWrapper:
    """The same without Join."""
    optimizer = replica.wrap(sgd)
    for step in range(STEPS):
        if replica.replica == 1 and step == STEPS - 2:
            optimizer.param_groups[0]["lr"] = 0.0
        replica.backward(step)
        optimizer.step()
    return optimizer


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


def scale(spread: Replica) -> DecentOptimWrapper:
    """Train a pipeline, whose plain tensors may be views of their buckets."""
    optimizer, scaler = spread.wrap(sgd, param_as_bucket_view=True), make_scaler()
    for step in range(STEPS):
        spread.backward(step, scaler)
        overflows = (spread.replica, step) == (0, 2)
        # On all ranks of the replica: torch looks at each rank's own gradients only.
        multiply_gradients(spread.model, float("inf") if overflows else 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.stats().skipped == overflows
    return optimizer


def multiply_gradients(model: nn.Module, factor: float) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(factor)


def mix_before_the_forward_pass(spread: Replica) -> DecentOptimWrapper:
    """What an evaluation gathers is mixed, and a backward pass may gather it again."""
    assert "overlap=True" in repr(spread.wrap(sgd)), "the default"
    optimizer = spread.wrap(sgd, overlap="forward")
    for step in range(STEPS):
        if step % 2:
            with torch.no_grad():
                spread.forward(step)
        spread.backward(step)
        optimizer.step()
        # The model has other parameters while they are gathered.
        optimizer.zero_grad()
    return optimizer


def module(spread: Replica, **options: Any) -> DecentralizedDataParallel:
    """The module that steps in the backward pass."""
    defaults = {"topology": "ring", "bucket_size_in_mb": CAP_MB, "overlap": True}
    options = {**defaults, "comm_dtype": torch.float32, **spread.gossip, **options}
    return DecentralizedDataParallel(spread.model, sgd, **options)


def scale_in_backward(spread: Replica, overlap: Any) -> DecentOptimWrapper:
    """With an average in between."""
    scaler = make_scaler()
    model = module(spread, scaler=scaler, overlap=overlap)
    for step in range(STEPS):
        spread.backward(step, scaler, through=model)
        if step == 2:
            # Of the whole replica, whatever shard this rank has.
            distance = model.global_avg(return_d2c=True)
            with torch.no_grad():
                spread.forward(step)
            model.revert_global_avg()
            distances = model.optimizer.all_gather(torch.tensor([distance], dtype=torch.float64))
            expected = model.optimizer.consensus_distance()
            assert distances.square().mean().sqrt().item() == pytest.approx(expected, rel=1e-10)
    return model.optimizer


class Way(NamedTuple):
    """How replicas train, on which layout, and how unsharded ones do, if in another way."""

    work: Callable[[Replica], DecentOptimWrapper]
    layout: str
    unsharded: Callable[[Replica], DecentOptimWrapper] | None = None


WAYS = {
    "its data ends early, and it takes part in the rounds of the others": Way(
        end_early, "only blocks", idle_early
    ),
    "a scaler skips its update, and not its round": Way(scale, "pipeline gpipe"),
    "it mixes before the forward pass what it has sent by a step": Way(
        mix_before_the_forward_pass, "only blocks"
    ),
    "it steps in the backward pass of a scaled loss": Way(
        partial(scale_in_backward, overlap=True), "tp inside"
    ),
    "it mixes before the forward pass what it has sent in the backward pass": Way(
        partial(scale_in_backward, overlap="forward"), "fsdp inside"
    ),
}


def go(replica: Replica, work: Callable[[Replica], DecentOptimWrapper]) -> Ended:
    return ended(replica, work(replica))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_replica_trains_as_an_unsharded_one_where(way: Way) -> None:
    layout = LAYOUTS[way.layout]
    expected = dict(run_whole(layout.replicas, go, way.unsharded or way.work))
    for replica, found in run_spread(layout, go, way.work):
        assert difference(found, expected[replica]) < EXACT
        assert difference(found, start()) > 1e-3


def stay_gathered(
    replica: Replica, cap: int, clip: float = CLIP / 2
) -> tuple[int, dict[str, Any], list[list[str]]]:
    """Step in the backward pass, and clip each bucket by its own norm."""
    model = module(replica, grad_clip_norm=clip, bucket_size_in_mb=cap / 2**20)
    for part in replica.model.modules():
        if isinstance(part, FSDPModule):
            part.set_reshard_after_backward(False)
    for step in range(STEPS):
        replica.backward(step, through=model)
    names = {id(param): name for name, param in replica.model.named_parameters()}
    buckets = [[names[id(each)] for each in bucket.members] for bucket in model.optimizer.buckets]
    return (*ended(replica, model.optimizer), buckets)


def test_a_replica_may_stay_gathered_whose_buckets_of_uneven_shards_are_clipped() -> None:
    """All ranks of a replica have the same buckets."""
    expected, unclipped = (run_whole(2, stay_gathered, 260, clip) for clip in (CLIP / 2, 1e9))
    # By its own shards, each rank of a replica would fill its buckets otherwise.
    for replica, found, buckets in run_spread(LAYOUTS["fsdp inside"], stay_gathered, 130):
        assert buckets == expected[replica][2]
        assert difference(found, expected[replica][1]) < EXACT
        assert difference(found, unclipped[replica][1]) > 1e-3


def send(replica: Replica, dtype: torch.dtype | None) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """The replica, and its part with the last round in flight and mixed."""
    optimizer = replica.wrap(BASES["fused adamw"], comm_dtype=dtype)
    for step in range(STEPS):
        replica.backward(step)
        optimizer.step()
    before = replica.full()
    assert optimizer.stats().bytes_sent > 0
    return (*ended(replica, optimizer), before)


def mean_of(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean over replicas, each of which has a parameter on equally many ranks."""
    names = set().union(*parts)
    return {name: np.mean([part[name] for part in parts if name in part], 0) for name in names}


@pytest.mark.parametrize(
    ("layout", "dtype", "rounded"),
    [
        # What codes leave out.
        ("fsdp and tp", INT4, 0.2),
        # A half of four rounds of values below 2.
        ("pipeline gpipe", torch.bfloat16, STEPS * 4 * 2**-7),
    ],
)
def test_narrow_values_keep_the_mean_of_replicas_and_what_the_ranks_of_one_share(
    layout: str, dtype: torch.dtype, rounded: float
) -> None:
    """A scale for many elements must not cover some that are shared and some that are not."""
    ranks = run_spread(LAYOUTS[layout], send, dtype)
    exact = run_whole(LAYOUTS[layout].replicas, send, None)
    for replica, after, before in ranks:
        shared = mean_of([other for at, other, _ in ranks if at == replica])
        assert difference(after, shared) == 0
        error = difference(after, exact[replica][1])
        assert 1e-6 < error < rounded
        assert difference(after, mean_of([before])) > 1e-4
    mean, end = mean_of([before for *_, before in ranks]), mean_of([after for _, after, _ in ranks])
    assert difference(end, mean) < EXACT
