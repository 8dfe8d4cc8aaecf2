"""The simulated clock."""

from __future__ import annotations

import importlib
import math
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import simulated
import torch
from simulation import Simulation, compute_times, parse_arguments, rows, simulate, slow_ranks

from decent_optim_wrapper import Group, TopologyFactory
from decent_optim_wrapper.topo import Topology

CLUSTER: dict[str, Any] = {
    **{"compute_time": 0.3, "jitter": 0.0, "bandwidth": 50e6, "latency": 0.0},
    **{"parameter_bytes": 20e6, "steps": 200},
}


def run(topology: Topology, **changes: Any) -> Simulation:
    return simulate(topology, **{**CLUSTER, **changes})


def test_the_clock_agrees_with_the_closed_case() -> None:
    found = run(TopologyFactory.create("ring", 4))
    for pace, seconds in zip(found[:3], (0.4, 0.7, 0.9), strict=True):
        assert pace == pytest.approx((seconds, 1 - 0.3 / seconds), rel=0.02)


class Rank:
    """A rank that walks from step to step, as slow and as simple as can be.

    Args:
        compute: seconds of its steps.
        every: steps from one launch to the next; None as soon as a round has been mixed.
        late: steps after a launch in which its round is waited for.
    """

    def __init__(self, compute: list[float], every: int | None, late: int) -> None:
        self.compute, self.every, self.late = compute, every, late
        self.step, self.clock, self.launches = 0, 0.0, 0

    def launch(self, arrival: float | None) -> float:
        """Walk on to the next launch, and return its time; the last round comes at `arrival`."""
        for age in range(1, len(self.compute) - self.step + 1):
            self.clock += self.compute[self.step]
            self.step += 1
            if arrival is not None:
                found = self.every is None and arrival <= self.clock
                if found or age == self.late:
                    self.clock, arrival = max(self.clock, arrival), None
            if arrival is None and (self.every is None or self.step % self.every == 0):
                self.launches += 1
                return self.clock
        # Others still need a rank that has made its steps.
        return max(self.clock, arrival or 0.0)


class World(NamedTuple):
    """A drawn cluster and schedule, and its times by definition."""

    topology: Topology
    cluster: dict[str, Any]
    every: int | None
    late: int
    buckets: int

    def simulated(self) -> list[float]:
        schedule: dict[str, Any] = {"gossip_every": self.every, "staleness": self.late}
        if self.every is None:
            schedule = {"gossip_every": "auto", "max_staleness": self.late}
        cap = self.cluster["parameter_bytes"] / self.buckets / 2**20
        found = simulate(self.topology, **self.cluster, **schedule, bucket_cap_mb=cap)
        return [*(pace.step_time for pace in found[:3]), found.steps_per_round]

    def expected(self) -> list[float]:
        cluster, n, steps = self.cluster, self.topology.world_size, self.cluster["steps"]
        generator = torch.Generator().manual_seed(cluster["seed"])
        compute = compute_times(n, steps, cluster["compute_time"], cluster["jitter"], generator)
        compute[:, slow_ranks(n, cluster["slow_share"], generator)] *= cluster["slow_factor"]
        ranks = [Rank(seconds.tolist(), self.every, self.late) for seconds in compute.T]
        arrivals: list[Any] = [None] * n
        for round in range(steps + 1):
            launched = [rank.launch(at) for rank, at in zip(ranks, arrivals, strict=True)]
            arrivals = self.arrivals(launched, round)
        inside, every = [0.0] * n, self.every or 1
        for step, seconds in enumerate(compute.tolist(), start=1):
            inside = [clock + taken for clock, taken in zip(inside, seconds, strict=True)]
            if step % every == 0:
                inside = self.arrivals(inside, step // every - 1)
        return [
            sum(rank.clock for rank in ranks) / n / steps,
            sum(inside) / n / steps,
            sum(self.summed(max(seconds)) for seconds in compute.tolist()) / steps,
            self.every or steps * n / sum(rank.launches for rank in ranks),
        ]

    def arrivals(self, launched: list[float], round: int) -> list[float]:
        """When every rank has the values of its group."""
        groups = [self.topology.group_of(rank, round) for rank in range(len(launched))]
        size = self.cluster["parameter_bytes"]
        return [max(launched[i] for i in g.ranks) + self.exchange(g, size) for g in groups]

    def exchange(self, group: Group, size: float) -> float:
        """One message each in a pair; in a larger group those of a ring, each with a part."""
        others = group.size - 1
        messages, share = (others, 1.0) if others <= 1 else (2 * others, 1 / group.size)
        seconds: float = self.cluster["latency"] + share * size / self.cluster["bandwidth"]
        return messages * seconds

    def summed(self, compute: float) -> float:
        """When a step has its sum: a bucket leaves when it is full and the one before is there."""
        arrived, size = 0.0, self.cluster["parameter_bytes"] / self.buckets
        for bucket in range(1, self.buckets + 1):
            filled = compute * (1 / 3 + 2 / 3 * bucket / self.buckets)
            everyone = Group(range(self.topology.world_size))
            arrived = max(filled, arrived) + self.exchange(everyone, size)
        return arrived


def drawn_world(draw: random.Random) -> World:
    # Base-2 has idle ranks, random has a triple.
    names = [("ring", 6), ("one-peer-exp", 8), ("base-2", 5), ("random", 7), ("complete", 3)]
    every = draw.choice([1, 2, 3, 5, None, None, None])
    # Without jitter and latency the times are whole numbers, and a round often comes just in time.
    jitter, latency = draw.choice([(0.0, 0.0), (0.3, 0.1)])
    cluster = {
        **{"compute_time": draw.choice([1.0, 2.0, 5.0]), "jitter": jitter, "latency": latency},
        **{"bandwidth": 1.0, "parameter_bytes": draw.choice([3.0, 6.0, 21.0])},
        **{"steps": draw.randint(1, 25), "seed": draw.randrange(100)},
        **{"slow_share": draw.choice([0.0, 0.2, 0.5]), "slow_factor": draw.choice([2.0, 6.0])},
    }
    late, buckets = draw.randint(1, every or 6), draw.choice([1, 2, 5, 50])
    return World(TopologyFactory.create(*draw.choice(names)), cluster, every, late, buckets)


@pytest.mark.parametrize("seed", range(4))
def test_the_clocks_equal_those_of_ranks_that_act_step_by_step(seed: int) -> None:
    draw = random.Random(seed)
    for world in [drawn_world(draw) for _ in range(40)]:
        assert world.simulated() == pytest.approx(world.expected(), rel=1e-9), world


NOT_SIMULATED = {"no communication", "bare exchange"}
README = Path(__file__).parent.parent / "examples" / "benchmark" / "README.md"


def test_the_clock_agrees_with_the_measured_network_lab() -> None:
    """All rows of the table of the benchmarks: 400 Mbit/s, 4 % headers, a ring of four."""
    _, _, rest = README.read_text(encoding="utf-8").partition("| ms per step | M = 10 MiB ")
    lines = [line.strip("| ").split(" | ") for line in rest.partition("\n\n")[0].splitlines()[2:]]
    measured = {name: [float(cell) / 1000 for cell in cells] for name, *cells in lines}
    measured = {name: times for name, times in measured.items() if not name.startswith("floor")}
    assert measured.keys() <= simulated.METHODS.keys() | NOT_SIMULATED
    sizes = (10, 20, 40)
    wires = [mib * 2**20 * 8 * 1.04 / 400e6 for mib in sizes]
    expected = simulated.expected(measured, sizes, wires, asleep=0.3)
    for name, times in expected.items():
        # The clock knows the wire, and not the CPU time of codes: four ranks share two cores.
        slack = 0.18 if name.startswith("ours") and "bf16" in name else 0.1
        assert measured[name] == pytest.approx(times, rel=slack), name


def test_every_row_of_the_network_lab_is_simulated() -> None:
    methods = importlib.import_module("step_time").METHODS
    # A forward pass that waits for each bucket is not simulated.
    known = {name for name in methods if not name.startswith("ours, forward")}
    assert known == simulated.METHODS.keys() | NOT_SIMULATED


def test_the_table_beside_the_measured_one_says_by_how_much_they_differ() -> None:
    measured = {"no communication": [0.3, 0.3], "ours": [0.33, 0.4], "unknown": [1.0, 1.0]}
    expected = simulated.expected(measured, (5, 10), wires=(0.1, 0.4), asleep=0.3)
    assert expected.keys() == {"ours"}
    assert simulated.table(expected, measured, (5, 10)).splitlines() == [
        "| simulated, ms per step (measured) | M = 5 MiB | M = 10 MiB |",
        "|---|---|---|",
        "| ours | 300 (+10%) | 400 (+0%) |",
    ]
    alone = simulated.expected({"ours": [0.4]}, (10,), wires=(0.2,), asleep=0.3)
    assert alone["ours"] == pytest.approx([0.3]), "no row without communication: what sleeps"


def test_a_row_of_the_network_lab_may_have_a_schedule_and_uneven_ranks() -> None:
    def seconds(name: str, **machines: Any) -> float:
        return simulated.step_seconds(simulated.METHODS[name], 40, 0.3, 0.872, **machines)

    slow = {"slow_share": 0.25, "slow_factor": 3.0, "jitter": 0.09}
    assert seconds("ours, every 3 steps, 3 late") == pytest.approx(0.3, rel=0.01)
    assert seconds("ours, auto") == pytest.approx(0.3, rel=1e-6)
    assert seconds("ours, auto", **slow) == pytest.approx(0.45, rel=0.03)
    assert seconds("DDP", **slow) > 1.5


def test_compute_times_have_the_mean_and_the_deviation_asked_for() -> None:
    times = compute_times(64, 2000, 0.3, 0.1, torch.Generator().manual_seed(1))
    assert times.min() > 0
    assert times.mean().item() == pytest.approx(0.3, rel=0.01)
    assert times.std().item() == pytest.approx(0.1, rel=0.02)
    assert times.log().std().item() == pytest.approx(math.sqrt(math.log1p(1 / 9)), rel=0.02)
    assert compute_times(3, 2, 0.0, 0.0, torch.Generator()).tolist() == [[0.0] * 3] * 2


def test_the_simulations_of_the_guide_print_its_rows() -> None:
    guide = (README.parent.parent / "guides" / "topologies.md").read_text(encoding="utf-8")
    start = "python examples/benchmark/simulation.py "
    lines = guide.replace("\\\n", " ").splitlines()
    commands = [line.removeprefix(start) for line in lines if line.startswith(start)]
    assert len(commands) == 3
    # The last --steps counts.
    options = [parse_arguments(f"{command} --steps 3".split()) for command in commands]
    printed = [row for each in options for row in rows(each)]
    told = re.findall(r"^\| (8|64|1024) \| `([\w=,-]+)` \| \d\.\d{3}", guide, re.MULTILINE)
    assert len(told) == 8 + 9
    keys = ("topology", "schedule")
    assert {*told} <= {(str(row["world_size"]), row[key]) for row in printed for key in keys}
