"""What the log shows: one line at the start, and what DECENT_LOG asks for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loguru import logger
from problem import make_params, take_steps, wrap
from ranks import run_script, run_threads

from decent_optim_wrapper import Schedule

STEPS = 4


@pytest.mark.parametrize(
    "options",
    [
        {"topology": "ring", "schedule": Schedule(gossip_every=2)},
        {"topology": "hierarchical", "local_world_size": 2, "comm_dtype": torch.int8},
    ],
    ids=str,
)
def test_one_line_says_what_is_sent(options: dict[str, Any]) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> float:
        params = make_params()
        optimizer = wrap(params, group, **options)
        sent = 0
        for step in range(STEPS):
            take_steps(optimizer, params, rank, [step])
            sent += optimizer.stats().bytes_sent
        return sent / STEPS

    lines: list[str] = []
    logger.enable("decent_optim_wrapper.start.summary")
    sink = logger.add(lambda message: lines.append(str(message)), level="TRACE", format="{message}")
    try:
        sent, *_ = run_threads(4, main)
    finally:
        logger.remove(sink)
        logger.disable("decent_optim_wrapper")
    (line,) = lines
    assert " 4 ranks: rank 0 sends " in line
    assert "(3 buckets). DECENT_LOG=info shows more" in line
    (size,) = re.findall(r"sends (\d+) bytes of parameters per step", line)
    assert float(size) == pytest.approx(sent, abs=0.5)
    assert sent > 100


# Two ranks, so that the groups of the rounds are logged, too.
SCRIPT = """
import importlib, os
os.environ["DECENT_LOG"] = LEVEL
# As in a process that imports it for the first time.
import decent_optim_wrapper
importlib.reload(decent_optim_wrapper)
from problem import make_params, take_steps, wrap
from ranks import run_threads

def main(rank, group):
    params = make_params()
    take_steps(wrap(params, group, bucket_cap_mb=25), params, rank, range(2))

run_threads(2, main)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "has", "has_not"),
    [
        ("", {"start.summary:", "2 ranks: rank 0 sends 448 bytes"}, {"wrapper:", "rounds:"}),
        ("off", set(), {" "}),
        ("info", {"start.summary:", "wrapper:", "rounds:", "| INFO "}, {"| DEBUG "}),
        ("debug", {"start.summary:", "wrapper:", "rounds:", "| INFO ", "| DEBUG "}, set()),
    ],
)
def test_decent_log_says_what_is_shown(
    level: str, has: set[str], has_not: set[str], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("LEVEL", repr(level)))
    printed = run_script("script.py", cwd=tmp_path)
    assert {text for text in has | has_not if text in printed} == has, printed
    # Nothing but the one line.
    assert level or printed.count("\n") == 1, printed
