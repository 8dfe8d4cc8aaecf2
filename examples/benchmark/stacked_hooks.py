"""The communication hooks of DDP, for the stacked gradients of simulated ranks.

A hook takes gradients of shape (trainings, ranks, parameters) and returns what DDP's ranks have
after it, of shape (trainings, parameters).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from stacked_gpt import SMALL, StackedGPT
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

Hook = Callable[[Tensor], Tensor]
# Values in a channel of `quantization_perchannel_hook`.
CHANNEL = 512


def bfloat16(grads: Tensor) -> Tensor:
    """`bf16_compress_hook`."""
    first, *others = (grads / grads.shape[1]).bfloat16().unbind(1)
    return sum(others, first).to(grads.dtype)


def eight_bits(grads: Tensor) -> Tensor:
    """`quantization_pertensor_hook`: a range for each rank."""
    return _quantised(grads).mean(1)


def eight_bits_of_channels(grads: Tensor) -> Tensor:
    """`quantization_perchannel_hook`: a range for each 512 values of a rank."""
    return _quantised(grads.unflatten(2, (-1, CHANNEL))).flatten(2).mean(1)


def _quantised(grads: Tensor) -> Tensor:
    """What 256 levels make of the values, between the least and the largest of the last dimension.

    As torch's MinMaxObserver, the range includes zero.
    """
    low, high = torch.aminmax(grads, dim=-1, keepdim=True)
    low, high = low.clamp_max(0), high.clamp_min(0)
    scale = ((high - low) / 255).clamp_min(torch.finfo(torch.float32).eps)
    zero = (-low / scale).round_().clamp_(0, 255)
    return ((grads / scale).round_() + zero).clamp_(0, 255).sub_(zero).mul_(scale)


class PowerSGD:
    """`powerSGD_hook` with warm starts and error feedback (Vogels et al., 2019).

    Args:
        rank: rank of the approximation of each matrix.
        gpt: the matrices of the model.
        start: steps that average gradients as they are.
    """

    def __init__(self, rank: int, gpt: StackedGPT = SMALL, start: int = 96) -> None:
        self._rank, self._start, self._gpt = rank, start, gpt
        self._steps = 0
        self._error: Tensor | None = None
        self._qs: list[Tensor] = []

    def __call__(self, grads: Tensor) -> Tensor:
        """Average the gradients of one step."""
        self._steps += 1
        if self._steps <= self._start:
            return grads.mean(1)
        whole = grads if self._error is None else grads + self._error
        trainings, ranks = grads.shape[:2]
        matrices = [
            m.unflatten(0, (trainings, ranks)) for m in self._gpt.split(whole.flatten(0, 1))
        ]
        qs = self._qs or [self.first_q(matrix) for matrix in matrices]
        self._qs, found = [], []
        for matrix, q in zip(matrices, qs, strict=True):
            _orthogonalize(q)
            p = (matrix @ q.unsqueeze(1)).mean(1)
            _orthogonalize(p)
            self._qs.append((matrix.transpose(2, 3) @ p.unsqueeze(1)).mean(1))
            found.append((p @ self._qs[-1].transpose(1, 2)).flatten(1))
        result = torch.cat(found, 1)
        self._error = whole - result.unsqueeze(1)
        return result

    def first_q(self, matrix: Tensor) -> Tensor:
        """A random matrix, the same for all trainings."""
        generator = np.random.default_rng(matrix.shape[3])
        values = generator.standard_normal((matrix.shape[3], self._rank))
        q = torch.as_tensor(values, dtype=matrix.dtype, device=matrix.device)
        return q.repeat(len(matrix), 1, 1)
