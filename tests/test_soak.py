"""The soak, with a seed of the day: no rank is lost for good, no recovery is without a fault."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ranks import run_script
from soak import Fleet, Footprint, Job, Pace, Progress, check_ends

pytestmark = pytest.mark.slow
SOAK = Path(__file__).parents[1] / "examples" / "benchmark" / "soak.py"


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_minute_of_faults_is_survived_by_all_ranks(tmp_path: Path) -> None:
    # Steps that mostly wait leave the cores to the tests on the other workers.
    command = ("--minutes", "1", "--step", "0.03", "--seed", os.environ["SOAK_SEED"])
    report = run_script(SOAK, *command, cwd=tmp_path, seconds=280)
    print(*command, report, sep="\n")
    assert "0 ranks for good" in report
    assert "faults: none" not in report
    assert "| 3 |" in report


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_slow_rank_is_no_reason_to_recover(tmp_path: Path) -> None:
    command = ("--quiet-rounds", "24", "--slow", "0.2", "--timeout", "20")
    report = run_script(SOAK, *command, cwd=tmp_path, seconds=280)
    assert "recoveries: 0," in report
    assert "faults: none" in report


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_faults_are_survived_by_ranks_that_never_wait(tmp_path: Path) -> None:
    options = ("--auto", "--step", "0.03", "--jitter", "0.03", "--slow", "0.03")
    command = ("--minutes", "0.7", *options, "--seed", os.environ["SOAK_SEED"])
    report = run_script(SOAK, *command, cwd=tmp_path, seconds=280)
    print(*command, report, sep="\n")
    assert "0 ranks for good" in report
    assert "faults: none" not in report
    assert "| 3 |" in report


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_codes_and_tracking_survive_faults(tmp_path: Path) -> None:
    options = ("--codes", "int8", "--tracking", "--step", "0.03")
    command = ("--minutes", "0.5", *options, "--seed", os.environ["SOAK_SEED"])
    report = run_script(SOAK, *command, cwd=tmp_path, seconds=280)
    print(*command, report, sep="\n")
    assert "0 ranks for good" in report
    assert "faults: none" not in report
    assert "| 3 |" in report


def test_the_margin_at_the_end_follows_the_pace_that_was_measured() -> None:
    margins = []
    for per_second in (7, 200):
        pace = Pace()
        for tick in range(200):
            pace.note(tick / 4, tick * per_second // 4)
        # Some seconds of rounds; those of an earlier pace do not count.
        margins.append(pace.margin)
        assert 3 * per_second < pace.margin < 20 + 5 * per_second
    assert margins[0] < margins[1]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"average": (1.0, 2.5)}, "they differ"),
        ({"average": (1.0, float("nan"))}, "finite"),
        ({"members": (0,)}, "members of rank 1, got"),
        ({"moved": 0.0}, "those of rank 1 do not"),
    ],
)
def test_what_counts_as_a_success_can_fail(change: dict[str, Any], text: str) -> None:
    end = Progress(
        round=9,
        members=(0, 1),
        steps=9,
        footprint=Footprint(mib=1.0, files=1, threads=1),
        stalls=(),
        average=(1.0, 2.0),
        moved=0.5,
    )
    check_ends({0: end, 1: end}, 2)
    with pytest.raises(ValueError, match=text):
        check_ends({0: end, 1: end._replace(**change)}, 2)


@pytest.mark.timeout(120)
def test_ranks_that_hang_are_a_failure_that_shows_their_stacks() -> None:
    job = Job(
        world_size=3,
        topology="complete",
        timeout=100,
        step=0.02,
        slow=0.0,
        jitter=0.0,
        auto=False,
    )
    fleet = Fleet(job)
    try:
        fleet.reach(5)
        fleet.delay(1, 1000)
        with pytest.raises(TimeoutError, match="no rank has got further for 4 s"):
            fleet.end(patience=4)
        stacks = fleet.stacks()
    finally:
        fleet.close()
    for rank in range(3):
        assert f"stacks of rank {rank}:" in stacks
    # One sleeps, and the others wait for it.
    assert stacks.count("in sleep_if_told") == 1
    assert stacks.count("in train") == 3
