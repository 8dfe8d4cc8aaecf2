"""The script that kills ranks: the others go on without each of them, and with it again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import after_a_kill
import pytest
from forked import start_process
from launched import children, hurried, launch


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_go_on_at_once_without_one_whose_end_the_launcher_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process that has imported torch takes its place."""
    spares: list[int] = []

    def start(command: Sequence[str], **_: Any) -> Any:
        launcher = partial(hurried, spare=2.0)
        options = command[command.index("run") + 1 :]
        process = start_process(launch, launcher, options, tmp_path, tmp_path / "out", daemon=False)

        def kill() -> None:
            of_ranks = [Path(f"/proc/{pid}/cmdline") for pid in children(process.pid or 0)]
            spares.append(sum("rank_main.py" in path.read_text() for path in of_ranks))
            process.kill()

        return mock.Mock(kill=kill, wait=process.join)

    monkeypatch.setattr("subprocess.Popen", start)
    # They would look for its heartbeat for longer than the script waits.
    options = "--spare --ranks 2 --minutes 0.05 --pause 3 --step 0.02 --stale-after 1000"
    monkeypatch.setattr("sys.argv", ["after_a_kill.py", *options.split()])
    after_a_kill.main()
    # The rank that has come back, and the next spare process.
    assert spares == [2]
    _, ranks, kills, share, stalls, returns, _ = (
        capsys.readouterr().out.splitlines()[-1].split(" | ")
    )
    assert (ranks, kills) == ("2", "1")
    assert 0 < float(share.removesuffix("%")) < 100
    assert 0 < float(stalls.split(", ")[0]) < float(returns.split(", ")[1])
