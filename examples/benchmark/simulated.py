"""What `simulate` says to each row of step_time.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from simulation import simulate

from decent_optim_wrapper import TopologyFactory

MIB = 1024 * 1024


class Method(NamedTuple):
    """How a method communicates.

    Args:
        pace: the field of `Simulation` that stands for it.
        topology: who mixes.
        bytes_share: bytes that it sends of each byte of the parameters.
        schedule: the options of its schedule.
        local_world_size: ranks per node.
        whole_update: whether nothing leaves before all parameters are updated, so that the wire is
            idle meanwhile.
    """

    pace: Literal["overlap", "no_overlap", "all_reduce"] = "overlap"
    topology: str = "ring"
    local_world_size: int = 1
    bytes_share: float = 1.0
    schedule: Mapping[str, Any] = {}
    whole_update: bool = False


# A byte for each value of four, and a scale for each block.
INT8 = 0.254
NODES = Method(topology="alternating-exp-ring", local_world_size=2)
AUTO = {"gossip_every": "auto"}
METHODS = {
    "DDP": Method(pace="all_reduce"),
    "DDP, bf16 hook": Method(pace="all_reduce", bytes_share=0.5),
    "PostLocalSGD, period 1": Method(pace="no_overlap", topology="complete"),
    "decent-dp": Method(),
    "ours": Method(),
    "ours, views": Method(),
    "ours, bf16": Method(bytes_share=0.5),
    "ours, bf16, views": Method(bytes_share=0.5),
    "ours, int8": Method(bytes_share=INT8),
    "ours, int8, views": Method(bytes_share=INT8),
    "ours, int4": Method(bytes_share=INT8 / 2),
    "ours, tracking, int8": Method(bytes_share=2 * INT8),
    "ours, complete": Method(topology="complete"),
    "ours, complete, bf16": Method(topology="complete", bytes_share=0.5),
    "ours, complete, int8": Method(topology="complete", bytes_share=INT8),
    "ours, nodes of 2": NODES,
    "ours, nodes of 2, bf16": NODES._replace(bytes_share=0.5),
    "ours, nodes of 2, int8": NODES._replace(bytes_share=INT8),
    "ours, whole update": Method(whole_update=True),
    "ours, in the backward pass": Method(),
    "ours, in the backward pass, bf16": Method(bytes_share=0.5),
    "ours, overlap=False": Method(pace="no_overlap"),
    "ours, overlap=False, int8": Method(pace="no_overlap", bytes_share=INT8),
    "ours, every 3 steps, 3 late": Method(schedule={"gossip_every": 3, "staleness": 3}),
    "ours, auto": Method(schedule=AUTO),
}


def step_seconds(
    method: Method,
    size_mib: float,
    compute: float,
    wire: float,
    update: float = 0.0,
    ranks: int = 4,
    bucket_cap_mb: float = 4,
    **machines: float,
) -> float:
    """Simulated seconds per step.

    Args:
        method: how it communicates.
        size_mib: of the parameters.
        compute: seconds of a step without communication.
        wire: seconds that one copy of the parameters takes from one rank to another.
        update: seconds of `compute` that the update takes.
        ranks: number of ranks.
        bucket_cap_mb: size of a bucket in MiB.
        **machines: jitter and slow ranks, as in `simulate`.
    """
    result = simulate(
        TopologyFactory.create(method.topology, ranks, method.local_world_size),
        compute_time=compute,
        bandwidth=size_mib * MIB / wire,
        latency=update if method.whole_update else 0.0,
        parameter_bytes=size_mib * MIB * method.bytes_share,
        bucket_cap_mb=bucket_cap_mb * method.bytes_share,
        steps=300,
        **{"jitter": 0.0, **machines},  # type: ignore[arg-type]
        **method.schedule,
    )
    seconds: float = getattr(result, method.pace).step_time
    return seconds


def expected(
    measured: Mapping[str, Sequence[float]],
    sizes: Sequence[float],
    wires: Sequence[float],
    asleep: float,
    **lab: Any,
) -> dict[str, list[float]]:
    """Simulated seconds per step of the methods that were measured.

    Args:
        measured: seconds per step by method and size, among them "no communication" if possible.
        sizes: of the parameters in MiB.
        wires: seconds that one copy takes, by size.
        asleep: seconds of the forward and backward of a step.
        **lab: further arguments of `step_seconds`.
    """
    computes = measured.get("no communication", [asleep] * len(sizes))
    return {
        name: [
            step_seconds(
                METHODS[name], size, compute, wire, update=max(0.0, compute - asleep), **lab
            )
            for size, compute, wire in zip(sizes, computes, wires, strict=True)
        ]
        for name in measured
        if name in METHODS
    }


def table(
    rows: Mapping[str, Sequence[float]],
    measured: Mapping[str, Sequence[float]],
    sizes: Sequence[float],
) -> str:
    """Simulated milliseconds per step, and by how much what was measured differs from them."""
    head = " | ".join(f"M = {size:g} MiB" for size in sizes)
    lines = [f"| simulated, ms per step (measured) | {head} |", "|---" * (len(sizes) + 1) + "|"]
    for name, times in rows.items():
        both = zip(times, measured[name], strict=True)
        cells = (f"{1000 * time:.0f} ({real / time - 1:+.0%})" for time, real in both)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
