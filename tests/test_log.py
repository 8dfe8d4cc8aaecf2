"""What the log shows: a line at the start, one after 100 steps, and what DECENT_LOG asks for."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loguru import logger
from modules import Training
from problem import make_params, take_steps, wrap
from ranks import run_script, run_threads

from decent_optim_wrapper import Extension, Schedule
from decent_optim_wrapper.codecs import INT2, INT3, INT4
from decent_optim_wrapper.gossip.extension import ExtensionContext
from decent_optim_wrapper.gossip.timing import KEPT_STEPS

STEPS = 4


def lines_of(
    main: Callable[[int, dist.ProcessGroup], Any], world_size: int
) -> tuple[list[str], list[Any]]:
    """What is logged by default, and what the ranks return."""
    lines: list[str] = []
    logger.enable("decent_optim_wrapper.start.summary")
    sink = logger.add(lambda message: lines.append(str(message)), level="TRACE", format="{message}")
    try:
        results = run_threads(world_size, main)
    finally:
        logger.remove(sink)
        logger.disable("decent_optim_wrapper")
    return lines, results


def waits_of(main: Callable[[int, dist.ProcessGroup], Any], world_size: int) -> list[str]:
    """The lines after the summary."""
    return [line for line in lines_of(main, world_size)[0] if "DECENT_LOG" not in line]


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

    (line,), (sent, *_) = lines_of(main, 4)
    assert " 4 ranks: rank 0 sends " in line
    assert "(3 buckets). DECENT_LOG=info shows more" in line
    (size,) = re.findall(r"sends (\d+) bytes of parameters per step", line)
    assert float(size) == pytest.approx(sent, abs=0.5)
    assert sent > 100


class Measured(Extension):
    """Pretends that steps took a second, and waited in every second one for a round.

    Args:
        shortest: the seconds of the wait for every fifth round.
        others: that for the others.
    """

    def __init__(self, shortest: float, others: float) -> None:
        self._waits = 2 * shortest, 2 * others

    def attach(self, context: ExtensionContext) -> None:
        meter, now = context.meter, time.perf_counter()
        # All but the last one.
        for step in range(KEPT_STEPS - 1):
            cost = meter.last._replace(wait_seconds=self._waits[step % 5 > 0])
            meter.history.append((now + step - KEPT_STEPS, cost, (0, 1) if step % 2 else ()))


INT8, FEWER = "comm_dtype=torch.int8 sends 7.9 times fewer bytes", "times fewer bytes"
PAIRS, LATE = "'one-peer-exp' sends 1.5 times fewer bytes", "bytes are not the reason"
NOTHING = "no other codec or topology would shorten that"
ONE_OF_THEM = "with topology='one-peer-exp' a step waits for one rank only"
GROUPS, CODED = {"topology": "complete"}, {"comm_dtype": torch.int8}


ADVICE: dict[str, tuple[tuple[float, float], dict[str, Any], set[str], set[str]]] = {
    "short": ((0.05, 0.05), {}, {NOTHING}, {FEWER, LATE}),
    "bytes": ((0.4, 0.5), {}, {INT8}, {"topology", LATE}),
    "bytes of groups": ((0.4, 0.5), GROUPS, {INT8, PAIRS}, {LATE}),
    "bytes of int8": ((0.4, 0.5), CODED, {"comm_dtype=torch.int3 sends"}, {"int8", LATE}),
    "bytes of int4": ((0.4, 0.5), {"comm_dtype": INT4}, {"comm_dtype=torch.int3 sends"}, {LATE}),
    "bytes of int3": ((0.4, 0.5), {"comm_dtype": INT3}, {"comm_dtype=torch.int2 sends"}, {"int3"}),
    "bytes of int2": (
        (0.4, 0.5),
        {"comm_dtype": INT2},
        {NOTHING, "mixing less often would"},
        {FEWER},
    ),
    "late ranks": ((0.0, 0.5), {}, {LATE, NOTHING, "optimizer.report()"}, {FEWER}),
    "late ranks of groups": ((0.0, 0.5), GROUPS, {LATE, ONE_OF_THEM}, {NOTHING, FEWER}),
}


@pytest.mark.parametrize(("waits", "options", "has", "has_not"), ADVICE.values(), ids=ADVICE)
def test_one_line_says_how_long_steps_have_waited_and_what_would_shorten_that(
    waits: tuple[float, float], options: dict[str, Any], has: set[str], has_not: set[str]
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        # In two buckets, of more than 64 KiB: bytes can explain a wait.
        params = make_params(shapes=[(170_000,), (170_000,)])
        more = {"topology": "ring", "bucket_cap_mb": 1.5, "extensions": [Measured(*waits)]}
        optimizer = wrap(params, group, **{**more, **options})
        assert len(optimizer.buckets) == 2
        take_steps(optimizer, params, rank, range(3))

    (line,) = waits_of(main, 4)
    (what, share), *_ = re.findall(r"the last 50 steps waited for (.*) (\d+)% of the time: ", line)
    # Another thread codes.
    is_coded = "comm_dtype" in options
    assert what == ("codes and the network" if is_coded else "the network")
    assert is_coded == ("where CPUs code slowly, comm_dtype=torch.float32" in line)
    assert float(share) == pytest.approx(100 * (0.2 * waits[0] + 0.8 * waits[1]), abs=6)
    assert {text for text in has | has_not if text in line} == has, line


def test_few_bytes_explain_no_wait() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params()
        optimizer = wrap(params, group, topology="ring", extensions=[Measured(0.5, 0.5)])
        take_steps(optimizer, params, rank, range(2))

    (line,) = waits_of(main, 2)
    assert LATE in line


@pytest.mark.parametrize("way", ["step", "backward"])
def test_each_wrapper_says_it_once_also_if_a_state_is_loaded(way: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        measured: dict[str, Any] = {"extensions": [Measured(0.5, 0.5)]}
        trained = [Training(rank, group, way, **measured) for _ in range(2)]
        for each in trained:
            each.train(range(3))
            each.optimizer.synchronize()
            each.optimizer.load_state_dict(each.optimizer.state_dict())
            each.train(range(3))
            assert len(each.optimizer.buckets) >= 2

    lines = waits_of(main, 2)
    assert ["the last 50 steps waited" in line for line in lines] == [True, True]


def test_a_rank_that_trains_alone_waits_for_nobody() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params()
        take_steps(wrap(params, group), params, rank, range(KEPT_STEPS + 1))

    assert not waits_of(main, 1)


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
    take_steps(wrap(params, group, bucket_cap_mb=25), params, rank, range(101))

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
    # Nothing but the two lines.
    assert level or printed.count("\n") == 2, printed
