"""A round that `step()` posts starts as one kernel of NCCL, on fake CUDA tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_cuda import fake_cuda
from torch import nn

from decent_optim_wrapper import DecentOptimWrapper, PeerError
from decent_optim_wrapper.comm.batch import Batches

pytestmark = pytest.mark.slow

# Two buckets of four parameters.
CAP_MB, PARAMETERS, BUCKETS = 0.016, 8, 2
SENT = ["send", "recv"]


def trained() -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(1000, device="cuda:0")) for _ in range(PARAMETERS)]
    for param in params:
        param.grad = torch.zeros_like(param)
    return params


def calls_of_a_round(size: int, **options: Any) -> list[str]:
    """What the GPU is asked to send in a step, after some others."""
    topology = "ring" if size == 2 else "complete"
    with fake_cuda("cpu:gloo,cuda:nccl", size) as (mode, group):
        base = torch.optim.SGD(trained(), lr=0.1)
        optimizer = DecentOptimWrapper(
            base, topology=topology, process_group=group, bucket_cap_mb=CAP_MB, **options
        )
        for _ in range(4):
            mode.step += 1
            group.on_gpu.clear()
            optimizer.step()
        calls = [call for _, call in group.on_gpu]
        optimizer.synchronize()
        return calls


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"on_nonfinite": "ignore"}, BUCKETS),
        # One more for the flags.
        ({}, BUCKETS + 1),
        ({"overlap": False}, BUCKETS + 1),
        ({"comm_dtype": torch.int8}, BUCKETS + 1),
        ({"gradient_tracking": True}, 2 * BUCKETS + 1),
    ],
)
def test_a_round_of_a_pair_is_one_kernel(options: dict[str, Any], messages: int) -> None:
    assert calls_of_a_round(2, **options) == ["coalesced", *SENT * messages, "exchange"]


@pytest.mark.parametrize("checks", [True, False])
def test_the_sums_of_a_group_are_one_kernel(checks: bool) -> None:
    calls = calls_of_a_round(4, on_nonfinite="raise" if checks else "ignore")
    sums = ["coalesced", *["allreduce"] * BUCKETS, "exchange"]
    assert calls == [*sums, *["allgather"] * checks]


def test_a_forward_pass_waits_for_its_own_bucket_only() -> None:
    with fake_cuda("cpu:gloo,cuda:nccl", 2) as (_, group):
        model = nn.Sequential(*(nn.Linear(31, 31, device="cuda:0") for _ in range(4)))
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DecentOptimWrapper(
            base, model=model, overlap="forward", process_group=group, bucket_cap_mb=0.008
        )
        optimizer.step()
        starts = [call for _, call in group.on_gpu if call == "exchange"]
        assert len(starts) > 1
        optimizer.synchronize()


def test_nothing_of_a_round_that_fails_on_its_way_starts_later() -> None:
    with fake_cuda("cpu:gloo,cuda:nccl", 2) as (_, group):
        params = trained()
        optimizer = DecentOptimWrapper(
            torch.optim.SGD(params, lr=0.1), process_group=group, bucket_cap_mb=CAP_MB
        )
        optimizer.step()
        # The base raises.
        optimizer.optimizer.param_groups[0]["lr"] = None
        group.on_gpu.clear()
        with pytest.raises(TypeError):
            optimizer.step()
        assert "send" not in [call for _, call in group.on_gpu]
        with pytest.raises((RuntimeError, PeerError)):
            optimizer.step()


def test_no_thread_waits_for_a_round_that_could_not_start() -> None:
    with fake_cuda("cpu:gloo,cuda:nccl", 2) as (_, group):
        batches, device = Batches(), torch.device("cuda:0")
        failed: list[BaseException] = []
        batches.collect()
        works = [batches.add(group, device, failed.append, lambda: 1 // 0) for _ in range(2)]
        assert not works[0].is_completed()
        with pytest.raises(ZeroDivisionError):
            batches.launch(failed.append)
        assert all(work.is_completed() for work in works)
        with pytest.raises(RuntimeError, match="to be launched"):
            works[0].wait()
