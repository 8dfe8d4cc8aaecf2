"""Hugging Face's Trainer trains as the same loop does in plain torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import framework_problem as task
import pytest
import torch
from framework_problem import RANKS, Plain, assert_same, values
from framework_ranks import Run, learns_the_digits, ranks_with
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import SequentialSampler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers"),
]
ACCUMULATED = 2
STEPS = 6
# An epoch: it is evaluated and saved after each.
EVERY = 2
SAVED = 4


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with ranks_with("transformers.trainer", "accelerate", "sklearn.datasets") as run:
        yield run


class Regressor(nn.Module):
    """As the Trainer takes models: they return their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = task.make_model()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.model(inputs)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


def make_trainer(folder: Path, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from decent_optim_wrapper.integrations.transformers import GossipMixin

    pairs = zip(*task.data()[:], strict=True)
    rows = [{"inputs": inputs, "labels": labels} for inputs, labels in pairs]

    class GossipTrainer(GossipMixin, Trainer):
        # Transformers 4 has no argument for it.
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(rows)

    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        optim="adamw_torch",
        learning_rate=0.05,
        weight_decay=0.1,
        lr_scheduler_type="linear",
        warmup_steps=2,
        max_grad_norm=task.CLIP,
        gradient_accumulation_steps=ACCUMULATED,
        per_device_train_batch_size=task.BATCH,
        per_device_eval_batch_size=len(rows) // RANKS,
        max_steps=STEPS,
        logging_steps=EVERY,
        eval_strategy="steps",
        eval_steps=EVERY,
        save_steps=EVERY,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    return GossipTrainer(
        model=Regressor(), args=args, train_dataset=rows, eval_dataset=rows, gossip=task.GOSSIP
    )


def plain_for(trainer: Any, rank: int) -> Plain:
    """The same in plain torch."""

    def base(model: nn.Module) -> torch.optim.Optimizer:
        decayed = trainer.get_decay_parameter_names(trainer.model)
        groups: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.1}, {"params": []}]
        for name, param in model.named_parameters():
            groups[f"model.{name}" not in decayed]["params"].append(param)
        return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.0)

    def factor(step: int) -> float:
        return step / 2 if step < 2 else (STEPS - step) / (STEPS - 2)

    def scheduler(base: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(base, factor)

    return Plain(rank, "no", base, scheduler, overlap=False)


def train_plainly(plain: Plain, steps: int) -> list[list[dict[str, Any]]]:
    """Returns what is saved after every epoch."""
    saved = []
    for _ in range(steps // EVERY):
        plain.train(task.batches_of(plain.rank), ACCUMULATED, scheduled=1)
        saved.append(plain.validate(task.data()[:]))
    return saved


def train_and_resume(rank: int, folder: Path) -> None:
    from safetensors.torch import load_file

    # The largest loss counts as the best, so that it is not the last.
    options = {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = make_trainer(folder, load_best_model_at_end=True, **options)
    assert not trainer.args.average_tokens_across_devices
    plain = plain_for(trainer, rank)
    trainer.train()
    assert not isinstance(trainer.model_wrapped, DistributedDataParallel)
    saved = train_plainly(plain, STEPS)
    logged = trainer.state.log_history
    losses = [each["eval_loss"] for each in logged if "eval_loss" in each]
    assert losses == pytest.approx(plain.losses, rel=1e-6)
    best = plain.losses.index(max(plain.losses))
    assert best < len(plain.losses) - 1
    assert trainer.state.best_global_step == EVERY * (best + 1)
    assert_same(trainer.model.model.state_dict(), saved[best][0])
    for epoch, (model, *_) in enumerate(saved):
        stored = load_file(folder / f"checkpoint-{EVERY * (epoch + 1)}" / "model.safetensors")
        assert_same(stored, {f"model.{name}": value for name, value in model.items()})
    steps = [each for each in logged if "loss" in each]
    assert len(steps) == STEPS // EVERY
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
    resumed = plain_for(trainer, rank)
    resumed.resume(saved[SAVED // EVERY - 1])
    train_plainly(resumed, STEPS - SAVED)
    resumed.optimizer.global_avg(may_revert=False)
    resumed.check(trainer.model.model)
    # As before, but with the average and the moments of rank 0 in the middle.
    assert not torch.equal(values(resumed.model)[0], saved[-1][0]["0.weight"])


def test_the_trainer_trains_evaluates_saves_and_resumes_as_plain_torch(
    run: Run, tmp_path: Path
) -> None:
    run(train_and_resume, tmp_path)


def test_the_example_learns_the_digits(run: Run, tmp_path: Path) -> None:
    assert learns_the_digits(run, "trainer_digits.py", tmp_path)
