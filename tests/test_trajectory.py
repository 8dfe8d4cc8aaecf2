"""Whole trajectories of several ranks in float64 against the dense-matrix oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import oracle
from problem import (
    TINY_CAP_MB,
    MakeOptimizer,
    adamw,
    backward,
    deviations,
    flatten,
    in_one_call,
    make_params,
    sgd,
)
from ranks import run_threads
from torch import Tensor

from decent_optim_wrapper import DecentOptimWrapper, Group, Topology, TopologyFactory

CASES = [
    ("complete", 2, 1),
    ("complete", 4, 1),
    ("complete", 3, 1),
    ("ring", 2, 1),
    ("ring", 4, 1),
    pytest.param("ring", 8, 1, marks=pytest.mark.slow),
    ("one-peer-exp", 4, 1),
    pytest.param("one-peer-exp", 8, 1, marks=pytest.mark.slow),
    ("alternating-exp-ring", 4, 2),
    pytest.param("alternating-exp-ring", 8, 2, marks=pytest.mark.slow),
    ("alternating-exp-ring", 4, 1),
]


class Lopsided(Topology):
    """Another weight in every phase: a round finished with the wrong one moves the mean."""

    def assign_groups(self) -> list[list[Group]]:
        phases = [
            [Group([0, 1], 0.9), Group([2, 3], 0.2)],
            [Group([0], None), Group([1, 2, 3], 0.6)],
            [Group([0, 1, 2, 3], 0.4)],
        ]
        return [[next(g for g in phase if r in g.ranks) for phase in phases] for r in range(4)]


def train(
    rank: int,
    group: dist.ProcessGroup | None,
    topology: Topology,
    steps: int,
    overlap: bool,
    make_optimizer: MakeOptimizer,
    **options: Any,
) -> Tensor:
    params = make_params()
    optimizer = DecentOptimWrapper(
        make_optimizer(params),
        topology=topology,
        bucket_cap_mb=TINY_CAP_MB,
        overlap=overlap,
        process_group=group,
        **options,
    )
    assert len(optimizer.buckets) >= 2
    for step in range(steps):
        backward(params, rank, step)
        optimizer.step()
    assert optimizer.round == steps
    optimizer.synchronize()
    return flatten(params)


def check_against_oracle(
    topology: Topology, overlap: bool, make_optimizer: MakeOptimizer, **options: Any
) -> None:
    steps = 2 * topology.period + 3
    rows = run_threads(
        topology.world_size,
        lambda rank, group: train(rank, group, topology, steps, overlap, make_optimizer, **options),
    )
    expected = oracle(topology, steps, overlap, make_optimizer)
    torch.testing.assert_close(torch.stack(rows), expected, rtol=1e-11, atol=1e-12)
    alone = oracle(Alone(topology.world_size), steps, overlap, make_optimizer)
    assert (alone - expected).abs().max() > 1e-2, "mixing made no difference"


class Alone(Topology):
    def assign_groups(self) -> list[list[list[int]]]:
        return [[[rank]] for rank in range(self._world_size)]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no_overlap"])
@pytest.mark.parametrize(("name", "world_size", "local"), CASES)
def test_follows_the_oracle(name: str, world_size: int, local: int, overlap: bool) -> None:
    check_against_oracle(TopologyFactory.create(name, world_size, local), overlap, sgd)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no_overlap"])
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
def test_follows_the_oracle_with_split_and_whole_updates(
    overlap: bool, split: bool, views: bool
) -> None:
    make = adamw if split else lambda params: in_one_call(adamw(params))
    check_against_oracle(Lopsided(4), overlap, make, param_as_bucket_view=views)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no_overlap"])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_follows_the_oracle_with_other_weights_in_every_phase(
    overlap: bool, make_optimizer: MakeOptimizer
) -> None:
    check_against_oracle(Lopsided(4), overlap, make_optimizer)


@pytest.mark.parametrize("name", ["complete", "ring", "one-peer-exp", "alternating-exp-ring"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_world_of_one_rank_is_the_plain_optimizer(name: str, overlap: bool) -> None:
    params = make_params()
    plain = sgd(params)
    for step in range(4):
        backward(params, 0, step)
        plain.step()
    result = train(0, None, TopologyFactory.create(name, 1), 4, overlap, sgd)
    assert torch.equal(result, flatten(params))
    assert not torch.equal(result, flatten(make_params()))


@pytest.mark.parametrize("topology", [Lopsided(4), TopologyFactory.create("ring", 4)])
def test_at_lr_zero_the_mean_stays_and_the_ranks_come_together(topology: Topology) -> None:
    rounds = 12

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(seed=rank)
        optimizer = DecentOptimWrapper(
            torch.optim.SGD(params, lr=0.0),
            topology=topology,
            bucket_cap_mb=TINY_CAP_MB,
            process_group=group,
            sync_at_start=False,
        )
        history = [flatten(params)]
        for step in range(rounds):
            backward(params, rank, step)
            optimizer.step()
            history.append(flatten(params))
        return torch.stack(history)

    spread = deviations(run_threads(4, main)).norm(dim=(1, 2))
    assert spread[0] > 1
    assert spread[-1] < 1e-2 * spread[0]


def test_a_parameter_without_gradient_on_one_rank_still_takes_part() -> None:
    topology = TopologyFactory.create("ring", 4)

    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        params = make_params()
        optimizer = DecentOptimWrapper(
            sgd(params), topology=topology, bucket_cap_mb=TINY_CAP_MB, process_group=group
        )
        for step in range(5):
            backward(params, rank, step)
            if rank == 2:
                params[0].grad = params[3].grad = None
            optimizer.step()
        optimizer.synchronize()
        return [param.detach().clone() for param in params]

    worlds = run_threads(4, main)
    start = make_params()
    assert all(not torch.equal(worlds[2][i], start[i]) for i in (0, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["complete", "ring"])
def test_low_precision_follows_the_oracle_to_its_rounding(dtype: torch.dtype, name: str) -> None:
    topology = TopologyFactory.create(name, 4)
    eps = torch.finfo(dtype).eps

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(dtype=dtype)
        optimizer = DecentOptimWrapper(
            torch.optim.SGD(params, lr=0.05),
            topology=topology,
            bucket_cap_mb=TINY_CAP_MB,
            process_group=group,
        )
        for step in range(6):
            backward(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        return flatten(params)

    expected = oracle(topology, 6, True, lambda params: torch.optim.SGD(params, lr=0.05))
    rows = torch.stack(run_threads(4, main))
    torch.testing.assert_close(rows, expected, rtol=10 * eps, atol=10 * eps)


def test_mixed_dtypes_layouts_and_empty_parameters_mix_together() -> None:
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]

    def make(rank: int) -> list[Tensor]:
        shapes: list[Tensor] = []
        for dtype in dtypes:
            image = torch.full((2, 3, 4, 4), float(rank + 1), dtype=dtype)
            shapes.append(image.to(memory_format=torch.channels_last))
            shapes.append(torch.full((3, 5), float(rank + 1), dtype=dtype).T)
            shapes.append(torch.empty(0, 2, dtype=dtype))
            shapes.append(torch.full((), float(rank + 1), dtype=dtype))
        return [tensor.requires_grad_() for tensor in shapes]

    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        params = make(rank)
        strides = [param.stride() for param in params]
        optimizer = DecentOptimWrapper(
            torch.optim.SGD(params, lr=0.1),
            topology="ring",
            process_group=group,
            sync_at_start=False,
        )
        for _ in range(2):
            optimizer.step()
        optimizer.synchronize()
        assert [param.stride() for param in params] == strides
        return [param.detach() for param in params]

    for params in run_threads(4, main):
        for param in params:
            assert torch.equal(param, torch.full_like(param, 2.5))
