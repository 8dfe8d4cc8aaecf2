"""The benchmark of the CUDA path, on the CPU: its oracle tells a wrong mixing, and it all runs."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import gpu
import pytest
import torch
from ranks import run_processes, run_script

SCRIPT = Path(__file__).parent.parent / "examples" / "benchmark" / "gpu.py"
SETUP = gpu.Setup("cpu", "gloo", 4)

pytestmark = pytest.mark.slow


def train(rank: int) -> dict[str, list[float]]:
    return gpu.trajectories(SETUP)


def test_every_trajectory_is_that_of_the_oracle() -> None:
    trajectories = run_processes(SETUP.ranks, train)
    bench, start = gpu.Bench(), gpu.flatten(gpu.draw(0))
    with mock.patch.object(bench, "run", return_value=trajectories):
        text = gpu.compared(bench, gpu.Setups(alone=[], shared=[SETUP], several=None))
    rows = re.findall(rf"^\| {SETUP} \| (.*) \| (.*) \|$", text, re.M)
    assert [name for name, _ in rows] == list(gpu.TRAJECTORIES)
    assert not bench.failures
    for name, error in rows:
        assert float(error) <= gpu.TOLERANCE, name
        found = torch.tensor([rank[name] for rank in trajectories])
        assert (found - start).abs().amax(dim=1).min() > 0.1


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
        for ranks in (alone, shared):
            check(ranks, method, *"###", gpu.NOT_MEASURED)
    for operation in ("copy_", "fused AdamW", "pack, check, mix", "pack, check, mix, views"):
        check(operation, *"####")
    for method in gpu.TRAINERS:
        check(shared, method, *"##")
    for name in gpu.TRAJECTORIES:
        check("passed", "c", shared, f"{name}: {gpu.TRAJECTORY}", "#, at most 1e-05")
    for method in ("ring", "complete"):
        check("measured", "c", shared, f"{method}: time of a step, in steps of DDP", "#")
    check(alone, "yes")
    check("passed", "d", alone, gpu.ONE_RANK, "")
    check("not measured", "a", shared, gpu.NO_WAIT, "")
    check("not measured", "e", shared, f"copies: {gpu.MEMORY}", "")
    assert {*gpu.MODES} == {row[1] for row in rows if row[::2][:2] == (shared, gpu.NOT_MEASURED)}
    assert "UserWarning" not in out
    assert not [row for row in rows if row[0] == "failed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure the GPU")
def test_without_a_gpu_it_measures_nothing(tmp_path: Path) -> None:
    assert "nothing was measured" in run_script(SCRIPT, cwd=tmp_path)
