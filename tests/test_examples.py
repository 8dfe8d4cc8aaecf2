"""The examples, launched as a user launches them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
pytest.importorskip("sklearn")
pytest.importorskip("torchvision")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(ranks: int, *command: str | Path, cwd: Path) -> str:
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return run(*launcher, *command, cwd=cwd)


def test_four_ranks_learn_the_digits_with_the_defaults(tmp_path: Path) -> None:
    result = tmp_path / "figures.json"
    torchrun(4, EXAMPLES / "train_digits.py", "--json", result, cwd=tmp_path)
    history = json.loads(result.read_text())
    assert history[-1]["averaged_accuracy"] >= 0.97
    assert history[-1]["consensus_distance"] > 0
    assert history[0]["averaged_accuracy"] < history[-1]["averaged_accuracy"]
    assert (tmp_path / "runs" / "digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("method", ["ddp", "local"])
def test_the_methods_to_compare_with_run(method: str, tmp_path: Path) -> None:
    script = EXAMPLES / "train_digits.py"
    out = torchrun(2, script, "--method", method, "--non-iid", "--epochs", "2", cwd=tmp_path)
    assert f"{method}, 2 ranks: averaged model" in out


def test_digits_also_run_as_a_plain_process(tmp_path: Path) -> None:
    options = ("--topology", "ring", "--optimizer", "adamw", "--epochs", "3")
    out = run(EXAMPLES / "train_digits.py", *options, cwd=tmp_path)
    assert "gossip on ring, 1 ranks: averaged model" in out


def test_cifar_resumes_from_the_newest_complete_set(tmp_path: Path) -> None:
    options = ("--fake-data", "--fake-samples", "32", "--batch-size", "8", "--topology", "ring")
    script = EXAMPLES / "train_cifar10.py"
    out = torchrun(2, script, *options, "--epochs", "2", "--warmup-epochs", "1", cwd=tmp_path)
    assert "epoch 2: loss" in out
    torn = tmp_path / "runs" / "cifar10" / "epoch_0003"
    torn.mkdir()
    (torn / "rank_0_of_2.pt").write_bytes(b"")
    out = torchrun(2, script, *options, "--epochs", "3", "--resume", cwd=tmp_path)
    assert "resumed after epoch 2, round 4" in out
    assert "epoch 3: loss" in out
    assert "epoch 2: loss" not in out


def test_the_custom_topology_can_be_looked_at_and_trained_on(tmp_path: Path) -> None:
    script = EXAMPLES / "custom_topology.py"
    assert "star: consensus rate" in run(script, cwd=tmp_path)
    assert "largest error of a weight 0.0" in torchrun(3, script, cwd=tmp_path)


def test_the_benchmarks_run_without_a_network_lab(tmp_path: Path) -> None:
    """Behaviour only: tests time nothing."""
    benchmark = EXAMPLES / "benchmark"
    small = ("--sizes", "1", "--steps", "2", "--warmup", "1", "--rate", "", "--ranks", "2")
    out = run(benchmark / "step_time.py", *small, "--methods", "DDP", "ours", cwd=tmp_path)
    assert "| ours |" in out
    assert (tmp_path / "runs" / "step_time.png").exists()
    out = run(benchmark / "overhead.py", "--parameters", "1e5", "--repeats", "1", cwd=tmp_path)
    assert "one round, views:" in out
    assert "| ring |" in run(benchmark / "startup.py", "--world-sizes", "16", cwd=tmp_path)
