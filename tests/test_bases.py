"""Bases and parameters that cannot be gossiped, or not while the next step runs, are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from problem import make_params
from ranks import run_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import distribute_tensor
from torch.optim import Optimizer

from decent_optim_wrapper import DecentOptimWrapper


def sharded(rank: int) -> tuple[str, str, str]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for layer in model:
        assert isinstance(layer, nn.Linear)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh))
    texts = []
    for sync_at_start in (True, False):
        base = torch.optim.SGD(model.named_parameters(), lr=0.1)
        with pytest.raises(TypeError) as caught:
            DecentOptimWrapper(base, sync_at_start=sync_at_start)
        texts.append(str(caught.value))
    plain = nn.Linear(4, 2)
    zero = ZeroRedundancyOptimizer(plain.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer") as refused:
        DecentOptimWrapper(zero)
    dist.destroy_process_group()
    return texts[0], texts[1], str(refused.value)


@pytest.mark.slow
def test_sharded_parameters_and_optimizers_are_refused_on_every_rank() -> None:
    for synchronised, own, zero in run_processes(2, sharded):
        assert synchronised == own
        assert "parameter 0.weight is a DTensor with (Replicate(),)" in own
        assert "wrap the plain optimizer" in zero


class NeedsItsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class SAM(torch.optim.SGD):
    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


class Adahessian(torch.optim.SGD): ...


class SecondOrder(torch.optim.SGD):
    @property
    def is_second_order(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [NeedsItsClosure, SAM, Adahessian, SecondOrder])
def test_what_needs_the_gradients_parameters_in_its_step_is_refused_with_overlap(
    kind: type[Optimizer],
) -> None:
    base = kind(make_params(), lr=0.1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=f"{kind.__name__} .* pass overlap=False"):
        DecentOptimWrapper(base)
    assert DecentOptimWrapper(base, overlap=False).round == 0
