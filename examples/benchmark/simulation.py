"""Simulates how long a step takes, with a clock for every rank of a topology.

    python examples/benchmark/simulation.py --world-size 8 64 --parameters 25e6 --bandwidth 125e6

It prints a row for each topology that fits and each schedule: seconds per step of overlapped
gossip, the share of them in which a rank waits, seconds per step without overlap and with an
all-reduce of all gradients (DDP), and how many times as fast as that overlapped gossip is.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.planning.tables import table
from decent_optim_wrapper.topo import Group, Topology, TopologyFactory

# Backward takes twice as long as forward.
_FORWARD_SHARE = 1 / 3
_MIB = 1 << 20


class Pace(NamedTuple):
    """The step time of a method.

    Args:
        step_time: mean seconds per step.
        waiting_share: mean share of that time in which a rank waits, in [0, 1].
    """

    step_time: float
    waiting_share: float


class Simulation(NamedTuple):
    """The paces of three methods with the same random compute times.

    Args:
        overlap: gossip with rounds that are transferred while the ranks compute.
        no_overlap: gossip with rounds inside a step: in every `gossip_every`-th step, or in each
            step if `gossip_every` is "auto".
        all_reduce: gradients that are averaged over all ranks in every step.
        steps_per_round: mean number of steps of a rank from one launch of an overlapped round to
            the next.
    """

    overlap: Pace
    no_overlap: Pace
    all_reduce: Pace
    steps_per_round: float = 1.0


class _Phase(NamedTuple):
    """The groups of a phase.

    Args:
        group_of: int64 of shape (ranks,), the number of each rank's group.
        seconds: float64 of shape (ranks,), the duration of the exchange of each rank's group.
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
    gossip_every: int | Literal["auto"] = 1,
    staleness: int = 1,
    max_staleness: int = 16,
    slow_share: float = 0.0,
    slow_factor: float = 3.0,
    bucket_cap_mb: float = 25,
) -> Simulation:
    """Simulate the step times of gossip, with and without overlap, and of all-reduce.

    Every rank computes for a log-normally distributed time. A group exchanges as soon as its last
    member has launched. A rank that has made its steps takes part in the rounds of the others. The
    all-reduce sends the gradients in buckets, each as soon as the backward pass has filled it.
    Every rank has its own link.

    Args:
        topology: the topology.
        compute_time: mean seconds of forward, backward and update.
        jitter: standard deviation of the compute time in seconds, independent for every rank and
            step.
        bandwidth: bytes per second that a rank can send, and receive at the same time.
        latency: seconds per message.
        parameter_bytes: bytes of one copy of the parameters.
        steps: number of steps.
        seed: seed of the compute times.
        gossip_every: number of steps from one round to the next. With "auto" a round is mixed by
            the first step that finds it arrived, and the next one starts at the end of that step.
        staleness: number of steps from the launch of a round to its mixing, at most `gossip_every`;
            1 with "auto".
        max_staleness: with "auto", number of steps after which a step waits for the round.
        slow_share: share of slow ranks; if it is above 0, at least one rank is slow.
        slow_factor: how many times as long a slow rank computes.
        bucket_cap_mb: size in MiB of a bucket of the all-reduce.

    Returns:
        Step times in seconds and shares of waiting.
    """
    if gossip_every != "auto" and staleness > gossip_every:
        raise ValueError(f"expected staleness <= gossip_every, got {staleness=}, {gossip_every=}")
    n = topology.world_size
    generator = torch.Generator(device="cpu").manual_seed(seed)
    compute = compute_times(n, steps, compute_time, jitter, generator)
    compute[:, slow_ranks(n, slow_share, generator)] *= slow_factor
    phases = [
        exchanges_of(topology, phase, bandwidth, latency, parameter_bytes)
        for phase in range(topology.period)
    ]
    if gossip_every == "auto":
        overlap, launches = mix_on_arrival(compute, phases, max_staleness)
        steps_per_round = steps / launches.mean(dtype=torch.float64).item()
    else:
        overlap = mix_after(compute, phases, gossip_every, staleness)
        steps_per_round = float(gossip_every)
    no_overlap = mix_after(
        compute, phases, 1 if gossip_every == "auto" else gossip_every, staleness=0
    )
    bucket_bytes = min(parameter_bytes, bucket_cap_mb * _MIB)
    buckets = parameter_bytes / bucket_bytes if bucket_bytes else 1.0
    bucket_seconds = _exchange_seconds(Group(range(n)), bandwidth, latency, bucket_bytes)
    all_reduce = _all_reduce(compute, buckets, bucket_seconds)
    return Simulation(
        overlap=_pace(overlap, compute),
        no_overlap=_pace(no_overlap, compute),
        all_reduce=_pace(all_reduce, compute),
        steps_per_round=steps_per_round,
    )


def compute_times(
    ranks: int, steps: int, mean: float, deviation: float, generator: torch.Generator
) -> Tensor:
    """Log-normal times of shape (steps, ranks)."""
    ratio = deviation / mean if mean else 0.0
    sigma = math.sqrt(math.log1p(ratio * ratio))
    draws = torch.randn(steps, ranks, generator=generator, dtype=torch.float64, device="cpu")
    return mean * (sigma * draws - sigma * sigma / 2).exp_()


def slow_ranks(ranks: int, share: float, generator: torch.Generator) -> Tensor:
    """Which ranks are slow: at least one, if any share of them is."""
    number = max(1, round(share * ranks)) if share else 0
    return torch.randperm(ranks, generator=generator, device="cpu")[:number]


def mix_after(
    compute: Tensor, phases: Sequence[_Phase], gossip_every: int, staleness: int
) -> Tensor:
    """When every rank has made its steps, if a round is mixed `staleness` steps after its launch.

    Args:
        compute: seconds of shape (steps, ranks).
        phases: of the topology.
        gossip_every: number of steps from one round to the next.
        staleness: at most `gossip_every`, so that one round is in flight at a time; with 0 a round
            is mixed in the step that launches it.
    """
    clock = torch.zeros_like(compute[0])
    arrived = clock
    for step, seconds in enumerate(compute, start=1):
        clock = clock + seconds
        if staleness and step > staleness and (step - staleness) % gossip_every == 0:
            clock = torch.maximum(clock, arrived)
        if step % gossip_every == 0:
            arrived = _exchanged(clock, phases[(step // gossip_every - 1) % len(phases)])
            clock = clock if staleness else arrived
    return clock


def mix_on_arrival(
    compute: Tensor, phases: Sequence[_Phase], max_staleness: int
) -> tuple[Tensor, Tensor]:
    """When every rank has made its steps, if a round is mixed by the first step that finds it.

    This goes from round to round, not from step to step: between the launch of a round and its
    mixing a rank computes without waiting, so its own compute times say which step will find it.

    Args:
        compute: seconds of shape (steps, ranks).
        phases: of the topology.
        max_staleness: number of steps after its launch in which a round is waited for.

    Returns:
        The times, and the number of rounds that every rank has launched in its steps.
    """
    steps, n = compute.shape
    # computed[rank, step]: the seconds of computing up to the end of that step.
    computed = torch.cat([compute.new_zeros(1, n), compute.cumsum(0)]).t().contiguous()
    waited = compute.new_zeros(n)
    launch_step = torch.ones(n, dtype=torch.int64, device="cpu")
    launched = computed[:, 1]
    launches = launch_step
    training = torch.ones(n, dtype=torch.bool, device="cpu")
    round_number = 0
    while training.any():
        arrived = _exchanged(launched, phases[round_number % len(phases)])
        found = torch.searchsorted(computed, (arrived - waited).unsqueeze(1)).squeeze(1)
        mix_step = found.clamp(launch_step + 1, launch_step + max_staleness)
        # The others still need the rounds of a rank that has no step left to mix them in.
        training = training & (mix_step <= steps)
        mix_step = mix_step.clamp(max=steps)
        ready = computed.gather(1, mix_step.unsqueeze(1)).squeeze(1) + waited
        launched = torch.maximum(ready, arrived)
        waited = torch.where(training, waited + (launched - ready), waited)
        launch_step = mix_step
        launches = launches + training
        round_number += 1
    return computed[:, steps] + waited, launches


def _all_reduce(compute: Tensor, buckets: float, bucket_seconds: float) -> Tensor:
    """When all ranks have made their steps, if each of them ends with the all-reduce."""
    first_filled = _FORWARD_SHARE + (1 - _FORWARD_SHARE) / buckets
    slowest = compute.amax(dim=1)
    # Backward fills the buckets at a constant rate: either all leave one behind the other from the
    # first on, or the last one does not wait for those before it.
    in_a_row = first_filled * slowest + buckets * bucket_seconds
    return torch.maximum(in_a_row, slowest + bucket_seconds).sum()


def _pace(clock: Tensor, compute: Tensor) -> Pace:
    end = clock.mean().item()
    waiting = 1 - compute.sum(0).mean().item() / end if end else 0.0
    # Without any waiting the two sums may differ in their last digits.
    return Pace(step_time=end / len(compute), waiting_share=max(0.0, waiting))


def _exchange_seconds(group: Group, bandwidth: float, latency: float, copy_bytes: float) -> float:
    messages = group.size - 1 if group.size <= 2 else 2 * (group.size - 1)
    return messages * latency + group.copies_sent * copy_bytes / bandwidth


def exchanges_of(
    topology: Topology, phase: int, bandwidth: float, latency: float, copy_bytes: float
) -> _Phase:
    """The exchanges of a phase: who takes part in which, and how long it takes."""
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


def schedule(text: str) -> dict[str, Any]:
    """Read the arguments of `simulate` that say when a round is launched and mixed."""
    items = [item.partition("=") for item in text.split(",")]
    return {name: value if value == "auto" else int(value) for name, _, value in items}


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the table, by the names of their columns."""
    found = []
    fitting = [
        (size, name)
        for size in args.world_size
        for name, kind in TopologyFactory.registered()
        if name in (args.topology or TopologyFactory.names()) and kind.accepts(size, 1)
    ]
    for size, name in fitting:
        for text in args.schedule:
            result = simulate(
                TopologyFactory.create(name, size),
                compute_time=args.compute_time,
                jitter=args.jitter,
                bandwidth=args.bandwidth,
                latency=args.latency,
                parameter_bytes=4 * args.parameters,
                steps=args.steps,
                slow_share=args.slow_share,
                **schedule(text),
            )
            row = {
                "world_size": size,
                "topology": name,
                "schedule": text,
                "steps_per_round": result.steps_per_round,
                "overlap_seconds": result.overlap.step_time,
                "overlap_waiting": result.overlap.waiting_share,
                "no_overlap_seconds": result.no_overlap.step_time,
                "all_reduce_seconds": result.all_reduce.step_time,
                "speedup": result.all_reduce.step_time / result.overlap.step_time,
            }
            found.append(row)
    return found


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world-size", type=int, nargs="+", default=[8])
    parser.add_argument("--topology", nargs="+", help="names; all that fit by default")
    parser.add_argument("--schedule", nargs="+", default=["gossip_every=1"], help="a row for each")
    parser.add_argument("--compute-time", type=float, default=0.3, help="seconds per step")
    parser.add_argument("--jitter", type=float, default=0.03, help="standard deviation, seconds")
    parser.add_argument("--slow-share", type=float, default=0, help="ranks three times as slow")
    parser.add_argument("--bandwidth", type=float, default=125e6, help="bytes per second")
    parser.add_argument("--latency", type=float, default=1e-4, help="seconds per message")
    parser.add_argument("--parameters", type=float, default=25e6, help="number of float32 values")
    parser.add_argument("--steps", type=int, default=500)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    print(table(rows(parse_arguments())))
