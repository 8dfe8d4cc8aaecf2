"""Log a run on real scans of digits, and draw it: the loss, and what gossip costs.

    OMP_NUM_THREADS=1 uv run --extra examples torchrun --standalone --nproc-per-node 2 \
        examples/integrations/log_digits.py

The second run exchanges inside `step()` (overlap=False): there all communication is waited for.
What the first one waits less was hidden under forward and backward passes. It takes 44 s of CPU
time, of both ranks together.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.integrations import gossip_stats
from decent_optim_wrapper.utils import DistInfo, init_distributed

INTERVAL = 10


class Curves:
    """What a tracker would draw."""

    def __init__(self) -> None:
        self.points: dict[str, list[tuple[int, float]]] = {}

    def add(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.points.setdefault(name, []).append((step, value))

    def medians(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values, one for each interval, since single waits are noisy."""
        rows: dict[int, list[float]] = {}
        for step, value in self.points[name]:
            rows.setdefault(step - (step - 1) % INTERVAL, []).append(value)
        return list(rows), [median(values) for values in rows.values()]


def train(world: DistInfo, steps: int, width: int, overlap: bool) -> Curves:
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16).float()[world.rank :: world.world_size]
    digits = torch.tensor(labels)[world.rank :: world.world_size]
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, 10),
    )
    optimizer = DecentOptimWrapper(
        torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), topology="ring", overlap=overlap
    )
    generator = torch.Generator().manual_seed(world.rank)
    curves = Curves()
    for step in tqdm(range(1, steps + 1), f"overlap={overlap}", disable=world.rank > 0):
        batch = torch.randint(len(digits), (64,), generator=generator)
        optimizer.zero_grad()
        loss = cross_entropy(model(images[batch]), digits[batch])
        loss.backward()
        optimizer.step()
        # The distance costs an all-reduce of the parameters.
        stats = gossip_stats(optimizer, distance=step % INTERVAL == 0)
        curves.add(step, {"loss": loss.item(), **stats})
    return curves


def draw(hidden: Curves, exposed: Curves, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3), layout="constrained")
    axes = figure.subplots(1, 3)
    for axis, name in zip(axes, ("loss", "gossip/consensus_distance"), strict=False):
        axis.plot(*hidden.medians(name))
        axis.set_title(name)
    for label, curves in {"overlap=True": hidden, "overlap=False": exposed}.items():
        axes[2].plot(*curves.medians("gossip/wait_seconds"), label=label)
    axes[2].set_title("gossip/wait_seconds")
    axes[2].legend()
    for axis in axes:
        axis.set_ylim(bottom=0)
        axis.set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=1024, help="of the hidden layers")
    parser.add_argument("--output", type=Path, default=Path("runs/stats.png"))
    args = parser.parse_args()
    world = init_distributed()
    hidden, exposed = (train(world, args.steps, args.width, overlap) for overlap in (True, False))
    if world.rank == 0:
        draw(hidden, exposed, args.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
