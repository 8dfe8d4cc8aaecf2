"""Accelerate trains as the same loop does in plain torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_problem import (
    BATCH,
    CLIP,
    GOSSIP,
    assert_same,
    data,
    from_rank_0,
    loss_of,
    make_base,
    make_model,
    moved,
    overflows,
    values,
)
from framework_ranks import EXAMPLES, RANKS, Run, ranks_with, run_example
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from decent_optim_wrapper import DecentOptimWrapper

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("accelerate"), reason="needs accelerate"),
]
ACCUMULATED = 2


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with ranks_with("accelerate", "sklearn.datasets") as run:
        yield run


class Accelerated:
    """A loop of Accelerate's, with accumulation and clipping."""

    def __init__(self, precision: str) -> None:
        from accelerate import Accelerator

        from decent_optim_wrapper.integrations.accelerate import prepare_for_gossip

        self.accelerator = Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=ACCUMULATED
        )
        if precision == "fp16":
            # Accelerate has float16 on a GPU only.
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024)
        self.gossip = prepare_for_gossip(self.accelerator, **GOSSIP)
        model = make_model()
        base = make_base(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(base, 0.9)
        loader: Any = DataLoader(data(), BATCH)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, base, scheduler, loader
        )
        assert not isinstance(self.model, DistributedDataParallel)
        assert self.model.training
        self.skipped: list[bool] = []

    def epoch(self, rank: int) -> None:
        for index, batch in enumerate(self.loader):
            with self.accelerator.accumulate(self.model):
                factor = float("inf") if self.overflows(rank, index) else 1.0
                self.accelerator.backward(factor * loss_of(self.model, batch))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self.skipped.append(self.accelerator.optimizer_step_was_skipped)

    def overflows(self, rank: int, index: int) -> bool:
        return self.accelerator.scaler is not None and overflows(rank, index)


class Plain:
    """The same in plain torch."""

    def __init__(self, rank: int, precision: str) -> None:
        self.rank = rank
        self.precision = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
            precision
        ]
        self.model = make_model()
        self.base = make_base(self.model)
        self.optimizer = DecentOptimWrapper(self.base, buffers=self.model.buffers(), **GOSSIP)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.base, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", 1024, enabled=precision == "fp16")

    def epoch(self) -> None:
        batches = [*DataLoader(data(), BATCH)][self.rank :: RANKS]
        for index, batch in enumerate(batches):
            with torch.autocast("cpu", self.precision, enabled=self.precision != torch.float32):
                out = self.model(batch[0])
            loss = nn.functional.mse_loss(out.float(), batch[1]) / ACCUMULATED
            if self.scaler.is_enabled() and overflows(self.rank, index):
                loss = loss * float("inf")
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if index % ACCUMULATED == ACCUMULATED - 1:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                if not self.optimizer.stats().skipped:
                    # As many as under DDP, where schedules count the batches of all ranks.
                    for _ in range(RANKS):
                        self.scheduler.step()
                self.optimizer.zero_grad()


def train_and_resume(rank: int, folder: Path, precision: str) -> None:
    ours, plain = Accelerated(precision), Plain(rank, precision)
    for _ in range(2):
        ours.epoch(rank)
        plain.epoch()
    assert_same(values(ours.model), values(plain.model))
    assert moved(plain.model)
    # The overflow is in the second of two accumulated batches.
    bad = precision == "fp16" and rank == 1
    assert ours.skipped == [bad, False, bad, False]
    assert ours.scheduler.get_last_lr() == plain.scheduler.get_last_lr()

    ours.accelerator.save_state(folder)
    own = values(ours.model)
    assert_same(own, values(plain.model))
    with plain.optimizer.averaged():
        saved = [
            deepcopy(part.state_dict())
            for part in (plain.model, plain.optimizer, plain.scheduler, plain.scaler)
        ]
        with ours.optimizer.averaged():
            assert_same(values(ours.model), values(plain.model))

    again = Accelerated(precision)
    again.accelerator.load_state(folder)
    resumed = Plain(rank, precision)
    resumed.model.load_state_dict(from_rank_0(saved[0]))
    resumed.optimizer.load_state_dict(from_rank_0(saved[1]))
    resumed.scheduler.load_state_dict(from_rank_0(saved[2]))
    assert not torch.equal(values(resumed.model)[0], own[0])
    if precision == "fp16":
        # Every rank writes its own to the same file.
        resumed.scaler.load_state_dict(again.accelerator.scaler.state_dict())
    again.epoch(rank)
    resumed.epoch()
    assert_same(values(again.model), values(resumed.model))


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_accelerate_trains_saves_and_resumes_as_plain_torch(
    run: Run, tmp_path: Path, precision: str
) -> None:
    run(train_and_resume, tmp_path, precision)


def test_the_example_learns_the_digits(run: Run, tmp_path: Path) -> None:
    example = EXAMPLES / "accelerate_digits.py"
    printed, _ = run(run_example, example, tmp_path, "--epochs", "4")
    (accuracy,) = re.findall(r"^test accuracy (.*)%$", printed, re.MULTILINE)
    assert float(accuracy) > 90
    average, last = (tmp_path / "runs" / name for name in ("accelerate", "accelerate_model"))
    assert_same(load_file(average / "model.safetensors"), load_file(last / "model.safetensors"))


def train_and_save_the_model(rank: int, folder: Path) -> None:
    ours = Accelerated("no")
    ours.epoch(rank)
    own = values(ours.model)
    with ours.optimizer.averaged():
        average = values(ours.model)
    assert not torch.equal(own[0], average[0]), "every rank keeps its own model until the end"
    ours.gossip.keep_average()
    assert_same(values(ours.accelerator.unwrap_model(ours.model)), average)
    ours.accelerator.save_model(ours.model, folder)
    ours.accelerator.wait_for_everyone()
    saved = make_model()
    saved.load_state_dict(load_file(folder / "model.safetensors"))
    assert_same(values(saved), average)


def test_the_model_that_accelerate_saves_at_the_end_is_the_average(
    run: Run, tmp_path: Path
) -> None:
    run(train_and_save_the_model, tmp_path)


def prepare_late(rank: int) -> None:
    from accelerate import Accelerator

    from decent_optim_wrapper.integrations.accelerate import prepare_for_gossip

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(make_model())
    prepare_for_gossip(accelerator, **GOSSIP)
    with pytest.raises(ValueError, match="call prepare_for_gossip\\(\\) first, and pass the model"):
        accelerator.prepare(make_base(model))


def test_ddp_cannot_be_left_on(run: Run) -> None:
    run(prepare_late)
