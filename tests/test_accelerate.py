"""Accelerate trains as the same loop does in plain torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from framework_problem import (
    BATCH,
    CLIP,
    DELAYED,
    GOSSIP,
    Plain,
    assert_same,
    assert_trained,
    data,
    loss_of,
    make_base,
    make_model,
    make_scaler,
    make_scheduler,
    overflows,
    values,
)
from framework_ranks import RANKS, Run, learns_the_digits, ranks_with
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

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

    def __init__(self, precision: str, forward: bool = False) -> None:
        from accelerate import Accelerator

        from decent_optim_wrapper.integrations.accelerate import prepare_for_gossip

        self.accelerator = Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=ACCUMULATED
        )
        if precision == "fp16":
            # Accelerate has float16 on a GPU only.
            self.accelerator.native_amp = True
            self.accelerator.scaler = make_scaler(precision)
        options = GOSSIP if forward else DELAYED
        self.gossip = prepare_for_gossip(self.accelerator, **options)
        model = make_model()
        base = make_base(model)
        scheduler, loader = make_scheduler(base), DataLoader(data(), BATCH)
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


def train_plainly(plain: Plain) -> None:
    """The same epoch in plain torch."""
    for index, batch in enumerate([*DataLoader(data(), BATCH)][plain.rank :: RANKS]):
        plain.backward(batch, index, ACCUMULATED)
        if index % ACCUMULATED == ACCUMULATED - 1:
            plain.step()
            # As many as under DDP, where schedules count the batches of all ranks.
            for _ in range(0 if plain.optimizer.stats().skipped else RANKS):
                plain.scheduler.step()


def train_and_resume(rank: int, folder: Path, precision: str) -> None:
    # In half precision, also mixed before the forward pass.
    fp16 = precision == "fp16"
    ours, plain = Accelerated(precision, fp16), Plain(rank, precision, overlap=not fp16)
    for _ in range(2):
        ours.epoch(rank)
        train_plainly(plain)
    assert_trained(ours.model, plain.model)
    # The overflow is in the second of two accumulated batches.
    bad = fp16 and rank == 1
    assert ours.skipped == [bad, False, bad, False]
    assert ours.scheduler.get_last_lr() == plain.scheduler.get_last_lr()

    ours.accelerator.save_state(folder)
    own = values(ours.model)
    assert_same(own, values(plain.model))
    saved = plain.validate(data()[:])
    with ours.optimizer.averaged(), plain.optimizer.averaged():
        assert_same(values(ours.model), values(plain.model))

    again = Accelerated(precision, fp16)
    again.accelerator.load_state(folder)
    resumed = Plain(rank, precision, overlap=not fp16)
    resumed.resume(saved)
    # A pair that mixes before the forward pass has its average already.
    assert torch.equal(values(resumed.model)[0], own[0]) == fp16
    if fp16:
        # Every rank writes its own to the same file.
        resumed.scaler.load_state_dict(again.accelerator.scaler.state_dict())
    again.epoch(rank)
    train_plainly(resumed)
    assert_same(values(again.model), values(resumed.model))


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_accelerate_trains_saves_and_resumes_as_plain_torch(
    run: Run, tmp_path: Path, precision: str
) -> None:
    run(train_and_resume, tmp_path, precision)


def test_the_example_learns_the_digits(run: Run, tmp_path: Path) -> None:
    assert learns_the_digits(run, "accelerate_digits.py", tmp_path)
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
    prepare_for_gossip(accelerator, **DELAYED)
    with pytest.raises(ValueError, match="call prepare_for_gossip\\(\\) first, and pass the model"):
        accelerator.prepare(make_base(model))


def test_ddp_cannot_be_left_on(run: Run) -> None:
    run(prepare_late)
