"""The script that kills a rank: the others go on without it, and with it again."""

from __future__ import annotations

import after_a_kill
import pytest
from ranks import start_server


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_one_kill_takes_time_and_the_killed_rank_comes_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start_server()
    monkeypatch.setattr("sys.argv", ["after_a_kill.py", "--seeds", "7"])
    monkeypatch.setattr(after_a_kill, "OURS", after_a_kill.OURS[1:])
    monkeypatch.setattr(after_a_kill, "TORCHFT", [])
    monkeypatch.setattr(after_a_kill, "AWAY_SECONDS", 0.5)
    after_a_kill.main()
    report = capsys.readouterr().out
    (row,) = (line.split("|")[1:-1] for line in report.splitlines() if line.startswith("| ours"))
    _, *times, survived = row
    assert survived.strip() == "1 of 1", report
    for time in times:
        median, longest = map(float, time.split(","))
        assert 0 < median <= longest, report
