"""The process group from the variables of torchrun, Slurm and Open MPI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_processes
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from decent_optim_wrapper import DecentOptimWrapper, utils
from decent_optim_wrapper.start.launch import Ranks, find_launch, init_distributed

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "1234",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07,10-12],login1",
    "SLURM_JOB_ID": "100",
    "SLURM_STEP_ID": "2",
}
LAUNCHERS = pytest.mark.parametrize("environ", [TORCHRUN, OPEN_MPI, SLURM], ids=["t", "m", "s"])


@LAUNCHERS
def test_every_launcher_says_the_same(environ: dict[str, str]) -> None:
    launch = find_launch({**environ, "MASTER_ADDR": "host", "MASTER_PORT": "1234"})
    assert launch.variables() == TORCHRUN


@LAUNCHERS
def test_a_missing_variable_is_named(environ: dict[str, str]) -> None:
    derived = {"SLURM_JOB_ID": "MASTER_PORT", "SLURM_STEP_NODELIST": "MASTER_ADDR"}
    for name in environ:
        lacking = {key: value for key, value in environ.items() if key != name}
        if name == "SLURM_STEP_ID":
            assert find_launch(lacking).master_port != find_launch(environ).master_port
            continue
        with pytest.raises(RuntimeError, match=rf"\b{derived.get(name, name)}\b"):
            find_launch(lacking)
        with pytest.raises(RuntimeError, match=rf"\b{derived.get(name, name)}\b"):
            find_launch({**environ, name: ""})


def test_without_a_launcher_the_error_says_how_to_start() -> None:
    with pytest.raises(RuntimeError, match=r"RANK.*OMPI_COMM_WORLD_RANK.*SLURM_PROCID.*torchrun"):
        find_launch({"WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("environ", "name", "value"),
    [
        (TORCHRUN, "WORLD_SIZE", "many"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK", "-1"),
        (SLURM, "SLURM_STEP_TASKS_PER_NODE", "4x2"),
    ],
)
def test_a_variable_that_is_no_number_is_named(
    environ: dict[str, str], name: str, value: str
) -> None:
    with pytest.raises(ValueError, match=f"{name}.*'{value}'"):
        find_launch({**environ, name: value})


@pytest.mark.parametrize("wrong", [{"RANK": "8"}, {"LOCAL_RANK": "4"}, {"LOCAL_WORLD_SIZE": "9"}])
def test_ranks_beyond_their_world_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="torchrun contradict"):
        find_launch({**TORCHRUN, **wrong})


def test_torchrun_goes_before_mpirun_and_mpirun_before_the_slurm_job_around_it() -> None:
    other = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "OMPI_COMM_WORLD_RANK": "3"}
    assert find_launch({**other, **TORCHRUN}).ranks == Ranks("torchrun", 5, 8, 1, 4)
    assert find_launch({**other, **OPEN_MPI}).ranks == Ranks("mpirun", 5, 8, 1, 4)
    assert find_launch({**SLURM, "WORLD_SIZE": "99"}).ranks == Ranks("srun", 5, 8, 1, 4)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[07,10-12],login1", "gpu07"),
        ("gpu[10-12]", "gpu10"),
        ("rack[2-3]-gpu[1,4].site", "rack2-gpu1.site"),
    ],
)
def test_rank_0_of_slurm_is_on_the_first_node_of_the_step(nodes: str, first: str) -> None:
    assert find_launch({**SLURM, "SLURM_STEP_NODELIST": nodes}).master_addr == first
    in_job = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}
    assert find_launch({**in_job, "SLURM_JOB_NODELIST": nodes}).master_addr == first


@pytest.mark.parametrize(
    ("tasks", "node", "here"), [("4(x2),2", 1, 4), ("4(x2),2", 2, 2), ("3", 0, 3), ("1,3,4", 1, 3)]
)
def test_slurm_nodes_may_have_different_numbers_of_tasks(tasks: str, node: int, here: int) -> None:
    environ = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)}
    assert find_launch(environ).ranks.local_world_size == here
    with pytest.raises(ValueError, match="SLURM_NODEID is 9"):
        find_launch({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_NODEID": "9"})


def test_slurm_steps_and_jobs_listen_on_ports_of_their_own() -> None:
    ports = {
        find_launch({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master_port
        for job in range(7_000_000, 7_000_100)
        for step in range(10)
    }
    assert len(ports) == 1000
    assert all(10000 <= int(port) < 30000 for port in ports)


def test_open_mpi_on_one_node_needs_no_address() -> None:
    environ = {key: value for key, value in OPEN_MPI.items() if key != "MASTER_ADDR"}
    launch = find_launch({**environ, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"})
    assert (launch.master_addr, launch.master_port) == ("127.0.0.1", "1234")


@pytest.mark.parametrize(
    ("devices", "backend", "place"),
    [
        (0, None, ("gloo", "cpu")),
        (4, None, ("nccl", "cuda:1")),
        (8, None, ("nccl", "cuda:1")),
        (8, "gloo", ("gloo", "cpu")),
        (1, "nccl", ("nccl", "cuda:0")),
        (2, "cpu:gloo,cuda:nccl", ("cpu:gloo,cuda:nccl", "cuda:1")),
    ],
)
def test_the_backend_follows_from_the_devices(
    monkeypatch: pytest.MonkeyPatch, devices: int, backend: str | None, place: tuple[str, str]
) -> None:
    calls = initialise_without_a_group(monkeypatch, devices)
    info = init_distributed(backend)
    assert info == (5, 8, 1, torch.device(place[1]), 4)
    gpu = info.device if info.device.type == "cuda" else None
    # NCCL is told which GPU it is to use.
    assert calls == ([place[0]] if gpu is None else [gpu.index, place[0], gpu])


def test_too_few_devices_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = initialise_without_a_group(monkeypatch, 2)
    with pytest.warns(UserWarning, match=r"2 CUDA device\(s\) for the 4 ranks.*backend=\"nccl\""):
        assert init_distributed().device == torch.device("cpu")
    assert calls == ["gloo"]
    initialise_without_a_group(monkeypatch, 0)
    with pytest.raises(ValueError, match="local rank 1 sees 0"):
        init_distributed("nccl")


def initialise_without_a_group(monkeypatch: pytest.MonkeyPatch, devices: int) -> list[Any]:
    """Let this process have that many CUDA devices, and note what is done instead of doing it."""
    calls: list[Any] = []
    monkeypatch.setattr(os, "environ", dict(TORCHRUN))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)

    def start(backend: str, timeout: timedelta | None, device_id: torch.device | None) -> None:
        calls.extend([backend] if device_id is None else [backend, device_id])

    monkeypatch.setattr(dist, "init_process_group", start)
    return calls


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_a_group_that_exists_is_described() -> None:
    assert init_distributed() == (0, 1, 0, torch.device("cpu"), 1)


OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def start_under_every_launcher(rank: int) -> list[tuple[Any, list[str], float, int]]:
    """Also as after a restart, with a store that still holds the addresses of dead processes."""
    size, seen = os.environ["WORLD_SIZE"], []
    launchers: list[dict[str, str]] = [
        dict(zip(OWN, (str(rank), size, str(rank), size), strict=True)),
        {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": size,
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": size,
        },
        {
            "SLURM_PROCID": str(rank),
            "SLURM_STEP_NUM_TASKS": size,
            "SLURM_LOCALID": str(rank),
            "SLURM_STEP_TASKS_PER_NODE": size,
        },
    ]
    for restarts, theirs in enumerate(launchers):
        environ = {key: value for key, value in os.environ.items() if key not in OWN}
        environ |= {**theirs, "TORCHELASTIC_RESTART_COUNT": str(restarts)}
        with mock.patch.dict(os.environ, environ, clear=True):
            info = utils.initialize_dist("gloo")
            again = init_distributed()
            assert again == info
            total = torch.tensor(float(rank + 1))
            dist.all_reduce(total)
            param = torch.zeros(1, requires_grad=True)
            optimizer = DecentOptimWrapper(torch.optim.SGD([param], lr=0.1))
            dist.destroy_process_group()
            local = optimizer.topology.local_world_size
            seen.append((tuple(info), [os.environ[name] for name in OWN], total.item(), local))
    return seen


@pytest.mark.slow
def test_two_processes_meet_under_every_launcher_and_again() -> None:
    for rank, seen in enumerate(run_processes(2, start_under_every_launcher)):
        assert len(seen) == 3
        for info, variables, total, local in seen:
            assert info == (rank, 2, rank, torch.device("cpu"), 2)
            assert variables == [str(rank), "2", str(rank), "2"]
            assert (total, local) == (3.0, 2)


def start_on_two_nodes(rank: int) -> tuple[tuple[int, ...], list[int] | None]:
    """As a task of ``srun --nodes 2 --ntasks-per-node 4``: one mesh dimension is the node."""
    for name in OWN:
        del os.environ[name]
    theirs = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 4)}
    os.environ.update({**SLURM, **theirs, "SLURM_NODEID": str(rank // 4)})
    info = init_distributed("gloo")
    nodes = info.world_size // info.local_world_size
    shape = nodes, info.local_world_size
    mesh = init_device_mesh(info.device.type, shape, mesh_dim_names=("gossip", "inner"))
    place = mesh.get_coordinate()
    dist.destroy_process_group()
    return shape, None if place is None else list(place)


@pytest.mark.slow
def test_srun_says_what_a_mesh_of_two_nodes_with_four_tasks_is_made_from() -> None:
    ranks = run_processes(8, start_on_two_nodes)
    assert ranks == [((2, 4), [node, task]) for node in range(2) for task in range(4)]
