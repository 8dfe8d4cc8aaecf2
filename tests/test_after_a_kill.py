"""The script that kills ranks: the others go on without each of them, and with it again."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_script

SCRIPT = Path(__file__).parent.parent / "examples" / "benchmark" / "after_a_kill.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_go_on_at_once_without_one_whose_end_the_launcher_tells(tmp_path: Path) -> None:
    # They would look for its heartbeat for longer than the script waits.
    options = "--ranks 3 --minutes 0.05 --pause 3 --step 0.02 --stale-after 1000"
    out = run_script(SCRIPT, *options.split(), cwd=tmp_path, seconds=280)
    _, ranks, kills, share, stalls, returns, _ = out.splitlines()[-1].split(" | ")
    assert (ranks, kills) == ("3", "1")
    assert 0 < float(share.removesuffix("%")) < 100
    assert 0 < float(stalls.split(", ")[0]) < float(returns.split(", ")[1])
