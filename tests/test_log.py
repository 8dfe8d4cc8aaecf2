"""What the log shows: one line at the start, and what DECENT_LOG asks for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loguru import logger
from problem import TINY_CAP_MB, backward, make_params, sgd
from ranks import run_threads

from decent_optim_wrapper import DecentOptimWrapper, Schedule

STEPS = 4
CASES: list[dict[str, Any]] = [
    {"topology": "ring"},
    {"topology": "ring", "schedule": Schedule(gossip_every=2)},
    {"topology": "complete"},
    {"topology": "hierarchical", "local_world_size": 2, "comm_dtype": torch.int8},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_one_line_says_what_is_sent(options: dict[str, Any]) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> float:
        params = make_params()
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
    assert " 4 ranks: rank 0 sends " in line
    assert "(3 buckets). DECENT_LOG=info shows more" in line
    found = re.search(r"sends ([\d.]+) KiB of parameters per step", line)
    assert found
    assert float(found[1]) == pytest.approx(sent[0] / 1024, abs=0.05)
    assert sent[0] > 100


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
    text = re.sub(r"decent_optim_wrapper\.(?:\w+\.)?(\w+):", r"\1:", done.stderr)
    words = {*re.findall(r"\| (\w+) +\|", text), *re.findall(r"- | (\w+):\w+:\d+ -", text)}
    shown = words | {each for each in has if each in text}
    assert has <= shown
    assert not has_not & shown
