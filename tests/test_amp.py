"""GradScaler drives the wrapper as it drives the base, and an overflow keeps no rank waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from modules import backward
from problem import flatten, make_params, wrap
from ranks import run_threads
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

KERNELS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "unfused": {},
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_rank_without_any_gradient_takes_part(kernel: dict[str, Any]) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(dtype=torch.float32)
        optimizer = wrap(params, group, torch.optim.SGD(params, lr=0.1, **kernel), topology="ring")
        unwrapped = torch.ones((), requires_grad=True)
        other = torch.optim.SGD([unwrapped], lr=0.1)
        scaler = GradScaler("cpu", init_scale=8.0)
        for _ in range(3):
            used = [unwrapped, *params] if rank == 0 else [unwrapped]
            backward(scaler.scale(torch.stack([each.sum() for each in used]).sum()))
            for each in (optimizer, other):
                scaler.step(each)
                each.zero_grad()
            assert not optimizer.stats().skipped
            scaler.update()
        optimizer.synchronize()
        return flatten(params) - flatten(make_params(dtype=torch.float32))

    assert run_threads(2, main)[1].abs().max() > 1e-2


def test_a_fused_update_counts_as_a_change_of_the_parameters() -> None:
    """Its kernels do not count it, and a graph that still needs the old values would not notice."""
    params = make_params(dtype=torch.float32)
    optimizer = wrap(params, base=torch.optim.SGD(params, lr=0.1, fused=True))
    assert len(optimizer.buckets) > 1
    backward(torch.stack([param.square().sum() for param in params]).sum())
    before, versions = flatten(params), [param._version for param in params]
    optimizer.step()
    assert not torch.equal(flatten(params), before)
    assert all(param._version > old for param, old in zip(params, versions, strict=True))
