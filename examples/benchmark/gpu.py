"""What the library costs on GPUs; ranks are processes on this machine.

    python examples/benchmark/gpu.py                # every part
    python examples/benchmark/gpu.py --parts a e --size-mib 512
    python examples/benchmark/gpu.py --device cpu --size-mib 1 --steps 2    # the same code, no GPU

It prints a table for each part. The script ends with 1 if a trajectory differs, or if anything
raises an error; all other figures are only printed. Over gloo several ranks share a GPU. NCCL takes
one rank per GPU: with one GPU it exchanges nothing, with several it exchanges in pairs (ring) and
in one group (complete). The command for the CPU takes some 10 s of CPU time.

- a: the time until `step()` returns, with the GPU idle before, and whether it waits for the GPU
- b: the step time at a quarter of the size, since over gloo the bytes travel through the memory of
  the machine
- c: trajectories, compared with as many ranks on the CPU
- d: one rank: construction, steps, averages, checkpoints
- e: the peak of the memory by option, in copies of the parameters
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple

import netlab
import torch
import torch._dynamo  # the first optimizer step would import it, in every rank
import torch.distributed as dist
from methods import Recipe, Training, ddp, module, no_communication, wrapper
from torch import Tensor, nn

from decent_optim_wrapper import GradientTracking, Late, OuterOptimizer, Schedule, StateGossip
from decent_optim_wrapper.checkpoint import Checkpoints
from decent_optim_wrapper.codecs import INT3, INT4

MIB = 1024 * 1024
LAYERS = 24
WARMUP = 2
TIMEOUT_SECONDS = 300
NOT_MEASURED = "not measured"
PASSED, FAILED = "passed", "failed"
# With the second, the ranks' small messages travel over gloo.
NCCL = ("nccl", "cpu:gloo,cuda:nccl")
# Of float32 after a few steps, as a part of the largest move.
TOLERANCE, CODED_TOLERANCE = 1e-5, 1e-2


class Setup(NamedTuple):
    """Ranks on this machine.

    Args:
        device: "cuda" or "cpu".
        backend: of torch.distributed.
        ranks: how many.
    """

    device: str
    backend: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.backend}, {self.ranks} rank{'s' * (self.ranks > 1)}"


def alone(device: str) -> list[Setup]:
    """Setups of one rank, which exchanges nothing."""
    return [Setup(device, backend, 1) for backend in (NCCL if device == "cuda" else ("gloo",))]


def exchanging(device: str) -> list[Setup]:
    """Setups of ranks that share a device, and of a rank for each of several GPUs."""
    if device == "cpu":
        return [Setup(device, "gloo", 2)]
    setups = [Setup(device, "gloo", ranks) for ranks in (2, 4)]
    # A ring needs an even number.
    if even := torch.cuda.device_count() // 2 * 2:
        setups.append(Setup(device, NCCL[1], even))
    return setups


def in_pairs(device: str) -> list[Setup]:
    """The same setups with two ranks."""
    return list(dict.fromkeys(each._replace(ranks=2) for each in exchanging(device)))


class Size(NamedTuple):
    """How much is measured.

    Args:
        mib: MiB of float32 parameters.
        steps: steps that are timed; a trajectory has two more.
    """

    mib: float
    steps: int

    @property
    def bucket_cap_mb(self) -> float:
        """At least four buckets."""
        return min(25.0, self.mib / 4)


def run(setup: Setup, main: Callable[..., Any], *args: Any) -> list[Any]:
    """What `main(setup, *args)` returns, by rank."""
    # CUDA does not work in a process that is forked once it has been used.
    method: Literal["fork", "spawn"] = "spawn" if setup.device == "cuda" else "fork"
    with netlab.lab(setup.ranks, rate="") as where:
        call = (where, setup.ranks, main, setup, *args)
        return netlab.run(*call, timeout=TIMEOUT_SECONDS, method=method)


def begin(setup: Setup) -> torch.device:
    """Join the process group of the setup; the device of this rank."""
    if setup.device == "cuda":
        # Over gloo all ranks share the first GPU.
        torch.cuda.set_device(0 if setup.backend == "gloo" else int(os.environ["RANK"]))
    dist.init_process_group(setup.backend, timeout=timedelta(seconds=60))
    if setup.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def finish(device: torch.device) -> None:
    """Wait until all ranks are here and the GPU is idle."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class MeanSquare(nn.Module):
    """The loss."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def build_model(mib: float, device: torch.device) -> nn.Module:
    width = max(4, int((mib * MIB / 4 / LAYERS) ** 0.5))
    torch.manual_seed(0)
    with device:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)), MeanSquare())
        for param in model.parameters():
            # Gradients as large in the first layer as in the last.
            nn.init.normal_(param, std=width**-0.5)
    return model


def batch_for(model: nn.Module, device: torch.device) -> Tensor:
    """A batch that differs from rank to rank."""
    width = next(model.parameters()).shape[1]
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(64, width, generator=generator).to(device)


def train(training: Training, batch: Tensor, steps: int) -> None:
    for _ in range(steps):
        training.step(batch)


ADAMW = Recipe(partial(torch.optim.AdamW, lr=1e-4, fused=True))


def gossip(model: nn.Module, size: Size, **options: Any) -> Training:
    options = {"topology": "ring", "bucket_cap_mb": size.bucket_cap_mb, **options}
    return wrapper(model, ADAMW, known=False, **options)


# Part a


class HostTime(NamedTuple):
    """Median seconds until step() returns, seconds in which it waits for the wire, and syncs."""

    step: float
    wait: float
    waits_for_gpu: str = NOT_MEASURED


HOST_METHODS: dict[str, dict[str, Any] | None] = {
    "fused AdamW": None,
    "ring": {},
    "ring, views": {"param_as_bucket_view": True},
    "complete": {"topology": "complete"},
}


def host_times(setup: Setup, size: Size) -> dict[str, HostTime]:
    """Run in every rank."""
    device = begin(setup)

    def build(options: dict[str, Any] | None) -> Any:
        model = build_model(size.mib, device)
        for param in model.parameters():
            # A gradient that differs from rank to rank.
            param.grad = torch.full_like(param, 1e-3 * (1 - 2 * (dist.get_rank() % 2)))
        if options is None:
            return ADAMW.optimizer(model.parameters())
        return gossip(model, size, **options).ours

    times = {}
    for name, options in HOST_METHODS.items():
        optimizer = build(options)
        steps, waits = [], []
        for _ in range(WARMUP + size.steps):
            finish(device)
            start = time.perf_counter()
            optimizer.step()
            steps.append(time.perf_counter() - start)
            waits.append(0.0 if options is None else optimizer.stats().wait_seconds)
        if options is not None:
            optimizer.synchronize()
        step, wait = (statistics.median(values[WARMUP:]) for values in (steps, waits))
        times[name] = HostTime(step=step, wait=wait)
    # Last, since a step that raises leaves its wrapper closed.
    if device.type == "cuda":
        for name, options in HOST_METHODS.items():
            times[name] = times[name]._replace(waits_for_gpu=gpu_waits(build, options, device))
    return times


def gpu_waits(
    build: Callable[[Any], Any], options: dict[str, Any] | None, device: torch.device
) -> str:
    """What torch says of a step that may not wait for the GPU."""
    try:
        optimizer = build(options)
        for _ in range(WARMUP):
            optimizer.step()
        finish(device)
    except RuntimeError as error:
        # The wrapper before may have closed connections when its step was stopped.
        return f"{NOT_MEASURED}: " + str(error).partition("\n")[0].replace("|", "/")
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    except RuntimeError as error:
        return "yes: " + str(error).partition("\n")[0].replace("|", "/")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no"


def host_rows(setup: Setup, size: Size) -> list[list[str]]:
    ranks = run(setup, host_times, size)
    bare = max(rank["fused AdamW"].step for rank in ranks)
    rows = []
    for name in HOST_METHODS:
        slowest = max((rank[name] for rank in ranks), key=lambda timing: timing.step)
        cells = [f"{1000 * slowest.step:.2f}", f"{1000 * slowest.wait:.2f}"]
        cells.append(f"{(slowest.step - slowest.wait) / bare:.2f}")
        rows.append([name, *cells, slowest.waits_for_gpu])
    return rows


# Part b


def in_backward(model: nn.Module, size: Size) -> Training:
    return module(model, ADAMW, topology="ring", bucket_size_in_mb=size.bucket_cap_mb)


TRAINERS: dict[str, Callable[[nn.Module, Size], Training]] = {
    "no communication": lambda model, size: no_communication(model, ADAMW),
    "DDP": lambda model, size: ddp(model, ADAMW),
    "ring": gossip,
    "ring, views": partial(gossip, param_as_bucket_view=True),
    "complete": partial(gossip, topology="complete"),
    "ring, in the backward pass": in_backward,
}


def step_times(setup: Setup, size: Size) -> dict[str, float]:
    """Run in every rank: mean seconds per step."""
    device = begin(setup)
    times = {}
    for name, make in TRAINERS.items():
        model = build_model(size.mib, device)
        training, batch = make(model, size), batch_for(model, device)
        train(training, batch, WARMUP)
        finish(device)
        # The wire is empty now: make it as busy as in training.
        train(training, batch, WARMUP)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        train(training, batch, size.steps)
        finish(device)
        times[name] = (time.perf_counter() - start) / size.steps
        training.finish()
        del model, training
        gc.collect()
    return times


def step_rows(setup: Setup, size: Size) -> list[list[str]]:
    ranks = run(setup, step_times, size._replace(mib=size.mib / 4))
    slowest = {name: max(rank[name] for rank in ranks) for name in TRAINERS}
    return [
        [name, f"{1000 * seconds:.1f}", f"{seconds / slowest['DDP']:.2f}"]
        for name, seconds in slowest.items()
    ]


# Part c

TRAJECTORY_MIB, CAP_MB = 0.25, 0.06
MOMENTUM = Recipe(partial(torch.optim.SGD, lr=0.03, momentum=0.9))
SLOW_MOMENTUM = partial(torch.optim.SGD, lr=0.7, momentum=0.5, nesterov=True)
# With model=, so that the first mixes in the forward pass. TopKCodec is left out: which of two
# almost equal values it keeps depends on their last bits, and all that follows on which it keeps.
TRAJECTORIES: dict[str, dict[str, Any]] = {
    "nothing passed": {},
    "delayed": {"overlap": True},
    "without overlap": {"overlap": False},
    "views": {"param_as_bucket_view": True},
    "delayed, views": {"overlap": True, "param_as_bucket_view": True},
    "complete": {"topology": "complete"},
    "complete, delayed": {"topology": "complete", "overlap": True},
    "late": {"overlap": Late(2), "schedule": Schedule(gossip_every=2)},
    "exact averages": {"schedule": Schedule(global_avg_every=4)},
    "skip": {"on_nonfinite": "skip"},
    "tracking": {"extensions": [GradientTracking()]},
    "state": {"extensions": [StateGossip("momentum_buffer")]},
    "outer optimizer": {"extensions": [OuterOptimizer(SLOW_MOMENTUM)]},
    "bf16": {"comm_dtype": torch.bfloat16},
    "int8": {"comm_dtype": torch.int8},
    "int8, delayed, views": {
        "comm_dtype": torch.int8,
        "overlap": True,
        "param_as_bucket_view": True,
    },
    "int8, complete": {"comm_dtype": torch.int8, "topology": "complete"},
    "int4, complete": {"comm_dtype": INT4, "topology": "complete"},
    "int3, complete": {"comm_dtype": INT3, "topology": "complete"},
}


def tolerance(name: str) -> float:
    """The largest error of a trajectory, as a part of the largest move."""
    # A value between two codes may be rounded to either.
    return CODED_TOLERANCE if "comm_dtype" in TRAJECTORIES[name] else TOLERANCE


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().cpu().double().reshape(-1) for tensor in tensors])


def trajectories(setup: Setup, steps: int) -> dict[str, list[float]]:
    """Run in every rank: how far its parameters have moved, with nothing left in flight."""
    device = begin(setup)
    moves = {}
    for name, options in TRAJECTORIES.items():
        # The random numbers of a GPU are others.
        model = build_model(TRAJECTORY_MIB, torch.device("cpu")).to(device)
        start = flatten(model.parameters())
        options = {"comm_dtype": torch.float32, "bucket_cap_mb": CAP_MB, **options}
        training = wrapper(model, MOMENTUM, **options)
        train(training, batch_for(model, device), steps)
        training.finish()
        moves[name] = (flatten(model.parameters()) - start).tolist()
    return moves


def trajectory_rows(setup: Setup, size: Size) -> list[list[str]]:
    """The largest error of a value, as a part of the largest move."""
    steps = WARMUP + size.steps
    ranks = run(setup, trajectories, steps)
    on_cpu = run(Setup("cpu", "gloo", setup.ranks), trajectories, steps)
    rows = []
    for name in TRAJECTORIES:
        here, there = (torch.tensor([rank[name] for rank in each]) for each in (ranks, on_cpu))
        error = ((here - there).abs().max() / there.abs().max()).item()
        outcome = PASSED if error <= tolerance(name) else FAILED
        rows.append([name, f"{error:.1e}", f"{tolerance(name):g}", outcome])
    return rows


# Part d


def one_rank(setup: Setup, folder: str) -> None:
    """Run in the only rank: raises unless all of it works."""
    device = begin(setup)
    size = Size(mib=1, steps=2)
    parts = []
    for _ in range(2):
        model = build_model(size.mib, device)
        training = gossip(model, size, buffers=model.buffers())
        optimizer: Any = training.ours
        parts.append((model, training, optimizer, Checkpoints(folder, optimizer)))
    (model, training, optimizer, checkpoints), resumed = parts
    batch = batch_for(model, device)
    start = flatten(model.parameters())
    train(training, batch, size.steps)
    own = flatten(model.parameters())
    with optimizer.averaged():
        average = flatten(model.parameters())
    if torch.equal(own, start) or not torch.equal(own, average):
        raise ValueError("expected steps to move the parameters, and an average of one not to")
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoints.save(optimizer.round, states)
    model_again, training_again, optimizer_again, reader = resumed
    saved = reader.load()
    if saved is None:
        raise ValueError("expected to load what was saved, found nothing")
    model_again.load_state_dict(saved.state["model"])
    optimizer_again.load_state_dict(saved.state["optimizer"])
    for each in (training, training_again):
        train(each, batch, size.steps)
    if not torch.equal(flatten(model.parameters()), flatten(model_again.parameters())):
        raise ValueError("expected the resumed run to continue bit for bit")


def one_rank_rows(setup: Setup, size: Size) -> list[list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        run(setup, one_rank, folder)
    return [[PASSED]]


# Part e

MODES: dict[str, Callable[[nn.Module, Size], Training]] = {
    "fused AdamW": TRAINERS["no communication"],
    "copies": gossip,
    "views": TRAINERS["ring, views"],
    "complete, copies": TRAINERS["complete"],
    "bf16": partial(gossip, comm_dtype=torch.bfloat16),
    "int8": partial(gossip, comm_dtype=torch.int8),
    "int8, views": partial(gossip, comm_dtype=torch.int8, param_as_bucket_view=True),
    "DecentralizedDataParallel": in_backward,
    "gradient tracking": partial(gossip, extensions=[GradientTracking()]),
    "staleness": partial(gossip, schedule=Schedule(gossip_every=2), overlap=Late(2)),
}


class Memory(NamedTuple):
    """Bytes on the GPU, and pinned in the memory of the machine; NaN where they are not counted."""

    gpu: float
    pinned: float


def peaks(setup: Setup, size: Size) -> dict[str, Memory]:
    """Run in every rank: the peaks in copies of the parameters."""
    device = begin(setup)
    found = {}
    for name, make in MODES.items():
        finish(device)
        gc.collect()
        before = allocated(device, "current")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.reset_peak_host_memory_stats()
        model = build_model(size.mib, device)
        training = make(model, size)
        nbytes = sum(param.nbytes for param in model.parameters())
        train(training, batch_for(model, device), WARMUP + 1)
        finish(device)
        after = allocated(device, "peak")
        copies = ((end - start) / nbytes for start, end in zip(before, after, strict=True))
        found[name] = Memory(*copies)
        training.finish()
        del model, training
    return found


def allocated(device: torch.device, which: str) -> Memory:
    """What this process has."""
    if device.type == "cpu":
        return Memory(math.nan, math.nan)
    gpu = torch.cuda.memory_stats(device)[f"allocated_bytes.all.{which}"]
    return Memory(gpu, torch.cuda.host_memory_stats().get(f"active_bytes.{which}", math.nan))


def memory_rows(setup: Setup, size: Size) -> list[list[str]]:
    ranks = run(setup, peaks, size)
    bare = max(rank["fused AdamW"].gpu for rank in ranks)
    rows = []
    for name in MODES:
        # The larger rank of each.
        gpu, pinned = map(max, zip(*(rank[name] for rank in ranks), strict=True))
        rows.append([name, *(f"{copies:.2f}" for copies in (gpu, gpu - bare, pinned))])
    return rows


class Part(NamedTuple):
    """A table.

    Args:
        setups: where it is measured, by device.
        rows: runs a setup, and returns its rows without the first cell.
        head: what is above these cells.
    """

    setups: Callable[[str], list[Setup]]
    rows: Callable[[Setup, Size], list[list[str]]]
    head: tuple[str, ...]


HOST_HEAD = ("optimizer", "ms until step() returns", "of them waiting for the wire")
PARTS = {
    "a": Part(
        lambda device: alone(device) + exchanging(device),
        host_rows,
        (*HOST_HEAD, "the rest, times AdamW", "waits for the GPU"),
    ),
    "b": Part(exchanging, step_rows, ("method", "ms per step", "times DDP")),
    "c": Part(exchanging, trajectory_rows, ("trajectory", "error", "at most", "outcome")),
    "d": Part(alone, one_rank_rows, ("constructs, steps, averages, saves, loads and resumes",)),
    # Each further pair of a rank would need a reference of its own.
    "e": Part(in_pairs, memory_rows, ("option", "on the GPU", "more than AdamW", "pinned")),
}


def print_part(part: Part, device: str, size: Size) -> bool:
    """Print the table of a part, and return whether any of it has failed."""
    failed = False
    print_row(["ranks", *part.head])
    print_row(["---"] * (1 + len(part.head)))
    for setup in part.setups(device):
        try:
            rows = part.rows(setup, size)
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            rows = [[FAILED]]
        for row in rows:
            print_row([str(setup), *row])
            failed |= FAILED in row
    return failed


def print_row(cells: list[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--size-mib", type=float, default=1024, help="of float32 parameters")
    parser.add_argument("--steps", type=int, default=10, help="that are timed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def machine(device: str) -> str:
    """What the figures were measured on."""
    if device == "cpu":
        return f"torch {torch.__version__}, CPU"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}, {', '.join(names)}"


def main() -> int:
    args = parse_arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no GPU: nothing was measured (--device cpu runs the same code)")
        return 0
    print(f"{machine(args.device)}; {args.size_mib:g} MiB of float32 parameters")
    failed = False
    for part in args.parts:
        print(f"\nPart {part}\n")
        failed |= print_part(PARTS[part], args.device, Size(args.size_mib, args.steps))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
