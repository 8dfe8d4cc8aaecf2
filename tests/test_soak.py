"""The soak, with a seed of the day: no rank is lost for good, no recovery is without a fault."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import soak
from faults import HARMLESS, LINKS, Kind, draw_faults
from forked import start_server
from soak import Failure, Footprint, Progress

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
FOOTPRINT = Footprint(mib=1.0, files=1, threads=1)
END = Progress(9, (0, 1), 9, FOOTPRINT, stalls=(), pace=0.01, average=(1.0, 2.0), moved=0.5)

# In turn: the seed of the day says which.
KINDS = (("--codes", "int8", "--tracking"), ("--auto", "--jitter", "0.06", "--slow", "0.06"))


@pytest.mark.soak
def test_faults_are_survived_by_all_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = os.environ["SOAK_SEED"]
    # Steps that mostly wait leave the cores to the tests on the other workers.
    command = ("--minutes", "0.12", "--timeout", "3", "--step", "0.06", "--seed", seed)
    command = (*command, *KINDS[int(seed) % 2])
    start_server()
    monkeypatch.setattr("sys.argv", ["soak.py", *command])
    code = soak.main()
    report = capsys.readouterr().out
    print(*command, report, sep="\n")
    assert code == 0
    assert "0 ranks for good" in report
    assert "faults: none" not in report
    assert report.rstrip().splitlines()[-1].startswith(f"seed {seed}: ")


def ends(**changes: Any) -> dict[int, Progress]:
    return {0: END, 1: END._replace(**changes)}


def growth(**changes: Any) -> list[str]:
    """What is said of a rank whose footprint has changed after its warm-up."""
    before, changed = [FOOTPRINT] * 9, [FOOTPRINT._replace(**changes)] * 9
    # What is under way now and then ends again.
    assert soak.check_growth({0: [*changed[:3], *before, *changed[:3], *before[:1]]}) == []
    return soak.check_growth({0: before, 1: before + changed})


USUAL = [2.0] * 10
TAKEN = "another process with this rank number is alive"


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (lambda: soak.check_ends(ends(), 2), ""),
        (lambda: soak.check_ends(ends(average=(1.0, 2.5)), 2), "they differ"),
        (lambda: soak.check_ends(ends(average=(1.0, float("nan"))), 2), "finite"),
        (lambda: soak.check_ends(ends(moved=0.0), 2), "rank 1 does not train"),
        (lambda: soak.check_stalls([*USUAL, 10.5], 5, 0.2), "stall of at most 10 s and 0.2 s"),
        (lambda: soak.check_stalls([3.0] * 10, 5, 0.2), "median stall of at most 2.5 s"),
        (lambda: growth(), ""),
        (lambda: growth(mib=66.0), "64 more MiB of memory of rank 1"),
        # A second process with the number of a living rank must be refused as such.
        (lambda: soak.check_refusal(1, Failure("ValueError", TAKEN)), ""),
        (lambda: soak.check_refusal(1, Failure("RuntimeError", "memory")), "text='memory'"),
    ],
)
def test_what_counts_as_a_success_can_fail(
    check: Callable[[], list[str] | None], text: str
) -> None:
    try:
        found = check() or []
    except ValueError as error:
        found = [str(error)]
    assert len(found) == bool(text)
    assert all(text in each for each in found)


def test_every_kind_of_fault_is_drawn_and_leaves_half_of_the_ranks() -> None:
    faults = list(islice(draw_faults(3, 7, 5.0, tuple(Kind)), 300))
    assert {fault.kind for fault in faults} == {*Kind}
    assert {len(fault.ranks) for fault in faults if fault.kind is Kind.STORM} == {2, 3}
    assert all(0 < len(set(fault.ranks)) == len(fault.ranks) < 4 for fault in faults)
    assert faults == list(islice(draw_faults(3, 7, 5.0, tuple(Kind)), 300))
    assert {*HARMLESS} & {*LINKS} == {Kind.SLOW_LINK, Kind.LOSSY_LINK, Kind.SHORT_CUT}
