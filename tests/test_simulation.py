"""The simulated clock."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import simulated
import torch

from decent_optim_wrapper import TopologyFactory
from decent_optim_wrapper.planning import Pace, Simulation, simulate
from decent_optim_wrapper.planning.simulation import (
    compute_times,
    exchanges_of,
    mix_after,
    mix_on_arrival,
    slow_ranks,
)
from decent_optim_wrapper.topo import Topology


def paces(topology: Topology, **changes: float) -> tuple[float, float, float]:
    options = {
        "compute_time": 0.3,
        "jitter": 0.0,
        "bandwidth": 50e6,
        "latency": 0.0,
        "parameter_bytes": 20e6,
        "steps": 200,
        **changes,
    }
    result = simulate(topology, **options)  # type: ignore[arg-type]
    return result.overlap.step_time, result.no_overlap.step_time, result.all_reduce.step_time


def test_the_clock_agrees_with_the_closed_cases() -> None:
    ring = TopologyFactory.create("ring", 4)
    assert paces(ring) == pytest.approx((0.4, 0.7, 0.3 + 0.6), rel=0.01)
    assert paces(ring, parameter_bytes=10e6) == pytest.approx((0.3, 0.5, 0.3 + 0.3), rel=0.01)
    assert paces(ring, parameter_bytes=0) == pytest.approx((0.3, 0.3, 0.3), rel=1e-9)
    still = simulate(ring, 0.3, 0.0, 50e6, 0.0, 0.0, steps=50)
    assert still.overlap.waiting_share == pytest.approx(0)
    assert simulate(ring, 0.3, 0.0, 50e6, 0.0, 20e6, 400).overlap.waiting_share == pytest.approx(
        0.25, abs=0.01
    )


def test_an_all_reduce_sends_a_bucket_as_soon_as_backward_has_filled_it() -> None:
    """Against a loop over the buckets, which leave one behind the other."""
    ring = TopologyFactory.create("ring", 4)
    for buckets, compute_time in ((1, 0.3), (2, 0.3), (5, 0.3), (5, 3.0), (50, 0.3), (50, 3.0)):
        cap = 20e6 / buckets
        arrived = 0.0
        for bucket in range(1, buckets + 1):
            filled = compute_time * (1 / 3 + 2 / 3 * bucket / buckets)
            arrived = max(filled, arrived) + 6 * 1e-3 + 1.5 * cap / 50e6
        changes = {"compute_time": compute_time, "latency": 1e-3, "bucket_cap_mb": cap / 2**20}
        assert paces(ring, **changes)[2] == pytest.approx(arrived, rel=1e-9)


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
    late = simulated.METHODS["ours, every 3 steps, 3 late"]
    auto = simulated.METHODS["ours, auto"]
    assert simulated.step_seconds(late, 40, 0.3, 0.872) == pytest.approx(0.3, rel=0.01)
    assert simulated.step_seconds(auto, 40, 0.3, 0.872) == pytest.approx(0.3, rel=1e-6)
    slow: dict[str, Any] = {"slow_share": 0.25, "slow_factor": 3.0, "jitter": 0.09}
    assert simulated.step_seconds(auto, 40, 0.3, 0.872, **slow) == pytest.approx(0.45, rel=0.03)
    ddp = simulated.METHODS["DDP"]
    assert simulated.step_seconds(ddp, 40, 0.3, 0.872, **slow) > 1.5


class Rounds(NamedTuple):
    """Gossip in the world of ticks: a step of rank i takes `compute[step][i]` ticks."""

    topology: Topology
    compute: list[list[int]]
    gossip_every: int | Literal["auto"]
    staleness: int
    # Ticks from the launch of the last member of a group of two or more to the arrival.
    wire: int


class World:
    """Ranks that act tick by tick, as slow and as simple as can be."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self.now = 0
        n = rounds.topology.world_size
        self.launched: list[list[int]] = [[] for _ in range(n)]  # [rank][round]: the tick
        self.ended: dict[int, int] = {}
        self.in_steps = [0] * n  # rounds that were launched before the rank had made its steps

    def run(self) -> tuple[list[int], list[int]]:
        """The tick at which every rank ends, and the rounds that it launched until then."""
        ranks = [self.rank(i) for i in range(self.rounds.topology.world_size)]
        while len(self.ended) < len(ranks):
            for rank in ranks:
                next(rank, None)
            self.now += 1
        return [self.ended[i] for i in range(len(ranks))], self.in_steps

    def arrived(self, rank: int, round: int) -> bool:
        group = self.rounds.topology.group_of(rank, round)
        if any(len(self.launched[i]) <= round for i in group.ranks):
            return False
        wire = self.rounds.wire if group.size > 1 else 0
        return self.now >= max(self.launched[i][round] for i in group.ranks) + wire

    def rank(self, i: int) -> Iterator[None]:
        """One rank; whoever drives it goes on to the next tick at every yield."""
        in_flight = None  # the step that launched it
        for step, compute in enumerate(self.rounds.compute, start=1):
            end = self.now + compute[i]
            while self.now < end:
                yield
            newest = len(self.launched[i]) - 1
            if in_flight is not None and step == in_flight + self.rounds.staleness:
                while not self.arrived(i, newest):
                    yield
            if in_flight is not None and self.may_mix(i, newest, step - in_flight):
                in_flight = None
            if in_flight is None and self.launches(step):
                self.launched[i].append(self.now)
                self.in_steps[i] += 1
                in_flight = step
        self.ended[i] = self.now
        while self.rounds.gossip_every == "auto":
            while not self.arrived(i, len(self.launched[i]) - 1):
                yield
            self.launched[i].append(self.now)
            yield

    def may_mix(self, rank: int, round: int, age: int) -> bool:
        if self.rounds.gossip_every == "auto":
            return self.arrived(rank, round)
        return age == self.rounds.staleness

    def launches(self, step: int) -> bool:
        return self.rounds.gossip_every == "auto" or step % self.rounds.gossip_every == 0


def drawn_rounds(draw: random.Random) -> Rounds:
    # Base-2 has idle ranks, random has a triple.
    names = [("ring", 6), ("one-peer-exp", 8), ("base-2", 5), ("random", 7), ("complete", 3)]
    name, n = draw.choice(names)
    every: int | Literal["auto"] = draw.choice([1, 2, 3, 5, "auto", "auto", "auto"])
    factors = [draw.choice([1, 1, 2, 6]) for _ in range(n)]
    steps = range(draw.randint(1, 25))
    return Rounds(
        topology=TopologyFactory.create(name, n),
        compute=[[f * draw.choice([1, 2, 3, 5]) for f in factors] for _ in steps],
        gossip_every=every,
        staleness=draw.randint(1, 6 if every == "auto" else every),
        wire=draw.choice([1, 2, 3, 7, 20]),
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_clocks_equal_those_of_ranks_that_act_tick_by_tick(seed: int) -> None:
    draw = random.Random(seed)
    for rounds in [drawn_rounds(draw) for _ in range(40)]:
        ended, launched = World(rounds).run()
        topology = rounds.topology
        # All groups exchange for the same time here; ticks are exact in float64.
        phases = [
            phase._replace(seconds=(phase.seconds > 0) * float(rounds.wire))
            for phase in (exchanges_of(topology, k, 1.0, 0.0, 1.0) for k in range(topology.period))
        ]
        compute = torch.tensor(rounds.compute, dtype=torch.float64)
        if rounds.gossip_every == "auto":
            clock, launches = mix_on_arrival(compute, phases, rounds.staleness)
            assert launches.tolist() == launched, rounds
        else:
            clock = mix_after(compute, phases, rounds.gossip_every, rounds.staleness)
            assert set(launched) == {len(compute) // rounds.gossip_every}
        assert clock.tolist() == ended, rounds


WIRE_BOUND: dict[str, Any] = {
    "compute_time": 0.3,
    "jitter": 0.1,
    "bandwidth": 125e6,
    "latency": 1e-4,
    "parameter_bytes": 100e6,  # 0.8 s for a pair
    "steps": 300,
}


def stale(topology: Topology, **changes: Any) -> Simulation:
    return simulate(topology, **{**WIRE_BOUND, **changes})


def test_staleness_hides_as_many_times_the_wire() -> None:
    """Without jitter a step takes the longer time of its computing and its share of the wire."""
    topology = TopologyFactory.create("one-peer-exp", 8)
    for k in (1, 2, 3, 4):
        for s in range(1, k + 1):
            result = stale(topology, gossip_every=k, staleness=s, jitter=0.0, latency=0.0)
            expected = (max(0.8, s * 0.3) + (k - s) * 0.3) / k
            assert result.overlap.step_time == pytest.approx(expected, rel=0.01)
            assert result.steps_per_round == k


def test_auto_with_a_bound_of_one_step_is_a_round_in_every_step() -> None:
    topology = TopologyFactory.create("base-2", 7)
    bounded = stale(topology, gossip_every="auto", max_staleness=1)
    every_step = stale(topology)
    assert bounded.overlap.step_time == pytest.approx(every_step.overlap.step_time, rel=0.02)
    assert bounded[1:] == every_step[1:]


def test_auto_waits_neither_for_the_wire_nor_for_a_slow_rank() -> None:
    topology = TopologyFactory.create("one-peer-exp", 64)
    options = {"slow_share": 0.01, "slow_factor": 3.0}
    auto = stale(topology, gossip_every="auto", **options)
    assert auto.overlap.waiting_share < 0.01
    assert auto.no_overlap.waiting_share > 0.5
    assert 2.5 < auto.steps_per_round < 6
    late = stale(topology, gossip_every=16, staleness=16, **options)
    assert late.overlap.step_time > 2 * auto.overlap.step_time, "all wait for the slow rank"
    fast = stale(topology, gossip_every="auto", parameter_bytes=0, latency=0)
    assert fast.overlap.waiting_share == pytest.approx(0, abs=1e-12)
    # One rank of 64 is slow: what is computed takes 66/64 as long on average.
    expected = 0.3 * 66 / 64
    assert auto.overlap.step_time == pytest.approx(expected, rel=0.03)


def test_compute_times_have_the_mean_and_the_deviation_asked_for() -> None:
    times = compute_times(64, 2000, 0.3, 0.1, torch.Generator().manual_seed(1))
    assert times.min() > 0
    assert times.mean().item() == pytest.approx(0.3, rel=0.01)
    assert times.std().item() == pytest.approx(0.1, rel=0.02)
    assert times.log().std().item() == pytest.approx(math.sqrt(math.log1p(1 / 9)), rel=0.02)
    assert compute_times(3, 2, 0.0, 0.0, torch.Generator()).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(
    ("share", "number"), [(0, 0), (0.001, 1), (0.01, 10), (0.5, 512), (1, 1024)]
)
def test_a_share_of_the_ranks_is_slow_and_at_least_one(share: float, number: int) -> None:
    slow = slow_ranks(1024, share, torch.Generator().manual_seed(0)).tolist()
    assert len(set(slow)) == len(slow) == number
    assert set(slow) <= set(range(1024))


CANNOT_BE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("compute_time", "jitter", "bandwidth", "parameter_bytes", "bucket_cap_mb"),
        (math.nan, math.inf, -1.0),
    ),
    "gossip_every": (0,),
    "staleness": (0,),
    "slow_share": (1.5, math.nan),
    "slow_factor": (0.5,),
}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        *(
            ({name: value}, f"{name}={value}")
            for name, values in CANNOT_BE.items()
            for value in values
        ),
        ({"bandwidth": 0}, "bandwidth=0"),
        ({"gossip_every": 2, "staleness": 3}, "expect"),
        ({"gossip_every": "auto", "staleness": 2}, "expect"),
        ({"gossip_every": "auto", "max_staleness": 0}, "expect"),
        ({"compute_time": 0.0}, "expect"),  # with jitter
        ({"compute_time": 1e308, "gossip_every": "auto"}, "expect"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="expect") as error:
        stale(TopologyFactory.create("ring", 4), **options)
    assert text in str(error.value)


@pytest.mark.parametrize("options", [{"gossip_every": "often"}, {"staleness": 1.0}])
def test_numbers_of_steps_are_whole(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="numbers of steps"):
        stale(TopologyFactory.create("ring", 4), **options)


def test_a_large_world_is_simulated() -> None:
    large = TopologyFactory.create("one-peer-exp", 4096)
    assert 0.3 < simulate(large, 0.3, 0.03, 1e9, 1e-5, 1e8, steps=100).overlap.step_time < 0.6


def test_nothing_to_do_takes_no_time_and_is_no_faster() -> None:
    ring = TopologyFactory.create("ring", 4)
    idle = simulate(ring, 0, 0, bandwidth=1, latency=0, parameter_bytes=0, steps=3)
    assert idle.speedup == 1
    assert idle.overlap == Pace(0, 0)
    none, some = Pace(0, 0), Pace(2, 0)
    assert Simulation(none, none, some).speedup == math.inf
    assert Simulation(some, none, some).speedup == 1
