"""The norm of a replica's gradients, on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from decent_optim_wrapper.mesh.replica import Replica


class Transfers(TorchFunctionMode):
    """Counts what is fetched from a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func in (torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.tolist)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_the_norms_of_many_gradients_are_fetched_at_once(norm_type: float) -> None:
    generator = torch.Generator().manual_seed(0)
    params = [torch.zeros(n, requires_grad=True) for n in (3, 0, 5, 7)]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    with Transfers() as transfers:
        norm = Replica().grad_norm(params, norm_type)
    assert transfers.count == 1
    whole = torch.cat([param.grad for param in params if param.grad is not None]).double()
    assert norm.item() == pytest.approx(whole.norm(norm_type).item(), rel=1e-6)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_no_gradients_have_the_norm_zero(norm_type: float) -> None:
    assert Replica().grad_norm([torch.zeros(3, requires_grad=True)], norm_type) == 0
