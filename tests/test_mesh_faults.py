"""A rank that dies or fails in one shard: the whole job ends, and soon."""

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
from meshes import LAYOUTS, Spread
from ranks import run_processes
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from decent_optim_wrapper import DecentOptimWrapper, NonFiniteError, PeerError, Schedule
from decent_optim_wrapper.optim.shards import local

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

RANKS, FAILING, FAILS_AT = 8, 3, 2
TIMEOUT = 3.0
# Of torch's own collectives. Only connections that stay open need it.
TORCH_TIMEOUT = timedelta(seconds=20)
# Far less than torch's own timeout of 30 minutes, and enough for a machine that is busy.
SOON = 40.0
STEPS = 6


def poison(spread: Spread) -> None:
    """Put NaN into what this rank holds of one parameter."""
    with torch.no_grad():
        for param in spread.model.parameters():
            held = param.to_local() if isinstance(param, DTensor) else param
            if held.numel():
                held.fill_(torch.nan)
                return


def train(rank: int, name: str, fault: str, folder: str, **options: Any) -> tuple[str, str, float]:
    """How a rank ends, and how many seconds after the fault."""
    at = Path(folder) / "at"
    store = FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=TORCH_TIMEOUT)
    spread = Spread(LAYOUTS[name])
    optimizer = spread.wrap(
        lambda params: torch.optim.SGD(params, lr=0.1), timeout=TIMEOUT, **options
    )
    assert len(optimizer.buckets) >= 2
    kind, text = "", ""
    try:
        for step in range(STEPS):
            spread.backward(step)
            if rank == FAILING and step == FAILS_AT:
                at.write_text(str(time.monotonic()))
                if fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "raises":
                    raise ZeroDivisionError("of the user")
                poison(spread)
            optimizer.step()
        optimizer.synchronize()
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    return kind, text, time.monotonic() - float(at.read_text())


def ends(tmp_path: Path, name: str, fault: str) -> list[tuple[str, str, float]]:
    lost = [FAILING] if fault == "killed" else []
    found = run_processes(RANKS, train, name, fault, str(tmp_path), lost=lost)
    print(name, fault, [(kind, round(seconds, 2)) for kind, _, seconds in found])
    return found


@pytest.mark.parametrize("name", ["fsdp inside", "tp outside", "pipeline 1f1b"])
def test_all_ranks_end_soon_where_one_is_killed_in_one_shard(tmp_path: Path, name: str) -> None:
    found = ends(tmp_path, name, "killed")
    assert all(kind for kind, _, _ in found)
    assert all(seconds < SOON for _, _, seconds in found)
    assert any(kind == "PeerError" and "lost rank" in text for kind, text, _ in found)


@pytest.mark.parametrize("name", ["fsdp inside", "pipeline 1f1b"])
def test_all_ranks_end_soon_where_one_raises_in_one_shard(tmp_path: Path, name: str) -> None:
    found = ends(tmp_path, name, "raises")
    assert found[FAILING][0] == "ZeroDivisionError"
    assert all(kind for kind, _, _ in found)
    assert all(seconds < SOON for _, _, seconds in found)


@pytest.mark.parametrize("name", ["fsdp inside", "pipeline 1f1b"])
def test_all_ranks_end_soon_where_one_shard_is_not_finite(tmp_path: Path, name: str) -> None:
    found = ends(tmp_path, name, "nan")
    assert all(kind for kind, _, _ in found)
    assert all(seconds < SOON for _, _, seconds in found)
    assert found[FAILING][0] == "NonFiniteError"


def average(rank: int, name: str, folder: str) -> tuple[str, set[float]]:
    """The error of an average of NaN, and the values of one that leaves NaN out."""
    store = FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    spread, error = Spread(LAYOUTS[name]), ""
    for on_nonfinite in ("raise", "skip"):
        optimizer = spread.wrap(
            lambda params: torch.optim.SGD(params, lr=0.1), on_nonfinite=on_nonfinite
        )
        with torch.no_grad():
            for param in spread.model.parameters():
                param.fill_(spread.replica)
        if rank == FAILING:
            poison(spread)
        try:
            optimizer.global_avg(may_revert=False)
        except NonFiniteError as raised:
            error = str(raised)
    held = [p.to_local() if isinstance(p, DTensor) else p for p in spread.model.parameters()]
    values = {value for tensor in held for value in tensor.detach().flatten().tolist()}
    dist.barrier()
    dist.destroy_process_group()
    return error, values


@pytest.mark.parametrize("name", ["fsdp inside", "tp inside", "pipeline 1f1b"])
def test_an_average_leaves_out_the_whole_replica_of_a_shard_that_is_not_finite(
    tmp_path: Path, name: str
) -> None:
    bad = FAILING // 2
    for error, values in run_processes(RANKS, average, name, str(tmp_path)):
        assert f"those of ranks [{bad}] hold NaN" in error
        assert values == {(0 + 2 + 3) / 3}


def average_momenta(rank: int, name: str, folder: str) -> tuple[str, list[set[float]]]:
    """The error of an average of momenta with NaN, and those of one that leaves NaN out."""
    store = FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
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
        if rank == FAILING:
            next(part for part in held if part.numel()).fill_(torch.nan)
        try:
            optimizer.global_avg(may_revert=False)
        except NonFiniteError as raised:
            error = str(raised)
    values = [set(local(momentum).flatten().tolist()) for momentum in momenta]
    dist.barrier()
    dist.destroy_process_group()
    return error, values


@pytest.mark.parametrize("name", ["fsdp inside", "tp inside", "pipeline 1f1b"])
def test_an_average_of_momenta_leaves_out_the_whole_replica_of_a_bad_shard(
    tmp_path: Path, name: str
) -> None:
    bad = FAILING // 2
    for error, values in run_processes(RANKS, average_momenta, name, str(tmp_path)):
        assert "finite momenta" in error
        assert f"those of ranks [{bad}] hold NaN" in error
        assert set().union(*values) == {(0 + 2 + 3) / 3}
