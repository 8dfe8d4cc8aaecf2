"""How well a topology mixes and how much it sends, in float64 and without a process group.

With W_1, ..., W_p the mixing matrices of one period and J the matrix of the mean, everything here
follows from the products of the W_t.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.topo import Topology, TopologyFactory

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
    # Rescaled every time: over a long period, or squared often, the product would vanish.
    power, log_radius = _away_from_mean(topology.world_size), 0.0
    for mixing in _mixing_matrices(topology):
        power = mixing @ power
        power, log_size = _rescaled(power - power.mean(dim=0, keepdim=True))
        log_radius += log_size
    # The k-th root of the size of the k-th power, k = 2, 4, 8, ..., tends to the spectral radius.
    # Eigenvalues would do, but LAPACK does not always find those of a product of many rounds.
    for doubling in range(1, _MOST_DOUBLINGS + 1):
        power, log_size = _rescaled(power @ power)
        log_radius += log_size / 2**doubling
    return math.exp(log_radius / topology.period)


def rounds_to_consensus(topology: Topology) -> int | None:
    """Number of rounds from phase 0 on after which all ranks hold the average; None if never.

    Ranks hold random numbers and mix them until a single round takes away all of the distance to
    the mean but rounding. Where the ranks come within 1e-5 of their distance at the start without
    such a round, the answer is None.
    """
    mixings = _mixing_matrices(topology)
    n, period = topology.world_size, topology.period
    generator = torch.Generator(device="cpu").manual_seed(0)
    away = torch.randn(n, _WITNESSES, generator=generator, dtype=torch.float64, device="cpu")
    away -= away.mean(dim=0)
    start = before = away.abs().max().item()
    # What a product of matrices can take to zero it has after as many periods as it has rows.
    for done in range(1, n * period + 1):
        away = mixings[(done - 1) % period] @ away
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
    mixings = _mixing_matrices(topology)
    n = topology.world_size
    noise = _away_from_mean(n)

    def one_round(covariance: Tensor, mixing: Tensor) -> Tensor:
        before, after = (0, noise) if overlap else (noise, 0)
        return mixing @ (mixing @ (covariance + before)).T + after

    # What one period makes of the ranks' distances, and adds to a covariance of zero.
    product, covariance = noise, torch.zeros_like(noise)
    for mixing in mixings:
        product = mixing @ product
        covariance = one_round(covariance, mixing)
    steady = _fixed_point(product, covariance)
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


def _mixing_matrices(topology: Topology) -> list[Tensor]:
    """The matrices of one period, sparse: most ranks mix with few others."""
    return [topology.mixing_matrix(phase).to_sparse() for phase in range(topology.period)]


def _rescaled(matrix: Tensor) -> tuple[Tensor, float]:
    """A matrix with a largest entry of 1, and the logarithm of what that took away."""
    size = matrix.abs().max().item()
    return (matrix / size, math.log(size)) if size else (matrix, -math.inf)


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
