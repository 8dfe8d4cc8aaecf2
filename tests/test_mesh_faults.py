"""A rank that dies, stops or fails in one shard: the whole job ends, and soon."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes import LAYOUTS, Layout, Spread, run_on_mesh
from ranks import run_processes
from torch import Tensor

from decent_optim_wrapper import (
    DecentOptimWrapper,
    NonFiniteError,
    PeerError,
    StateAverage,
)
from decent_optim_wrapper.optim.shards import local

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("ranks_on_a_mesh"),
]

LAYOUTS_OF_4 = {
    "fsdp": Layout({"gossip": 2, "fsdp": 2}),
    "tp": Layout({"tp": 2, "gossip": 2}),
    "pipeline": Layout({"gossip": 2, "pp": 2}),
}
FAILING = 3
# A rank that stops is noticed by nothing else. No other fault may take until the end of a wait,
# which is further away than that of the test.
TIMEOUT, NEVER = 4.0, 600.0


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def train(rank: int, name: str, fault: str) -> tuple[str, str]:
    """How a rank ends."""
    timeout = TIMEOUT if fault == "stopped" else NEVER
    dist.init_process_group("gloo")
    spread = Spread(LAYOUTS_OF_4[name], timeout=timedelta(seconds=timeout))
    optimizer = spread.wrap(sgd, timeout=timeout)
    assert len(optimizer.buckets) >= 2
    try:
        for step in range(6):
            spread.backward(step)
            if (rank, step) == (FAILING, 2):
                fail(spread, fault)
            optimizer.step()
        optimizer.synchronize()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def fail(spread: Spread, fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raises":
        raise ZeroDivisionError("of the user")
    with torch.no_grad():
        local(next(iter(spread.model.parameters()))).fill_(torch.nan)


# What becomes of one shard, the layout, and what all ranks end with.
FAULTS = [
    ("killed", "fsdp", "PeerError"),
    ("stopped", "pipeline", "PeerError"),
    ("raises", "tp", "ZeroDivisionError"),
    ("nan", "pipeline", "NonFiniteError"),
]


@pytest.mark.parametrize(("fault", "name", "error"), FAULTS)
def test_all_ranks_end_soon_where_one_fails_in_one_shard(fault: str, name: str, error: str) -> None:
    lost = [FAILING] if fault in ("killed", "stopped") else []
    found = run_processes(4, train, name, fault, lost=lost)
    assert all(kind for kind, _ in found)
    if lost:
        assert any(kind == error and "lost rank" in text for kind, text in found)
    else:
        assert found[FAILING][0] == error


def lose_on_the_way(rank: int, dies_before: str, folder: Path) -> tuple[str, str]:
    """As `train`, where nobody ends before all have noticed: no connection closes by itself."""
    dist.init_process_group("gloo")
    spread = Spread(LAYOUTS_OF_4["pipeline"])
    optimizer = spread.wrap(sgd, timeout=NEVER)
    assert len(optimizer.buckets) >= 2
    begun = []

    def begin(step: int, call: str) -> None:
        begun.append(call)
        if (rank, step, call) == (3, 1, dies_before):
            os.kill(os.getpid(), signal.SIGKILL)
        for param in spread.model.parameters():
            param.grad = torch.ones_like(param)

    def advance() -> None:
        for step in range(4):
            begin(step, "clip")
            optimizer.clip_grad_norm_(1.0)
            begin(step, "step")
            optimizer.step()

    with pytest.raises(PeerError) as caught:
        advance()
    with pytest.raises(PeerError):
        optimizer.all_gather(torch.zeros(1))
    (folder / f"ended_{rank}").touch()
    deadline = time.monotonic() + 60
    while len([*folder.glob("ended_*")]) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    return str(caught.value), begun[-1]


@pytest.mark.parametrize("dies_before", ["clip", "step"])
def test_a_loss_is_passed_on_along_other_dimensions(tmp_path: Path, dies_before: str) -> None:
    found = run_processes(4, lose_on_the_way, dies_before, tmp_path, lost=[3])
    assert len([*tmp_path.iterdir()]) == 3
    # Rank 0 meets the lost rank along no dimension.
    texts = [f"lost rank {rank}, which failed with PeerError" for rank in (1, 2, 3)]
    assert any(text in found[0][0] for text in texts)
    assert {call for _, call in found} == {"clip", "step"}


def average(name: str, momenta: bool) -> tuple[str, set[float]]:
    """The error of an average of NaN, and the values of one that leaves NaN out."""
    spread, error = Spread(LAYOUTS[name]), ""
    for on_nonfinite in ("raise", "skip"):
        optimizer = spread.wrap(
            lambda params: torch.optim.SGD(params, lr=0.0, momentum=0.9),
            on_nonfinite=on_nonfinite,
            extensions=[StateAverage()],
        )
        spread.backward(0)
        optimizer.step()
        optimizer.synchronize()
        for tensor in (held := parts(spread, optimizer, momenta)):
            tensor.fill_(spread.replica)
        if dist.get_rank() == FAILING:
            next(tensor for tensor in held if tensor.numel()).fill_(torch.nan)
        try:
            optimizer.global_avg(may_revert=False)
        except NonFiniteError as raised:
            error = str(raised)
    values = (tensor.flatten().tolist() for tensor in parts(spread, optimizer, momenta))
    return error, set().union(*values)


def parts(spread: Spread, optimizer: DecentOptimWrapper, momenta: bool) -> list[Tensor]:
    """What this rank holds of the parameters, or of their momenta."""
    tensors = [state["momentum_buffer"] for state in optimizer.state.values()]
    return [local(each).detach() for each in (tensors if momenta else spread.model.parameters())]


@pytest.mark.parametrize(("name", "momenta"), [("fsdp inside", True), ("tp inside", False)])
def test_averages_leave_out_the_whole_replica_of_a_shard_with_nan(name: str, momenta: bool) -> None:
    kind = "momenta" if momenta else "parameters"
    for error, values in run_on_mesh(8, average, name, momenta):
        assert f"those of ranks [{FAILING // 2}] hold NaN" in error
        assert f"finite {kind}" in error
        assert values == {(0 + 2 + 3) / 3}
