"""Hugging Face's Trainer trains as the same loop does in plain torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from copy import deepcopy
from itertools import islice
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
    make_model,
    moved,
    values,
)
from framework_ranks import EXAMPLES, RANKS, Run, ranks_with, run_example
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from decent_optim_wrapper import DecentOptimWrapper

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers"),
]
ACCUMULATED = 2
STEPS = 6
SAVED = 4


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with ranks_with("transformers.trainer", "accelerate", "sklearn.datasets") as run:
        yield run


class Regressor(nn.Module):
    """As the Trainer takes models: they return their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.model(inputs)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(data())

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, labels = data()[index]
        return {"inputs": inputs, "labels": labels}


def make_trainer(folder: Path, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from decent_optim_wrapper.integrations.transformers import GossipMixin

    class GossipTrainer(GossipMixin, Trainer):
        pass

    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "optim": "adamw_torch",
        "learning_rate": 0.05,
        "weight_decay": 0.1,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
        "max_grad_norm": CLIP,
        "gradient_accumulation_steps": ACCUMULATED,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": len(data()) // RANKS,
        "train_sampling_strategy": "sequential",
        "max_steps": STEPS,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
    }
    args = TrainingArguments(**{**defaults, **options})
    return GossipTrainer(
        model=Regressor(), args=args, train_dataset=Rows(), eval_dataset=Rows(), gossip=GOSSIP
    )


class Plain:
    """The same in plain torch."""

    def __init__(self, rank: int, decayed: list[str]) -> None:
        self.rank = rank
        self.model = Regressor()
        named = list(self.model.named_parameters())
        groups: list[dict[str, Any]] = [
            {"params": [param for name, param in named if name in decayed], "weight_decay": 0.1},
            {"params": [param for name, param in named if name not in decayed]},
        ]
        self.base = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.0)
        self.optimizer = DecentOptimWrapper(self.base, buffers=self.model.buffers(), **GOSSIP)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.base, lr_factor)
        self.losses: list[float] = []
        self.saved: list[list[dict[str, Any]]] = []

    def train(self, first: int, last: int) -> None:
        for step, parts in islice(enumerate(self.accumulated()), first, last):
            self.model.train()
            for inputs, labels in parts:
                loss = self.model(inputs, labels)["loss"] / ACCUMULATED
                loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            if step % 2:
                self.evaluate()

    def accumulated(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        inputs, labels = data()[:]
        batches = [*zip(inputs.split(BATCH), labels.split(BATCH), strict=True)][self.rank :: RANKS]
        while True:
            yield batches[:ACCUMULATED]
            yield batches[ACCUMULATED:]

    def evaluate(self) -> None:
        self.model.eval()
        with self.optimizer.averaged(), torch.no_grad():
            self.losses.append(self.model(*data()[:])["loss"].item())
            self.saved.append(deepcopy([part.state_dict() for part in self.parts]))

    @property
    def parts(self) -> list[Any]:
        return [self.model, self.optimizer, self.scheduler]


def lr_factor(step: int) -> float:
    return step / 2 if step < 2 else (STEPS - step) / (STEPS - 2)


def train_and_resume(rank: int, folder: Path) -> None:
    from safetensors.torch import load_file

    # The largest loss counts as the best, so that it is not the last.
    options = {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = make_trainer(folder, load_best_model_at_end=True, **options)
    assert not trainer.args.average_tokens_across_devices
    plain = Plain(rank, trainer.get_decay_parameter_names(trainer.model))
    trainer.train()
    assert not isinstance(trainer.model_wrapped, DistributedDataParallel)
    plain.train(0, STEPS)
    logged = trainer.state.log_history
    losses = [each["eval_loss"] for each in logged if "eval_loss" in each]
    assert losses == pytest.approx(plain.losses, rel=1e-6)
    best = plain.losses.index(max(plain.losses))
    assert best < len(plain.losses) - 1
    assert trainer.state.best_global_step == 2 * (best + 1)
    assert_same(trainer.model.state_dict(), plain.saved[best][0])
    assert moved(trainer.model.model)
    for step, (model, *_) in enumerate(plain.saved):
        stored = load_file(folder / f"checkpoint-{2 * step + 2}" / "model.safetensors")
        assert_same(stored, dict(model))
    steps = [each for each in logged if "loss" in each]
    assert len(steps) == STEPS // 2
    assert all(each["gossip/consensus_distance"] > 0 for each in steps)
    assert all(each["gossip/bytes"] + each["gossip/wait_seconds"] >= 0 for each in steps)
    # The logged loss is the mean over the ranks, and the norm that of the rank's own gradients.
    figures = plain.optimizer.all_gather(
        torch.tensor([[each["loss"], each["grad_norm"]] for each in steps])
    )
    assert figures[0, :, 0].equal(figures[1, :, 0])
    assert figures[0, :, 1].ne(figures[1, :, 1]).all()

    trainer = make_trainer(folder)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}"))
    resumed = Plain(rank, trainer.get_decay_parameter_names(trainer.model))
    for part, state in zip(resumed.parts, from_rank_0(plain.saved[SAVED // 2 - 1]), strict=True):
        part.load_state_dict(state)
    resumed.train(SAVED, STEPS)
    resumed.optimizer.global_avg(may_revert=False)
    assert_same(values(trainer.model), values(resumed.model))
    # As before, but with the average and the moments of rank 0 in the middle.
    assert not torch.equal(values(resumed.model)[0], plain.saved[-1][0]["model.0.weight"])


def test_the_trainer_trains_evaluates_saves_and_resumes_as_plain_torch(
    run: Run, tmp_path: Path
) -> None:
    run(train_and_resume, tmp_path)


def test_the_example_learns_the_digits(run: Run, tmp_path: Path) -> None:
    example = EXAMPLES / "trainer_digits.py"
    printed, _ = run(run_example, example, tmp_path, "--epochs", "4")
    (accuracy,) = re.findall(r"^test accuracy (.*)%$", printed, re.MULTILINE)
    assert float(accuracy) > 90
