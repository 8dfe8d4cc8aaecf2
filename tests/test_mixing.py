"""How well topologies mix and what they send, with the functions of an example."""

from __future__ import annotations

import math
import re
from functools import reduce
from pathlib import Path

import pytest
import torch
from mixing import bytes_per_round, consensus_rate, rounds_to_consensus, steady_error
from scripted_ranks import listed

from decent_optim_wrapper import Group, TopologyFactory
from decent_optim_wrapper.topo import RandomMatching, Topology

GUIDE = Path(__file__).parent.parent / "examples" / "guides" / "topologies.md"
WEIGHTED = listed(6, [[Group([0, 3], 0.7), Group([1, 2, 4], 0.2)], [Group([0, 1, 5], 0.5), [2, 3]]])
NAMED = [
    *(("complete", 5), ("one-peer-exp", 8), ("ring", 12), ("greedy", 7), ("greedy", 12)),
    *(("hypercuboid", 12), ("base-2", 12), ("bipartite-exp", 10)),
]


@pytest.mark.parametrize("topology", [WEIGHTED, *(TopologyFactory.create(*each) for each in NAMED)])
def test_the_steady_error_and_the_rate_agree_with_dense_matrices(topology: Topology) -> None:
    """Noise of variance 1 comes after the mixing with overlap, else before it."""
    n, period = topology.world_size, topology.period
    matrices = [topology.mixing_matrix(phase) for phase in range(period)]
    noise = torch.eye(n, dtype=torch.float64) - 1 / n
    for overlap in (True, False):
        covariance, errors = torch.zeros_like(noise), []
        for step in range(600):
            w = matrices[step % period]
            covariance = w @ covariance @ w.T + noise if overlap else w @ (covariance + noise) @ w.T
            errors.append(covariance.trace().item() / n)
        expected = pytest.approx(sum(errors[-period:]) / period, rel=1e-9, abs=1e-12)
        assert steady_error(topology, overlap=overlap) == expected
    left = reduce(lambda done, matrix: matrix @ done, matrices) - 1 / n
    radius = torch.linalg.eigvals(left).abs().max().item()
    # The root of a rounding error is far above it.
    expected = pytest.approx(radius ** (1 / period) if radius > 1e-9 else 0.0, rel=1e-6)
    assert consensus_rate(topology) == expected


# The rounds after which an average is exact, whichever phase comes first; None if it never is.
ROUNDS: dict[str, dict[tuple[int, int], int | None]] = {
    "complete": {(5, 1): 1},
    "ring": {(2, 1): 1, (4, 1): 2, (6, 1): None},
    "one-peer-exp": {(8, 1): 3, (16, 1): 4},
    "alternating-exp-ring": {(2, 1): 2, (8, 2): 4, (16, 2): 6, (12, 3): 4},
    "base-2": {
        (n, 1): rounds
        for n, rounds in enumerate([1, 3, 2, 5, 4, 5, 3, 7, 6, 7, 5, 7, 6, 7, 4, 9], start=2)
    },
    "hypercuboid": {(7, 1): 1, (8, 1): 3, (12, 1): 3, (30, 1): 3, (36, 1): 4},
    "hierarchical": {(12, 3): 4},
    "greedy": {(5, 1): None, (8, 1): 3},
    "bipartite-exp": {(6, 1): None, (8, 1): 3},
}


@pytest.mark.parametrize(
    ("name", "size", "rounds"),
    [(name, size, rounds) for name, of in ROUNDS.items() for size, rounds in of.items()],
)
def test_an_average_is_exact_after_the_known_number_of_rounds(
    name: str, size: tuple[int, int], rounds: int | None
) -> None:
    topology = TopologyFactory.create(name, *size)
    assert rounds_to_consensus(topology) == rounds == dense_rounds(topology)
    assert (consensus_rate(topology) == 0) == (rounds is not None)
    if name in ("complete", "ring", "one-peer-exp", "alternating-exp-ring"):
        pairs = 2 if name == "alternating-exp-ring" else 1
        starts = range(0, topology.period, pairs)
        assert {dense_rounds(topology, start) for start in starts} == {rounds}
    if name == "base-2":
        assert topology.period == rounds
        assert max(g.size for t in range(topology.period) for g in topology.groups(t)) == 2


def dense_rounds(topology: Topology, start: int = 0) -> int | None:
    """Exact averaging by products of matrices."""
    n = topology.world_size
    left = torch.eye(n, dtype=torch.float64)
    for done in range(1, 4 * topology.period + n):
        left = topology.mixing_matrix(start + done - 1) @ left
        if (left - 1 / n).abs().max() < 1e-12:
            return done
    return None


def test_rates_steady_errors_and_bytes_of_known_topologies() -> None:
    assert steady_error(TopologyFactory.create("ring", 12)) == pytest.approx(1.889, abs=1e-3)
    # Eigenvalues do not converge here.
    assert consensus_rate(TopologyFactory.create("greedy", 48)) == pytest.approx(math.sqrt(0.5))
    apart = RandomMatching(8, period=1)
    assert consensus_rate(apart) == pytest.approx(1)
    assert steady_error(apart) == math.inf
    for name, n, copies in (("ring", 8, 1), ("complete", 4, 1.5), ("alternating-exp-ring", 4, 0.5)):
        assert bytes_per_round(TopologyFactory.create(name, n), 1000) == (1000 * copies,) * 2
    some_idle = listed(3, [[[0, 1]], [[0, 2]]])
    assert bytes_per_round(some_idle, 300) == pytest.approx((200, 300))


def test_the_tables_of_the_guide_are_what_the_functions_compute() -> None:
    heading = re.compile(r"^(\d+) ranks(?:, one per node| in nodes of (\d+)):$", re.MULTILINE)
    _, *tables = heading.split(GUIDE.read_text("utf-8"))
    assert len(tables) == 9
    for n, local, text in zip(tables[::3], tables[1::3], tables[2::3], strict=True):
        rows = re.findall(r"^\| `(\S+)` \| (.*) \|$", text, re.MULTILINE)
        assert len(rows) >= 6
        for name, row in rows:
            topology = TopologyFactory.create(name, int(n), int(local or 1))
            phases = range(topology.period)
            sizes = sorted({group.size for phase in phases for group in topology.groups(phase)})
            rounds = rounds_to_consensus(topology)
            computed = [
                *(str(topology.period), ", ".join(map(str, sizes))),
                *(f"{consensus_rate(topology):.3f}", str(rounds or "never")),
                *(f"{steady_error(topology):.3f}", f"{bytes_per_round(topology, 1).mean:.2f}"),
            ]
            assert computed == row.split(" | "), (name, n)
