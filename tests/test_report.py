"""What gossip costs is written to trackers of every kind; a report names the slow rank and link."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problem import flatten, make_params, take_steps, wrap
from ranks import run_threads
from torch import Tensor

from decent_optim_wrapper.gossip.timing import StepStats
from decent_optim_wrapper.integrations import gossip_stats
from decent_optim_wrapper.report import Link, Report, diagnose, measure

GUIDES = Path(__file__).parent.parent / "examples" / "guides"


def test_costs_and_distance_have_names_for_trackers() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Any, Tensor, int]:
        optimizer = wrap(params := make_params(), group, topology="ring")
        take_steps(optimizer, params, rank, range(2))
        values = gossip_stats(optimizer), gossip_stats(optimizer, distance=False)
        return values, flatten(params), optimizer.stats().bytes_sent

    ranks = run_threads(4, main)
    rows = torch.stack([row for _, row, _ in ranks])
    distance = (rows - rows.mean(dim=0)).norm(dim=1).square().mean().sqrt()
    assert distance > 0.01
    for (values, without_distance), _, bytes_sent in ranks:
        assert values["gossip/bytes"] == bytes_sent > 0
        assert values["gossip/update_seconds"] > 0
        names = {f"gossip/{name}" for name in ("wait_seconds", "mix_seconds", "skipped")}
        assert names <= without_distance.keys() < values.keys()
        assert values["gossip/consensus_distance"] == pytest.approx(distance.item())
        assert "gossip/consensus_distance" not in without_distance


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_a_slow_rank_is_named_and_who_waits_for_it(overlap: bool) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Report:
        optimizer = wrap(params := make_params(), group, topology="ring", overlap=overlap)
        for step in range(7):
            time.sleep(0.2 if rank == 2 else 0)
            take_steps(optimizer, params, rank, [step])
        return optimizer.report()

    reports = run_threads(4, main)
    for report in reports:
        assert report == reports[0]
    assert report.slow_rank == 2
    assert "rank 2 is slow" in str(report)
    assert {report.ranks[rank].waits_for for rank in (1, 3)} == {2}
    assert all(each.bytes_sent > 0 for each in report.ranks)
    assert report.ranks[2].computing_seconds >= 0.2


def report_of(
    computing: list[float],
    waits: dict[tuple[int, int], float],
    *members: int,
    fastest: float = 1.0,
    nbytes: float = 1e6,
) -> Report:
    """Of ranks that wait for nothing else; a pair of ranks is who waits and for whom.

    Args:
        fastest: the wait of the fastest rounds, as a share of the median.
    """
    size = len(computing)
    pairs = torch.zeros(size, size, dtype=torch.float64)
    for pair, seconds in waits.items():
        pairs[pair] = seconds
    longest = pairs.amax(dim=1)
    costs = [[0.1, computing[i], longest[i], 0.0, nbytes] for i in range(size)]
    medians = pairs + longest.diag()
    rows = [torch.tensor(costs, dtype=torch.float64), medians, fastest * medians]
    return diagnose(torch.cat(rows, dim=1), members)


def test_both_ends_wait_for_a_slow_link_and_one_for_a_slow_rank() -> None:
    ring = {(0, 1): 0.03, (1, 0): 0.04, (1, 2): 0.0, (2, 1): 0.06, (2, 3): 0.07, (3, 2): 0.0}
    report = report_of([0.02, 0.02, 0.02, 0.08], ring, 0, 4, 5, 7)
    assert report.slow_rank == 7
    assert report.slow_link is not None
    assert report.slow_link.ranks == (0, 4)
    assert report.slow_link.wait_seconds == pytest.approx(0.03)
    assert [each.waits_for for each in report.ranks] == [4, 0, 7, None]
    assert "link between ranks 0 and 4 is slow" in str(report)
    assert "overlap=AsItArrives()" in report.advice[0]
    # It is 1.02 times as slow; 1.25 times, but for 2 % of a step.
    for computing in ([0.08, 0.082], [0.008, 0.01]):
        report = report_of(computing, {(0, 1): 0.001, (1, 0): 0.001}, 0, 1)
        assert (report.slow_rank, report.slow_link) == (None, None)
        assert report.advice == ("no rank and no link is slow",)


def test_a_link_is_blamed_only_for_waits_that_its_bytes_explain() -> None:
    of_two = partial(report_of, [0.04, 0.04], {(0, 1): 0.052, (1, 0): 0.054}, 0, 1)
    slow = of_two()
    assert slow.slow_link == Link(ranks=(0, 1), wait_seconds=0.052)
    (advice,) = slow.advice
    assert "torch.int2" in advice
    for busy in (of_two(nbytes=3072), of_two(fastest=0.1)):
        assert busy.slow_link is None
        (advice,) = busy.advice
        assert advice.startswith("no rank is slow, but all wait 53% of a step: they share cores")
        assert "int8" not in advice
        assert [each.waits_for for each in busy.ranks] == [1, 0]
    # In groups of more than two: for their bytes, and for other things.
    of_four = [[0.1, 0.04, 0.05, 0.0, 1e6] + [0.0] * 8 for _ in range(4)]
    rows = torch.tensor(of_four, dtype=torch.float64)
    rows[:, 5:9].fill_diagonal_(0.05)
    assert "they share cores" in str(diagnose(rows, range(4)))
    rows[:, 9:].fill_diagonal_(0.04)
    report = diagnose(rows, range(4))
    assert "all wait 50% of a step: send fewer bits" in str(report)
    assert [each.waits_for for each in report.ranks] == [None] * 4


def test_the_row_of_a_rank_has_its_typical_waits_and_the_waits_of_its_fastest_rounds() -> None:
    waits = [0.0, *(0.05 if round % 5 else 0.001 for round in range(60))]
    history = [
        (float(end), StepStats(10, wait, 0.0, 0.0, 1, end), (end % 2, 2))
        for end, wait in enumerate(waits)
    ]
    rounds: Any = SimpleNamespace(
        policy=SimpleNamespace(meter=SimpleNamespace(history=history)),
        session=SimpleNamespace(transport=SimpleNamespace(rank=2, world_size=4)),
    )
    row = measure(rounds).tolist()
    assert row[:5] == pytest.approx([1.0, 0.95, 0.05, 0.0, 10.0])
    # Half of the rounds with each partner; in the place of this rank, all of them.
    assert row[5:9] == [0.05, 0.05, 0.05, 0.0]
    assert row[9:] == [0.001, 0.001, 0.001, 0.0]


def test_a_report_is_also_plain_values() -> None:
    report = report_of([0.02, 0.08], {(0, 1): 0.03, (1, 0): 0.03}, 0, 7)
    values = asdict(report)
    assert (values["slow_rank"], values["slow_link"]["ranks"]) == (7, (0, 7))
    assert json.loads(json.dumps(values))["ranks"][1]["computing_seconds"] == 0.08
    page = (GUIDES / "frameworks.md").read_text(encoding="utf-8")
    names = gossip_stats(wrap(make_params())).keys()
    assert names == {*re.findall(r"`(gossip/[\w/]+)`", page)}
