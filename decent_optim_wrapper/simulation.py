"""Step times before the machines are rented: a max-plus clock over the ranks of a topology."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.analysis import copies_sent
from decent_optim_wrapper.topo import Topology

# Backward takes twice as long as forward; an all-reduce of gradients can start with backward.
_FORWARD_SHARE = 1 / 3


class Pace(NamedTuple):
    """How fast a method steps.

    Args:
        step_time: mean seconds per step.
        waiting_share: share of that time in which a rank, on average, does not compute.
    """

    step_time: float
    waiting_share: float


class Simulation(NamedTuple):
    """The paces of the three methods on the same draws of compute time."""

    overlap: Pace
    no_overlap: Pace
    all_reduce: Pace


class _Phase(NamedTuple):
    """The groups of a phase.

    Args:
        group_of: int64 of shape (ranks,), the group of every rank.
        seconds: float64 of shape (ranks,), how long the exchange of the rank's group takes.
    """

    group_of: Tensor
    seconds: Tensor


def simulate(
    topology: Topology,
    compute_time: float,
    jitter: float,
    bandwidth: float,
    latency: float,
    parameter_bytes: float,
    steps: int = 1000,
    seed: int = 0,
) -> Simulation:
    """Run the ranks' clocks.

    Every rank computes for a normally distributed time (cut off at 0). A group exchanges as soon
    as its last member has launched, over links of its own for each rank.

    Args:
        topology: who mixes with whom.
        compute_time: mean seconds of forward, backward and update.
        jitter: its standard deviation, in seconds, independent for every rank and step.
        bandwidth: bytes per second that a rank can send, and receive at the same time.
        latency: seconds per message.
        parameter_bytes: size of one copy of the parameters.
        steps: number of steps.
        seed: of the compute times.

    Raises:
        ValueError: a negative time, or a bandwidth or number of steps that is not positive.
    """
    if min(compute_time, jitter, latency, parameter_bytes) < 0 or min(bandwidth, steps) <= 0:
        raise ValueError(
            f"simulate expects times and bytes of 0 or more, bandwidth and steps above 0, got "
            f"{compute_time=}, {jitter=}, {bandwidth=}, {latency=}, {parameter_bytes=}, {steps=}"
        )
    phases = [
        _phase(topology, phase, bandwidth, latency, parameter_bytes)
        for phase in range(topology.period)
    ]
    n = topology.world_size
    ring_seconds = _exchange_seconds(n, bandwidth, latency, parameter_bytes)
    overlap, no_overlap, all_reduce = (torch.zeros(n, dtype=torch.float64) for _ in range(3))
    computed = torch.zeros(n, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        draw = torch.randn(n, generator=generator, dtype=torch.float64)
        compute = (compute_time + jitter * draw).clamp_(min=0)
        computed += compute
        if step:
            arrived = _exchanged(overlap, phases[(step - 1) % topology.period])
            overlap = torch.maximum(overlap + compute, arrived)
        else:
            overlap = overlap + compute
        no_overlap = _exchanged(no_overlap + compute, phases[step % topology.period])
        reduced = (all_reduce + _FORWARD_SHARE * compute).max() + ring_seconds
        all_reduce = torch.maximum((all_reduce + compute).max(), reduced).expand(n)
    return Simulation(
        *(_pace(clock, computed, steps) for clock in (overlap, no_overlap, all_reduce))
    )


def _pace(clock: Tensor, computed: Tensor, steps: int) -> Pace:
    end = clock.mean().item()
    return Pace(end / steps, 1 - computed.mean().item() / end if end else 0.0)


def _exchange_seconds(size: int, bandwidth: float, latency: float, copy_bytes: float) -> float:
    if size == 1:
        return 0.0
    messages = 1 if size == 2 else 2 * (size - 1)
    return messages * latency + copies_sent(size) * copy_bytes / bandwidth


def _phase(
    topology: Topology, phase: int, bandwidth: float, latency: float, copy_bytes: float
) -> _Phase:
    groups = topology.groups(phase)
    group_of = torch.empty(topology.world_size, dtype=torch.int64)
    seconds = torch.empty(topology.world_size, dtype=torch.float64)
    for index, group in enumerate(groups):
        ranks = torch.tensor(group.ranks)
        group_of[ranks] = index
        seconds[ranks] = _exchange_seconds(group.size, bandwidth, latency, copy_bytes)
    return _Phase(group_of, seconds)


def _exchanged(launched: Tensor, phase: _Phase) -> Tensor:
    """When every rank has the bytes of its group: after the last member's launch."""
    last = torch.zeros_like(launched).scatter_reduce(0, phase.group_of, launched, "amax")
    return last[phase.group_of] + phase.seconds
