"""The simulated clock."""

from __future__ import annotations

import math

import pytest
import torch

from decent_optim_wrapper import TopologyFactory
from decent_optim_wrapper.planning import Pace, Simulation, simulate
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


def test_the_clock_agrees_with_the_measured_network_lab() -> None:
    """The table of the benchmarks: 400 Mbit/s, 4 % headers, M = 20 and 40 MiB on a ring of four."""
    ring = TopologyFactory.create("ring", 4)
    for mib, gossip, ddp in ((20, 0.450, 0.808), (40, 0.920, 1.456)):
        ours, _, all_reduce = paces(
            ring,
            bandwidth=400e6 / 8 / 1.04,
            parameter_bytes=mib * 2**20,
            compute_time=0.309,
            bucket_cap_mb=4,
        )
        assert ours == pytest.approx(gossip, rel=0.08)
        assert all_reduce == pytest.approx(ddp, rel=0.08)


def test_jitter_hurts_a_barrier_more_than_gossip() -> None:
    topology = TopologyFactory.create("one-peer-exp", 64)
    gossip, _, barrier = paces(topology, jitter=0.05, parameter_bytes=0)
    assert 0.3 < gossip < barrier


def test_a_large_world_is_simulated_and_bad_figures_are_refused() -> None:
    large = TopologyFactory.create("one-peer-exp", 4096)
    assert 0.3 < simulate(large, 0.3, 0.03, 1e9, 1e-5, 1e8, steps=100).overlap.step_time < 0.6
    with pytest.raises(ValueError, match="bandwidth=0"):
        paces(TopologyFactory.create("ring", 4), bandwidth=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize(
    "name", ["compute_time", "jitter", "bandwidth", "parameter_bytes", "bucket_cap_mb"]
)
def test_figures_that_cannot_be_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        paces(TopologyFactory.create("ring", 4), **{name: value})


def test_nothing_to_do_takes_no_time_and_is_no_faster() -> None:
    ring = TopologyFactory.create("ring", 4)
    idle = simulate(ring, 0, 0, bandwidth=1, latency=0, parameter_bytes=0, steps=3)
    assert idle.speedup == 1
    assert idle.overlap == Pace(0, 0)
    none, some = Pace(0, 0), Pace(2, 0)
    assert Simulation(none, none, some).speedup == math.inf
    assert Simulation(some, none, some).speedup == 1


def test_the_clock_runs_on_the_cpu_whatever_the_default_device() -> None:
    torch.set_default_device("meta")
    try:
        assert paces(TopologyFactory.create("ring", 4))[1] == pytest.approx(0.7, rel=0.01)
    finally:
        torch.set_default_device(None)
