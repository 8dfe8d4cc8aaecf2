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


def ends(tmp_path: Path, name: str, fault: str) -> list[tuple[str, str, float]]:
    lost = [FAILING] if fault in ("killed", "stopped") else []
    found = run_processes(RANKS, train, name, fault, str(tmp_path), lost=lost)
    print(name, fault, [(kind, round(seconds, 2)) for kind, _, seconds in found])
    return found


def ends_soon(tmp_path: Path, name: str, fault: str) -> list[tuple[str, str, float]]:
    """How all ranks end; a machine that is busy may be late, but not every time."""
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        found = ends(folder, name, fault)
        assert all(kind for kind, _, _ in found)
        if all(seconds < SOON for _, _, seconds in found):
            return found
    pytest.fail(f"some ranks ended later than {SOON} s after the fault: {found}")


@pytest.mark.parametrize("name", ["fsdp inside", "tp outside", "pipeline 1f1b"])
def test_all_ranks_end_soon_where_one_is_killed_in_one_shard(tmp_path: Path, name: str) -> None:
    found = ends_soon(tmp_path, name, "killed")
    assert any(kind == "PeerError" and "lost rank" in text for kind, text, _ in found)


@pytest.mark.parametrize("name", ["fsdp inside", "pipeline 1f1b"])
def test_all_ranks_end_soon_where_one_stops_in_one_shard(tmp_path: Path, name: str) -> None:
    found = ends_soon(tmp_path, name, "stopped")
    assert any(kind == "PeerError" and "lost rank" in text for kind, text, _ in found)


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


@pytest.mark.parametrize("name", ["fsdp inside", "pipeline 1f1b"])
def test_all_ranks_end_soon_where_one_raises_in_one_shard(tmp_path: Path, name: str) -> None:
    found = ends_soon(tmp_path, name, "raises")
    assert found[FAILING][0] == "ZeroDivisionError"


@pytest.mark.parametrize("name", ["fsdp inside", "pipeline 1f1b"])
def test_all_ranks_end_soon_where_one_shard_is_not_finite(tmp_path: Path, name: str) -> None:
    found = ends_soon(tmp_path, name, "nan")
    assert found[FAILING][0] == "NonFiniteError"


AVERAGED = ("fsdp inside", "tp inside", "pipeline 1f1b")


def average_all() -> list[tuple[str, set[float], str, set[float]]]:
    return [(*average(name), *average_momenta(name)) for name in AVERAGED]


def average(name: str) -> tuple[str, set[float]]:
    """The error of an average of NaN, and the values of one that leaves NaN out."""
    spread, error = Spread(LAYOUTS[name]), ""
    for on_nonfinite in ("raise", "skip"):
        optimizer = spread.wrap(
            lambda params: torch.optim.SGD(params, lr=0.1), on_nonfinite=on_nonfinite
        )
        with torch.no_grad():
            for param in spread.model.parameters():
                param.fill_(spread.replica)
        if dist.get_rank() == FAILING:
            poison(spread)
        try:
            optimizer.global_avg(may_revert=False)
        except NonFiniteError as raised:
            error = str(raised)
    held = [p.to_local() if isinstance(p, DTensor) else p for p in spread.model.parameters()]
    values = {value for tensor in held for value in tensor.detach().flatten().tolist()}
    return error, values


def average_momenta(name: str) -> tuple[str, set[float]]:
    """The error of an average of momenta with NaN, and those of one that leaves NaN out."""
    spread, error, momenta = Spread(LAYOUTS[name]), "", []
    for on_nonfinite in ("raise", "skip"):
        optimizer = spread.wrap(
            lambda params: torch.optim.SGD(params, lr=0.0, momentum=0.9),
            on_nonfinite=on_nonfinite,
            schedule=Schedule(average_state="average"),
        )
        spread.backward(0)
        optimizer.step()
        optimizer.synchronize()
        momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
        for momentum in momenta:
            momentum.fill_(spread.replica)
        held = [local(momentum) for momentum in momenta]
        if dist.get_rank() == FAILING:
            next(part for part in held if part.numel()).fill_(torch.nan)
        try:
            optimizer.global_avg(may_revert=False)
        except NonFiniteError as raised:
            error = str(raised)
    values = [set(local(momentum).flatten().tolist()) for momentum in momenta]
    return error, set().union(*values)


def test_averages_leave_out_the_whole_replica_of_a_shard_that_is_not_finite() -> None:
    bad = f"those of ranks [{FAILING // 2}] hold NaN"
    for found in run_on_mesh(RANKS, average_all):
        assert len(found) == len(AVERAGED)
        for error, values, error_of_momenta, momenta in found:
            assert bad in error
            assert "finite momenta" in error_of_momenta
            assert bad in error_of_momenta
            assert values == momenta == {(0 + 2 + 3) / 3}
