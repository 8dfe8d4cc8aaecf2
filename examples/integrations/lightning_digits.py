"""Lightning's Trainer on real scans of digits, with gossip instead of DDP.

Start it as any script of Lightning's, which then starts the other ranks, or with torchrun:

    uv run --extra examples --extra lightning python examples/integrations/lightning_digits.py

It took two minutes on 2 busy cores, with two ranks.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from decent_optim_wrapper.integrations.lightning import GossipStrategy


class Digits(pl.LightningModule):
    """A module as for DDP: nothing in it knows of gossip."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.net(inputs), targets)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        inputs, targets = batch
        hits = (self.net(inputs).argmax(dim=1) == targets).float().mean()
        self.log("accuracy", hits, sync_dist=True, prog_bar=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    train, test = torch.utils.data.random_split(
        digits, [0.8, 0.2], torch.Generator().manual_seed(0)
    )
    pl.seed_everything(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.ranks,
        strategy=GossipStrategy(),
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint("runs/lightning", monitor="accuracy", mode="max")],
        logger=False,
    )
    trainer.fit(Digits(), DataLoader(train, 32, shuffle=True), DataLoader(test, 64))
    (best,) = trainer.test(ckpt_path="best", dataloaders=DataLoader(test, 64))
    trainer.print(f"test accuracy {100 * best['accuracy']:.1f}%")


if __name__ == "__main__":
    main()
