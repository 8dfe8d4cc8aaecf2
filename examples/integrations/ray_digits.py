"""Ray Train on real scans of digits, with gossip, and checkpoints in Ray's storage.

Ray starts the ranks, and all of them again after a failure. They go on from the last checkpoint, to
which each rank adds a file of its own. uv must not make an environment for every rank:

    export RAY_ENABLE_UV_RUN_RUNTIME_ENV=0
    uv run --all-extras --group ray python examples/integrations/ray_digits.py --fail-after 3
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn

from decent_optim_wrapper import DecentOptimWrapper


def train_rank(config: dict[str, Any]) -> None:
    """Run in every rank, whose process group Ray has made."""
    rank, ranks = train.get_context().get_world_rank(), train.get_context().get_world_size()
    pixels, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(pixels / 16).float(), torch.tensor(labels)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    test, learnt = order[:360], order[360 + rank :: ranks]
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = DecentOptimWrapper(base, model=model)
    first, saved = 0, train.get_checkpoint()
    if saved is not None:
        with saved.as_directory() as folder:
            state = torch.load(Path(folder) / f"rank_{rank}.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
    for epoch in range(first + 1, config["epochs"] + 1):
        shuffled = torch.randperm(len(learnt), generator=torch.Generator().manual_seed(epoch))
        for chosen in learnt[shuffled].split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
            optimizer.step()
        with optimizer.averaged(), torch.no_grad():
            accuracy = (model(inputs[test]).argmax(dim=1) == targets[test]).float().mean().item()
        if first == 0 and (rank, epoch) == (1, config["fail_after"]):
            os._exit(1)
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch}, Path(folder) / f"rank_{rank}.pt")
            report = {"epoch": epoch, "accuracy": accuracy, "restored": first}
            train.report(report, checkpoint=train.Checkpoint.from_directory(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--fail-after", type=int, help="epochs after which rank 1 dies once")
    args = parser.parse_args()
    # Without the dashboard, which is not installed, an actor of Ray logs a warning every second.
    ray.init(log_to_driver=False)
    trainer = TorchTrainer(
        train_rank,
        train_loop_config=vars(args),
        # A quarter of a core for each rank: this machine may have few.
        scaling_config=train.ScalingConfig(
            num_workers=args.ranks, resources_per_worker={"CPU": 0.25}
        ),
        run_config=train.RunConfig(
            storage_path=str(Path("runs/ray").absolute()),
            failure_config=train.FailureConfig(max_failures=2),
        ),
    )
    report = trainer.fit().metrics or {}
    print("{restored} epochs restored, {epoch} done: accuracy {accuracy:.1%}".format(**report))
