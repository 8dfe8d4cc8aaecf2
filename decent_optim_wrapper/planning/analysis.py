"""How well a topology mixes and how much it sends, in float64 and without a process group.

With W_1, ..., W_p the mixing matrices of one period and J the matrix of the mean, everything here
follows from the products of the W_t, in which x <- W_t x is applied to all rows at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.topo import Group, Topology, TopologyFactory

# A round that leaves this share of the distance to the mean has averaged exactly, up to rounding.
_EXACT = 1e-9
# Below it, rounding is too large a share of the distance to tell.
_ROUNDING_SHOWS = 1e-5
_VANISHED = 1e-16
# 2^50 periods: whatever has not died out by then does not contract.
_MOST_DOUBLINGS = 50
_WITNESSES = 2


class BytesSent(NamedTuple):
    """Bytes that a rank sends per round, averaged over the phases.

    Args:
        mean: over the ranks.
        maximum: of the rank that sends most.
    """

    mean: float
    maximum: float


def consensus_rate(topology: Topology) -> float:
    """Contraction of the distance to the average per round, in the long run.

    The spectral radius of W_p ... W_2 W_1 - J over a period p, to the power 1/p; 0 where the
    average is reached exactly.
    """
    # Rounding would turn an exact zero, reached over several periods, into some small rate.
    if rounds_to_consensus(topology) is not None:
        return 0.0
    power, log_radius = _PeriodProduct.of(_mixings(topology))
    # The k-th root of the size of the k-th power, k = 2, 4, 8, ..., tends to the spectral radius.
    # Eigenvalues would do, but LAPACK does not always find those of a product of many rounds.
    for doubling in range(1, _MOST_DOUBLINGS + 1):
        power = power @ power
        size = power.abs().max().item()
        if not size:
            return 0.0
        power /= size
        log_radius += math.log(size) / 2**doubling
    return math.exp(log_radius / topology.period)


def rounds_to_consensus(topology: Topology) -> int | None:
    """Number of rounds from phase 0 on after which all ranks hold the average; None if never.

    Ranks hold random numbers and mix them until a single round takes away all of the distance to
    the mean but rounding. Where the ranks come within 1e-5 of their distance at the start without
    such a round, the answer is None.
    """
    mixings = _mixings(topology)
    n, period = topology.world_size, topology.period
    generator = torch.Generator(device="cpu").manual_seed(0)
    away = torch.randn(n, _WITNESSES, generator=generator, dtype=torch.float64, device="cpu")
    away -= away.mean(dim=0)
    start = before = away.abs().max().item()
    # What a product of matrices can take to zero it has after as many periods as it has rows.
    for done in range(1, n * period + 1):
        away = mixings[(done - 1) % period](away)
        left = away.abs().max().item()
        if left <= _EXACT * before:
            return done
        if left < _ROUNDING_SHOWS * start:
            return None
        before = left
    return None


def steady_error(topology: Topology, overlap: bool = True) -> float:
    """How far apart unit white noise keeps the ranks: (1/n) E ||x - mean(x)||^2.

    Args:
        topology: the topology.
        overlap: the noise enters after the mixing, x <- W x + noise; else x <- W (x + noise).

    Returns:
        The error after a round in the steady state, averaged over the phases. Smaller is better;
        infinite where some ranks never receive anything of others.
    """
    mixings = _mixings(topology)
    n = topology.world_size
    noise = _away_from_mean(n)

    def one_round(covariance: Tensor, mixing: _Mixing) -> Tensor:
        if overlap:
            return mixing.both_sides(covariance) + noise
        return mixing.both_sides(covariance + noise)

    # What one period adds to a covariance of zero.
    covariance = torch.zeros_like(noise)
    for mixing in mixings:
        covariance = one_round(covariance, mixing)
    steady = _fixed_point(_PeriodProduct.of(mixings).matrix(), covariance)
    if steady is None:
        return math.inf
    errors = []
    for mixing in mixings:
        steady = one_round(steady, mixing)
        errors.append(steady.trace().item() / n)
    return math.fsum(errors) / len(errors)


def bytes_per_round(topology: Topology, parameter_bytes: float) -> BytesSent:
    """Bytes that a rank sends per round.

    A pair exchanges one copy of the parameters; a larger group of m all-reduces as a ring, which
    takes 2 (m - 1) / m copies; a rank alone sends nothing.

    Args:
        topology: the topology.
        parameter_bytes: size of one copy.
    """
    totals = [
        math.fsum(group.copies_sent for group in topology.schedule(rank))
        for rank in range(topology.world_size)
    ]
    per_copy = parameter_bytes / topology.period
    mean = math.fsum(totals) / len(totals)
    return BytesSent(mean=mean * per_copy, maximum=max(totals) * per_copy)


def suggest(world_size: int, local_world_size: int = 1) -> tuple[str, ...]:
    """The names of the topologies that fit, best first by mixing per byte.

    The order is that of steady error times mean bytes per round: how far apart noise keeps the
    ranks, and what it costs to hold them together.

    Args:
        world_size: number of ranks.
        local_world_size: ranks per node.

    Raises:
        ValueError: the sizes make no world.
    """

    def cost(name: str) -> float:
        topology = TopologyFactory.create(name, world_size, local_world_size)
        return steady_error(topology) * bytes_per_round(topology, 1).mean

    kinds = TopologyFactory.registered()
    fitting = [name for name, kind in kinds if kind.accepts(world_size, local_world_size)]
    return tuple(sorted(fitting, key=cost))


class _Mixing(NamedTuple):
    """x <- W x for one phase, without the matrix.

    Args:
        group_of: int64 of shape (ranks,), the group of every rank.
        own: float64 of shape (ranks, 1), weight of a rank's own row.
        other: the same, weight of the row of another member of its group.
    """

    group_of: Tensor
    own: Tensor
    other: Tensor

    @classmethod
    def of(cls, groups: Iterable[Group], world_size: int) -> _Mixing:
        group_of = [0] * world_size
        own, other = [1.0] * world_size, [0.0] * world_size
        for number, group in enumerate(groups):
            for rank in group.ranks:
                group_of[rank], own[rank] = number, group.self_weight
                other[rank] = (1 - group.self_weight) / max(1, group.size - 1)
        return cls(
            group_of=torch.tensor(group_of, device="cpu"),
            own=torch.tensor(own, dtype=torch.float64, device="cpu").unsqueeze(1),
            other=torch.tensor(other, dtype=torch.float64, device="cpu").unsqueeze(1),
        )

    def __call__(self, rows: Tensor) -> Tensor:
        """W rows, for float64 rows of shape (ranks, columns)."""
        sums = torch.zeros_like(rows).index_add_(0, self.group_of, rows)
        return (self.own - self.other) * rows + self.other * sums[self.group_of]

    def both_sides(self, covariance: Tensor) -> Tensor:
        """W C W', for a symmetric C of shape (ranks, ranks)."""
        return self(self(covariance).T.contiguous())


class _PeriodProduct(NamedTuple):
    """W_p ... W_1 - J as ``scaled * exp(log_scale)``, with a largest entry of `scaled` of 1.

    The product is rescaled every round: over a long period it would sink into its rounding.
    """

    scaled: Tensor
    log_scale: float

    @classmethod
    def of(cls, mixings: list[_Mixing]) -> _PeriodProduct:
        scaled, log_scale = _away_from_mean(len(mixings[0].group_of)), 0.0
        for mixing in mixings:
            scaled = mixing(scaled)
            scaled -= scaled.mean(dim=0, keepdim=True)
            size = scaled.abs().max().item()
            if not size:
                break
            scaled /= size
            log_scale += math.log(size)
        return cls(scaled=scaled, log_scale=log_scale)

    def matrix(self) -> Tensor:
        return self.scaled * math.exp(self.log_scale)


def _mixings(topology: Topology) -> list[_Mixing]:
    """The phases of one period."""
    n = topology.world_size
    return [_Mixing.of(topology.groups(phase), n) for phase in range(topology.period)]


def _away_from_mean(n: int) -> Tensor:
    """I - J, which takes the mean away; also the covariance of unit noise without its mean."""
    return torch.eye(n, dtype=torch.float64, device="cpu") - 1 / n


def _fixed_point(product: Tensor, added: Tensor) -> Tensor | None:
    """The fixed point of C <- P C P' + Q, by doubling the steps taken; None if there is none."""
    for _ in range(_MOST_DOUBLINGS):
        if product.abs().max() < _VANISHED:
            return added
        added = product @ added @ product.T + added
        product = product @ product
    return None
