"""A loop of Accelerate's on real scans of digits, with gossip instead of DDP.

    OMP_NUM_THREADS=1 uv run --extra examples --extra accelerate \
        torchrun --standalone --nproc-per-node 2 examples/integrations/accelerate_digits.py

Only the lines that name gossip or an average are not in a script for DDP. It takes 23 s of CPU
time, of both ranks together.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from decent_optim_wrapper.integrations.accelerate import prepare_for_gossip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    parts = torch.utils.data.random_split(digits, [0.8, 0.2], torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=46 * args.epochs)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    gossip = prepare_for_gossip(accelerator)
    model, optimizer, scheduler, train, test = accelerator.prepare(
        model,
        optimizer,
        scheduler,
        DataLoader(parts[0], 32, shuffle=True),
        DataLoader(parts[1], 64),
    )
    for _ in tqdm(range(args.epochs), "epochs", disable=not accelerator.is_main_process):
        model.train()
        for inputs, targets in train:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    model.eval()
    with optimizer.averaged(), torch.no_grad():
        hits = [
            accelerator.gather_for_metrics(model(inputs).argmax(dim=1) == targets)
            for inputs, targets in test
        ]
    accelerator.print(f"test accuracy {100 * torch.cat(hits).float().mean():.1f}%")
    accelerator.save_state("runs/accelerate")  # the average, too
    gossip.keep_average()  # until here every rank has its own model
    accelerator.save_model(model, "runs/accelerate_model")
    accelerator.end_training()


if __name__ == "__main__":
    main()
