"""Hugging Face's Trainer on real scans of digits, with gossip instead of DDP.

    OMP_NUM_THREADS=1 uv run --extra examples --extra transformers \
        torchrun --standalone --nproc-per-node 2 examples/integrations/trainer_digits.py

`GossipMixin` is all that differs from a script for DDP. It takes 32 s of CPU time, of both ranks
together.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer, TrainingArguments

from decent_optim_wrapper.integrations.transformers import GossipMixin


class GossipTrainer(GossipMixin, Trainer):
    """Any subclass of Trainer."""


class Classifier(nn.Module):
    """As the Trainer takes models: they return their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def accuracy(predicted: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(axis=1) == predicted.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    pixels, labels = load_digits(return_X_y=True)
    rows = [
        {"pixels": torch.tensor(scan / 16).float(), "labels": int(digit)}
        for scan, digit in zip(pixels, labels, strict=True)
    ]
    train, test = torch.utils.data.random_split(rows, [0.8, 0.2], torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    trainer = GossipTrainer(
        model=Classifier(),
        args=TrainingArguments(
            "runs/trainer",
            use_cpu=True,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=32,
            learning_rate=1e-2,
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
            logging_steps=10,
            report_to="none",
        ),
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=accuracy,
    )
    trainer.train()
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"test accuracy {100 * found['eval_accuracy']:.1f}%")


if __name__ == "__main__":
    main()
