"""What the log shows: one line at the start, and what DECENT_LOG asks for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loguru import logger
from problem import TINY_CAP_MB, backward, make_params, sgd
from ranks import run_threads
from torch import Tensor

from decent_optim_wrapper import DecentOptimWrapper, Schedule

STEPS = 4
# Of a unit, how many bytes, and to how many of them the line rounds.
UNITS = {"bytes": (1, 0.5), "KiB": (2**10, 0.05 * 2**10)}
CASES: list[dict[str, Any]] = [
    {"topology": "ring"},
    {"topology": "ring", "schedule": Schedule(gossip_every=2)},
    {"topology": "complete"},
    {"topology": "hierarchical", "local_world_size": 2, "comm_dtype": torch.int8},
]


def line_at_the_start(
    options: dict[str, Any], make: Callable[[], list[Tensor]]
) -> tuple[str, float]:
    """The line that four ranks log, and the bytes that rank 0 sends in a step."""

    def main(rank: int, group: dist.ProcessGroup) -> float:
        params = make()
        optimizer = DecentOptimWrapper(
            sgd(params), process_group=group, bucket_cap_mb=TINY_CAP_MB, **options
        )
        sent = 0
        for step in range(STEPS):
            backward(params, rank, step)
            optimizer.step()
            sent += optimizer.stats().bytes_sent
        return sent / STEPS

    lines: list[str] = []
    logger.enable("decent_optim_wrapper.start.summary")
    sink = logger.add(lambda message: lines.append(str(message)), level="TRACE", format="{message}")
    try:
        sent = run_threads(4, main)
    finally:
        logger.remove(sink)
        logger.disable("decent_optim_wrapper")
    (line,) = lines
    return line, sent[0]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_one_line_says_what_is_sent(options: dict[str, Any]) -> None:
    line, sent = line_at_the_start(options, make_params)
    assert " 4 ranks: rank 0 sends " in line
    assert "(3 buckets). DECENT_LOG=info shows more" in line
    check_amount(line, sent, "bytes")
    assert sent > 100


def test_a_larger_amount_is_in_kib() -> None:
    line, sent = line_at_the_start(
        {"topology": "ring"}, lambda: [torch.zeros(300, requires_grad=True)]
    )
    check_amount(line, sent, "KiB")


def check_amount(line: str, sent: float, unit: str) -> None:
    found = re.search(rf"sends ([\d.]+) {unit} of parameters per step", line)
    assert found, line
    size, rounding = UNITS[unit]
    assert float(found[1]) * size == pytest.approx(sent, abs=rounding)


# Two ranks, so that the groups of the rounds are logged, too.
SCRIPT = """
from test_log import DecentOptimWrapper, backward, make_params, run_threads, sgd

def main(rank, group):
    params = make_params()
    optimizer = DecentOptimWrapper(sgd(params), process_group=group)
    for step in range(2):
        backward(params, rank, step)
        optimizer.step()

run_threads(2, main)
"""


ONE_LINE = re.compile(
    r"[\d:. -]+ \| INFO +\| decent_optim_wrapper\.start\.summary:\w+:\d+ - "
    r"Complete\(.*\), 2 ranks: rank 0 sends \d+ bytes of parameters per step \(1 bucket\)\. "
    r"DECENT_LOG=info shows more, DECENT_LOG=off nothing"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "has", "has_not"),
    [
        ("", {"summary"}, {"wrapper", "pipeline"}),
        ("off", set(), {"summary", "wrapper", "pipeline"}),
        ("info", {"summary", "wrapper", "INFO"}, {"DEBUG"}),
        ("debug", {"summary", "wrapper", "INFO", "DEBUG"}, set()),
        ("loud", {"summary", 'expects "off", "info" or "debug", got'}, {"wrapper"}),
    ],
)
def test_decent_log_says_what_is_shown(level: str, has: set[str], has_not: set[str]) -> None:
    here = Path(__file__).parent
    env = {**os.environ, "DECENT_LOG": level, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=here, env=env, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    if level in ("", "off"):
        # Nothing but the one line, or not even that.
        assert done.stdout == ""
        lines = [ONE_LINE.fullmatch(line) is not None for line in done.stderr.splitlines()]
        assert lines == [True] * len(has), done.stderr
    text = re.sub(r"decent_optim_wrapper\.(?:\w+\.)?(\w+):", r"\1:", done.stderr)
    words = {*re.findall(r"\| (\w+) +\|", text), *re.findall(r"- | (\w+):\w+:\d+ -", text)}
    shown = words | {each for each in has if each in text}
    assert has <= shown
    assert not has_not & shown
