"""The soak, with a seed of the day: no rank is lost for good, no recovery is without a fault."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from faults import HARMLESS, LINKS, Fault, Injector, Kind, draw_faults
from ranks import run_script
from soak import (
    Failure,
    Fleet,
    Footprint,
    Job,
    Pace,
    Progress,
    Stall,
    Stop,
    check_ends,
    check_growth,
    check_refusal,
    check_stalls,
    without_stops,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SOAK = Path(__file__).parents[1] / "examples" / "benchmark" / "soak.py"
END = Progress(
    round=9,
    members=(0, 1),
    steps=9,
    footprint=Footprint(mib=1.0, files=1, threads=1),
    stalls=(),
    pace=0.01,
    average=(1.0, 2.0),
    moved=0.5,
)

# In turn: the seed of the day says which.
KINDS = (("--codes", "int8", "--tracking"), ("--auto", "--jitter", "0.06", "--slow", "0.06"))


@pytest.mark.soak
def test_faults_are_survived_by_all_ranks(tmp_path: Path) -> None:
    seed = os.environ["SOAK_SEED"]
    # Steps that mostly wait leave the cores to the tests on the other workers.
    command = ("--minutes", "0.2", "--timeout", "4", "--step", "0.06", *KINDS[int(seed) % 2])
    command = (*command, "--seed", seed)
    report = run_script(SOAK, *command, cwd=tmp_path, seconds=280)
    print(*command, report, sep="\n")
    assert "0 ranks for good" in report
    assert "faults: none" not in report
    assert report.rstrip().splitlines()[-1].startswith(f"seed {seed}: ")
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
    check_ends({0: END, 1: END}, 2)
    with pytest.raises(ValueError, match=text):
        check_ends({0: END, 1: END._replace(**change)}, 2)


def test_long_stalls_are_a_failure() -> None:
    usual = [2.0] * 10
    assert check_stalls([], timeout=5, allowance=0.0) == []
    assert check_stalls([*usual, 9.9], timeout=5, allowance=0.0) == []
    (wrong,) = check_stalls([*usual, 10.5], timeout=5, allowance=0.2)
    assert "longest stall of at most 10 s and 0.2 s" in wrong
    assert check_stalls([*usual, 10.5], timeout=5, allowance=0.6) == []
    (wrong,) = check_stalls([3.0] * 10, timeout=5, allowance=0.2)
    assert "median stall of at most 2.5 s" in wrong
    # Too few for a median.
    assert check_stalls([3.0] * 4, timeout=5, allowance=0.2) == []


@pytest.mark.parametrize(
    ("footprint", "text"),
    [
        (Footprint(mib=66.0, files=1, threads=1), "64 more MiB of memory of rank 1"),
        (Footprint(mib=1.0, files=10, threads=1), "8 more open files of rank 1"),
        (Footprint(mib=1.0, files=1, threads=8), "6 more threads of rank 1"),
    ],
)
def test_what_grows_after_warm_up_is_a_failure(footprint: Footprint, text: str) -> None:
    warm = dict.fromkeys(range(2), END.footprint)
    assert check_growth(warm, {0: END, 1: END}) == []
    # A rank that was restarted late has not warmed up.
    assert check_growth({0: END.footprint}, {0: END, 1: END._replace(footprint=footprint)}) == []
    (wrong,) = check_growth(warm, {0: END, 1: END._replace(footprint=footprint)})
    assert text in wrong


def test_a_stall_of_a_stopped_rank_does_not_count() -> None:
    stalls = [Stall(end=10.0, seconds=2.0), Stall(end=20.0, seconds=2.0)]
    assert without_stops(stalls, []) == stalls
    for stop in (Stop(7.0, 9.0), Stop(9.5, 11.0), Stop(8.5, 9.0), Stop(9.0)):
        assert stalls[0] not in without_stops(stalls, [stop])
    assert without_stops(stalls, [Stop(1.0, 7.0), Stop(11.0, 17.0)]) == stalls


def test_a_twin_must_be_refused_as_such() -> None:
    check_refusal(1, Failure("ValueError", "another process with this rank number is alive"))
    with pytest.raises(ValueError, match="rank 1 to be refused, but it trains"):
        check_refusal(1, END)
    with pytest.raises(ValueError, match="to be refused as such, got out of memory"):
        check_refusal(1, Failure("RuntimeError", "out of memory"))


class NotedCalls:
    """Ranks that report at once, and of which only the calls are noted."""

    def __init__(self, world_size: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.twins = 0
        self._alive = set(range(world_size))

    def kill(self, rank: int) -> None:
        self.calls.append(("kill", rank))
        self._alive.remove(rank)

    def start(self, rank: int) -> None:
        self.calls.append(("start", rank))
        self._alive.add(rank)

    def start_twin(self, rank: int) -> None:
        self.calls.append(("start_twin", rank))
        self.twins += 1

    def listen(self, seconds: float) -> set[int]:
        self.twins = 0
        return self._alive

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        (Kind.STORM, [("kill", 1), ("kill", 2), ("start", 1), ("start", 2)]),
        (Kind.TWIN, [("start_twin", 1)]),
        (Kind.STORE_STOP, [("stop_store", 0.01)]),
        (Kind.SLOW_LINK, [("slow_down", 1, True), ("slow_down", 1, False)]),
        (Kind.CUT, [("cut", 1), ("kill", 1), ("mend", 1), ("start", 1)]),
    ],
)
def test_a_fault_is_a_few_calls(kind: Kind, calls: list[tuple[Any, ...]]) -> None:
    ranks = NotedCalls(4)
    injector = Injector(ranks, 4)
    # Two ranks are away for longer than a busy machine takes to kill the second one.
    is_storm = kind is Kind.STORM
    injector.inject(Fault(kind, (1, 2) if is_storm else (1,), 0.01, 2.0 if is_storm else 0.01, 0.0))
    injector.settle()
    assert ranks.calls == calls
    assert injector.losses == {Kind.STORM: 2, Kind.CUT: 1}.get(kind, 0)


def test_every_kind_of_fault_is_drawn_and_leaves_half_of_the_ranks() -> None:
    faults = list(islice(draw_faults(3, 7, 5.0, tuple(Kind)), 300))
    assert {fault.kind for fault in faults} == {*Kind}
    assert {len(fault.ranks) for fault in faults if fault.kind is Kind.STORM} == {2, 3}
    assert all(0 < len(set(fault.ranks)) == len(fault.ranks) < 4 for fault in faults)
    assert faults == list(islice(draw_faults(3, 7, 5.0, tuple(Kind)), 300))
    assert {*HARMLESS} & {*LINKS} == {Kind.SLOW_LINK, Kind.SHORT_CUT}


def job(timeout: float) -> Job:
    return Job(
        world_size=3,
        topology="complete",
        timeout=timeout,
        step=0.02,
        slow=0.0,
        jitter=0.0,
        auto=False,
    )


def test_without_a_store_a_loss_ends_all_ranks_with_a_peer_error() -> None:
    fleet = Fleet(job(timeout=3))
    try:
        fleet.reach(5)
        assert fleet.end_without_store(victim=1) == []
    finally:
        fleet.close()
    assert sorted(fleet.lost) == [0, 2]


def test_ranks_that_hang_are_a_failure_that_shows_their_stacks() -> None:
    fleet = Fleet(job(timeout=100))
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
