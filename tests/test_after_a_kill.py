"""The script that kills ranks: the others go on without each of them, and with it again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import after_a_kill
import pytest
from after_a_kill import Kill, Life, Step
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
    options = "--spare --ranks 2 --kills 1 --minutes 0.05 --quiet 3 --step 0.02 --stale-after 1000"
    monkeypatch.setattr("sys.argv", ["after_a_kill.py", *options.split()])
    code = after_a_kill.main()
    printed = capsys.readouterr().out
    assert code == 0, printed
    # The rank that has come back, and the next spare process.
    assert spares == [2]
    _, ranks, kills, recoveries, share, stalls, returns, _ = printed.splitlines()[-1].split(" | ")
    assert (ranks, kills) == ("2", "1")
    assert recoveries in ("1 of 2", "2 of 2")
    assert float(share.removesuffix("%")) > 0
    assert 0 < float(stalls.split(", ")[0]) < float(returns.split(", ")[1])


def life(rank: int, start: float, *steps: tuple[float, int], ranks: int = 2) -> Life:
    """A process of the rank, and when each of its steps ended and in which epoch."""
    found = [Step(end=end, ranks=ranks, epoch=epoch) for end, epoch in steps]
    return Life(rank=rank, start=start, process=100 * rank + int(start), steps=found)


KILL = Kill(time=10.0, rank=1, process=100)
KILLED = life(1, 0, (5, 1), (9, 1))
# It starts at 12 and is back at 15.
BACK = life(1, 12, (15, 3), (50, 4))


def test_a_kill_explains_going_on_without_a_rank_and_with_it_and_nothing_else() -> None:
    quiet = [life(0, 0, (5, 1), (11, 2), (15, 3), (50, 3)), KILLED, life(1, 12, (15, 3), (50, 3))]
    assert after_a_kill.unexplained(quiet, [KILL]) == []
    assert after_a_kill.unexplained(quiet, []) == [2, 3]
    once_more = [life(0, 0, (5, 1), (11, 2), (15, 3), (50, 4)), KILLED, BACK]
    assert after_a_kill.unexplained(once_more, [KILL]) == [4]
    before = [
        life(0, 0, (5, 1), (8, 2), (11, 3), (15, 4)),
        life(1, 0, (5, 1), (8, 2)),
        life(1, 12, (15, 4)),
    ]
    assert after_a_kill.unexplained(before, [KILL]) == [2]
    twice = [life(0, 0, (5, 1), (11, 2), (12.5, 3), (15, 4)), KILLED, life(1, 14, (15, 4))]
    assert after_a_kill.unexplained(twice, [KILL]) == [3]


def test_ranks_that_join_one_after_the_other_at_the_start_are_no_recovery() -> None:
    both = [life(0, 0, (5, 2), (11, 3), (15, 4)), life(1, 1, (5, 2), (9, 2))]
    apart = [life(0, 0, (3, 1), ranks=1), *both]
    assert after_a_kill.recoveries(apart) == [3, 4]
    assert after_a_kill.unexplained(apart, [KILL]) == [4]


def test_a_rank_lost_and_back_within_one_agreement_is_one_recovery() -> None:
    together = [life(0, 0, (5, 1), (15, 2)), KILLED, life(1, 12, (15, 2))]
    assert after_a_kill.unexplained(together, [KILL]) == []
    assert after_a_kill.unexplained(together, []) == [2]


def test_a_rank_is_back_once_a_later_process_of_it_makes_a_step() -> None:
    assert after_a_kill.back([KILLED, BACK], KILL) == BACK
    assert after_a_kill.back([KILLED, life(1, 12)], KILL) is None
    assert after_a_kill.back([KILLED, life(0, 12, (15, 3))], KILL) is None
