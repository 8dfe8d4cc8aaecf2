"""What a topology does and costs, before the machines are rented: float64, no process group."""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper._mixing import PRIME, Mixing, mixings
from decent_optim_wrapper.topo import Topology

_VANISHED = 1e-16
# 2^50 periods: what has not died out by then does not contract.
_MOST_DOUBLINGS = 50
# Each fails to see a difference with a probability of 1 in 2^31.
_WITNESSES = 2


class Bytes(NamedTuple):
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
    return Figures(topology).consensus_rate


def rounds_to_consensus(topology: Topology) -> int | None:
    """Number of rounds from phase 0 on after which all ranks hold the average; None if never.

    Ranks hold random numbers and mix them in exact arithmetic, modulo a prime, until all are
    equal. What a product of matrices can take to zero it has after as many periods as it has rows.
    """
    return Figures(topology).rounds_to_consensus


def steady_error(topology: Topology, overlap: bool = True) -> float:
    """How far apart unit white noise keeps the ranks: (1/n) E ||x - mean(x)||^2.

    Args:
        topology: the topology.
        overlap: the noise enters after the mixing, x <- W x + noise; else x <- W (x + noise).

    Returns:
        The error after a round in the steady state, averaged over the phases. Smaller is better;
        infinite where some ranks never hear of others.
    """
    return Figures(topology, overlap).steady_error


def bytes_per_round(topology: Topology, parameter_bytes: float) -> Bytes:
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
    return Bytes(math.fsum(totals) / len(totals) * per_copy, max(totals) * per_copy)


class Figures:
    """All of the above for one topology, each worked out when it is first asked for.

    Args:
        topology: the topology.
        overlap: as in `steady_error`.
    """

    def __init__(self, topology: Topology, overlap: bool = True) -> None:
        self._topology = topology
        self._overlap = overlap
        self._mixings = mixings(topology)
        n = topology.world_size
        self._noise = torch.eye(n, dtype=torch.float64, device="cpu") - 1 / n

    @cached_property
    def copies_sent(self) -> Bytes:
        """As `bytes_per_round`, for parameters of one byte."""
        return bytes_per_round(self._topology, 1)

    @cached_property
    def cost(self) -> float:
        """Steady error times mean bytes per round: what holding the ranks together costs."""
        return self.steady_error * self.copies_sent.mean

    @cached_property
    def rounds_to_consensus(self) -> int | None:
        """See the function of that name."""
        n, period = self._topology.world_size, self._topology.period
        generator = torch.Generator(device="cpu").manual_seed(0)
        shape = (n, _WITNESSES)
        rows = torch.randint(PRIME, shape, generator=generator, dtype=torch.int64, device="cpu")
        for done in range(1, n * period + 1):
            rows = self._mixings[(done - 1) % period].exactly(rows)
            if torch.equal(rows, rows[:1].expand_as(rows)):
                return done
        return None

    @cached_property
    def consensus_rate(self) -> float:
        """See the function of that name."""
        # Rounding would turn an exact zero, reached over several periods, into some small rate.
        if self.rounds_to_consensus is not None:
            return 0.0
        left, scale = self._period_product
        radius = torch.linalg.eigvals(left).abs().max().item()
        return math.exp((scale + math.log(radius)) / self._topology.period) if radius else 0.0

    @cached_property
    def steady_error(self) -> float:
        """See the function of that name."""
        covariance = self._steady_covariance()
        if covariance is None:
            return math.inf
        errors = []
        for mixing in self._mixings:
            covariance = self._one_round(covariance, mixing)
            errors.append(covariance.trace().item() / self._topology.world_size)
        return math.fsum(errors) / len(errors)

    @cached_property
    def _period_product(self) -> tuple[Tensor, float]:
        """W_p ... W_1 - J as a matrix and the logarithm of the factor that it lacks."""
        left, scale = self._noise, 0.0
        for mixing in self._mixings:
            left = mixing(left)
            left -= left.mean(dim=0, keepdim=True)
            size = left.abs().max().item()
            if not size:
                return left, 0.0
            # Rescaled every round: over a long period the product would sink into its rounding.
            left /= size
            scale += math.log(size)
        return left, scale

    def _one_round(self, covariance: Tensor, mixing: Mixing) -> Tensor:
        if self._overlap:
            return mixing.both_sides(covariance) + self._noise
        return mixing.both_sides(covariance + self._noise)

    def _steady_covariance(self) -> Tensor | None:
        """The fixed point of C <- P C P' + Q over a period, by doubling; None if there is none."""
        covariance = torch.zeros_like(self._noise)
        for mixing in self._mixings:
            covariance = self._one_round(covariance, mixing)
        left, scale = self._period_product
        product = left * math.exp(scale)
        for _ in range(_MOST_DOUBLINGS):
            if product.abs().max() < _VANISHED:
                return covariance
            covariance = product @ covariance @ product.T + covariance
            product = product @ product
        return None
