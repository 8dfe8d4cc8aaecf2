"""A small model and data for the tests of frameworks, and what they train in plain torch."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler
from torch.utils.data import DataLoader, TensorDataset

from decent_optim_wrapper import DecentOptimWrapper, Schedule

RANKS = 2
# A framework then mixes before the forward pass: bit for bit the trajectory without overlap, which
# `Plain` then has.
GOSSIP: dict[str, Any] = {
    "topology": "ring",
    "comm_dtype": torch.float32,
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


def batches_of(rank: int) -> list[Any]:
    """An epoch as most frameworks deal it to the ranks: four batches."""
    return [*DataLoader(data(), BATCH)][rank::RANKS]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def make_base(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_scheduler(base: Optimizer) -> LRScheduler:
    return ExponentialLR(base, 0.9)


def make_scaler(precision: str) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", SCALE, enabled=precision == "fp16")


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs).float(), targets)


def overflow_at(rank: int, index: int) -> float:
    """A factor of the loss in float16."""
    return float("inf") if (rank, index) == (1, 1) else 1.0


class Plain:
    """The loop that a framework runs, in plain torch.

    Args:
        rank: this rank.
        precision: "no", "bf16" or "fp16", in which a backward pass overflows.
        base: makes the optimizer of the model.
        make_scheduler: makes the scheduler of the base.
        overlap: the option of the wrapper.
    """

    def __init__(
        self,
        rank: int,
        precision: str = "no",
        base: Any = make_base,
        scheduler: Any = make_scheduler,
        overlap: bool = True,
    ) -> None:
        self.rank = rank
        self.model = make_model()
        self.base = base(self.model)
        options = {**GOSSIP, "buffers": self.model.buffers(), "overlap": overlap}
        self.optimizer = DecentOptimWrapper(self.base, **options)
        self.scheduler = scheduler(self.base)
        self.scaler = make_scaler(precision)
        self._dtype = DTYPES[precision]
        self.losses: list[float] = []

    @property
    def parts(self) -> list[Any]:
        """What is saved in a checkpoint."""
        return [self.model, self.optimizer, self.scheduler]

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32)

    def train(
        self, batches: Iterable[Any], accumulated: int = 1, scheduled: int = 0, first: int = 0
    ) -> None:
        """Make a step of so many batches each, and if it is not skipped, steps of the scheduler."""
        self.model.train()
        for index, batch in enumerate(batches, first):
            with self.autocast():
                loss = loss_of(self.model, batch) / accumulated
            if self.scaler.is_enabled():
                loss = loss * overflow_at(self.rank, index)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if (index + 1) % accumulated == 0:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
                for _ in range(0 if self.optimizer.stats().skipped else scheduled):
                    self.scheduler.step()

    def validate(self, batch: Any) -> list[dict[str, Any]]:
        """Returns the states of the parts, with the average."""
        self.model.eval()
        with self.optimizer.averaged(), torch.no_grad(), self.autocast():
            self.losses.append(loss_of(self.model, batch).item())
            return deepcopy([part.state_dict() for part in self.parts])

    def resume(self, saved: list[dict[str, Any]]) -> None:
        """Load as many parts as were saved, which Lightning and others have of rank 0 only."""
        box = [saved]
        dist.broadcast_object_list(box)
        for part, state in zip(self.parts, box[0], strict=False):
            part.load_state_dict(state)

    def check(self, found: nn.Module) -> None:
        """A framework has trained a model to the same values, which differ from the start."""
        assert_same(values(found), values(self.model))
        assert not any(map(torch.equal, found.parameters(), make_model().parameters()))


def values(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)
