"""What the library is compared with where the time to a goal is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


class Training(NamedTuple):
    """What a method trains with.

    Args:
        network: the model, perhaps inside a module that communicates.
        optimizer: None if the network steps in its backward pass.
        finish: waits until the ranks have ended their rounds.
    """

    network: nn.Module
    optimizer: Any | None
    finish: Callable[[], Any] = lambda: None


def ddp(model: nn.Module, base: Optimizer, compress: bool = False) -> Training:
    network = DistributedDataParallel(model)
    if compress:
        network.register_comm_hook(None, bf16_compress_hook)
    return Training(network, base)


def post_local_sgd(model: nn.Module, base: Optimizer, period: int) -> Training:
    return Training(model, PostLocalSGDOptimizer(base, PeriodicModelAverager(period=period)))


class MuonWithAdamW(Optimizer):
    """Muon for the matrices of hidden layers, and AdamW for embeddings, the head and vectors.

    Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with updates as
    long as those of AdamW (Liu et al., 2025), so that both take one learning rate.

    Args:
        model: the model.
        lr: the learning rate.
        betas: those of AdamW.
    """

    def __init__(self, model: nn.Module, lr: float, betas: tuple[float, float]) -> None:
        linear = [each for each in model.modules() if isinstance(each, nn.Linear)]
        # The last one is the head.
        hidden = [each.weight for each in linear[:-1]]
        ids = {id(param) for param in hidden}
        others = [param for param in model.parameters() if id(param) not in ids]
        self._parts = (
            torch.optim.Muon(hidden, lr=lr, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr, betas=betas),
        )
        super().__init__([{"params": hidden}, {"params": others}], {"lr": lr})
        # Schedulers set the learning rates of both.
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()
