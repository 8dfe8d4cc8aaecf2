"""What a topology does and costs, before the machines are rented: float64, no process group."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.topo import Topology

_EXACT = 1e-12
# 2^50 periods: what has not died out by then does not contract.
_MOST_DOUBLINGS = 50


class Bytes(NamedTuple):
    """Bytes that a rank sends per round, averaged over the phases.

    Args:
        mean: over the ranks.
        maximum: of the rank that sends most.
    """

    mean: float
    maximum: float


def mixing_matrices(topology: Topology) -> list[Tensor]:
    """The mixing matrices of one period, float64 of shape (world_size, world_size)."""
    return [topology.mixing_matrix(phase) for phase in range(topology.period)]


def consensus_rate(topology: Topology) -> float:
    """Contraction of the distance to the average per round, in the long run.

    The spectral radius of W_p ... W_2 W_1 - J over a period p, to the power 1/p; 0 where the
    average is reached exactly.
    """
    left = _without_mean(torch.eye(topology.world_size, dtype=torch.float64))
    scale = 0.0
    for matrix in mixing_matrices(topology):
        left = _without_mean(matrix @ left)
        size = left.abs().max().item()
        if size < _EXACT:
            return 0.0
        # Rescaled every round: over a long period the product would sink into its rounding.
        left /= size
        scale += math.log(size)
    radius = torch.linalg.eigvals(left).abs().max().item()
    return math.exp((scale + math.log(radius)) / topology.period) if radius else 0.0


def rounds_to_consensus(topology: Topology) -> int | None:
    """Number of rounds from phase 0 on after which all ranks hold the average; None if never."""
    left = _without_mean(torch.eye(topology.world_size, dtype=torch.float64))
    for done, matrix in enumerate(mixing_matrices(topology), start=1):
        left = _without_mean(matrix @ left)
        size = left.abs().max()
        # A single round that takes all: a slow contraction never does.
        if size < _EXACT:
            return done
        left /= size
    return None


def steady_error(topology: Topology, overlap: bool = True) -> float:
    """How far apart unit white noise keeps the ranks: (1/n) E ||x - mean(x)||^2.

    Args:
        topology: the topology.
        overlap: the noise enters after the mixing, x <- W x + noise; else x <- W (x + noise).

    Returns:
        The error after a round in the steady state, averaged over the phases. Smaller is better;
        infinite where some ranks never hear of others.
    """
    matrices = mixing_matrices(topology)
    noise = _without_mean(torch.eye(topology.world_size, dtype=torch.float64))
    covariance = _steady_covariance(matrices, noise, overlap)
    if covariance is None:
        return math.inf
    errors = []
    for matrix in matrices:
        covariance = _one_round(covariance, matrix, noise, overlap)
        errors.append(covariance.trace().item() / topology.world_size)
    return math.fsum(errors) / len(errors)


def bytes_per_round(topology: Topology, parameter_bytes: float) -> Bytes:
    """Bytes that a rank sends per round.

    A pair exchanges one copy of the parameters; a larger group of m all-reduces as a ring, which
    takes 2 (m - 1) / m copies; a rank alone sends nothing.

    Args:
        topology: the topology.
        parameter_bytes: size of one copy.
    """
    totals = torch.zeros(topology.world_size, dtype=torch.float64)
    for phase in range(topology.period):
        for group in topology.groups(phase):
            totals[list(group.ranks)] += copies_sent(group.size)
    sent = totals * parameter_bytes / topology.period
    return Bytes(sent.mean().item(), sent.max().item())


def copies_sent(group_size: int) -> float:
    """Copies of the parameters that a member of a group sends: 0, 1 or those of a ring."""
    if group_size <= 2:
        return float(group_size - 1)
    return 2 * (group_size - 1) / group_size


def _without_mean(rows: Tensor) -> Tensor:
    return rows - rows.mean(dim=0, keepdim=True)


def _one_round(covariance: Tensor, matrix: Tensor, noise: Tensor, overlap: bool) -> Tensor:
    if overlap:
        return matrix @ covariance @ matrix.T + noise
    return matrix @ (covariance + noise) @ matrix.T


def _steady_covariance(matrices: list[Tensor], noise: Tensor, overlap: bool) -> Tensor | None:
    """The fixed point of C <- P C P' + Q over a period, by doubling; None where there is none."""
    covariance = torch.zeros_like(noise)
    product = noise.clone()
    for matrix in matrices:
        covariance = _one_round(covariance, matrix, noise, overlap)
        product = matrix @ product
    for _ in range(_MOST_DOUBLINGS):
        if product.abs().max() < 1e-16:
            return covariance
        covariance = product @ covariance @ product.T + covariance
        product = product @ product
    return None
