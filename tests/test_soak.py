"""The soak, with a seed of the day: no rank is lost for good, no recovery is without a fault."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ranks import run_script
from soak import Fleet, Footprint, Job, Pace, Progress, check_ends

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SOAK = Path(__file__).parents[1] / "examples" / "benchmark" / "soak.py"


# In turn: the seed of the day says which.
KINDS = (("--codes", "int8", "--tracking"), ("--auto", "--jitter", "0.06", "--slow", "0.06"))


@pytest.mark.soak
def test_faults_are_survived_by_all_ranks(tmp_path: Path) -> None:
    seed = os.environ["SOAK_SEED"]
    # Steps that mostly wait leave the cores to the tests on the other workers.
    command = ("--minutes", "0.2", "--timeout", "3", "--step", "0.06", *KINDS[int(seed) % 2])
    command = (*command, "--seed", seed)
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
        with pytest.raises(TimeoutError, match="no rank has got further for 2 s"):
            fleet.end(patience=2)
        stacks = fleet.stacks()
    finally:
        fleet.close()
    for rank in range(3):
        assert f"stacks of rank {rank}:" in stacks
    # One sleeps, and the others wait for it.
    assert stacks.count("in sleep_if_told") == 1
    assert stacks.count("in train") == 3
