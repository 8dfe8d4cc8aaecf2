"""Runs the README's loop with the installed package: ``torchrun ... installed.py README.md``.

It needs nothing of the tests, and fails if the package comes from the clone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import decent_optim_wrapper

Batch = tuple[Tensor, Tensor]


class Loader:
    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(40):
            inputs = torch.randn(16, 10, generator=generator)
            yield inputs, inputs.sum(dim=1, keepdim=True)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def main(readme: Path) -> None:
    package = Path(decent_optim_wrapper.__file__).parent
    if package.parent == readme.resolve().parent:
        raise RuntimeError(f"expected an installed package, got the clone's {package}")
    validated: list[Tensor] = []
    namespace: dict[str, Any] = {
        "build_model": lambda: nn.Linear(10, 1),
        "loader": Loader(),
        "loss": loss,
        "validate": lambda model: validated.append(
            nn.utils.parameters_to_vector(model.parameters())
        ),
    }
    (loop,) = re.findall(
        r"\A# .*?^```python\n(.*?)^```$",
        readme.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    exec(compile(loop, str(readme), "exec"), namespace)
    average, optimizer = validated[0], namespace["optimizer"]
    everywhere = optimizer.all_gather(average.detach())
    torch.manual_seed(0)
    start = nn.utils.parameters_to_vector(nn.Linear(10, 1).parameters())
    if not (everywhere == everywhere[0]).all() or (average == start).all():
        raise RuntimeError(f"expected one trained average on all ranks, got {everywhere}")
    if optimizer.stats().bytes_sent == 0:
        raise RuntimeError("expected the ranks to send something, but nothing was sent")
    if optimizer.rank == 0:
        print("torch", torch.__version__, "decent_optim_wrapper", decent_optim_wrapper.__version__)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
