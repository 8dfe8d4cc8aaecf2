"""Topologies of any size, what they do and cost, and the simulated clock."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from decent_optim_wrapper import TopologyFactory
from decent_optim_wrapper.__main__ import main
from decent_optim_wrapper.analysis import (
    bytes_per_round,
    consensus_rate,
    mixing_matrices,
    rounds_to_consensus,
    steady_error,
)
from decent_optim_wrapper.simulation import simulate
from decent_optim_wrapper.topo import Hierarchical, RandomMatching, Topology

BASE_2_ROUNDS = [1, 3, 2, 5, 4, 5, 3, 7, 6, 7, 5, 7, 6, 7, 4, 9]


def test_every_phase_of_every_topology_is_symmetric_and_doubly_stochastic() -> None:
    sizes = [(n, local) for n in range(1, 17) for local in range(1, n + 1) if n % local == 0]
    checked = 0
    for name, kind in TopologyFactory.registered():
        for size in sizes:
            if not kind.fits(*size):
                continue
            for matrix in mixing_matrices(TopologyFactory.create(name, *size)):
                assert torch.equal(matrix, matrix.T)
                torch.testing.assert_close(matrix.sum(0), torch.ones_like(matrix[0]))
                assert (matrix >= 0).all()
                checked += 1
    assert checked > 1000


@pytest.mark.parametrize(
    ("name", "n", "error"),
    [
        ("complete", 5, 0.8),
        ("one-peer-exp", 8, 1.375),
        ("one-peer-exp", 32, 1.781),
        ("ring", 12, 1.889),
        ("greedy", 5, 1.006),
        ("greedy", 7, 1.195),
        ("greedy", 8, 1.375),
        ("greedy", 12, 1.558),
        ("greedy", 24, 1.738),
        ("hypercuboid", 12, 1.389),
        ("base-2", 12, 1.932),
        ("bipartite-exp", 10, 1.501),
    ],
)
def test_the_steady_error_is_the_known_one(name: str, n: int, error: float) -> None:
    assert steady_error(TopologyFactory.create(name, n)) == pytest.approx(error, abs=1e-3)


def test_without_overlap_the_error_is_that_after_mixing() -> None:
    assert steady_error(TopologyFactory.create("complete", 5), overlap=False) == pytest.approx(0)
    ring = TopologyFactory.create("ring", 6)
    assert 0 < steady_error(ring, overlap=False) < steady_error(ring)


def test_the_steady_error_is_what_noise_does() -> None:
    topology = TopologyFactory.create("greedy", 7)
    matrices = mixing_matrices(topology)
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(7, 20_000, dtype=torch.float64)
    errors = []
    for step in range(60):
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        x = matrices[step % len(matrices)] @ x + noise
        errors.append((x - x.mean(dim=0)).square().sum().item() / x.numel())
    assert sum(errors[20:]) / 40 == pytest.approx(steady_error(topology), rel=0.01)


@pytest.mark.parametrize(("n", "rounds"), list(zip(range(2, 18), BASE_2_ROUNDS, strict=True)))
def test_base_2_is_exact_after_the_known_number_of_rounds(n: int, rounds: int) -> None:
    topology = TopologyFactory.create("base-2", n)
    assert topology.period == rounds
    assert rounds_to_consensus(topology) == rounds
    largest = max(g.size for t in range(rounds) for g in topology.groups(t))
    assert largest == 2


@pytest.mark.parametrize(("n", "rounds"), [(7, 1), (8, 3), (12, 3), (30, 3), (36, 4)])
def test_the_hypercuboid_is_exact_after_its_prime_factors(n: int, rounds: int) -> None:
    assert rounds_to_consensus(TopologyFactory.create("hypercuboid", n)) == rounds


def test_random_matchings_follow_their_seed_and_contract_as_theory_has_it() -> None:
    def groups(seed: int) -> list[object]:
        topology = RandomMatching(7, seed=seed)
        return [topology.groups(t) for t in range(topology.period)]

    assert groups(3) == groups(3) != groups(4)
    for n in (6, 7):
        topology = RandomMatching(n, seed=1, period=2000)
        x = torch.randn(n, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x -= x.mean(dim=0)
        left = [(w @ x).square().sum() / x.square().sum() for w in mixing_matrices(topology)]
        expected = (n // 2 - 1) / (n - 1)
        assert sum(left).item() / len(left) == pytest.approx(expected, abs=0.02)  # type: ignore[union-attr]


def test_hierarchical_averages_nodes_and_then_gossips_between_them() -> None:
    topology = Hierarchical(8, 2, inner="ring")
    ranks = [[group.ranks for group in topology.groups(t)] for t in range(topology.period)]
    inside = [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert ranks == [
        inside,
        [(0, 2), (1, 3), (4, 6), (5, 7)],
        inside,
        [(0, 6), (1, 7), (2, 4), (3, 5)],
    ]
    assert rounds_to_consensus(Hierarchical(12, 3)) == 4
    with pytest.raises(ValueError, match="more than one node"):
        Hierarchical(4, 4)


def test_rates_rounds_and_bytes_of_known_topologies() -> None:
    ring = TopologyFactory.create("ring", 8)
    assert consensus_rate(ring) == pytest.approx(0.5**0.5, abs=1e-6)
    assert rounds_to_consensus(ring) is None
    assert consensus_rate(TopologyFactory.create("one-peer-exp", 8)) == 0
    long = RandomMatching(12, period=400)
    assert rounds_to_consensus(long) is None
    assert consensus_rate(long) == pytest.approx(math.sqrt(5 / 11), abs=0.05)
    assert bytes_per_round(ring, 1000) == (1000, 1000)
    assert bytes_per_round(TopologyFactory.create("complete", 4), 1000) == (1500, 1500)
    alone = TopologyFactory.create("alternating-exp-ring", 4, 1)
    assert bytes_per_round(alone, 1000) == (500, 500)


def test_ranks_that_never_hear_of_each_other_drift_apart() -> None:
    apart = RandomMatching(8, period=1)
    assert steady_error(apart) == math.inf
    assert consensus_rate(apart) == pytest.approx(1)
    with pytest.raises(ValueError, match="unknown inner topology 'rign'"):
        Hierarchical(8, 2, inner="rign")


def test_suggestions_fit_and_start_with_the_best_per_byte() -> None:
    for sizes in ((7, 1), (8, 2), (12, 4)):
        names = TopologyFactory.suggest(*sizes)
        kinds = dict(TopologyFactory.registered())
        assert set(names) == {name for name, kind in kinds.items() if kind.fits(*sizes)}
        costs = []
        for name in names:
            topology = TopologyFactory.create(name, *sizes)
            costs.append(steady_error(topology) * bytes_per_round(topology, 1).mean)
        assert costs == sorted(costs)


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
    assert paces(ring) == pytest.approx((0.4, 0.7, 0.1 + 0.6), rel=0.01)
    assert paces(ring, parameter_bytes=10e6) == pytest.approx((0.3, 0.5, 0.1 + 0.3), rel=0.01)
    assert paces(ring, parameter_bytes=0) == pytest.approx((0.3, 0.3, 0.3), rel=1e-9)
    still = simulate(ring, 0.3, 0.0, 50e6, 0.0, 0.0, steps=50)
    assert still.overlap.waiting_share == pytest.approx(0)
    assert simulate(ring, 0.3, 0.0, 50e6, 0.0, 20e6, 400).overlap.waiting_share == pytest.approx(
        0.25, abs=0.01
    )


def test_the_clock_agrees_with_the_measured_network_lab() -> None:
    """The README's table: 400 Mbit/s, 4 % headers, M = 20 and 40 MiB on a ring of four."""
    ring = TopologyFactory.create("ring", 4)
    for mib, gossip, ddp in ((20, 0.450, 0.808), (40, 0.920, 1.456)):
        ours, _, all_reduce = paces(
            ring, bandwidth=400e6 / 8 / 1.04, parameter_bytes=mib * 2**20, compute_time=0.309
        )
        assert ours == pytest.approx(gossip, rel=0.08)
        assert all_reduce == pytest.approx(ddp, rel=0.08)


def test_jitter_hurts_a_barrier_more_than_gossip() -> None:
    topology = TopologyFactory.create("one-peer-exp", 64)
    gossip, _, barrier = paces(topology, jitter=0.05, parameter_bytes=0)
    assert 0.3 < gossip < barrier


def test_a_large_simulation_is_quick_and_bad_figures_are_refused() -> None:
    start = time.process_time()
    simulate(TopologyFactory.create("one-peer-exp", 4096), 0.3, 0.03, 1e9, 1e-5, 1e8, steps=1000)
    assert time.process_time() - start < 20
    with pytest.raises(ValueError, match="bandwidth=0"):
        paces(TopologyFactory.create("ring", 4), bandwidth=0)


def test_the_table_of_topologies_names_those_that_fit_and_why_others_do_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["topologies", "--world-size", "7"]) == 0
    text = capsys.readouterr().out
    assert "greedy" in text
    assert "ring does not fit: it needs an even world size" in text
    assert main(["topologies", "--world-size", "7", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    greedy = next(row for row in data["topologies"] if row["name"] == "greedy")
    assert greedy["steady_error"] == pytest.approx(1.195, abs=1e-3)
    assert {"name": "ring", "needs": "an even world size"} in data["misfits"]


def test_show_draws_in_text_and_in_pictures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        path = tmp_path / f"ring{suffix}"
        assert main(["show", "ring", "--world-size", "4", "-o", str(path)]) == 0
        assert path.read_bytes().startswith(start)
    assert "phase 1: 0-3  1-2" in capsys.readouterr().out


def test_a_missing_matplotlib_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as caught:
        main(["show", "ring", "--world-size", "4", "-o", "ring.png"])
    assert caught.value.code == 2
    assert "decent-optim-wrapper[plot]" in capsys.readouterr().err


def test_simulate_prints_the_speed_up_and_draws_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "speed.png"
    command = ["simulate", "--world-size", "4", "8", "--steps", "50", "-o", str(picture), "--json"]
    assert main(command) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["world_size"] for row in rows} == {4, 8}
    assert all(row["speedup"] > 0 for row in rows)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [
        ["topologies", "--world-size", "0"],
        ["topologies", "--world-size", "8", "--local-world-size", "3"],
        ["show", "rign", "--world-size", "4"],
        ["show", "ring", "--world-size", "5"],
        ["show", "ring", "--world-size", "4", "-o", "ring.gif"],
        ["simulate", "--world-size", "4", "--bandwidth", "-1"],
        ["comm"],
        ["nonsense"],
    ],
)
def test_bad_arguments_give_one_line_and_exit_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines


def test_comm_measures_every_pair_under_torchrun() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")
    command = ("-m", "decent_optim_wrapper", "comm", "--json", "--mib", "1", "--repeats", "2")
    done = subprocess.run(
        [sys.executable, *launcher, *command], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    bandwidth = torch.tensor(data["bandwidth"])
    assert torch.equal(bandwidth > 0, ~torch.eye(3, dtype=torch.bool))
    assert data["all_reduce_bytes_per_second"] > 0
