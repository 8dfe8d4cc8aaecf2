"""Accelerate trains as the same loop does in plain torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import framework_problem as task
import pytest
import torch
from framework_problem import Plain, assert_same, values
from framework_ranks import Run, learns_the_digits, ranks_with
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

    def __init__(self, precision: str) -> None:
        from accelerate import Accelerator

        from decent_optim_wrapper.integrations.accelerate import prepare_for_gossip

        self.accelerator = Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=ACCUMULATED
        )
        fp16 = precision == "fp16"
        if fp16:
            # Accelerate has float16 on a GPU only.
            self.accelerator.native_amp = True
            self.accelerator.scaler = task.make_scaler(precision)
        # In half precision, also mixed before the forward pass.
        self.gossip = prepare_for_gossip(
            self.accelerator, **(task.GOSSIP if fp16 else task.DELAYED)
        )
        model = task.make_model()
        base = task.make_base(model)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            *(model, base, task.make_scheduler(base), DataLoader(task.data(), task.BATCH))
        )
        assert not isinstance(self.model, DistributedDataParallel)
        assert self.model.training
        self.skipped: list[bool] = []

    def train(self, rank: int) -> None:
        for index, batch in enumerate(self.loader):
            with self.accelerator.accumulate(self.model):
                factor = task.overflow_at(rank, index) if self.accelerator.scaler else 1.0
                self.accelerator.backward(factor * task.loss_of(self.model, batch))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), task.CLIP)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self.skipped.append(self.accelerator.optimizer_step_was_skipped)


def train_plainly(plain: Plain) -> None:
    # As many steps of the schedule as under DDP, where it counts the batches of all ranks.
    plain.train(task.batches_of(plain.rank), ACCUMULATED, scheduled=task.RANKS)


def train_and_resume(rank: int, folder: Path, precision: str) -> None:
    fp16 = precision == "fp16"
    ours, plain = Accelerated(precision), Plain(rank, precision, overlap=not fp16)
    for _ in range(2):
        ours.train(rank)
        train_plainly(plain)
    plain.check(ours.model)
    # The overflow is in the second of two accumulated batches.
    bad = fp16 and rank == 1
    assert ours.skipped == [bad, False, bad, False]
    assert ours.scheduler.get_last_lr() == plain.scheduler.get_last_lr()

    ours.accelerator.save_state(folder)
    own = values(ours.model)
    plain.check(ours.model)
    saved = plain.validate(task.data()[:])
    with ours.optimizer.averaged(), plain.optimizer.averaged():
        plain.check(ours.model)

    again, resumed = Accelerated(precision), Plain(rank, precision, overlap=not fp16)
    again.accelerator.load_state(folder)
    resumed.resume(saved)
    # A pair that mixes before the forward pass has its average already.
    assert torch.equal(values(resumed.model)[0], own[0]) == fp16
    if fp16:
        # Every rank writes its own to the same file.
        resumed.scaler.load_state_dict(again.accelerator.scaler.state_dict())
    again.train(rank)
    train_plainly(resumed)
    resumed.check(again.model)


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_accelerate_trains_saves_and_resumes_as_plain_torch(
    run: Run, tmp_path: Path, precision: str
) -> None:
    run(train_and_resume, tmp_path, precision)


def test_the_example_learns_the_digits(run: Run, tmp_path: Path) -> None:
    assert learns_the_digits(run, "accelerate_digits.py", tmp_path)
    average, last = (tmp_path / "runs" / name for name in ("accelerate", "accelerate_model"))
    assert_same(load_file(average / "model.safetensors"), load_file(last / "model.safetensors"))


def prepare_late(rank: int) -> None:
    from accelerate import Accelerator

    from decent_optim_wrapper.integrations.accelerate import prepare_for_gossip

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(task.make_model())
    prepare_for_gossip(accelerator, **task.DELAYED)
    with pytest.raises(ValueError, match="call prepare_for_gossip\\(\\) first, and pass the model"):
        accelerator.prepare(task.make_base(model))


def test_ddp_cannot_be_left_on(run: Run) -> None:
    run(prepare_late)
