"""Simulated step times: a clock for every rank of a topology."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.topo import Group, Topology

# Backward takes twice as long as forward.
_FORWARD_SHARE = 1 / 3
_MIB = 1 << 20


class Pace(NamedTuple):
    """How fast a method steps.

    Args:
        step_time: mean seconds per step.
        waiting_share: mean share of that time in which a rank does not compute, in [0, 1].
    """

    step_time: float
    waiting_share: float


class Simulation(NamedTuple):
    """The paces of three methods with the same random compute times."""

    overlap: Pace
    no_overlap: Pace
    all_reduce: Pace

    @property
    def speedup(self) -> float:
        """Speed-up of overlapped gossip over all-reduce; 1 if neither takes any time."""
        ours, theirs = self.overlap.step_time, self.all_reduce.step_time
        if ours:
            return theirs / ours
        return math.inf if theirs else 1.0


class _Phase(NamedTuple):
    """The groups of a phase.

    Args:
        group_of: int64 of shape (ranks,), the number of every rank's group.
        seconds: float64 of shape (ranks,), the time that the exchange of the rank's group takes.
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
    *,
    bucket_cap_mb: float = 25,
) -> Simulation:
    """Simulate the step times of gossip, with and without overlap, and of all-reduce.

    Every rank computes for a normally distributed time (cut off at 0). A group exchanges as soon
    as its last member has launched. The all-reduce sends the gradients in buckets, each as soon as
    backward has filled it. Every rank has its own link.

    Args:
        topology: which ranks mix.
        compute_time: mean seconds of forward, backward and update.
        jitter: standard deviation of the compute time in seconds, independent for every rank and
            step.
        bandwidth: bytes per second that a rank can send, and receive at the same time.
        latency: seconds per message.
        parameter_bytes: bytes of one copy of the parameters.
        steps: number of steps.
        seed: seed of the compute times.
        bucket_cap_mb: size in MiB of a bucket of the all-reduce.

    Returns:
        Step times in seconds and shares of waiting.

    Raises:
        ValueError: a time is negative, the bandwidth, the size of a bucket or the number of steps
            is not positive, or an argument is infinite or not a number.
    """
    figures = (compute_time, jitter, bandwidth, latency, parameter_bytes, steps, bucket_cap_mb)
    positive = min(bandwidth, steps, bucket_cap_mb) > 0 and min(figures) >= 0
    if not positive or not all(map(math.isfinite, figures)):
        raise ValueError(
            f"simulate expects times and bytes of 0 or more, bandwidth, steps and bucket_cap_mb "
            f"above 0, all finite, got {compute_time=}, {jitter=}, {bandwidth=}, {latency=}, "
            f"{parameter_bytes=}, {steps=}, {bucket_cap_mb=}"
        )
    phases = [
        _phase(topology, phase, bandwidth, latency, parameter_bytes)
        for phase in range(topology.period)
    ]
    n = topology.world_size
    bucket_bytes = min(parameter_bytes, bucket_cap_mb * _MIB)
    bucket_seconds = _exchange_seconds(Group(range(n)), bandwidth, latency, bucket_bytes)
    buckets = parameter_bytes / bucket_bytes if bucket_bytes else 1.0
    first_bucket_share = _FORWARD_SHARE + (1 - _FORWARD_SHARE) / buckets
    start = torch.zeros(n, dtype=torch.float64, device="cpu")
    overlap, no_overlap, all_reduce, computed = start, start, start, start
    generator = torch.Generator(device="cpu").manual_seed(seed)
    for step in range(steps):
        draw = torch.randn(n, generator=generator, dtype=torch.float64, device="cpu")
        compute = (compute_time + jitter * draw).clamp_(min=0)
        computed = computed + compute
        if step:
            arrived = _exchanged(overlap, phases[(step - 1) % topology.period])
            overlap = torch.maximum(overlap + compute, arrived)
        else:
            overlap = overlap + compute
        no_overlap = _exchanged(no_overlap + compute, phases[step % topology.period])
        # Backward fills the buckets at a constant rate: either all leave one behind the other from
        # the first on, or the last one does not wait for those before it.
        first = (all_reduce + first_bucket_share * compute).max() + buckets * bucket_seconds
        last = (all_reduce + compute).max() + bucket_seconds
        all_reduce = torch.maximum(first, last).expand(n)
    return Simulation(
        overlap=_pace(overlap, computed, steps),
        no_overlap=_pace(no_overlap, computed, steps),
        all_reduce=_pace(all_reduce, computed, steps),
    )


def _pace(clock: Tensor, computed: Tensor, steps: int) -> Pace:
    end = clock.mean().item()
    if not math.isfinite(end):
        raise ValueError(
            "expected times whose sum a float can hold, got an infinite sum; make the times shorter"
        )
    waiting = 1 - computed.mean().item() / end if end else 0.0
    return Pace(step_time=end / steps, waiting_share=waiting)


def _exchange_seconds(group: Group, bandwidth: float, latency: float, copy_bytes: float) -> float:
    messages = group.size - 1 if group.size <= 2 else 2 * (group.size - 1)
    return messages * latency + group.copies_sent * copy_bytes / bandwidth


def _phase(
    topology: Topology, phase: int, bandwidth: float, latency: float, copy_bytes: float
) -> _Phase:
    group_of = [0] * topology.world_size
    seconds = [0.0] * topology.world_size
    for number, group in enumerate(topology.groups(phase)):
        taken = _exchange_seconds(group, bandwidth, latency, copy_bytes)
        for rank in group.ranks:
            group_of[rank], seconds[rank] = number, taken
    return _Phase(
        group_of=torch.tensor(group_of, device="cpu"),
        seconds=torch.tensor(seconds, dtype=torch.float64, device="cpu"),
    )


def _exchanged(launched: Tensor, phase: _Phase) -> Tensor:
    """The time at which every rank has the bytes of its group, whose last member launches last."""
    last = torch.zeros_like(launched).scatter_reduce(0, phase.group_of, launched, "amax")
    return last[phase.group_of] + phase.seconds
