"""The script that kills a rank: the others go on without it, and with it again."""

from __future__ import annotations

from pathlib import Path

import pytest
from after_a_kill import Outcome, cells
from ranks import run_script

SCRIPT = Path(__file__).parents[1] / "examples" / "benchmark" / "after_a_kill.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_kill_takes_time_and_the_killed_rank_comes_back(tmp_path: Path) -> None:
    report = run_script(SCRIPT, "--seeds", "7", cwd=tmp_path, seconds=280)
    rows = [line.split("|")[1:-1] for line in report.splitlines() if line.startswith("| ours")]
    assert len(rows) == 2, report
    for _, *times, survived in rows:
        assert survived.strip() == "1 of 1", report
        for time in times:
            median, longest = map(float, time.split(","))
            assert 0 < median <= longest, report


def test_a_row_holds_the_median_and_the_longest_of_all_survivors() -> None:
    outcomes = [Outcome([1.0, 2.0], [0.25, 0.5], [0.1, 0.1]), Outcome([9.0], [0.75], [0.3])]
    assert cells(outcomes, 3) == ["2.00, 9.00", "0.50, 0.75", "0.10, 0.30", "2 of 3"]


def test_a_row_without_any_survivor_has_no_times() -> None:
    assert cells([], 5) == ["-", "-", "-", "0 of 5"]
