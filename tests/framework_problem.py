"""A small model, data and settings for the tests of frameworks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from decent_optim_wrapper import Schedule

GOSSIP: dict[str, Any] = {
    "topology": "ring",
    "bucket_cap_mb": 1e-4,
    "schedule": Schedule(gossip_every=2),
}
BATCH = 4
CLIP = 0.5


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(32, 4, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def make_base(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs).float(), targets)


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def values(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def moved(model: nn.Module) -> bool:
    pairs = zip(model.parameters(), make_model().parameters(), strict=True)
    return all(not torch.equal(now, before) for now, before in pairs)


def from_rank_0(saved: Any) -> Any:
    """Lightning stores what rank 0 has, and all ranks load it."""
    box = [saved]
    dist.broadcast_object_list(box)
    return box[0]


def overflows(rank: int, step: int) -> bool:
    return rank == 1 and step == 1
