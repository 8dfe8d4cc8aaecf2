"""Real processes: the default process group, sub-groups, and scripts that end mid-round."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problem import TINY_CAP_MB, backward, flatten, make_params, oracle, sgd
from ranks import run_processes

from decent_optim_wrapper import DecentOptimWrapper, TopologyFactory

STEPS = 5


def train_on_default_group(rank: int, topology: str) -> list[float]:
    dist.init_process_group("gloo")
    params = make_params(seed=rank)
    optimizer = DecentOptimWrapper(sgd(params), topology=topology, bucket_cap_mb=TINY_CAP_MB)
    assert (optimizer.rank, optimizer.world_size) == (rank, 4)
    assert optimizer.topology.local_world_size == int(os.environ["LOCAL_WORLD_SIZE"])
    for step in range(STEPS):
        backward(params, rank, step)
        optimizer.step()
    optimizer.synchronize()
    dist.destroy_process_group()
    return list(flatten(params).tolist())


@pytest.mark.parametrize("name", ["complete", "ring", "alternating-exp-ring"])
def test_the_default_group_and_torchruns_variables_are_found(name: str) -> None:
    rows = torch.tensor(
        run_processes(4, train_on_default_group, name, local_world_size=2), dtype=torch.float64
    )
    topology = TopologyFactory.create(name, 4, 2)
    torch.testing.assert_close(rows, oracle(topology, STEPS, True, sgd), rtol=1e-11, atol=1e-12)


def train_in_halves(rank: int) -> tuple[list[float], int]:
    dist.init_process_group("gloo")
    halves: list[Any] = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    mine, other = halves[rank // 3], halves[1 - rank // 3]
    with pytest.raises(ValueError, match="not a member"):
        DecentOptimWrapper(sgd(make_params()), process_group=other)
    params = make_params()
    optimizer = DecentOptimWrapper(sgd(params), process_group=mine, bucket_cap_mb=TINY_CAP_MB)
    for step in range(STEPS):
        backward(params, rank, step)
        optimizer.step()
    optimizer.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    return list(flatten(params).tolist()), optimizer.rank


def test_a_process_group_restricts_the_gossip_to_its_ranks() -> None:
    rows = run_processes(6, train_in_halves)
    assert [rank for _, rank in rows] == [0, 1, 2, 0, 1, 2]
    values = torch.tensor([row for row, _ in rows], dtype=torch.float64)
    expected = oracle(TopologyFactory.create("complete", 3), STEPS, True, sgd)
    torch.testing.assert_close(values[:3], expected, rtol=1e-11, atol=1e-12)
    assert (values[:3] - values[3:]).abs().max() > 1e-3


def end_mid_round(rank: int, topology: str, destroy: bool) -> bool:
    dist.init_process_group("gloo")
    params = [torch.randn(200_000, requires_grad=True) for _ in range(3)]
    optimizer = DecentOptimWrapper(
        torch.optim.SGD(params, lr=0.1), topology=topology, bucket_cap_mb=1
    )
    # A module's global is dropped last, when the interpreter is half gone.
    globals()["kept"] = optimizer
    optimizer.step()
    if destroy:
        dist.destroy_process_group()
    return optimizer.state_dict()["gossip"]["in_flight"] is True


@pytest.mark.parametrize("destroy", [True, False], ids=["destroyed", "not_destroyed"])
@pytest.mark.parametrize("topology", ["ring", "complete", "alternating-exp-ring"])
def test_a_script_that_ends_with_a_round_in_flight_exits_cleanly(
    topology: str, destroy: bool
) -> None:
    assert run_processes(4, end_mid_round, topology, destroy, local_world_size=2) == [True] * 4
