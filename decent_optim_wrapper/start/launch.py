"""Make the default process group from the variables that torchrun, Slurm or Open MPI set."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from decent_optim_wrapper.comm import interfaces
from decent_optim_wrapper.comm.store import part_of_run
from decent_optim_wrapper.start.membership import FIRST_MEETING
from decent_optim_wrapper.warn import warn

# In the order of the fields of `Launch` after its launcher.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]


class DistInfo(NamedTuple):
    """The ranks and the device of this process.

    Args:
        rank: rank in the process group.
        world_size: number of ranks.
        local_rank: rank among the ranks of the same node.
        device: the device for the model.
        local_world_size: number of ranks on the same node.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    local_world_size: int


class Launch(NamedTuple):
    """The variables of a launcher, and the address at which rank 0 listens, if known."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str = ""
    master_port: str = ""

    @property
    def is_one_node(self) -> bool:
        """True if all ranks are on one machine."""
        return self.world_size == self.local_world_size

    def variables(self) -> dict[str, str]:
        """The environment variables that torchrun would have set.

        Raises:
            RuntimeError: the address is not known.
        """
        names = (*_TORCHRUN, "MASTER_ADDR", "MASTER_PORT")
        found = dict(zip(names, map(str, self[1:]), strict=True))
        for name, value in found.items():
            if not value:
                raise RuntimeError(
                    f"the variable {name} is missing; export MASTER_ADDR, the host of rank 0, and "
                    f"MASTER_PORT, a free port there, on all ranks (`mpirun -x` passes them on)"
                )
        return found


def init_distributed(
    backend: str | None = None, timeout: timedelta | None = None, interface: str | None = None
) -> DistInfo:
    """Make the default process group under torchrun, Slurm's srun or Open MPI's mpirun; collective.

    Variables of torchrun take precedence over Open MPI's, and these over Slurm's.
    MASTER_ADDR and MASTER_PORT are taken from the environment. If they are missing, the defaults
    under Slurm are the first node of the job step and a port made from the numbers of job and step;
    under Open MPI on one node the address is 127.0.0.1. Under all three launchers the variables
    that torchrun sets are then set, and GLOO_SOCKET_IFNAME=lo if all ranks are on one node and it
    is not set: nobody else reaches gloo there. LOCAL_WORLD_SIZE is the wrapper's default for
    `local_world_size`.

    If torchrun restarts the ranks of one node, they use other keys of its store than before. On
    several nodes launch with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 instead.

    An existing process group is only described; if it has several ranks, a launcher's variables say
    which of them share a node. If it is a group of NCCL, the current CUDA device is set.

    Args:
        backend: None takes nccl if this process sees a CUDA device for every rank of its node, else
            gloo. If every rank sees only its own device, pass ``"nccl"``.
        timeout: timeout of collectives; None takes torch's default.
        interface: network interface of gloo, NCCL and the store that rank 0 serves, such as "wg0";
            they listen on its address only. None takes the variable DECENT_INTERFACE. Without one,
            the first rank of each of several nodes warns if it listens on a public address; see
            "Machines at several sites".

    Returns:
        Rank, world size, local rank, device and local world size. With nccl the device is the CUDA
        device of the local rank, which becomes the current device; else the CPU.

    Raises:
        RuntimeError: a variable is missing; the text names it. Or this process comes back to ranks
            that train with ``elastic``, whose process group it could not enter.
        ValueError: a variable has a wrong value, there is no CUDA device for this rank, or no such
            interface.
    """
    if dist.is_initialized():
        size = dist.get_world_size()
        launch = Launch("", 0, 1, 0, 1) if size == 1 else find_launch(os.environ)
        launch = launch._replace(rank=dist.get_rank(), world_size=size)
        device = _device(dist.get_backend(), launch)
    else:
        launch = find_launch(os.environ)
        backend = backend or _default_backend(launch)
        device = _device(backend, launch)
        os.environ.update(launch.variables())
        interface = use_interface(launch, interface, serves=launch.rank == 0)
        # Without it, torch takes the GPU of the local rank, also where there is another number.
        gpu = device if device.type == "cuda" else None
        more = _find_store(launch, interface, timeout or default_pg_timeout)
        dist.init_process_group(backend, timeout=timeout, device_id=gpu, **more)
    rank, world_size, local_rank, local_world_size = launch[1:5]
    return DistInfo(rank, world_size, local_rank, device, local_world_size)


initialize_dist = init_distributed


def find_launch(environ: Mapping[str, str]) -> Launch:
    """Read the variables of the launcher that has started this process.

    Raises:
        RuntimeError: a variable is missing.
        ValueError: a variable has a wrong value.
    """
    # mpirun in a Slurm job inherits the SLURM_PROCID of the job, the same in all its processes.
    for launcher, names in (("torchrun", _TORCHRUN), ("mpirun", _OPEN_MPI)):
        if environ.get(names[0]):
            rank, world_size, local_rank, local_size = (_number(environ, name) for name in names)
            launch = Launch(launcher, rank, world_size, local_rank, local_size)
            break
    else:
        launch = _find_slurm_step(environ)
    if not launch.rank < launch.world_size >= launch.local_world_size > launch.local_rank:
        raise ValueError(
            f"the variables of {launch.launcher} contradict each other: {launch}; unset those that "
            f"are left from another launcher and start the script again"
        )
    addr, port = launch.master_addr, launch.master_port
    if launch.launcher == "mpirun" and launch.is_one_node:
        addr = "127.0.0.1"
    return launch._replace(
        master_addr=environ.get("MASTER_ADDR") or addr,
        master_port=environ.get("MASTER_PORT") or port,
    )


def use_interface(launch: Launch, interface: str | None, serves: bool) -> str | None:
    """Make gloo and NCCL of this process use a network interface.

    Without one, the first rank of each of several nodes warns of public addresses.

    Args:
        launch: the ranks.
        interface: its name; None takes the variable.
        serves: whether a store on this node listens on all addresses.

    Returns:
        Its name, if there is one.

    Raises:
        ValueError: there is no such interface, or it has no address.
    """
    name = interface or os.environ.get(interfaces.VARIABLE)
    os.environ.update(interfaces.socket_variables(name, launch.world_size, launch.is_one_node))
    is_first = not launch.is_one_node and not launch.local_rank
    if is_first and not name and (public := interfaces.public_addresses(serves)):
        warn(
            f"rank {launch.rank}: gloo or the store listens on {', '.join(public)}, which the "
            f"internet may reach, and neither asks who connects or encrypts anything; name the "
            f"interface of a tunnel in `run --interface`, init_distributed(interface=) or "
            f"{interfaces.VARIABLE}, or let a firewall close the ports of this machine"
        )
    return name


def _find_slurm_step(environ: Mapping[str, str]) -> Launch:
    if not environ.get("SLURM_PROCID"):
        raise RuntimeError(
            "this process was started without a launcher: expected the variable RANK (torchrun), "
            "OMPI_COMM_WORLD_RANK (mpirun) or SLURM_PROCID (srun); start the script with "
            "`torchrun --nproc-per-node <ranks> script.py`"
        )
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    # Only srun sets the first one. A batch script would wait for tasks that do not start.
    if tasks > 1 and not environ.get("SLURM_STEP_NUM_TASKS"):
        raise RuntimeError(
            f"this process is not one of the {tasks} tasks of its Slurm job, because it was "
            f"started without srun (SLURM_STEP_NUM_TASKS is missing); start the script with srun"
        )
    return Launch(
        launcher="srun",
        rank=_number(environ, "SLURM_PROCID"),
        world_size=tasks,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_world_size=_slurm_tasks_here(environ),
        master_addr=_first_slurm_node(environ),
        master_port=_slurm_port(environ),
    )


def _slurm_tasks_here(environ: Mapping[str, str]) -> int:
    """The tasks of this node, from a list such as 4(x2),3: two nodes of 4 tasks and one of 3."""
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    text, entry = _text(environ, *names), r"(\d+)(?:\(x(\d+)\))?"
    nodes = re.findall(entry, text) if re.fullmatch(rf"{entry}(?:,{entry})*", text) else []
    counts = [int(tasks) for tasks, times in nodes for _ in range(int(times or 1))]
    node = _number(environ, "SLURM_NODEID") if len(set(counts)) > 1 else 0
    if node >= len(counts):
        raise ValueError(
            f"{names[0]} should have the tasks of each node, as in 4(x2),3, got {text!r} on node "
            f"{node}; start the script with srun, which sets it"
        )
    return counts[node]


def _first_slurm_node(environ: Mapping[str, str]) -> str:
    """The node where Slurm puts rank 0 by default; empty if its variables do not say."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    # The first entry of a list such as gpu[07,10-12],login1: gpu07.
    first = next(re.finditer(r"(?:[^,\[]|\[[^\]]*\])*", nodes))
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first[0])


def _slurm_port(environ: Mapping[str, str]) -> str:
    """A port from 10000 to 29999 that differs between the steps on a node; empty outside a job."""
    if not environ.get("SLURM_JOB_ID"):
        return ""
    step = _number(environ, "SLURM_STEP_ID") if environ.get("SLURM_STEP_ID") else 0
    return str(10000 + (31 * _number(environ, "SLURM_JOB_ID") + step) % 20000)


def _number(environ: Mapping[str, str], *names: str) -> int:
    text = _text(environ, *names)
    if not text.isdecimal():
        raise ValueError(
            f"the variable {names[0]} must be a number, got {text!r}; start the script with "
            f"torchrun, srun or mpirun, which set it, or correct it"
        )
    return int(text)


def _text(environ: Mapping[str, str], *names: str) -> str:
    """The first of these variables that is set."""
    for name in names:
        if text := environ.get(name):
            return text
    raise RuntimeError(
        f"the variable {' or '.join(names)} is missing; start the script with torchrun, srun or "
        f"mpirun, which set it, or export it"
    )


def _find_store(launch: Launch, interface: str | None, timeout: timedelta) -> dict[str, Any]:
    """Arguments for `init_process_group` if torch itself would not find the right store.

    The store of rank 0 would listen on all addresses.

    torchrun keeps one store over its restarts, which still contains the addresses of processes that
    have ended (pytorch#135712). So keys get a prefix for each restart. The agents of several nodes
    count their restarts differently.

    Raises:
        RuntimeError: the other ranks have gone on without it.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    place = launch.master_addr, int(launch.master_port)
    is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if interface and not is_launchers:
        serves = launch.rank == 0
        store = interfaces.serve(*place, interface) if serves else TCPStore(*place, timeout=timeout)
        store.set_timeout(timeout)
        return {"store": store, "rank": launch.rank, "world_size": launch.world_size}
    if restarts == "0":
        return {}
    if is_launchers:
        stores: list[Any] = [TCPStore(*place, is_master=False)]
        if "TORCHELASTIC_MAX_RESTARTS" not in os.environ:
            # Our launcher starts a rank alone again. The others may have met in the process group
            # that all entered at first, whose keys have this prefix.
            stores.append(PrefixStore("default_pg/0/", stores[0]))
        if any(part_of_run(each, FIRST_MEETING, timeout).check(["epoch"]) for each in stores):
            raise RuntimeError(
                f"rank {launch.rank}: this process is started again in a run with elastic, whose "
                f"process group it cannot enter; leave init_distributed() out of the script, and "
                f"let Elastic() find the launcher's store"
            )
    if not launch.is_one_node:
        return {}
    store, rank, world_size = next(rendezvous("env://"))
    return {"store": PrefixStore(restarts, store), "rank": rank, "world_size": world_size}


def _default_backend(launch: Launch) -> str:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices >= launch.local_world_size and dist.is_nccl_available():
        return "nccl"
    if devices:
        warn(
            f"rank {launch.rank} sees {devices} CUDA device(s) for the {launch.local_world_size} "
            f"ranks of its node and uses gloo and the CPU; if every rank sees only its own device, "
            f'call init_distributed(backend="nccl")'
        )
    return "gloo"


def _device(backend: str, launch: Launch) -> torch.device:
    """The device for this backend; a CUDA device becomes the current one."""
    if "nccl" not in backend:
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    index = 0 if devices == 1 else launch.local_rank
    if index >= devices:
        raise ValueError(
            f"nccl expects a CUDA device for every rank of a node, but local rank "
            f"{launch.local_rank} sees {devices}; start fewer ranks or pass backend='gloo'"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
