"""The benchmark of the CUDA path, on the CPU: a wrong trajectory is a failure, and it all runs."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import gpu
import pytest
import torch
from ranks import run_script

SCRIPT = Path(__file__).parent.parent / "examples" / "benchmark" / "gpu.py"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("wrong", [False, True])
def test_a_trajectory_that_differs_from_the_one_on_the_cpu_has_failed(wrong: bool) -> None:
    setup, moves = gpu.Setup("cpu", "gloo", 4), [0.5, -1.0]
    # A little more than what is tolerated.
    scales = {name: 1 + 1.1 * gpu.tolerance(name) * wrong for name in gpu.TRAJECTORIES}
    found = [dict.fromkeys(scales, moves)] * setup.ranks
    wanted = [{name: [scales[name] * x for x in moves] for name in scales}] * setup.ranks
    bench = gpu.Bench()
    with mock.patch.object(bench, "run", side_effect=[found, wanted]):
        text = gpu.compared(bench, gpu.Setups(alone=[], shared=[setup], several=None))
    assert re.findall(rf"^\| {setup} \| ([^|]*) \|", text, re.M) == list(gpu.TRAJECTORIES)
    assert len(bench.failures) == wrong * len(gpu.TRAJECTORIES)


def cells(line: str) -> tuple[str, ...]:
    """Those of a line of a table, with # for numbers."""
    number = r"^[\d.]+(e-\d+)?(?=$|, at most)"
    return tuple(re.sub(number, "#", cell) for cell in line[2:-2].split(" | "))


@pytest.mark.timeout(300)  # on a busy machine
def test_it_runs_on_the_cpu_and_says_what_it_cannot_measure(tmp_path: Path) -> None:
    small = ("--device", "cpu", "--size-mib", "1", "--steps", "1", "--tables")
    out = run_script(SCRIPT, *small, cwd=tmp_path, seconds=280)
    rows = {cells(line) for line in out.splitlines() if line.startswith("| ")}
    alone, shared = "gloo, 1 rank (exchanges nothing)", "gloo, 2 ranks"

    def check(*row: str) -> None:
        assert row in rows, row

    for method in gpu.HOST_METHODS:
        check(alone, method, *"###", gpu.NOT_MEASURED)
        check(shared, method, *"###", gpu.NOT_MEASURED)
    for name in gpu.TRAJECTORIES:
        bound = f"#, at most {gpu.tolerance(name):g}"
        check("passed", "c", shared, f"{name}: {gpu.TRAJECTORY}", bound)
    check("pack, check, mix, views", *"####")
    check("measured", "c", shared, "complete: time of a step, in steps of DDP", "#")
    check("passed", "d", alone, gpu.ONE_RANK, "")
    check("not measured", "a", shared, gpu.NO_WAIT, "")
    check("not measured", "e", shared, f"copies: {gpu.MEMORY}, pinned", "")
    assert {*gpu.MODES} == {row[1] for row in rows if row[::2][:2] == (shared, gpu.NOT_MEASURED)}
    assert "UserWarning" not in out
    assert not [row for row in rows if row[0] == "failed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure the GPU")
def test_without_a_gpu_it_measures_nothing(tmp_path: Path) -> None:
    assert "nothing was measured" in run_script(SCRIPT, cwd=tmp_path)
