"""Ranks that are simulated in one process: what a method makes of their stacked replicas.

A replica is a row of one matrix, so optimizers that update each value by itself, codecs and mixing
matrices take all ranks of several trainings together. The optimizers and codecs are from torch and
the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from stacked_gpt import HIDDEN, STEPS, batch, initial_weights, split, stacked_loss
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim._muon import _zeropower_via_newtonschulz

from decent_optim_wrapper import Topology, TopologyFactory
from decent_optim_wrapper.codecs import Codec
from decent_optim_wrapper.optim import AccumAdamW, lr_scheduler_fn_cosine_with_warmup
from decent_optim_wrapper.wire.coded import shares

BETAS = (0.9, 0.95)
# The defaults of torch.optim.Muon.
NEWTON_SCHULZ = {"ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5, "eps": 1e-7}


class Method(NamedTuple):
    """How the ranks communicate.

    Args:
        topology: who mixes parameters with whom, as a name or made from the number of ranks; None
            for DDP.
        every: steps from one round to the next.
        late: steps from the launch of a round to its mixing, which comes before the update of that
            step; 0 mixes before the next forward pass.
        codec: the codec of the messages; None for float32.
        outer: makes an outer optimizer from the anchors; it steps after every round.
        reduce_dtype: dtype in which gradients are summed; None if they are not.
        momentum: γ of GASLoC (Cagnasso et al., 2026), whose rounds set x <- W y + γ (y - y'): y are
            the replicas before the round, and y' those before the last one.
        moments: steps between two rounds of Adam's moments, by name in its state (DES-LOC, Iacob
            et al., 2025).
    """

    topology: str | Callable[[int], Topology] | None = "one-peer-exp"
    every: int = 1
    late: int = 0
    codec: Codec | None = None
    outer: Callable[[list[Tensor]], Optimizer] | None = None
    reduce_dtype: torch.dtype | None = None
    momentum: float = 0.0
    moments: tuple[tuple[str, int], ...] = ()

    def replicas(self, ranks: int) -> int:
        """How many replicas differ: in DDP all are the same, and are one with the whole batch."""
        return 1 if self.reduce_dtype == torch.float32 else ranks


class Rounds:
    """The rounds of a method over stacked replicas.

    Args:
        method: the method.
        x: the replicas, of shape (trainings * ranks, parameters).
        ranks: number of ranks in each training.
    """

    def __init__(self, method: Method, x: Tensor, ranks: int) -> None:
        self._method, self._x, self._ranks = method, x, ranks
        self._topology = method.topology
        if isinstance(method.topology, str):
            self._topology = TopologyFactory.create(method.topology, ranks)
        elif method.topology is not None:
            self._topology = method.topology(ranks)
        # By phase: rows of one group are the same.
        self._references: dict[int, Tensor] = {}
        self._in_flight: Tensor | None = None
        self._launched = self._steps = self._arrival = 0
        self._anchor = x.detach().clone()
        self._before = self._anchor.clone()
        self._outer = method.outer([self._anchor]) if method.outer else None

    @torch.no_grad()
    def before_update(self) -> None:
        """Average gradients, and mix a round that has arrived."""
        if self._method.reduce_dtype == torch.bfloat16:
            grads = self._by_training(self._x.grad / self._ranks).bfloat16().unbind(1)
            self._by_training(self._x.grad).copy_(sum(grads[1:], grads[0]).unsqueeze(1))
        if self._steps == self._arrival:
            self.finish()

    @torch.no_grad()
    def after_update(self, optimizers: Sequence[Optimizer]) -> None:
        """Launch a round when one is due, and mix moments of the optimizers of the replicas."""
        self._steps += 1
        for name, every in self._method.moments:
            if self._steps % every == 0:
                for moment in (each[name] for o in optimizers for each in o.state.values()):
                    matrix = self._topology.mixing_matrix(self._steps // every).to(moment)
                    moment.copy_((matrix @ self._by_training(moment)).view_as(moment))
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
        matrix = self._topology.mixing_matrix(self._launched).to(self._x)
        phase = self._launched % self._topology.period
        self._launched += 1
        if self._method.codec is None:
            change = (matrix @ self._by_training(self._x)).view_as(self._x) - self._x
            if self._method.momentum:
                change += self._method.momentum * (self._x - self._before)
                self._before.copy_(self._x)
            return change
        if phase not in self._references:
            self._references[phase] = self._anchor.clone()
        reference = self._references[phase]
        decoded = round_trip(self._method.codec, self._x, reference)
        mean = (matrix @ self._by_training(decoded)).view_as(decoded)
        owned = self._owned(self._launched - 1)
        if owned.any():
            # The owner of a part sends its mean with the codec, too, and keeps the error.
            error, mean = mean, round_trip(self._method.codec, mean, torch.zeros_like(mean))
            decoded -= (self._by_training(error - mean) * owned).view_as(decoded)
        reference.add_(mean)
        return mean - decoded

    def _owned(self, number: int) -> Tensor:
        """Where a rank owns a part of its group's vector in a round, the size; of larger groups."""
        owned = torch.zeros(self._ranks, self._x.shape[1])
        for group in self._topology.groups(number):
            if group.size > 2:
                parts = shares(self._x.shape[1], self._method.codec.block, group.size, number)
                for rank, part in zip(group.ranks, parts, strict=True):
                    owned[rank, part] = group.size
        return owned

    def _by_training(self, rows: Tensor) -> Tensor:
        """Replicas as (trainings, ranks, parameters)."""
        return rows.unflatten(0, (-1, self._ranks))


def round_trip(codec: Codec, x: Tensor, reference: Tensor) -> Tensor:
    """What the ranks decode of the differences x - reference."""
    message = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8)
    codec.encode(x.detach().flatten(), message, reference.flatten())
    decoded = torch.empty(x.numel(), dtype=x.dtype)
    for place, (values,) in codec.decode(message, numel=x.numel(), dtype=x.dtype):
        decoded[place] = values
    return decoded.view_as(x)


class StackedMuon(Optimizer):
    """`torch.optim.Muon` with ``adjust_lr_fn="match_rms_adamw"``, for stacked matrices.

    The weight decay is AdamW's default.

    Args:
        stacks: tensors of shape (ranks, rows, columns), with gradients.
        lr: learning rate.
    """

    def __init__(self, stacks: list[Tensor], lr: float) -> None:
        super().__init__(stacks, {"lr": lr})
        self._averages = [torch.zeros_like(stack) for stack in stacks]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        orthogonal = torch.vmap(partial(_zeropower_via_newtonschulz, **NEWTON_SCHULZ))
        for stack, average in zip(group["params"], self._averages, strict=True):
            average.lerp_(stack.grad, 1 - 0.95)
            update = orthogonal(stack.grad.lerp(average, 0.95))
            stack.mul_(1 - 0.01 * group["lr"])
            stack.sub_(update, alpha=0.2 * max(stack.shape[1:]) ** 0.5 * group["lr"])


def muon(x: Tensor, lr: float) -> list[Optimizer]:
    """Muon for the hidden matrices of each rank, and AdamW for the others; needs `x.grad`."""
    parts = split(x.detach())
    for part, grad in zip(parts, split(x.grad), strict=True):
        part.grad = grad
    hidden = [parts[place] for place in HIDDEN]
    others = [part for place, part in enumerate(parts) if place not in HIDDEN]
    return [StackedMuon(hidden, lr), AdamW(others, lr=lr, betas=BETAS)]


class NoiseOfRanks(Optimizer):
    """AdamW whose second moment follows the square of a short average b of the gradients.

    b <- β b + (1 - β) g with β = (n - 1) / (n + 1) has the variance of the mean of n gradients, so
    the second moment sees the noise of all ranks.

    Args:
        x: the parameters.
        lr: learning rate.
        ranks: n.
    """

    def __init__(self, x: Tensor, lr: float, ranks: int) -> None:
        super().__init__([x], {"lr": lr, "decay": (ranks - 1) / (ranks + 1)})
        self._steps = 0
        self._slots = [torch.zeros_like(x) for _ in range(3)]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,), (average, square, short) = self.param_groups, self._slots
        (x,), lr, decay = group["params"], group["lr"], group["decay"]
        self._steps += 1
        x.mul_(1 - 0.01 * lr)
        average.lerp_(x.grad, 1 - BETAS[0])
        short.lerp_(x.grad, 1 - decay)
        unbiased = short / (1 - decay**self._steps)
        square.mul_(BETAS[1]).addcmul_(unbiased, unbiased, value=1 - BETAS[1])
        root = (square / (1 - BETAS[1] ** self._steps)).sqrt_().add_(1e-8)
        x.addcdiv_(average, root, value=-lr / (1 - BETAS[0] ** self._steps))


OPTIMIZERS: dict[str, Callable[[Tensor, float], list[Optimizer]]] = {
    "AdamW": lambda x, lr: [AdamW([x], lr=lr, betas=BETAS, fused=True)],
    # The moments move once in 4 steps: these betas forget as much in a step.
    "AccumAdamW": lambda x, lr: [
        AccumAdamW([x], lr=lr, betas=(BETAS[0] ** 4, BETAS[1] ** 4), accum_iter=4)
    ],
    "SGD": lambda x, lr: [SGD([x], lr=lr, momentum=0.9)],
    "Muon": muon,
    **{
        f"AdamW, noise of {ranks}": lambda x, lr, ranks=ranks: [NoiseOfRanks(x, lr, ranks)]  # type: ignore[misc]
        for ranks in (4, 8, 16)
    },
}


def slice_of(x: Tensor, place: slice) -> Tensor:
    """Some rows of the replicas as a parameter of their own, with their gradient."""
    rows = x.detach()[place]
    rows.grad = x.grad[place]
    return rows


def train(
    method: Method,
    optimizer: str,
    ranks: int,
    lrs: Sequence[float],
    seeds: Sequence[int],
    steps: int = STEPS,
) -> Tensor:
    """Train with a method once for each learning rate and seed.

    The rate rises linearly for a tenth of the steps, and falls to zero by a cosine.

    Returns:
        the replicas after the last step, of shape (lrs, seeds, replicas, parameters).
    """
    replicas = method.replicas(ranks)
    starts = torch.stack([initial_weights(seed) for seed in seeds])
    x = starts.repeat_interleave(replicas, 0).repeat(len(lrs), 1).requires_grad_()
    x.grad = torch.zeros_like(x)
    rounds = Rounds(method, x, replicas)
    size = len(seeds) * replicas
    optimizers = [
        each
        for place, lr in enumerate(lrs)
        for each in OPTIMIZERS[optimizer](slice_of(x, slice(place * size, (place + 1) * size)), lr)
    ]
    warmup = steps // 10
    schedule = partial(lr_scheduler_fn_cosine_with_warmup, t_max=steps - warmup, t_warmup=warmup)
    schedulers = [schedule(each) for each in optimizers]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for _ in range(steps):
        x.grad.zero_()
        batches = torch.cat([batch(generator, replicas) for generator in generators])
        stacked_loss(split(x), batches.repeat(len(lrs), 1, 1)).backward()
        rounds.before_update()
        for each in (*optimizers, *schedulers):
            each.step()
        rounds.after_update(optimizers)
    rounds.finish()
    return x.detach().view(len(lrs), len(seeds), replicas, -1)
