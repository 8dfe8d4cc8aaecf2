"""The simulated clock."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import simulated
from simulation import parse_arguments, rows, simulate

from decent_optim_wrapper import TopologyFactory


def test_the_clock_agrees_with_the_closed_case() -> None:
    found = simulate(
        TopologyFactory.create("ring", 4),
        compute_time=0.3,
        jitter=0.0,
        bandwidth=50e6,
        latency=0.0,
        parameter_bytes=20e6,
        steps=200,
    )
    for pace, seconds in zip(found[:3], (0.4, 0.7, 0.9), strict=True):
        assert pace == pytest.approx((seconds, 1 - 0.3 / seconds), rel=0.02)


NOT_SIMULATED = {"no communication"}
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
