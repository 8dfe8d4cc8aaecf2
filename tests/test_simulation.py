"""The simulated clock."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
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


GUIDE = Path(__file__).parent.parent / "examples" / "guides" / "topologies.md"


def test_the_simulations_of_the_guide_print_its_rows() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
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
