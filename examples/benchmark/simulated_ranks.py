"""Ranks that are simulated in one process: what a method makes of their stacked replicas.

A replica is a row of one matrix, so optimizers that update each value by itself, codecs and mixing
matrices take all ranks of several trainings together. The optimizers and codecs are from torch and
the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from stacked_gpt import SMALL, StackedGPT
from stacked_hooks import Hook
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim._muon import _zeropower_via_newtonschulz

from decent_optim_wrapper import Topology, TopologyFactory
from decent_optim_wrapper.codecs import Codec
from decent_optim_wrapper.optim import AccumAdamW, AdamW, lr_scheduler_fn_cosine_with_warmup
from decent_optim_wrapper.wire.coded import owned_rows

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
        hook: makes the communication hook of DDP that averages gradients; None if there is none.
        streams: steps that an outer step travels (Streaming DiLoCo, Douillard et al., 2025): each
            fragment of the model has a step of its own in `every` steps, and what arrives is mixed
            with the replica, half and half. None for an outer step that ranks wait for.
        momentum: γ of GASLoC (Cagnasso et al., 2026), whose rounds set x <- W y + γ (y - y'): y are
            the replicas before the round, and y' those before the last one.
        moments: steps between two rounds of Adam's moments, by name in its state (DES-LOC, Iacob
            et al., 2025).
        feedback: how much of what a coded pseudo-gradient has lost is added to the next one
            (SparseLoCo, Sarfi et al., 2025); None for nothing.
    """

    topology: str | Callable[[int], Topology] | None = "one-peer-exp"
    every: int = 1
    late: int = 0
    codec: Codec | None = None
    outer: Callable[[list[Tensor]], Optimizer] | None = None
    hook: Callable[[StackedGPT], Hook] | None = None
    streams: int | None = None
    momentum: float = 0.0
    moments: tuple[tuple[str, int], ...] = ()
    feedback: float | None = None

    def replicas(self, ranks: int) -> int:
        """How many replicas differ: in DDP all are the same, and are one with the whole batch."""
        return 1 if self.topology is None and self.hook is None else ranks


class Rounds:
    """The rounds of a method over stacked replicas.

    Args:
        method: the method.
        x: the replicas, of shape (trainings * ranks, parameters).
        ranks: number of ranks in each training.
        gpt: the model.
    """

    def __init__(self, method: Method, x: Tensor, ranks: int, gpt: StackedGPT = SMALL) -> None:
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
        self._unsent = torch.zeros_like(self._anchor)
        self._outer = method.outer([self._anchor]) if method.outer else None
        self._hook = method.hook(gpt) if method.hook else None

    @torch.no_grad()
    def before_update(self) -> None:
        """Average gradients, and mix a round that has arrived."""
        if self._hook is not None:
            grads = self._by_training(self._x.grad)
            grads.copy_(self._hook(grads).unsqueeze(1))
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
        if self._method.outer is not None:
            decoded = self._pseudo_gradients()
            mean = (matrix @ self._by_training(decoded)).view_as(decoded)
            return self._anchor + mean - self._x
        if phase not in self._references:
            self._references[phase] = self._anchor.clone()
        reference = self._references[phase]
        decoded = round_trip(self._method.codec, self._x, reference)
        mean = (matrix @ self._by_training(decoded)).view_as(decoded)
        owned = self._owned(self._launched - 1)
        if owned.any():
            # The owner of a part sends its mean with the codec, too, and keeps the error.
            codec = self._method.codec.of_means(int(owned.max()))
            error, mean = mean, round_trip(codec, mean, torch.zeros_like(mean))
            decoded -= (self._by_training(error - mean) * owned).view_as(decoded)
        reference.add_(mean)
        return mean - decoded

    def _pseudo_gradients(self) -> Tensor:
        """What is decoded of the changes since the last outer step, and of what was not sent."""
        wanted = self._x - self._anchor
        if self._method.feedback is not None:
            wanted += self._method.feedback * self._unsent
        decoded = round_trip(self._method.codec, wanted, torch.zeros_like(wanted))
        self._unsent = wanted - decoded
        return decoded

    def _owned(self, number: int) -> Tensor:
        """Where a rank owns a part of its group's vector in a round, the size; of larger groups."""
        owned = torch.zeros(self._ranks, self._x.shape[1])
        for group in self._topology.groups(number):
            if group.size > 2:
                block = self._method.codec.block
                length = -(-self._x.shape[1] // (block * group.size)) * block
                for rank, row in zip(group.ranks, owned_rows(group.size, number), strict=True):
                    owned[rank, row * length : (row + 1) * length] = group.size
        return owned

    def _by_training(self, rows: Tensor) -> Tensor:
        """Replicas as (trainings, ranks, parameters)."""
        return rows.unflatten(0, (-1, self._ranks))


class Fragment(NamedTuple):
    """A part of the model that has outer steps of its own.

    Args:
        columns: its place in the replicas, an int64 vector.
        anchor: where the last outer step ended, of shape (trainings * ranks, columns).
        outer: the outer optimizer of the anchor.
        offset: when it is sent, in steps.
    """

    columns: Tensor
    anchor: Tensor
    outer: Optimizer
    offset: int


class StreamingRounds:
    """The rounds of Streaming DiLoCo over stacked replicas (Douillard et al., 2025).

    Each of four fragments, of every fourth matrix, is sent once in `every` steps. After `streams`
    steps its outer step is made, and each rank goes on half-way between it and its own values.

    Args:
        method, x, ranks, gpt: as in `Rounds`.
    """

    FRAGMENTS, OWN = 4, 0.5

    def __init__(self, method: Method, x: Tensor, ranks: int, gpt: StackedGPT = SMALL) -> None:
        self._method, self._x, self._ranks = method, x, ranks
        places = torch.arange(x.shape[1]).split([prod(shape) for shape in gpt.shapes])
        self._fragments = []
        for number in range(self.FRAGMENTS):
            columns = torch.cat(places[number :: self.FRAGMENTS])
            anchor = x.detach()[:, columns].clone()
            offset = number * method.every // self.FRAGMENTS
            self._fragments.append(Fragment(columns, anchor, method.outer([anchor]), offset))
        self._in_flight: dict[int, Tensor] = {}
        self._steps = 0

    def before_update(self) -> None:
        """Do nothing: all happens after an update."""

    @torch.no_grad()
    def after_update(self, optimizers: Sequence[Optimizer]) -> None:
        """Send a fragment when it is due, and take in one that has arrived."""
        self._steps += 1
        for number, fragment in enumerate(self._fragments):
            age = (self._steps - fragment.offset) % self._method.every
            if age == 0:
                self._in_flight[number] = self._pseudo_gradient(fragment)
            if age == self._method.streams:
                self._receive(number)

    @torch.no_grad()
    def finish(self) -> None:
        """Receive what is in flight."""
        for number in [*self._in_flight]:
            self._receive(number)

    def _pseudo_gradient(self, fragment: Fragment) -> Tensor:
        values, codec = self._x.detach()[:, fragment.columns], self._method.codec
        change = (
            values - fragment.anchor
            if codec is None
            else round_trip(codec, values, fragment.anchor)
        )
        mean = change.unflatten(0, (-1, self._ranks)).mean(1, keepdim=True)
        return -mean.expand(-1, self._ranks, -1).flatten(0, 1)

    def _receive(self, number: int) -> None:
        if number in self._in_flight:
            fragment = self._fragments[number]
            fragment.anchor.grad = self._in_flight.pop(number)
            fragment.outer.step()
            values = self._x.detach()[:, fragment.columns]
            self._x[:, fragment.columns] = torch.lerp(fragment.anchor, values, self.OWN)


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


def muon(x: Tensor, lr: float, gpt: StackedGPT, ranks: int = 1) -> list[Optimizer]:
    """Muon for the hidden matrices of each rank, and AdamW for the others; needs `x.grad`.

    AdamW's second moments have the noise of `ranks` ranks.
    """
    parts = gpt.split(x.detach())
    for part, grad in zip(parts, gpt.split(x.grad), strict=True):
        part.grad = grad
    hidden = [parts[place] for place in gpt.hidden]
    others = [part for place, part in enumerate(parts) if place not in gpt.hidden]
    return [StackedMuon(hidden, lr), AdamW(others, lr, betas=BETAS, ranks=ranks)]


class NoiseOfFirstMoment(Optimizer):
    """AdamW whose second moment follows the square of the unbiased first moment.

    It has the noise of about 19 ranks, and no state of its own.

    Args:
        x: the parameters.
        lr: learning rate.
    """

    def __init__(self, x: Tensor, lr: float) -> None:
        super().__init__([x], {"lr": lr})
        self._steps = 0
        self._average, self._square = torch.zeros_like(x), torch.zeros_like(x)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        (x,), lr = group["params"], group["lr"]
        self._steps += 1
        x.mul_(1 - 0.01 * lr)
        self._average.lerp_(x.grad, 1 - BETAS[0])
        unbiased = self._average / (1 - BETAS[0] ** self._steps)
        self._square.mul_(BETAS[1]).addcmul_(unbiased, unbiased, value=1 - BETAS[1])
        root = (self._square / (1 - BETAS[1] ** self._steps)).sqrt_().add_(1e-8)
        x.addcdiv_(unbiased, root, value=-lr)


OPTIMIZERS: dict[str, Callable[[Tensor, float, StackedGPT], list[Optimizer]]] = {
    "AdamW": lambda x, lr, _: [AdamW([x], lr, betas=BETAS, fused=True, ranks=1)],
    # The moments move once in 4 steps: these betas forget as much in a step.
    "AccumAdamW": lambda x, lr, _: [
        AccumAdamW([x], lr=lr, betas=(BETAS[0] ** 4, BETAS[1] ** 4), accum_iter=4)
    ],
    "SGD": lambda x, lr, _: [SGD([x], lr=lr, momentum=0.9)],
    "Muon": muon,
    "AdamW, noise by the first moment": lambda x, lr, _: [NoiseOfFirstMoment(x, lr)],
    **{
        f"AdamW, noise of {n}": lambda x, lr, _, n=n: [
            AdamW([x], lr, betas=BETAS, fused=True, ranks=n)
        ]  # type: ignore[misc]
        for n in (4, 8, 16)
    },
    # With torch's own β2.
    "AdamW .999": lambda x, lr, _: [AdamW([x], lr, fused=True, ranks=1)],
    **{
        f"AdamW .999, noise of {n}": lambda x, lr, _, n=n: [AdamW([x], lr, fused=True, ranks=n)]  # type: ignore[misc]
        for n in (4, 8, 16)
    },
    **{f"Muon, noise of {n}": partial(muon, ranks=n) for n in (4, 8, 16)},
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
    steps: int,
    gpt: StackedGPT = SMALL,
) -> Tensor:
    """Train with a method once for each learning rate and seed.

    The rate rises linearly for a tenth of the steps, and falls to zero by a cosine.

    Returns:
        the replicas after the last step, of shape (lrs, seeds, replicas, parameters).
    """
    replicas = method.replicas(ranks)
    starts = torch.stack([gpt.initial_weights(seed) for seed in seeds])
    x = starts.repeat_interleave(replicas, 0).repeat(len(lrs), 1).requires_grad_()
    x.grad = torch.zeros_like(x)
    kind = Rounds if method.streams is None else StreamingRounds
    rounds = kind(method, x, replicas, gpt)
    size = len(seeds) * replicas
    optimizers = [
        each
        for place, lr in enumerate(lrs)
        for each in OPTIMIZERS[optimizer](
            slice_of(x, slice(place * size, (place + 1) * size)), lr, gpt
        )
    ]
    warmup = steps // 10
    schedule = partial(lr_scheduler_fn_cosine_with_warmup, t_max=steps - warmup, t_warmup=warmup)
    schedulers = [schedule(each) for each in optimizers]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for _ in range(steps):
        x.grad.zero_()
        batches = torch.cat([gpt.batch(generator, replicas) for generator in generators])
        gpt.stacked_loss(gpt.split(x), batches.repeat(len(lrs), 1, 1)).backward()
        rounds.before_update()
        for each in (*optimizers, *schedulers):
            each.step()
        rounds.after_update(optimizers)
    rounds.finish()
    return x.detach().view(len(lrs), len(seeds), replicas, -1)
