"""How well a topology mixes and how much it sends, in float64 and without a process group.

Copy this file to your script, and import from it. `custom_topology.py` compares two topologies.

With W_1, ..., W_p the mixing matrices of one period and J the matrix of the mean, everything here
follows from products of the W_t.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper import Topology

# A round that leaves this share of the distance to the mean has averaged exactly, up to rounding.
_EXACT = 1e-9
# Below this distance the share of rounding is too large.
_ROUNDING_SHOWS = 1e-5
_VANISHED = 1e-16
# 2^50 periods: a distance that remains after them does not contract.
_MOST_DOUBLINGS = 50
_WITNESSES = 2


class BytesSent(NamedTuple):
    """Bytes that a rank sends per round, averaged over the phases.

    Args:
        mean: mean over the ranks, in bytes.
        maximum: bytes of the rank that sends most.
    """

    mean: float
    maximum: float


def consensus_rate(topology: Topology) -> float:
    """Factor by which the distance to the average shrinks per round, in the long run.

    This is the spectral radius of W_p ... W_2 W_1 - J over a period p, to the power 1/p, with J the
    matrix of the mean; 0 if the average is reached exactly.
    """
    # Rounding would turn an exact zero, reached over several periods, into some small rate.
    if rounds_to_consensus(topology) is not None:
        return 0.0
    # Rescaled every time, or the product would vanish over a long period or many squarings.
    power, log_radius = _away_from_mean(topology.world_size), 0.0
    for mixing in _mixing_matrices(topology):
        power = mixing @ power
        power, log_size = _rescaled(power - power.mean(dim=0, keepdim=True))
        log_radius += log_size
    # The k-th root of the size of the k-th power, k = 2, 4, 8, ..., tends to the spectral radius.
    # Not by eigenvalues: LAPACK does not always find the eigenvalues of a product of many rounds.
    for doubling in range(1, _MOST_DOUBLINGS + 1):
        power, log_size = _rescaled(power @ power)
        log_radius += log_size / 2**doubling
    return math.exp(log_radius / topology.period)


def rounds_to_consensus(topology: Topology) -> int | None:
    """Number of rounds from phase 0 after which all ranks have the exact average; None if never.

    The ranks start with random numbers and mix them until a single round removes all of the
    distance to the mean except rounding. If the distance falls below 1e-5 of that at the start
    without such a round, the result is None.
    """
    mixings = _mixing_matrices(topology)
    n, period = topology.world_size, topology.period
    generator = torch.Generator(device="cpu").manual_seed(0)
    away = torch.randn(n, _WITNESSES, generator=generator, dtype=torch.float64, device="cpu")
    away -= away.mean(dim=0)
    start = before = away.abs().max().item()
    # A matrix whose powers vanish has done so after as many powers as it has rows.
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
    """Steady distance of the ranks under unit white noise: (1/n) E ||x - mean(x)||^2.

    Args:
        topology: the topology.
        overlap: add the noise after the mixing, x <- W x + noise; otherwise x <- W (x + noise).

    Returns:
        The error after a round in the steady state, averaged over the phases. Smaller is better.
        It is infinite if some ranks never mix with others.
    """
    mixings = _mixing_matrices(topology)
    n = topology.world_size
    noise = _away_from_mean(n)

    def one_round(covariance: Tensor, mixing: Tensor) -> Tensor:
        before, after = (0, noise) if overlap else (noise, 0)
        return mixing @ (mixing @ (covariance + before)).T + after

    # The product of one period's matrices, and the covariance that its noise adds to zero.
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
    takes 2 (m - 1) / m copies; an idle rank sends nothing.

    Args:
        topology: the topology.
        parameter_bytes: bytes of one copy.

    Returns:
        Mean and maximum over the ranks, in bytes.
    """
    phases = []
    for phase in range(topology.period):
        copies = [0.0] * topology.world_size
        for group in topology.groups(phase):
            for rank in group.ranks:
                copies[rank] = group.copies_sent
        phases.append(copies)
    totals = [math.fsum(each) for each in zip(*phases, strict=True)]
    per_copy = parameter_bytes / topology.period
    mean = math.fsum(totals) / len(totals)
    return BytesSent(mean=mean * per_copy, maximum=max(totals) * per_copy)


def _mixing_matrices(topology: Topology) -> list[Tensor]:
    """The matrices of one period, sparse: most ranks mix with few others."""
    return [topology.mixing_matrix(phase).to_sparse() for phase in range(topology.period)]


def _rescaled(matrix: Tensor) -> tuple[Tensor, float]:
    """The matrix divided by its largest entry, and the logarithm of that entry."""
    size = matrix.abs().max().item()
    return (matrix / size, math.log(size)) if size else (matrix, -math.inf)


def _away_from_mean(n: int) -> Tensor:
    """I - J, which subtracts the mean; also the covariance of unit noise without its mean."""
    return torch.eye(n, dtype=torch.float64, device="cpu") - 1 / n


def _fixed_point(product: Tensor, added: Tensor) -> Tensor | None:
    """The fixed point of C <- P C P' + Q, by doubling the number of steps; else None."""
    for _ in range(_MOST_DOUBLINGS):
        if product.abs().max() < _VANISHED:
            return added
        added = product @ added @ product.T + added
        product = product @ product
    return None
