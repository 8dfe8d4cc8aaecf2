"""The CIFAR-10 example: checkpoints, and restarts under torchrun."""

from __future__ import annotations

import importlib.util
import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import begin_process, print_to, run_processes, run_script
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from decent_optim_wrapper.checkpoint import Checkpoints

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not importlib.util.find_spec("torchvision"), reason="needs torchvision"),
]
CIFAR = Path(__file__).parent.parent / "examples" / "train_cifar10.py"
# Two epochs of three steps, with sets in the middle of both.
TINY = (
    *("--fake-data", "--fake-samples", "6", "--batch-size", "1", "--save-every", "2"),
    *("--epochs", "2", "--warmup-epochs", "1", "--lr", "0.01", "--topology", "ring", "--no-amp"),
)
LAST = 6


class Small(nn.Sequential):
    """In the place of a ResNet-18, whose checkpoints of 90 MB take most of the time."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        # The example replaces both.
        self.conv1 = self.maxpool = nn.Identity()
        self.norm = nn.BatchNorm2d(64)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(64, num_classes)


def train(_: int, folder: Path, *options: str) -> None:
    """Train a small model as this rank, which prints to a file."""
    print_to(folder / "out")
    os.chdir(folder)
    sys.argv[:] = [str(CIFAR), *TINY, *options]
    with mock.patch("torchvision.models.resnet18", Small):
        runpy.run_path(str(CIFAR), run_name="__main__")


def printed(folder: Path) -> str:
    return (folder / "out").read_text()


def file_of(folder: Path, step: int, rank: int) -> Path:
    return folder / "runs" / "cifar10" / f"step_{step:08d}" / f"rank_{rank}_of_2.pt"


def trained(folder: Path) -> list[dict[str, Tensor]]:
    """The models of both ranks after the last step."""
    files = (file_of(folder, LAST, rank) for rank in (0, 1))
    return [torch.load(file, weights_only=True)["model"] for file in files]


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("never_stopped")
    run_processes(2, train, folder)
    assert "epoch 2: loss" in printed(folder)
    return folder


def run_under_torchrun(folder: Path) -> None:
    """As torchrun does, whose ranks would import torch again in every life."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=2,
        run_id="one launch",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="forkserver",
    )
    elastic_launch(config, run_as_a_rank)(folder)


def run_as_a_rank(folder: Path) -> None:
    """In its first life, rank 1 leaves its newest file torn and is killed."""
    begin_process()
    save = Checkpoints.save

    def save_and_die(checkpoints: Checkpoints, step: int, state: dict[str, Any]) -> None:
        save(checkpoints, step, state)
        if step == 4:
            os.truncate(file_of(folder, step, rank=1), 1000)
            os.kill(os.getpid(), signal.SIGKILL)

    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        mock.patch.object(Checkpoints, "save", save_and_die).start()
    train(0, folder)


def test_torchrun_restarts_a_killed_rank_from_the_newest_set_that_is_whole(
    never_stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the agent sets is taken back; in the main thread, it would handle signals, too.
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    agent = threading.Thread(target=run_under_torchrun, args=[tmp_path], daemon=True)
    agent.start()
    agent.join(110)
    out = printed(tmp_path)
    assert not agent.is_alive(), out
    assert "step_00000004/rank_1_of_2.pt cannot be used" in out
    assert out.count("resumed after step") == 1
    assert "resumed after step 2, round 2" in out
    assert all(map(equal, trained(tmp_path), trained(never_stopped)))
    assert not equal(*trained(tmp_path))


def test_cifar_goes_on_from_an_earlier_launch_only_with_resume(never_stopped: Path) -> None:
    expected = trained(never_stopped)
    file_of(never_stopped, LAST, rank=0).unlink()
    refusal = "the checkpoints of another launch, up to step 4: go on from there"
    with pytest.raises(AssertionError, match=refusal):
        run_processes(2, train, never_stopped)
    run_processes(2, train, never_stopped, "--resume")
    assert "resumed after step 4, round 4" in printed(never_stopped)
    assert all(map(equal, trained(never_stopped), expected))


def test_cifar_also_runs_as_a_plain_process_in_mixed_precision(tmp_path: Path) -> None:
    options = ("--fake-data", "--fake-samples", "2", "--batch-size", "2", "--epochs", "1")
    assert "epoch 1: loss" in run_script(CIFAR, *options, cwd=tmp_path)
