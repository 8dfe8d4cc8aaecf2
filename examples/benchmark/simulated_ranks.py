"""Ranks that are simulated in one process: what a method makes of their stacked replicas.

A replica is a row of one matrix, so optimizers that update each value by itself, codecs and mixing
matrices take all ranks together. The optimizers and codecs are those of torch and of the library.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple

import torch
from stacked_gpt import HIDDEN, STEPS, batch, initial_weights, split, stacked_loss
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from decent_optim_wrapper import TopologyFactory
from decent_optim_wrapper.codecs import Codec
from decent_optim_wrapper.optim import AccumAdamW, lr_scheduler_fn_cosine_with_warmup

BETAS = (0.9, 0.95)


class Method(NamedTuple):
    """How the ranks communicate.

    Args:
        topology: who mixes parameters with whom; None for DDP.
        every: steps from one round to the next.
        late: steps from the launch of a round to its mixing, which comes before the update of that
            step; 0 mixes before the next forward pass.
        codec: the codec of the messages of pairs; None for float32.
        outer: makes an outer optimizer from the anchors; it steps after every round.
        reduce_dtype: dtype in which gradients are summed; None if they are not.
    """

    topology: str | None = "one-peer-exp"
    every: int = 1
    late: int = 0
    codec: Codec | None = None
    outer: Callable[[list[Tensor]], Optimizer] | None = None
    reduce_dtype: torch.dtype | None = None

    def replicas(self, ranks: int) -> int:
        """How many replicas differ: in DDP all are the same, and are one with the whole batch."""
        return 1 if self.reduce_dtype == torch.float32 else ranks


class Rounds:
    """The rounds of a method over stacked replicas.

    Args:
        method: the method.
        x: the replicas, of shape (ranks, parameters).
    """

    def __init__(self, method: Method, x: Tensor) -> None:
        self._method, self._x = method, x
        self._topology = None
        if method.topology is not None:
            self._topology = TopologyFactory.create(method.topology, len(x))
        # By phase: rows of one group are the same.
        self._references: dict[int, Tensor] = {}
        self._in_flight: Tensor | None = None
        self._launched = self._steps = self._arrival = 0
        self._anchor = x.detach().clone()
        self._outer = method.outer([self._anchor]) if method.outer else None

    @torch.no_grad()
    def before_update(self) -> None:
        """Average gradients, and mix a round that has arrived."""
        if self._method.reduce_dtype == torch.bfloat16:
            grads = (self._x.grad / len(self._x)).bfloat16()
            self._x.grad.copy_(reduce(torch.add, grads))
        if self._steps == self._arrival:
            self.finish()

    @torch.no_grad()
    def after_update(self) -> None:
        """Launch a round when one is due."""
        self._steps += 1
        if self._topology is None or self._steps % self._method.every:
            return
        self._in_flight = self._change()
        self._arrival = self._steps + self._method.late - 1
        if not self._method.late:
            self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """Mix the round in flight, if there is one."""
        if self._in_flight is not None:
            self._x.add_(self._in_flight)
            self._in_flight = None
            if self._outer is not None:
                self._anchor.grad = self._anchor - self._x
                self._outer.step()
                self._x.copy_(self._anchor)

    def _change(self) -> Tensor:
        """What the next round adds to the replicas as they are now."""
        matrix = self._topology.mixing_matrix(self._launched).to(self._x.dtype)
        phase = self._launched % self._topology.period
        self._launched += 1
        if self._method.codec is None:
            return matrix @ self._x - self._x
        if phase not in self._references:
            self._references[phase] = self._anchor.clone()
        reference = self._references[phase]
        decoded = round_trip(self._method.codec, self._x, reference)
        mean = matrix @ decoded
        reference.add_(mean)
        return mean - decoded


def round_trip(codec: Codec, x: Tensor, reference: Tensor) -> Tensor:
    """What the ranks decode of the differences x - reference."""
    message = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8)
    codec.encode(x.detach().flatten(), message, reference.flatten())
    decoded = torch.empty(x.numel(), dtype=x.dtype)
    for place, (values,) in codec.decode(message, numel=x.numel(), dtype=x.dtype):
        decoded[place] = values
    return decoded.view_as(x)


def muon(x: Tensor, lr: float) -> list[Optimizer]:
    """Muon for the hidden matrices of each rank, and AdamW for the others; needs `x.grad`."""
    parts, grads = split(x.detach()), split(x.grad)
    for part, grad in zip(parts, grads, strict=True):
        part.grad = grad
    hidden = []
    for place in HIDDEN:
        for matrix, grad in zip(parts[place], grads[place], strict=True):
            hidden.append(nn.Parameter(matrix))
            hidden[-1].grad = grad
    others = [part for place, part in enumerate(parts) if place not in HIDDEN]
    return [
        Muon(hidden, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        AdamW(others, lr=lr, betas=BETAS),
    ]


OPTIMIZERS: dict[str, Callable[[Tensor, float], list[Optimizer]]] = {
    "AdamW": lambda x, lr: [AdamW([x], lr=lr, betas=BETAS, fused=True)],
    # The moments move once in 4 steps: these betas forget as much in a step.
    "AccumAdamW": lambda x, lr: [
        AccumAdamW([x], lr=lr, betas=(BETAS[0] ** 4, BETAS[1] ** 4), accum_iter=4)
    ],
    "SGD": lambda x, lr: [SGD([x], lr=lr, momentum=0.9)],
    "Muon": muon,
}


def train(
    method: Method, optimizer: str, ranks: int, lr: float, seed: int, steps: int = STEPS
) -> Tensor:
    """Train with a method, and return the stacked replicas after the last step.

    The rate rises linearly for a tenth of the steps, and falls to zero by a cosine.
    """
    x = initial_weights(seed).repeat(method.replicas(ranks), 1).requires_grad_()
    x.grad = torch.zeros_like(x)
    rounds = Rounds(method, x)
    optimizers = OPTIMIZERS[optimizer](x, lr)
    warmup = steps // 10
    schedule = partial(lr_scheduler_fn_cosine_with_warmup, t_max=steps - warmup, t_warmup=warmup)
    schedulers = [schedule(each) for each in optimizers]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x.grad.zero_()
        stacked_loss(split(x), batch(generator, len(x))).backward()
        rounds.before_update()
        for each in (*optimizers, *schedulers):
            each.step()
        rounds.after_update()
    rounds.finish()
    return x.detach()
