"""The process group from the variables of torchrun, Slurm and Open MPI."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_processes
from torch._C._distributed_c10d import HashStore, TCPStore

from decent_optim_wrapper import DecentOptimWrapper, Elastic, utils
from decent_optim_wrapper.elastic.membership.epoch import FIRST_NOTE
from decent_optim_wrapper.elastic.membership.rendezvous import Rendezvous
from decent_optim_wrapper.start.launch import find_launch, init_distributed

# What each launcher calls the rank, the number of ranks, and both among the ranks of the node.
OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI_NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
TASKS = "SLURM_STEP_TASKS_PER_NODE"
NAMES = {
    "torchrun": OWN,
    "mpirun": tuple(f"OMPI_COMM_WORLD_{name}" for name in MPI_NAMES),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", TASKS),
}


def variables(launcher: str, *numbers: Any, **others: str) -> dict[str, str]:
    """What a launcher sets for a rank."""
    return dict(zip(NAMES[launcher], map(str, numbers), strict=True)) | others


TORCHRUN = variables("torchrun", 5, 8, 1, 4, MASTER_ADDR="host", MASTER_PORT="1234")
OPEN_MPI = variables("mpirun", 5, 8, 1, 4, MASTER_ADDR="host", MASTER_PORT="1234")
SLURM = variables(
    *("srun", 5, 8, 1, "4(x2)"),
    SLURM_STEP_NODELIST="gpu[07,10-12],login1",
    SLURM_JOB_ID="100",
    SLURM_STEP_ID="2",
)


@pytest.mark.parametrize("environ", [TORCHRUN, OPEN_MPI, SLURM], ids=NAMES)
def test_every_launcher_says_the_same_and_a_missing_variable_is_named(
    environ: dict[str, str],
) -> None:
    launch = find_launch({**environ, "MASTER_ADDR": "host", "MASTER_PORT": "1234"})
    assert launch.variables() == TORCHRUN
    derived = {"SLURM_JOB_ID": "MASTER_PORT", "SLURM_STEP_NODELIST": "MASTER_ADDR"}
    for name in environ.keys() - {"SLURM_STEP_ID"}:
        without = {key: value for key, value in environ.items() if key != name}
        for lacking in (without, {**environ, name: ""}):
            with pytest.raises(RuntimeError, match=rf"\b{derived.get(name, name)}\b"):
                find_launch(lacking).variables()


@pytest.mark.parametrize(
    ("environ", "wrong", "words"),
    [
        ({}, {"WORLD_SIZE": "4"}, "RANK.*OMPI_COMM_WORLD_RANK.*SLURM_PROCID.*torchrun"),
        (TORCHRUN, {"WORLD_SIZE": "many"}, "WORLD_SIZE.*'many'"),
        (OPEN_MPI, {"OMPI_COMM_WORLD_LOCAL_RANK": "-1"}, "OMPI_COMM_WORLD_LOCAL_RANK.*'-1'"),
        # As in a batch script, which is no task of a step.
        (
            SLURM,
            {"SLURM_STEP_NUM_TASKS": "", "SLURM_STEP_ID": "", "SLURM_NTASKS": "4"},
            "4 tasks.*start the script with srun",
        ),
        (SLURM, {TASKS: "4x2"}, f"{TASKS}.*'4x2'.*with srun"),
        (SLURM, {TASKS: "4,3", "SLURM_NODEID": "2"}, f"{TASKS}.*'4,3' on node 2.*with srun"),
        (TORCHRUN, {"RANK": "8"}, "torchrun contradict.*unset those that are left"),
    ],
)
def test_an_error_names_the_wrong_variable_and_says_what_to_do(
    environ: dict[str, str], wrong: dict[str, str], words: str
) -> None:
    with pytest.raises((ValueError, RuntimeError), match=words) as caught:
        find_launch(environ | wrong)
    is_missing = not environ or "SLURM_NTASKS" in wrong
    assert caught.type is (RuntimeError if is_missing else ValueError)


def test_torchrun_goes_before_mpirun_and_mpirun_before_the_slurm_job_around_it() -> None:
    other = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "OMPI_COMM_WORLD_RANK": "3"}
    assert find_launch({**other, **TORCHRUN})[:5] == ("torchrun", 5, 8, 1, 4)
    assert find_launch({**other, **OPEN_MPI})[:5] == ("mpirun", 5, 8, 1, 4)
    assert find_launch({**SLURM, "WORLD_SIZE": "99"})[:5] == ("srun", 5, 8, 1, 4)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[07,10-12],login1", "gpu07"), ("rack[2-3]-gpu[1,4].site", "rack2-gpu1.site")],
)
def test_rank_0_of_slurm_is_on_the_first_node_of_the_step(nodes: str, first: str) -> None:
    in_job = {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": nodes}
    for names in ({"SLURM_STEP_NODELIST": nodes}, in_job):
        assert find_launch(SLURM | names).master_addr == first


@pytest.mark.parametrize(
    ("tasks", "node", "here"), [("4(x2),2", 1, 4), ("4(x2),2", 2, 2), ("3", 0, 3), ("1,3,4", 1, 3)]
)
def test_slurm_nodes_may_have_different_numbers_of_tasks(tasks: str, node: int, here: int) -> None:
    environ = {TASKS: tasks, "SLURM_NODEID": str(node)}
    assert find_launch(SLURM | environ).local_world_size == here


def test_slurm_steps_and_jobs_listen_on_ports_of_their_own() -> None:
    ports = {
        find_launch({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": step}).master_port
        for job in range(7_000_000, 7_000_100)
        for step in ("", *map(str, range(1, 10)))
    }
    assert len(ports) == 1000
    assert all(10000 <= int(port) < 30000 for port in ports)


def test_open_mpi_on_one_node_needs_no_address() -> None:
    launch = find_launch(variables("mpirun", 5, 8, 1, 8, MASTER_PORT="1234"))
    assert (launch.master_addr, launch.master_port) == ("127.0.0.1", "1234")


@pytest.mark.parametrize(
    ("devices", "backend", "place"),
    [
        (0, None, ("gloo", "cpu")),
        (4, None, ("nccl", "cuda:1")),
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


def test_gloo_is_open_to_other_nodes_and_on_an_interface_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    initialise_without_a_group(monkeypatch, 0)
    init_distributed("gloo")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    os.environ.update(WORLD_SIZE="4", RANK="1", GLOO_SOCKET_IFNAME="eth0")
    init_distributed("gloo")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


def test_too_few_devices_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = initialise_without_a_group(monkeypatch, 2)
    with pytest.warns(UserWarning, match=r"2 CUDA device\(s\) for the 4 ranks.*backend=\"nccl\""):
        assert init_distributed().device == torch.device("cpu")
    assert calls == ["gloo"]
    initialise_without_a_group(monkeypatch, 0)
    with pytest.raises(ValueError, match="local rank 1 sees 0"):
        init_distributed("nccl")


def initialise_without_a_group(monkeypatch: pytest.MonkeyPatch, devices: int) -> list[Any]:
    """Pretend that there are this many CUDA devices, and note what is done instead of doing it."""
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


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_process_that_comes_back_to_elastic_ranks_cannot_enter_their_group(
    monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    """It would wait there in silence. Ranks that are not elastic are all started again."""
    calls = initialise_without_a_group(monkeypatch, 0)
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(served.port)}
    own = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    os.environ.update(where | own)
    init_distributed("gloo")
    Rendezvous.built = 0
    other = Rendezvous(served, 0, 1, timedelta(seconds=40), stale_after=2.0)
    assert other.gather(FIRST_NOTE).members == (0,)
    if restarts:
        with pytest.raises(RuntimeError, match=r"^rank 5: .* run with elastic.*leave init_"):
            init_distributed("gloo")
    else:
        init_distributed("gloo")
    assert len(calls) == 2 - restarts


def come_back_after_a_process_group(rank: int) -> list[str]:
    """Train with elastic in a process group, and enter it again as after a restart."""
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(served.port)}
    os.environ.update(
        variables("torchrun", 0, 1, 0, 1, TORCHELASTIC_USE_AGENT_STORE="True"), **where
    )
    init_distributed("gloo")
    param = torch.ones(1, requires_grad=True)
    optimizer = DecentOptimWrapper(torch.optim.SGD([param], lr=0.1), elastic=Elastic())
    param.grad = torch.ones(1)
    optimizer.step()
    assert param.item() < 1
    del optimizer
    dist.destroy_process_group()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    texts = []
    for environ in ({}, {"TORCHELASTIC_MAX_RESTARTS": "1"}):
        os.environ.update(environ)
        try:
            init_distributed("gloo")
        except RuntimeError as error:
            texts.append(str(error))
    return texts


@pytest.mark.slow
def test_a_process_that_comes_back_cannot_enter_a_group_that_elastic_ranks_began_in() -> None:
    """torchrun starts all ranks again, which meet in a new group."""
    ((text,),) = run_processes(1, come_back_after_a_process_group)
    assert "run with elastic, whose process group it cannot enter" in text


def start_under_every_launcher(rank: int) -> list[tuple[Any, list[str], float, int]]:
    """Also as after a restart, with a store that still has the addresses of dead processes."""
    seen = []
    for restarts, launcher in enumerate(NAMES):
        theirs = variables(launcher, rank, 2, rank, 2, TORCHELASTIC_RESTART_COUNT=str(restarts))
        unset = {*OWN, "GLOO_SOCKET_IFNAME"}
        others = {key: value for key, value in os.environ.items() if key not in unset}
        with mock.patch.dict(os.environ, others | theirs, clear=True):
            info = utils.initialize_dist("gloo")
            assert init_distributed() == info
            # Only this machine reaches gloo, which all ranks share.
            assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
            total = torch.tensor(float(rank + 1))
            dist.all_reduce(total)
            param = torch.zeros(1, requires_grad=True)
            optimizer = DecentOptimWrapper(torch.optim.SGD([param], lr=0.1))
            dist.destroy_process_group()
            local = optimizer.topology.local_world_size
            seen.append((tuple(info), [os.environ[name] for name in OWN], total.item(), local))
    # Without a launcher, a group that exists is described.
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert init_distributed() == (0, 1, 0, torch.device("cpu"), 1)
    return seen


@pytest.mark.slow
def test_two_processes_meet_under_every_launcher_and_again() -> None:
    for rank, seen in enumerate(run_processes(2, start_under_every_launcher)):
        place = (rank, 2, rank, torch.device("cpu"), 2)
        assert seen == [(place, [str(rank), "2", str(rank), "2"], 3.0, 2)] * 3
