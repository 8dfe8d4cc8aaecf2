"""The CIFAR-10 example: checkpoints, and restarts under torchrun."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from ranks import run_script, run_script_on_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("torchvision"), reason="needs torchvision"),
]


def launcher(ranks: int) -> tuple[str, ...]:
    return "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"


CIFAR = EXAMPLES / "train_cifar10.py"
# Two epochs of four steps, with a set in the middle and at the end of each.
TINY_CIFAR = (
    *("--fake-data", "--fake-samples", "8", "--batch-size", "1", "--save-every", "2"),
    *("--epochs", "2", "--warmup-epochs", "1", "--lr", "0.01", "--topology", "ring", "--no-amp"),
)


def cifar_file(cwd: Path, step: int, rank: int) -> Path:
    return cwd / "runs" / "cifar10" / f"step_{step:08d}" / f"rank_{rank}_of_2.pt"


def trained(cwd: Path) -> list[dict[str, torch.Tensor]]:
    """The models of both ranks after the last step."""
    files = (cifar_file(cwd, 8, rank) for rank in (0, 1))
    return [torch.load(file, weights_only=True)["model"] for file in files]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("never_stopped")
    assert "epoch 2: loss" in run_script_on_ranks(2, CIFAR, *TINY_CIFAR, cwd=folder)
    return folder


@contextmanager
def launched(*command: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def worker(agent: subprocess.Popen[str], rank: int) -> int:
    """The process of that rank among the children of torchrun."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # It has ended, or is not ours.
            continue
        if int(parent) == agent.pid and f"RANK={rank}".encode() in variables:
            return int(folder.name)
    raise AssertionError(f"torchrun has no process of rank {rank}")


@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for ranks in /proc")
def test_torchrun_restarts_a_killed_rank_from_the_newest_set_that_is_whole(
    never_stopped: Path, tmp_path: Path
) -> None:
    """The killed rank also leaves its newest file torn."""
    command = (*launcher(2), "--max-restarts=2", str(CIFAR), *TINY_CIFAR)
    with launched(*command, cwd=tmp_path) as agent:
        wait_until(lambda: all(cifar_file(tmp_path, 4, rank).exists() for rank in (0, 1)), agent)
        victim = worker(agent, rank=1)
        os.kill(victim, signal.SIGSTOP)
        newest = max(step for step in (4, 6, 8) if cifar_file(tmp_path, step, rank=1).exists())
        os.truncate(cifar_file(tmp_path, newest, rank=1), 1_000_000)
        os.kill(victim, signal.SIGKILL)
        out = agent.communicate(timeout=120)[0]
    assert agent.returncode == 0, out
    assert f"step_{newest:08d}/rank_1_of_2.pt cannot be used" in out
    assert out.count("resumed after step") == 1
    assert f"resumed after step {newest - 2}, round {newest - 2}" in out
    assert all(map(equal, trained(tmp_path), trained(never_stopped)))
    assert not equal(*trained(tmp_path))


def test_cifar_goes_on_from_an_earlier_launch_only_with_resume(never_stopped: Path) -> None:
    expected = trained(never_stopped)
    cifar_file(never_stopped, 8, rank=0).unlink()
    refusal = "the checkpoints of another launch, up to step 6: go on from there"
    with pytest.raises(AssertionError, match=refusal):
        run_script_on_ranks(2, CIFAR, *TINY_CIFAR, cwd=never_stopped)
    out = run_script_on_ranks(2, CIFAR, *TINY_CIFAR, "--resume", cwd=never_stopped)
    assert "resumed after step 6, round 6" in out
    assert all(map(equal, trained(never_stopped), expected))


def test_cifar_also_runs_as_a_plain_process_in_mixed_precision(tmp_path: Path) -> None:
    options = ("--fake-data", "--fake-samples", "4", "--batch-size", "4", "--epochs", "1")
    assert "epoch 1: loss" in run_script(CIFAR, *options, cwd=tmp_path)
