"""A report names the rank and the link that are slow."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problem import TINY_CAP_MB, backward, make_params, sgd
from ranks import environment, launcher_store, run_threads

from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.gossip.timing import StepStats
from decent_optim_wrapper.integrations import gossip_stats, log_stats
from decent_optim_wrapper.report import Report, diagnose

NONE = math.nan
GUIDES = Path(__file__).parent.parent / "examples" / "guides"


class Writer:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def log(self, values: dict[str, float], step: int) -> None:
        self.values = values


def test_a_slow_rank_is_named_and_who_waits_for_it() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Report, dict[str, float]]:
        params = make_params()
        optimizer = DecentOptimWrapper(
            sgd(params), process_group=group, topology="ring", bucket_cap_mb=TINY_CAP_MB
        )
        for step in range(12):
            time.sleep(0.2 if rank == 2 else 0)
            backward(params, rank, step)
            optimizer.step()
        writer = Writer()
        log_stats(optimizer, writer, distance=False, report=True)
        return optimizer.report(), writer.values

    reports, written = zip(*run_threads(4, main), strict=True)
    for report in reports:
        assert report.as_dict() == reports[0].as_dict()
    assert report.slow_rank == 2
    assert "rank 2 is slow" in str(report)
    assert {report.ranks[rank].waits_for for rank in (1, 3)} == {2}
    assert all(each.bytes_sent > 0 for each in report.ranks)
    assert written[0]["gossip/slow_rank"] == 2
    assert written[0]["gossip/rank_2/computing_seconds"] >= 0.2
    assert written[0]["gossip/rank_1/waits_for"] == 2
    assert written[0]["gossip/rank_1/bytes_sent"] == report.ranks[1].bytes_sent


def rows(computing: list[float], pairs: dict[tuple[int, int], float]) -> torch.Tensor:
    """Of ranks that wait for nothing else; a pair of ranks is who waits and for whom."""
    size = len(computing)
    waits = torch.full((size, size), NONE, dtype=torch.float64)
    for (rank, other), seconds in pairs.items():
        waits[rank, other] = seconds
    costs = [
        [0.1, seconds, waits[i].nan_to_num(0).max(), 0.0, 8.0]
        for i, seconds in enumerate(computing)
    ]
    return torch.cat([torch.tensor(costs, dtype=torch.float64), waits, waits], dim=1)


def test_both_ends_wait_for_a_slow_link_and_one_for_a_slow_rank() -> None:
    ring = {(0, 1): 0.03, (1, 0): 0.04, (1, 2): 0.0, (2, 1): 0.06, (2, 3): 0.07, (3, 2): 0.0}
    report = diagnose(rows([0.02, 0.02, 0.02, 0.08], ring), (0, 4, 5, 7), paired=True)
    assert report.slow_rank == 7
    assert report.slow_link is not None
    assert report.slow_link.ranks == (0, 4)
    assert report.slow_link.wait_seconds == pytest.approx(0.03)
    assert [each.waits_for for each in report.ranks] == [4, 0, 7, None]
    assert "link between ranks 0 and 4" in str(report)
    assert 'gossip_every="auto"' in report.advice[0]


class Reporting:
    """A wrapper that has this report."""

    def __init__(self, report: Report) -> None:
        self.report = lambda: report

    def stats(self) -> StepStats:
        return StepStats(8, 0.0, 0.0, 0.0, 1, 12)

    def consensus_distance(self) -> float:
        return 0.5


def test_trackers_get_the_whole_report_as_numbers() -> None:
    def logged(report: Report) -> dict[str, float]:
        optimizer: Any = Reporting(report)
        return gossip_stats(optimizer, report=True)

    slow = diagnose(rows([0.02, 0.08], {(0, 1): 0.03, (1, 0): 0.03}), (0, 7), paired=True)
    values = logged(slow)
    assert all(type(value) is float for value in values.values())
    names = ("slow_rank", "slow_link_rank_a", "slow_link_rank_b", "slow_link_seconds")
    assert [values[f"gossip/{name}"] for name in names] == [7, 0, 7, 0.03]
    for each in slow.ranks:
        for name, value in each._asdict().items():
            assert name == "rank" or values[f"gossip/rank_{each.rank}/{name}"] == value
    quick = logged(diagnose(rows([0.02, 0.02], {}), (0, 7), paired=True))
    assert [quick[f"gossip/{name}"] for name in names] == [-1, -1, -1, 0]
    assert quick["gossip/rank_0/waits_for"] == -1
    assert quick.keys() == values.keys()
    page = (GUIDES / "frameworks.md").read_text(encoding="utf-8")
    table = re.findall(r"`(gossip/[\w/]+)`", page)
    assert {f"gossip/{name}" for name in names} < {*table} <= quick.keys()


def test_where_nobody_is_slow_nothing_is_to_be_changed() -> None:
    report = diagnose(rows([0.08, 0.082], {(0, 1): 0.001, (1, 0): 0.001}), (0, 1), paired=True)
    assert (report.slow_rank, report.slow_link) == (None, None)
    assert report.advice == ("no rank and no link is slow",)


SCRIPT = """
import time, torch
from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.utils import init_distributed
rank, *_ = init_distributed()
params = [torch.zeros(3, requires_grad=True), torch.zeros(4, requires_grad=True)]
optimizer = DecentOptimWrapper(torch.optim.SGD(params, lr=0.1 * (1 + rank)), topology="ring")
for _ in range(12):
    time.sleep(0.2 * rank)
    sum(((rank + 1) * param - 1).square().sum() for param in params).backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_an_environment_variable_prints_the_report_at_the_end() -> None:
    """Of real interpreters, whose end it is."""
    store = launcher_store()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={
                **os.environ,
                **environment(store, 2, 2),
                "PYTHONPATH": os.pathsep.join(sys.path),
                "DECENT_REPORT": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [each.communicate(timeout=110)[0] for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0]
    assert printed[0].count("rank 1 is slow") == 1
    assert "computing" in printed[0]
    assert printed[1] == ""
