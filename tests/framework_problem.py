"""A small model and data for the tests of frameworks, and what they train in plain torch."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from decent_optim_wrapper import DecentOptimWrapper, Schedule

# A framework then mixes before the forward pass: bit for bit the trajectory without overlap, which
# `Plain` then has.
GOSSIP: dict[str, Any] = {
    "topology": "ring",
    "bucket_cap_mb": 1e-4,
    "schedule": Schedule(gossip_every=2),
}
DELAYED: dict[str, Any] = {**GOSSIP, "overlap": True}
BATCH = 4
CLIP = 0.5
# Of the scaler at the start.
SCALE = 1024
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(32, 4, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def make_base(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_scheduler(base: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(base, 0.9)


def make_scaler(precision: str) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", SCALE, enabled=precision == "fp16")


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs).float(), targets)


def overflows(rank: int, step: int) -> bool:
    return rank == 1 and step == 1


class Plain:
    """The loop that a framework runs, in plain torch.

    Args:
        rank: this rank.
        precision: "no", "bf16" or "fp16", in which a backward pass overflows.
        model: the one of all frameworks by default.
        base: trains the model.
        scheduler: of the base.
        overlap: that of the wrapper.
    """

    def __init__(
        self,
        rank: int,
        precision: str = "no",
        model: nn.Module | None = None,
        base: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        overlap: bool = True,
    ) -> None:
        self.rank = rank
        self.model = model or make_model()
        self.base = base or make_base(self.model)
        options = {**GOSSIP, "buffers": self.model.buffers(), "overlap": overlap}
        self.optimizer = DecentOptimWrapper(self.base, **options)
        self.scheduler = scheduler or make_scheduler(self.base)
        self.scaler = make_scaler(precision)
        self._dtype = DTYPES[precision]
        self.losses: list[float] = []

    @property
    def parts(self) -> list[Any]:
        """What a checkpoint holds."""
        return [self.model, self.optimizer, self.scheduler]

    def backward(self, batch: Any, index: int, parts: int = 1) -> None:
        """Add the gradients of a batch, one of several that are accumulated to their mean."""
        self.model.train()
        with torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32):
            loss = loss_of(self.model, batch) / parts
        if self.scaler.is_enabled() and overflows(self.rank, index):
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def validate(self, batch: Any) -> list[dict[str, Any]]:
        """Returns the states of the parts, with the average."""
        self.model.eval()
        with self.optimizer.averaged(), torch.no_grad():
            self.losses.append(loss_of(self.model, batch).item())
            return deepcopy([part.state_dict() for part in self.parts])

    def resume(self, saved: list[dict[str, Any]]) -> None:
        """Load as many parts as were saved, which Lightning and others have of rank 0 only."""
        box = [saved]
        dist.broadcast_object_list(box)
        for part, state in zip(self.parts, box[0], strict=False):
            part.load_state_dict(state)


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def values(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def assert_trained(found: nn.Module, expected: nn.Module) -> None:
    """That two models have the same values, and not those of the start."""
    assert_same(values(found), values(expected))
    start = make_model().parameters()
    assert not any(map(torch.equal, found.parameters(), start))
