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
from meshes import LAYOUTS, Spread, run_on_mesh
from ranks import run_processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from decent_optim_wrapper import DecentOptimWrapper, NonFiniteError, PeerError, Schedule
from decent_optim_wrapper.optim.shards import local

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("ranks_on_a_mesh"),
]

RANKS, FAILING, FAILS_AT = 8, 3, 2
TIMEOUT = 6.0
SOON = TIMEOUT + 2
STEPS = 6
# Of tests in which nothing may wait so long.
LONG = 30.0


def poison(spread: Spread) -> None:
    """Put NaN into what this rank holds of one parameter."""
    with torch.no_grad():
        for param in spread.model.parameters():
            held = param.to_local() if isinstance(param, DTensor) else param
            if held.numel():
                held.fill_(torch.nan)
                return


def train(rank: int, name: str, fault: str, folder: str, **options: Any) -> tuple[str, str, float]:
    """How a rank ends, and how many seconds after the fault, or after its call if that is later."""
    at = Path(folder) / "at"
    dist.init_process_group("gloo")
    spread = Spread(LAYOUTS[name], timeout=timedelta(seconds=TIMEOUT))
    optimizer = spread.wrap(
        lambda params: torch.optim.SGD(params, lr=0.1), timeout=TIMEOUT, **options
    )
    assert len(optimizer.buckets) >= 2
    kind, text, called = "", "", 0.0
    try:
        for step in range(STEPS):
            called = time.monotonic()
            spread.backward(step)
            if rank == FAILING and step == FAILS_AT:
                at.write_text(str(time.monotonic()))
                if fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if fault == "raises":
                    raise ZeroDivisionError("of the user")
                poison(spread)
            if fault == "stopped":
                # A busy machine computes late, and only waits are bounded.
                called = time.monotonic()
            optimizer.step()
        optimizer.synchronize()
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    ended = time.monotonic()
    fault_at = float(at.read_text())
    return kind, text, ended - (max(called, fault_at) if fault == "stopped" else fault_at)


def ends_soon(tmp_path: Path, name: str, fault: str) -> list[tuple[str, str, float]]:
    """How all ranks end; a machine that is busy may be late, but not every time."""
    lost = [FAILING] if fault in ("killed", "stopped") else []
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        found = run_processes(RANKS, train, name, fault, str(folder), lost=lost)
        assert all(kind for kind, _, _ in found)
        if all(seconds < SOON for _, _, seconds in found):
            return found
    pytest.fail(f"some ranks ended later than {SOON} s after the fault: {found}")


# What becomes of one shard, the layout, and what all ranks end with.
FAULTS = [
    ("killed", "fsdp inside", "PeerError"),
    ("killed", "tp outside", "PeerError"),
    ("stopped", "pipeline 1f1b", "PeerError"),
    ("raises", "fsdp inside", "ZeroDivisionError"),
    ("nan", "pipeline 1f1b", "NonFiniteError"),
]


@pytest.mark.parametrize(("fault", "name", "error"), FAULTS)
def test_all_ranks_end_soon_where_one_fails_in_one_shard(
    tmp_path: Path, fault: str, name: str, error: str
) -> None:
    found = ends_soon(tmp_path, name, fault)
    if error == "PeerError":
        assert any(kind == error and "lost rank" in text for kind, text, _ in found)
    else:
        assert found[FAILING][0] == error


def lose_on_the_way(rank: int, dies_before: str, folder: str) -> tuple[str, str, float]:
    """As `train`, where nobody ends before all have noticed: no connection closes by itself."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gossip", "pp"))
    params = [torch.ones(4, requires_grad=True) for _ in range(2)]
    optimizer = DecentOptimWrapper(
        torch.optim.SGD(params, lr=0.1),
        topology="ring",
        bucket_cap_mb=16 / 2**20,
        timeout=LONG,
        mesh=mesh,
        gossip_dim="gossip",
    )
    assert len(optimizer.buckets) == 2
    start, text = 0.0, ""
    try:
        for step in range(4):
            for call in ("clip", "step"):
                start = time.monotonic()
                if (rank, step, call) == (3, 1, dies_before):
                    os.kill(os.getpid(), signal.SIGKILL)
                for param in params:
                    param.grad = torch.ones_like(param)
                if call == "clip":
                    optimizer.clip_grad_norm_(1.0)
                else:
                    optimizer.step()
    except PeerError as error:
        text = str(error)
    waited = time.monotonic() - start
    with pytest.raises(PeerError):
        optimizer.all_gather(torch.zeros(1))
    (Path(folder) / f"ended_{rank}").touch()
    deadline = time.monotonic() + 2 * LONG
    while len([*Path(folder).glob("ended_*")]) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    return text, call, waited


@pytest.mark.parametrize("dies_before", ["clip", "step"])
def test_a_loss_seen_along_one_dimension_is_passed_on_along_the_others(
    tmp_path: Path, dies_before: str
) -> None:
    found = run_processes(4, lose_on_the_way, dies_before, str(tmp_path), lost=[3])
    assert all(waited < LONG / 2 for _, _, waited in found)
    # Rank 0 meets the lost rank along no dimension.
    assert any(
        f"lost rank {rank}, which failed with PeerError" in found[0][0] for rank in (1, 2, 3)
    )
    assert {call for _, call, _ in found} == {"clip", "step"}


AVERAGED = ("fsdp inside", "tp inside", "pipeline 1f1b")


def average_all() -> list[tuple[str, set[float]]]:
    """The error of an average of NaN, and the values of one that leaves NaN out."""
    return [average(name, momenta) for name in AVERAGED for momenta in (False, True)]


def average(name: str, momenta: bool) -> tuple[str, set[float]]:
    spread, error = Spread(LAYOUTS[name]), ""
    for on_nonfinite in ("raise", "skip"):
        optimizer = spread.wrap(
            lambda params: torch.optim.SGD(params, lr=0.0, momentum=0.9),
            on_nonfinite=on_nonfinite,
            schedule=Schedule(average_state="average"),
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


def parts(spread: Spread, optimizer: DecentOptimWrapper, momenta: bool) -> list[torch.Tensor]:
    """What this rank holds of the parameters, or of their momenta."""
    tensors = [state["momentum_buffer"] for state in optimizer.state.values()]
    return [local(each).detach() for each in (tensors if momenta else spread.model.parameters())]


def test_averages_leave_out_the_whole_replica_of_a_shard_that_is_not_finite() -> None:
    bad = f"those of ranks [{FAILING // 2}] hold NaN"
    for found in run_on_mesh(RANKS, average_all):
        assert len(found) == 2 * len(AVERAGED)
        for number, (error, values) in enumerate(found):
            assert bad in error
            assert ("finite momenta" if number % 2 else "finite parameters") in error
            assert values == {(0 + 2 + 3) / 3}
