"""Private memory of a rank: what each option costs beyond training alone.

    python examples/benchmark/memory.py    # 2 ranks on loopback, 50 M float32 parameters, 8 minutes

With --parameters 5e6 it takes a minute or two; what does not grow with them then weighs more.

Every method trains the same stack of linear layers with AdamW on a ring. Private memory is what
/proc/self/smaps_rollup counts for one process alone, without the libraries that the ranks share.
Its peak over some steps is exact and not sampled: it is the private memory before them, plus what
the kernel's high-water mark rises above the resident memory at that time. Freed memory is returned
at once, but not with --malloc. A copy is the bytes of the parameters; without communication there
are four: parameters, gradients and the two moments.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import netlab
import torch
import torch._dynamo  # the first optimizer step would import it, in every rank
import torch.distributed as dist
from torch import Tensor, nn

from decent_optim_wrapper import DecentOptimWrapper, GradientTracking
from decent_optim_wrapper.codecs import INT3, INT4
from decent_optim_wrapper.ddp import DecentralizedDataParallel

MIB = 2**20
# mallopt's name for the size from which memory is mapped, and unmapped when it is freed.
M_MMAP_THRESHOLD = -3
LAYERS = 44
WARM_UP, STEPS = 4, 3
ALONE = "no communication"


Step = Callable[[Tensor], None]


class Memory(NamedTuple):
    """Private memory of one rank, in bytes, without what it had before the model was built.

    Args:
        between: between two steps.
        peak: the most within a step.
    """

    between: int
    peak: int


def loop(network: Any, optimizer: Any | None) -> Step:
    """A training step; without an optimizer if the update is inside the backward pass."""

    def step(inputs: Tensor) -> None:
        network(inputs).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


def alone(model: nn.Module) -> Step:
    return loop(model, adamw(model.parameters()))


def ddp(model: nn.Module, **options: Any) -> Step:
    network = nn.parallel.DistributedDataParallel(model, **options)
    return loop(network, adamw(model.parameters()))


def gossip(model: nn.Module, **options: Any) -> Step:
    return loop(model, DecentOptimWrapper(adamw(model.parameters()), topology="ring", **options))


def with_model(model: nn.Module) -> Step:
    """With nothing passed but the model: all ranks in int3, before the forward pass."""
    return loop(model, DecentOptimWrapper(adamw(model.parameters()), model=model))


def in_backward(model: nn.Module, **options: Any) -> Step:
    return loop(DecentralizedDataParallel(model, adamw, topology="ring", **options), None)


OPTIONS: dict[str, dict[str, Any]] = {
    "": {"comm_dtype": torch.float32},
    ", bf16": {"comm_dtype": torch.bfloat16},
    ", int8": {"comm_dtype": torch.int8},
    ", int4": {"comm_dtype": INT4},
    ", int3": {"comm_dtype": INT3},
    ", tracking": {"extensions": [GradientTracking()], "comm_dtype": torch.float32},
    ", tracking, int8": {"extensions": [GradientTracking()], "comm_dtype": torch.int8},
}


def ours(name: str, make: Callable[..., Step]) -> dict[str, Callable[[nn.Module], Step]]:
    """The rows of a class, each with copies and with views."""
    return {
        f"{name}{option}{form}": partial(make, param_as_bucket_view=views, **chosen)
        for option, chosen in OPTIONS.items()
        for form, views in ((", copies", False), (", views", True))
    }


METHODS: dict[str, Callable[[nn.Module], Step]] = {
    ALONE: alone,
    "torch DDP": ddp,
    "torch DDP, gradient_as_bucket_view": partial(ddp, gradient_as_bucket_view=True),
    **ours("DecentOptimWrapper", gossip),
    "DecentOptimWrapper, model=model": with_model,
    **ours("DecentralizedDataParallel", in_backward),
    **ours("DecentralizedDataParallel, overlap=True", partial(in_backward, overlap=True)),
}


def private() -> int:
    """What this process has to itself, in bytes."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(map(int, re.findall(r"Private_\w+:\s+(\d+) kB", rollup))) * 1024


def resident(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError(f"expected {field} in /proc/self/status, which only Linux has")
    return int(found[1]) * 1024


def measure(method: str, parameters: int, returns: bool) -> Memory:
    """Run in every rank."""
    if returns:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    # The collector would write to what was imported before the fork, and so copy it.
    gc.freeze()
    dist.init_process_group("gloo")
    before = private()
    width = round((parameters / LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    step = METHODS[method](model)
    inputs = torch.full((8, width), 1.0 + dist.get_rank())
    for _ in range(WARM_UP):
        step(inputs)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    between, now = private() - before, resident("VmRSS")
    for _ in range(STEPS):
        step(inputs)
    return Memory(between=between, peak=between + resident("VmHWM") - now)


def run(method: str, parameters: int, returns: bool) -> Memory:
    """The larger figures of two ranks, which return freed memory at once or as glibc does."""
    with netlab.lab(2, rate="") as where:
        ranks = netlab.run(where, 2, measure, method, parameters, returns, timeout=300)
    return Memory(*(max(column) for column in zip(*ranks, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=float, default=50e6)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--malloc", action="store_true", help="leave freed memory to glibc")
    args = parser.parse_args()
    os.environ.setdefault("LOGURU_LEVEL", "ERROR")
    began, copy = time.monotonic(), 4 * args.parameters
    print(f"{args.parameters / 1e6:g} M float32 parameters in {LAYERS} layers, one rank of 2")
    print(f"| method | between steps, MiB | peak, MiB | copies beyond {ALONE} |")
    print("|---|---|---|---|")
    figures = partial(run, parameters=int(args.parameters), returns=not args.malloc)
    least = figures(ALONE)
    for method in args.methods:
        found = least if method == ALONE else figures(method)
        columns = " | ".join(f"{each / MIB:.0f}" for each in found)
        print(f"| {method} | {columns} | {(found.peak - least.peak) / copy:.2f} |", flush=True)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
