"""The benchmark of the CUDA path, on the CPU: a wrong trajectory is a failure, and it all runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import gpu
import pytest
import torch
from ranks import run_script

SCRIPT = Path(__file__).parent.parent / "examples" / "benchmark" / "gpu.py"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("scale", "outcome"), [(1.1, gpu.FAILED), (0.9, gpu.PASSED)])
def test_a_trajectory_that_differs_from_the_one_on_the_cpu_has_failed(
    scale: float, outcome: str, capsys: pytest.CaptureFixture[str]
) -> None:
    moves = [0.5, -1.0]
    # A little more or less than what is tolerated.
    scales = {name: 1 + scale * gpu.tolerance(name) for name in gpu.TRAJECTORIES}
    found = [dict.fromkeys(scales, moves)] * 2
    wanted = [{name: [factor * x for x in moves] for name, factor in scales.items()}] * 2
    arguments = ["gpu.py", "--device", "cpu", "--parts", "c"]
    runs = mock.patch.object(gpu, "run", side_effect=[found, wanted])
    with mock.patch("sys.argv", arguments), runs:
        assert gpu.main() == (outcome == gpu.FAILED)
    rows = [line for line in capsys.readouterr().out.splitlines() if "gloo" in line]
    assert [row.split(" | ")[1] for row in rows] == list(gpu.TRAJECTORIES)
    assert all(row.endswith(f"| {outcome} |") for row in rows)


def test_ranks_that_raise_an_error_have_failed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["gpu.py", "--device", "cpu", "--parts", "d"]
    error = ValueError("the disk is full")
    with mock.patch("sys.argv", arguments), mock.patch.object(gpu, "begin", side_effect=error):
        assert gpu.main() == 1
    out, err = capsys.readouterr()
    assert "| gloo, 1 rank | failed |" in out
    assert "ValueError: the disk is full" in err


@pytest.mark.timeout(300)  # on a busy machine
def test_it_runs_on_the_cpu_and_says_what_it_cannot_measure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["gpu.py", "--device", "cpu", "--size-mib", "1", "--steps", "1"]
    tiny: dict[str, Any] = {"LAYERS": 8, "TRAJECTORY_MIB": 0.01, "CAP_MB": 0.0025}
    with mock.patch("sys.argv", small), mock.patch.multiple(gpu, **tiny):
        assert gpu.main() == 0
    out = capsys.readouterr().out
    rows = [line[2:-2].split(" | ") for line in out.splitlines() if line.startswith("| gloo")]
    shared = [row[1:] for row in rows if row[0] == "gloo, 2 ranks"]
    names = [*gpu.HOST_METHODS, *gpu.TRAINERS, *gpu.TRAJECTORIES, *gpu.MODES]
    assert [row[0] for row in shared] == names
    for row in (row for row in shared if row[-1] not in (gpu.NOT_MEASURED, gpu.PASSED, "nan")):
        assert row[0] in gpu.TRAINERS
        assert float(row[1]) > 0
    assert sum(row[-1] == gpu.PASSED for row in shared) == len(gpu.TRAJECTORIES)
    assert ["gloo, 1 rank", gpu.PASSED] in rows
    assert "UserWarning" not in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure the GPU")
def test_without_a_gpu_it_measures_nothing(tmp_path: Path) -> None:
    assert "nothing was measured" in run_script(SCRIPT, cwd=tmp_path)
