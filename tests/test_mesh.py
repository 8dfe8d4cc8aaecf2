"""Gossip on one dimension of a mesh: the trajectory is that of the unsharded model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle
from typing import Any, NamedTuple

import pytest
import torch
from covering import OVERLAP, pairwise
from meshes import (
    CAP_MB,
    LAYOUTS,
    STEPS,
    Oracle,
    Spread,
    batch,
    difference,
    loss_of,
    make_model,
    run_on_mesh,
)
from problem import flatten
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from decent_optim_wrapper import DecentOptimWrapper, Schedule
from decent_optim_wrapper.codecs import INT4
from decent_optim_wrapper.ddp import DecentralizedDataParallel
from decent_optim_wrapper.optim import QGSGD, AccumAdamW

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


def sgd(params: Sequence[Tensor]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(params: Sequence[Tensor]) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def foreach_sgd(params: Sequence[Tensor]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True)


def foreach_adamw(params: Sequence[Tensor]) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1, foreach=True)


def fused_adamw(params: Sequence[Tensor]) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1, fused=True)


def accum(params: Sequence[Tensor]) -> Optimizer:
    return AccumAdamW(params, lr=0.02, accum_iter=2)


def quasi_global(params: Sequence[Tensor]) -> Optimizer:
    return QGSGD(params, lr=0.1)


def nesterov(params: Sequence[Tensor]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


BASES: dict[str, Make] = {
    each.__name__: each
    for each in (sgd, foreach_adamw, quasi_global, accum, foreach_sgd, fused_adamw, adamw)
}
SCHEDULES = {
    "plain": Schedule(),
    "averages": Schedule(global_avg_every=AVERAGE_EVERY),
    "outer": Schedule(global_avg_every=AVERAGE_EVERY, outer=nesterov),
    "late": Schedule(gossip_every=2, staleness=2),
}


class Case(NamedTuple):
    """How a replica is spread, and how it trains."""

    layout: str
    base: str
    schedule: str
    overlap: bool
    # The gradients are clipped, and the average is evaluated after each step.
    clips: bool
    evaluates: bool

    @property
    def overlaps(self) -> bool:
        """A round that travels under several steps always overlaps with them."""
        return self.overlap or self.schedule == "late"


# All pairs of values take minutes: `MESH_CASES=all` after a change. Else each layout once.
ALL = os.environ.get("MESH_CASES") == "all"
BOTH = {"yes": True, "no": False}
ROTATING = zip(LAYOUTS, cycle(BASES), cycle(SCHEDULES), cycle(OVERLAP), strict=False)
PAIRS = pairwise(
    *({name: name for name in each} for each in (LAYOUTS, BASES, SCHEDULES)), OVERLAP, BOTH, BOTH
)
# The order of the dimensions is that of the trajectories alone: each way to spread a replica is
# clipped and evaluated once.
PLAIN = {"tp outside", "fsdp inside", "pipeline gpipe"}
CASES = (
    [Case(*row.values) for row in PAIRS]
    if ALL
    else [
        Case(*row[:3], OVERLAP[row[3]], clips=row[0] not in PLAIN, evaluates=row[0] not in PLAIN)
        for row in ROTATING
    ]
)


class Trained(NamedTuple):
    """What became of a case on one rank."""

    replica: int
    params: dict[str, Any]
    # Of the gradients in each step, if they are clipped.
    norms: list[float]
    # To the mean of the replicas, with the last round in flight and without it.
    distances: tuple[float, float]


def train(case: Case) -> Trained:
    spread = Spread(LAYOUTS[case.layout])
    optimizer = spread.wrap(
        BASES[case.base], overlap=case.overlaps, schedule=SCHEDULES[case.schedule]
    )
    assert len(optimizer.buckets) >= 2
    norms = []
    for step in range(STEPS):
        spread.backward(step)
        if case.clips:
            norms.append(optimizer.clip_grad_norm_(CLIP).item())
        optimizer.step()
        if case.evaluates:
            # FSDP gathers parameters in this forward pass, and would go on with them.
            with optimizer.averaged(), torch.no_grad():
                spread.forward(step)
    with_round = optimizer.consensus_distance()
    optimizer.synchronize()
    distances = with_round, optimizer.consensus_distance()
    return Trained(spread.replica, spread.full(), norms, distances)


@cache
def oracle(replicas: int, base: str, schedule: str, overlap: bool, clips: bool = False) -> Oracle:
    averages = AVERAGE_EVERY if schedule in ("averages", "outer") else 0
    outer = nesterov if schedule == "outer" else None
    late = 2 if schedule == "late" else 1
    clip = CLIP if clips else 0.0
    made = Oracle(
        replicas, BASES[base], clip=clip, average_every=averages, make_outer=outer, late=late
    )
    return made.train(overlap)


def all_of(work: Callable[[Any], Any], cases: Sequence[Any]) -> list[Any]:
    return [work(case) for case in cases]


def on_all(work: Callable[[Any], Any], cases: Sequence[Any]) -> list[list[Any]]:
    """What each of 8 ranks returns for each case."""
    return run_on_mesh(8, all_of, work, cases)


@pytest.mark.parametrize("part", range(4 if ALL else 1))
def test_a_replica_follows_the_unsharded_oracle_however_it_is_spread(part: int) -> None:
    """Its gradients are clipped by the norm of the whole replica; evaluating changes nothing."""
    start = dict(make_model().named_parameters())
    cases = CASES[part :: 4 if ALL else 1]
    for results in on_all(train, cases):
        for case, found in zip(cases, results, strict=True):
            replicas = LAYOUTS[case.layout].replicas
            expected = oracle(replicas, case.base, case.schedule, case.overlaps, case.clips)
            assert difference(found.params, expected.parameters(found.replica)) < EXACT, case
            assert difference(found.params, start) > 1e-3
            if case.clips:
                assert found.norms == pytest.approx(expected.norms[found.replica], rel=1e-10), case
                assert min(found.norms) > CLIP
            with_round, distance = found.distances
            assert distance == pytest.approx(expected.distance(), rel=1e-10), case
            # A round that has been in flight since the last step brings the replicas closer.
            assert distance < with_round or not case.overlaps or case.schedule == "late"


NORMS = (1.0, float("inf"))


def test_other_norms_are_those_of_the_whole_replica_too() -> None:
    layouts = ["fsdp and tp", "pipeline and tp", "fsdp with empty shards"]
    expected = [
        [Oracle(2, sgd).gradient_norm(replica, norm_type) for norm_type in NORMS]
        for replica in range(2)
    ]
    for results in on_all(other_norms, layouts):
        for replica, norms in results:
            assert norms == pytest.approx(expected[replica], rel=1e-10)
    for first, second in zip(*expected, strict=True):
        assert first != second
    assert sum(param.numel() for param in make_model().parameters()) > 100


def other_norms(layout: str) -> tuple[int, list[float]]:
    spread = Spread(LAYOUTS[layout])
    optimizer = spread.wrap(sgd)
    norms = []
    for norm_type in NORMS:
        spread.backward(0)
        norms.append(optimizer.clip_grad_norm_(CLIP, norm_type).item())
    return spread.replica, norms


def send_half(layout: str) -> tuple[int, dict[str, Any], int]:
    spread = Spread(LAYOUTS[layout])
    optimizer = spread.wrap(sgd, comm_dtype=torch.bfloat16)
    for step in range(STEPS):
        spread.backward(step)
        optimizer.step()
    optimizer.synchronize()
    return spread.replica, spread.full(), optimizer.stats().bytes_sent


def test_half_the_bytes_stay_within_their_rounding() -> None:
    layouts = ["tp outside", "fsdp inside", "pipeline 1f1b"]
    for results in on_all(send_half, layouts):
        for layout, (replica, found, sent) in zip(layouts, results, strict=True):
            expected = oracle(LAYOUTS[layout].replicas, "sgd", "plain", True).parameters(replica)
            assert sent > 0
            # Values are below 2, and rounded in each of the rounds.
            assert 1e-6 < difference(found, expected) < STEPS * 4 * torch.finfo(torch.bfloat16).eps


Codes = tuple[str, torch.dtype]


class Coded(NamedTuple):
    """What became of one rank's part, with the last round in flight and mixed."""

    replica: int
    before: dict[str, Any]
    after: dict[str, Any]


def send_codes(case: Codes) -> Coded:
    layout, dtype = case
    spread = Spread(LAYOUTS[layout])
    optimizer = spread.wrap(sgd, comm_dtype=dtype)
    for step in range(STEPS):
        spread.backward(step)
        optimizer.step()
    before = spread.full()
    optimizer.synchronize()
    return Coded(spread.replica, before, spread.full())


def mean_of(parts: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Of the replicas, each of which has a parameter on equally many ranks."""
    held: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, value in part.items():
            held.setdefault(name, []).append(torch.from_numpy(value))
    return {name: torch.stack(values).mean(0) for name, values in held.items()}


def test_codes_keep_the_mean_of_replicas_and_what_the_ranks_of_one_share() -> None:
    """A scale for many elements must not cover some that are shared and some that are not."""
    cases = [
        ("tp inside", torch.int8),
        ("fsdp and tp", INT4),
        ("fsdp with empty shards", torch.int8),
        ("pipeline 1f1b", INT4),
    ]
    for case, ranks in zip(cases, zip(*on_all(send_codes, cases), strict=True), strict=True):
        layout, dtype = case
        exact = oracle(LAYOUTS[layout].replicas, "sgd", "plain", True)
        mean = mean_of([rank.before for rank in ranks])
        for rank in ranks:
            shared = mean_of([other.after for other in ranks if other.replica == rank.replica])
            error = difference(rank.after, exact.parameters(rank.replica))
            assert difference(rank.after, shared) == 0, case
            assert 1e-6 < error < {torch.int8: 0.02, INT4: 0.2}[dtype], case
            assert difference(rank.after, mean_of([rank.before])) > 1e-4, case
        after = mean_of([rank.after for rank in ranks])
        assert max((after[name] - mean[name]).abs().max() for name in mean) < EXACT, case


def end_early(layout: str) -> tuple[int, dict[str, Any]]:
    spread = Spread(LAYOUTS[layout])
    optimizer = spread.wrap(sgd)
    with Join([optimizer]):
        for step in range(STEPS - 2 * (spread.replica == 1)):
            spread.backward(step)
            optimizer.step()
    optimizer.synchronize()
    return spread.replica, spread.full()


def test_a_replica_whose_data_ends_early_takes_part_in_the_rounds_of_the_others() -> None:
    layouts = ["fsdp outside", "tp inside", "pipeline gpipe"]
    steps = [STEPS, STEPS - 2, STEPS, STEPS]
    expected = Oracle(4, sgd, steps=steps).train()
    for results in on_all(end_early, layouts):
        for layout, (replica, found) in zip(layouts, results, strict=True):
            assert difference(found, expected.parameters(replica)) < EXACT, layout


def scale(layout: str) -> tuple[int, dict[str, Any], list[bool]]:
    spread = Spread(LAYOUTS[layout])
    optimizer = spread.wrap(sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    skipped = []
    for step in range(STEPS):
        spread.backward(step, scaler)
        if step == 2 and spread.replica == 0:
            # On all ranks of the replica: torch looks at each rank's own gradients only.
            for param in spread.model.parameters():
                if param.grad is not None:
                    param.grad.mul_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        skipped.append(optimizer.stats().skipped)
    optimizer.synchronize()
    return spread.replica, spread.full(), skipped


def test_a_grad_scaler_skips_the_update_of_one_replica_and_not_its_round() -> None:
    layouts = ["fsdp inside", "pipeline 1f1b"]
    expected = Oracle(4, sgd, skips={(0, 2)}).train()
    for results in on_all(scale, layouts):
        for layout, (replica, found, skipped) in zip(layouts, results, strict=True):
            assert skipped == [replica == 0 and step == 2 for step in range(STEPS)], layout
            assert difference(found, expected.parameters(replica)) < EXACT, layout


SCALE = 2.0**7


def unscale(layout: str) -> tuple[int, dict[str, Any]]:
    spread = Spread(LAYOUTS[layout])
    optimizer = spread.wrap(sgd)
    for step in range(STEPS):
        spread.backward(step)
        for param in spread.model.parameters():
            if param.grad is not None:
                param.grad.mul_(SCALE)
        # As a GradScaler does, but torch's own fails on these gradients.
        vars(optimizer).update(found_inf=torch.zeros(()), grad_scale=torch.tensor(SCALE))
        optimizer.step()
    optimizer.synchronize()
    return spread.replica, spread.full()


def test_gradients_of_which_some_are_sharded_are_unscaled_together() -> None:
    expected = oracle(4, "sgd", "plain", True)
    for ((replica, found),) in on_all(unscale, ["tp inside"]):
        assert difference(found, expected.parameters(replica)) < EXACT


def step_in_backward(layout: str) -> tuple[int, dict[str, Any], int]:
    spread = Spread(LAYOUTS[layout])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    model = DecentralizedDataParallel(
        spread.model,
        lambda named: sgd([param for _, param in named]),
        topology="ring",
        scaler=scaler,
        mesh=spread.mesh,
        gossip_dim="gossip",
        bucket_size_in_mb=CAP_MB,
    )
    for step in range(STEPS):
        spread.backward(step, scaler, through=model)
        if step == 2:
            model.global_avg()
            with torch.no_grad():
                spread.forward(step)
            model.revert_global_avg()
    model.optimizer.synchronize()
    return spread.replica, spread.full(), len(model.optimizer.buckets)


def test_a_step_in_the_backward_pass_of_a_scaled_loss_follows_the_oracle_too() -> None:
    layouts = ["tp outside", "fsdp and tp", "hsdp"]
    for results in on_all(step_in_backward, layouts):
        for layout, (replica, found, buckets) in zip(layouts, results, strict=True):
            expected = oracle(LAYOUTS[layout].replicas, "sgd", "plain", True).parameters(replica)
            assert difference(found, expected) < EXACT, layout
            assert buckets >= 2


def train_on_the_group(_: None) -> tuple[int, dict[str, Any]]:
    spread = Spread(LAYOUTS["pipeline 1f1b"])
    optimizer = DecentOptimWrapper(
        sgd(list(spread.model.parameters())),
        topology="ring",
        bucket_cap_mb=CAP_MB,
        process_group=spread.mesh.get_group("gossip"),
    )
    for step in range(STEPS):
        spread.backward(step)
        optimizer.step()
    optimizer.synchronize()
    return spread.replica, spread.full()


def test_the_process_group_of_a_mesh_is_enough_for_stages_of_plain_tensors() -> None:
    for ((replica, found),) in on_all(train_on_the_group, [None]):
        expected = oracle(4, "sgd", "plain", True).parameters(replica)
        assert difference(found, expected) < EXACT


def clip_without_gradients(layout: str) -> tuple[int, float]:
    spread = Spread(LAYOUTS[layout])
    optimizer = spread.wrap(sgd)
    spread.backward(0)
    if spread.mesh.get_local_rank("pp") == 1:
        spread.model.zero_grad()
    return spread.replica, optimizer.clip_grad_norm_(CLIP).item()


def test_a_stage_without_gradients_is_clipped_with_the_others() -> None:
    whole = [Oracle(2, sgd).gradient_norm(replica, 2.0) for replica in range(2)]
    for ((replica, norm),) in on_all(clip_without_gradients, ["pipeline and tp"]):
        assert CLIP < norm < whole[replica]


def idle_in_a_stage(layout: str) -> float:
    spread = Spread(LAYOUTS[layout])
    model = DecentralizedDataParallel(
        spread.model,
        lambda named: torch.optim.SGD(named, lr=1.0),
        topology="ring",
        mesh=spread.mesh,
        gossip_dim="gossip",
        bucket_size_in_mb=CAP_MB,
        grad_clip_norm=CLIP,
        update_in_backward=False,
    )
    assert len(model.optimizer.buckets) >= 2
    before = flatten([*spread.model.parameters()])
    if spread.mesh.get_local_rank("pp"):
        model.idle_step()
    else:
        x, y = batch(spread.replica, 0)
        loss_of(model(x), y).backward()  # type: ignore[no-untyped-call]
    # The mixing is left to the next step.
    return float((flatten([*spread.model.parameters()]) - before).norm())


def test_an_idle_stage_takes_part_in_the_clipping_of_its_replica() -> None:
    moved = [each for (each,) in on_all(idle_in_a_stage, ["pipeline 1f1b"])]
    assert moved == pytest.approx([CLIP, 0.0] * 4, rel=1e-4)


def idle_after_an_evaluation(layout: str) -> tuple[Any, Any, Any]:
    mesh = LAYOUTS[layout].mesh()
    # The root has all parameters, and keeps them gathered after a forward pass without gradients.
    inner = make_model()
    fully_shard(inner, mesh=mesh["fsdp"])
    model = DecentralizedDataParallel(
        inner,
        lambda named: sgd([param for _, param in named]),
        topology="ring",
        mesh=mesh,
        gossip_dim="gossip",
        bucket_size_in_mb=CAP_MB,
    )
    x, y = batch(mesh.get_local_rank("gossip"), 0)
    loss_of(model(x), y).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        before = model(x)
        # It mixes the round in flight.
        model.idle_step()
        after = model(x)
        model.optimizer.replica.reshard()
        again = model(x)
    return before.numpy(), after.numpy(), again.numpy()


def test_an_idle_step_after_an_evaluation_is_seen_by_the_next_one() -> None:
    for ((before, after, again),) in on_all(idle_after_an_evaluation, ["fsdp inside"]):
        assert (after == again).all()
        assert (before != after).any()
