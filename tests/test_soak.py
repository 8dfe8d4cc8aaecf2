"""The soak, with a seed of the day: no rank is lost for good, no recovery is without a fault."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[1] / "examples" / "benchmark" / "soak.py"


def soak(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    command = [sys.executable, str(SOAK), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    report = f"{' '.join(command[1:])}\n{done.stdout}"
    # Not only where it fails: the seed of today is to be read in every log.
    with capsys.disabled():
        print(f"\n{report}")
    assert done.returncode == 0, f"{report}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_minute_of_faults_is_survived_by_all_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seed = datetime.now(UTC).strftime("%Y%m%d")
    report = soak(capsys, "--minutes", "1", "--seed", seed)
    assert "0 ranks for good" in report
    assert "faults: none" not in report
    assert "| 3 |" in report


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_slow_rank_is_no_reason_to_recover(capsys: pytest.CaptureFixture[str]) -> None:
    report = soak(capsys, "--quiet-rounds", "24", "--slow", "0.2", "--timeout", "20")
    assert "recoveries: 0," in report
    assert "faults: none" in report
