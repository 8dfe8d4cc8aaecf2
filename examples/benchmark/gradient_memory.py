"""Memory of gradients in one step: all of them, or those of one bucket.

    python examples/benchmark/gradient_memory.py    # 2 ranks on loopback, 100 M float32 parameters

Every method trains the same stack of linear layers by SGD with momentum on a ring. Bytes of
gradients are summed whenever a gradient is complete, inside the backward pass. The copies that DDP
makes in its buckets are not counted, but they are part of the resident memory. The peak is Linux's
high-water mark of a rank over one step, including torch itself. Freed memory is returned at once.
A method takes about 35 s of CPU time, of both ranks together.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import netlab
import torch
import torch._dynamo  # the first optimizer step would import it, in every rank
import torch.distributed as dist
from torch import Tensor, nn

from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.ddp import DecentralizedDataParallel

MIB = 2**20
LAYERS = 44
BUCKET_CAP_MB = 25
WARM_UP, STEPS = 4, 3
# mallopt's name for the size from which memory is mapped, and unmapped when it is freed.
M_MMAP_THRESHOLD = -3

Step = Callable[[Tensor], None]


class Memory(NamedTuple):
    """Memory of one rank, in bytes.

    Args:
        gradients: most gradients at a time in a step.
        between: resident memory between two steps.
        peak: peak of the resident memory in a step.
    """

    gradients: int
    between: int
    peak: int


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)


def loop(network: Any, optimizer: Any | None) -> Step:
    """A training step; without an optimizer if the update is inside the backward pass."""

    def step(inputs: Tensor) -> None:
        network(inputs).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


def ddp(model: nn.Module, **options: Any) -> Step:
    network = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB, **options)
    return loop(network, sgd(model.parameters()))


def decent_dp(model: nn.Module) -> Step:
    from decent_dp.ddp import DecentralizedDataParallel as Theirs

    return loop(Theirs(model, sgd_of_named, topology="ring", bucket_size_in_mb=BUCKET_CAP_MB), None)


def sgd_of_named(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return sgd([tensor for _, tensor in named])


def gossip(model: nn.Module, **options: Any) -> Step:
    options = {"topology": "ring", "bucket_cap_mb": BUCKET_CAP_MB, **options}
    return loop(model, DecentOptimWrapper(sgd(model.parameters()), **options))


def in_backward(model: nn.Module, **options: Any) -> Step:
    options = {"topology": "ring", "bucket_size_in_mb": BUCKET_CAP_MB, **options}
    # As decent-dp mixes; before the forward pass takes a copy of the parameters more.
    network = DecentralizedDataParallel(model, sgd_of_named, overlap=True, **options)
    return loop(network, None)


METHODS: dict[str, Callable[[nn.Module], Step]] = {
    "torch DDP": ddp,
    "torch DDP, gradient_as_bucket_view": partial(ddp, gradient_as_bucket_view=True),
    "decent-dp": decent_dp,
    "DecentOptimWrapper": gossip,
    "DecentOptimWrapper, views": partial(gossip, param_as_bucket_view=True),
    "DecentralizedDataParallel": in_backward,
    "DecentralizedDataParallel, copies": partial(in_backward, param_as_bucket_view=False),
    "DecentralizedDataParallel, at the end": partial(in_backward, update_in_backward=False),
}


def resident(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError(f"expected {field} in /proc/self/status, which only Linux has")
    return int(found[1]) * 1024


def measure(method: str, parameters: int) -> Memory:
    """Run in every rank."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    dist.init_process_group("gloo")
    width = round((parameters / LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    params = list(model.parameters())
    most = 0

    def look(_: Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.grad.nbytes for p in params if p.grad is not None))

    for param in params:  # before other hooks, which may free the gradient
        param.register_post_accumulate_grad_hook(look)
    step = METHODS[method](model)
    inputs = torch.ones(8, width)
    for _ in range(WARM_UP):
        step(inputs)
    most, between = 0, resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    for _ in range(STEPS):
        step(inputs)
    return Memory(most, between, resident("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    args = parser.parse_args()
    if importlib.util.find_spec("decent_dp") is None and "decent-dp" in args.methods:
        print("decent-dp is not installed (pip install decent-dp): left out")
        args.methods.remove("decent-dp")
    os.environ.setdefault("LOGURU_LEVEL", "ERROR")
    print(
        f"{args.parameters / 1e6:g} M float32 parameters in {LAYERS} layers, MiB on one rank of 2"
    )
    print("| method | gradients, most at a time | resident between steps | resident, peak |")
    print("|---|---|---|---|")
    for method in args.methods:
        with netlab.lab(2, rate="") as where:
            ranks = netlab.run(where, 2, measure, method, int(args.parameters), timeout=300)
        most = Memory(*(max(column) for column in zip(*ranks, strict=True)))
        columns = " | ".join(f"{each / MIB:.0f}" for each in most)
        print(f"| {method} | {columns} |", flush=True)


if __name__ == "__main__":
    main()
