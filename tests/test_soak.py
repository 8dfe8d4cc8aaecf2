"""The soak, with a seed of the day: no rank is lost for good, no recovery is without a fault."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ranks import run_script

pytestmark = [pytest.mark.slow, pytest.mark.soak]
SOAK = Path(__file__).parents[1] / "examples" / "benchmark" / "soak.py"


@pytest.mark.timeout(300)
def test_a_minute_of_faults_is_survived_by_all_ranks(tmp_path: Path) -> None:
    # Steps that mostly wait leave the cores to the tests on the other workers.
    command = ("--minutes", "1", "--step", "0.03", "--seed", os.environ["SOAK_SEED"])
    report = run_script(SOAK, *command, cwd=tmp_path, seconds=280)
    print(*command, report, sep="\n")
    assert "0 ranks for good" in report
    assert "faults: none" not in report
    assert "| 3 |" in report


@pytest.mark.timeout(300)
def test_a_slow_rank_is_no_reason_to_recover(tmp_path: Path) -> None:
    command = ("--quiet-rounds", "24", "--slow", "0.2", "--timeout", "20")
    report = run_script(SOAK, *command, cwd=tmp_path, seconds=280)
    assert "recoveries: 0," in report
    assert "faults: none" in report


@pytest.mark.timeout(300)
def test_faults_are_survived_by_ranks_that_never_wait(tmp_path: Path) -> None:
    options = ("--auto", "--step", "0.03", "--jitter", "0.03", "--slow", "0.03")
    command = ("--minutes", "0.7", *options, "--seed", os.environ["SOAK_SEED"])
    report = run_script(SOAK, *command, cwd=tmp_path, seconds=280)
    print(*command, report, sep="\n")
    assert "0 ranks for good" in report
    assert "faults: none" not in report
    assert "| 3 |" in report
