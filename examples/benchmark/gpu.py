"""What the library costs on GPUs; ranks are processes on this machine.

    python examples/benchmark/gpu.py                # every part that this machine can run
    python examples/benchmark/gpu.py --parts b e --size-mib 512 --tables
    python examples/benchmark/gpu.py --device cpu --size-mib 1 --steps 2    # the same code, no GPU

It prints one page of verdicts, to be kept or sent: what has passed or failed, with the figure, and
what this machine could not measure. --tables adds the tables behind it. The page is done within
--minutes, 5 on one GPU and 10 on several: in the last minute nothing begins, and at its end what
still runs is stopped, and has failed.

Over gloo several ranks share a GPU. NCCL takes one rank per GPU: with one GPU it exchanges nothing,
with several in pairs (ring) and in one group (complete). The script ends with 1 if anything has
failed; to miss a goal of speed or memory is no failure. The command for the CPU takes 19 s of CPU
time; the others were not measured.

- a: the time until `step()` returns, with the GPU idle before, and whether it waits for the GPU
- b: the GPU's time to pack, check and mix a round
- c: trajectories against those of ranks on the CPU, and the step time against DDP
- d: one rank over NCCL: construction, steps, averages, checkpoints
- e: the peak of the memory by option
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple

import netlab
import torch
import torch._dynamo  # the first optimizer step would import it, in every rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from decent_optim_wrapper import (
    DecentOptimWrapper,
    DecentralizedDataParallel,
    GradientTracking,
    Late,
    OuterOptimizer,
    Schedule,
    StateGossip,
)
from decent_optim_wrapper.checkpoint import Checkpoints
from decent_optim_wrapper.codecs import TopKCodec, is_finite_on_device

MIB = 1024 * 1024
LAYERS = 24
WARMUP = 2
TIMEOUT_SECONDS = 300
# What begins has at least as long: a rank imports torch first.
SHORTEST_SECONDS = 60
NOT_MEASURED = "not measured"
PASSED, FAILED, MISSED, MEASURED = "passed", "failed", "goal missed", "measured"
# What the verdicts are on.
HOST_TIME = "time until step() returns, less the wait for the wire, in steps of fused AdamW"
NO_WAIT = "a step does not wait for the GPU"
PACKING = "bytes per second, in those of copy_"
TRAJECTORY = "distance to the same ranks on the CPU"
ONE_RANK = "constructs, steps, averages, saves, loads and resumes"
MEMORY = "copies of the parameters more than AdamW, at the peak"
# With the second, the ranks' small messages travel over gloo.
NCCL = ("nccl", "cpu:gloo,cuda:nccl")
# Of float32 after a few steps, as a part of the largest move.
TOLERANCE, CODED_TOLERANCE = 1e-5, 1e-2


class Setup(NamedTuple):
    """Ranks on this machine.

    Args:
        device: "cuda" or "cpu".
        backend: of torch.distributed.
        ranks: how many; 0 if this machine has too few GPUs.
    """

    device: str
    backend: str
    ranks: int

    def goal(self, bound: float, least: bool = False) -> Goal | None:
        """A goal of a GPU; None on the CPU."""
        return Goal(bound, least) if self.device == "cuda" else None

    def __str__(self) -> str:
        if not self.ranks:
            return f"{self.backend}, several GPUs"
        alone = " (exchanges nothing)" if self.ranks == 1 else ""
        return f"{self.backend}, {self.ranks} rank{'s' * (self.ranks > 1)}{alone}"


class Setups(NamedTuple):
    """What is measured where.

    Args:
        alone: one rank.
        shared: ranks that share a device.
        several: a rank for each of several GPUs; None without any.
    """

    alone: list[Setup]
    shared: list[Setup]
    several: Setup | None

    @classmethod
    def on(cls, device: str) -> Setups:
        """The setups of this machine."""
        if device == "cpu":
            return cls([Setup(device, "gloo", 1)], [Setup(device, "gloo", 2)], None)
        gpus = torch.cuda.device_count()
        return cls(
            alone=[Setup(device, backend, 1) for backend in NCCL],
            shared=[Setup(device, "gloo", ranks) for ranks in (2, 4)],
            # A ring needs an even number.
            several=Setup(device, NCCL[1], gpus - gpus % 2),
        )

    @property
    def exchanging(self) -> list[Setup]:
        """Those with several ranks."""
        return self.shared + ([self.several] if self.several else [])

    @property
    def pairs(self) -> list[Setup]:
        """The same with two ranks."""
        pairs = (each._replace(ranks=min(2, each.ranks)) for each in self.exchanging)
        return list(dict.fromkeys(pairs))


class Size(NamedTuple):
    """How much is measured.

    Args:
        mib: MiB of float32 parameters.
        steps: steps that are timed.
    """

    mib: float
    steps: int

    @property
    def bucket_cap_mb(self) -> float:
        """At least four buckets."""
        return min(25.0, self.mib / 4)


class Verdict(NamedTuple):
    """A line of the page.

    Args:
        part: the part of the script.
        ranks: where it was measured.
        what: what is promised or aimed at.
        outcome: "passed", "failed", "goal missed", "measured" (without a goal) or "not measured".
        figure: what was measured; empty without a figure.
    """

    part: str
    ranks: str
    what: str
    outcome: str
    figure: str = ""


class Goal(NamedTuple):
    """What a figure should be.

    Args:
        bound: at most this, or at least.
        least: whether it is the least.
        otherwise: the outcome if it is something else.
    """

    bound: float
    least: bool = False
    otherwise: str = MISSED

    def is_met(self, value: float) -> bool:
        """Whether a figure is as it should be; NaN is not."""
        return value >= self.bound if self.least else value <= self.bound

    def __str__(self) -> str:
        return f"at {'least' if self.least else 'most'} {self.bound:g}"


class Bench:
    """Runs functions on ranks, and collects verdicts and what fails.

    Args:
        seconds: within which all ends. Nothing begins in the last `SHORTEST_SECONDS`.
    """

    def __init__(self, seconds: float = float("inf")) -> None:
        self.failures: list[str] = []
        self.verdicts: list[Verdict] = []
        self._end = time.monotonic() + seconds
        # What has not begun.
        self._skipped: set[Setup] = set()

    def say(self, part: str, setup: Setup, what: str, outcome: str, figure: str = "") -> None:
        """Add a verdict, and remember it if it is a failure."""
        self.verdicts.append(Verdict(part, str(setup), what, outcome, figure))
        if outcome == FAILED and figure:
            self.fail(f"{what} on {setup}: {figure}")

    def judge(
        self, part: str, setup: Setup, what: str, value: float | None, goal: Goal | None = None
    ) -> None:
        """Add the verdict on a figure.

        Args:
            part: as in `Verdict`.
            setup: where it was measured.
            what: as in `Verdict`.
            value: the figure; None if there is none.
            goal: what it should be; None for a figure without a goal.
        """
        if value is None:
            self.say(part, setup, what, self.missing(setup))
        elif goal is None:
            self.say(part, setup, what, MEASURED, f"{value:.2g}")
        else:
            outcome = PASSED if goal.is_met(value) else goal.otherwise
            self.say(part, setup, what, outcome, f"{value:.2g}, {goal}")

    def missing(self, setup: Setup) -> str:
        """The cell of a run that returned nothing."""
        return FAILED if setup.ranks and setup not in self._skipped else NOT_MEASURED

    def run(self, setup: Setup, main: Callable[..., Any], *args: Any) -> list[Any] | None:
        """What `main(setup, *args)` returns, by rank.

        None if it fails, without the GPUs, or if no time is left.
        """
        if not setup.ranks:
            return None
        self._skipped.discard(setup)
        if (left := self._end - time.monotonic()) < SHORTEST_SECONDS:
            self._skipped.add(setup)
            return None
        # CUDA does not work in a process that is forked once it has been used.
        method: Literal["fork", "spawn"] = "spawn" if setup.device == "cuda" else "fork"
        with netlab.lab(setup.ranks, rate="") as where:
            call = (where, setup.ranks, main, setup, *args)
            try:
                return netlab.run(*call, timeout=min(TIMEOUT_SECONDS, left), method=method)
            except RuntimeError as error:
                self.fail(f"{main.__name__} on {setup}: {error}")
                return None

    def fail(self, text: str) -> None:
        """Remember a failure, and print it among the errors."""
        self.failures.append(text)
        print(text, file=sys.stderr, flush=True)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def begin(setup: Setup) -> torch.device:
    """Join the process group of the setup; the device of this rank."""
    os.environ.setdefault("LOGURU_LEVEL", "ERROR")
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


def build_model(mib: float, device: torch.device) -> nn.Module:
    width = max(4, int((mib * MIB / 4 / LAYERS) ** 0.5))
    torch.manual_seed(0)
    with device:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        for param in model.parameters():
            # Gradients as large in the first layer as in the last.
            nn.init.normal_(param, std=width**-0.5)
    return model


def model_with_gradients(mib: float, device: torch.device) -> nn.Module:
    """A model with a gradient that differs from rank to rank."""
    model = build_model(mib, device)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3 * (1 - 2 * (dist.get_rank() % 2)))
    return model


def adamw(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def gossip(model: nn.Module, size: Size, **options: Any) -> DecentOptimWrapper:
    options = {"topology": "ring", "bucket_cap_mb": size.bucket_cap_mb, **options}
    return DecentOptimWrapper(adamw(model.parameters()), **options)


# Part a


class HostTime(NamedTuple):
    """Median seconds until step() returns, those of them that it waits for the wire, and syncs."""

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
        model = model_with_gradients(size.mib, device)
        return adamw(model.parameters()) if options is None else gossip(model, size, **options)

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


def part_a(bench: Bench, setups: Setups, size: Size) -> str:
    rows = []
    for setup in [*setups.alone, *setups.exchanging]:
        ranks = bench.run(setup, host_times, size)
        ratios, waits = [], []
        for name in HOST_METHODS:
            if ranks is None:
                rows.append([str(setup), name, *[bench.missing(setup)] * 4])
                continue
            slowest = max((rank[name] for rank in ranks), key=lambda timing: timing.step)
            bare = max(rank["fused AdamW"].step for rank in ranks)
            ratio = (slowest.step - slowest.wait) / bare
            cells = [f"{1000 * slowest.step:.2f}", f"{1000 * slowest.wait:.2f}", f"{ratio:.2f}"]
            rows.append([str(setup), name, *cells, slowest.waits_for_gpu])
            ratios.append(ratio)
            waits.append(f"{name}: {slowest.waits_for_gpu}")
        slowest_ratio = max(ratios, default=None)
        bench.judge("a", setup, HOST_TIME, slowest_ratio, setup.goal(1.3))
        judge_waits(bench, setup, waits)
    head = ["ranks", "optimizer", "ms until step() returns", "of them waiting for the wire"]
    head += ["the rest, times AdamW (goal 1.3)", "waits for the GPU"]
    return table(head, rows)


def judge_waits(bench: Bench, setup: Setup, waits: list[str]) -> None:
    """Whether a step waits for the GPU: over NCCL it must not.

    Args:
        bench: takes the verdict.
        setup: where it was measured.
        waits: by method, what torch says.
    """
    unmeasured = [each for each in waits if NOT_MEASURED in each]
    guilty = [each for each in waits if ": yes" in each]
    if guilty:
        outcome = FAILED if "nccl" in setup.backend else MISSED
        bench.say("a", setup, NO_WAIT, outcome, "; ".join(guilty))
    elif unmeasured or not waits:
        bench.say("a", setup, NO_WAIT, NOT_MEASURED if waits else bench.missing(setup))
    else:
        bench.say("a", setup, NO_WAIT, PASSED)


# Part b


def device_seconds(action: Callable[[], Any], device: torch.device, steps: int) -> float:
    """Median seconds on the device."""
    seconds = []
    for _ in range(WARMUP + steps):
        if device.type == "cpu":
            start = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - start)
            continue
        events: Any = torch.cuda.Event
        first, last = (events(enable_timing=True) for _ in range(2))
        first.record()
        action()
        last.record()
        torch.cuda.synchronize(device)
        seconds.append(first.elapsed_time(last) / 1000)
    return statistics.median(seconds[WARMUP:])


class Traffic(NamedTuple):
    """Seconds, and the bytes that are read and written at least."""

    seconds: float
    nbytes: int


def device_times(setup: Setup, size: Size) -> dict[str, Traffic]:
    """Run in the only rank."""
    device = begin(setup)
    model = model_with_gradients(size.mib, device)
    nbytes = sum(param.nbytes for param in model.parameters())
    ones, others = torch.ones(2, nbytes // 4, device=device)
    seconds = partial(device_seconds, device=device, steps=size.steps)
    times = {"copy_": Traffic(seconds(partial(ones.copy_, others)), 2 * nbytes)}
    del ones, others
    # It reads parameters, gradients and both moments, and writes all but the gradients.
    times["fused AdamW"] = Traffic(seconds(adamw(model.parameters()).step), 7 * nbytes)
    for views in (False, True):
        buckets = gossip(model, size, param_as_bucket_view=views).buckets
        for bucket in buckets:
            bucket.pair()[1].data.zero_()

        def pack_check_mix(buckets: Any = buckets) -> None:
            for bucket in buckets:
                outgoing, incoming = bucket.pair()
                bucket.pack(outgoing)
                usable = is_finite_on_device(outgoing.data)
                # As in `PlainExchange.apply_usable`.
                torch.where(usable, incoming.data, outgoing.data, out=incoming.data)
                bucket.mix_(incoming, 0.5)

        # The packing reads and writes, unless they are views; the check reads; the choice and the
        # mixing read the own and the peer's values, and write.
        passes = 7 if views else 9
        name = "pack, check, mix" + ", views" * views
        times[name] = Traffic(seconds(pack_check_mix), passes * nbytes)
    return times


def part_b(bench: Bench, setups: Setups, size: Size) -> str:
    ranks = bench.run(setups.alone[-1], device_times, size)
    head = ["operation", "ms", "GB/s", "of copy_'s (goal 0.6)", "times AdamW (goal 0.5)"]
    if ranks is None:
        bench.judge("b", setups.alone[-1], PACKING, None)
        return table(head, [["all", *[bench.missing(setups.alone[-1])] * 4]])
    setup, (times,) = setups.alone[-1], ranks
    rates = {name: each.nbytes / each.seconds for name, each in times.items()}
    rows = []
    for name, each in times.items():
        cells = [f"{1000 * each.seconds:.2f}", f"{rates[name] / 1e9:.1f}"]
        cells.append(f"{rates[name] / rates['copy_']:.2f}")
        rows.append([name, *cells, f"{each.seconds / times['fused AdamW'].seconds:.2f}"])
        if name.startswith("pack"):
            goal = setup.goal(0.6, least=True)
            bench.judge("b", setup, f"{name}: {PACKING}", rates[name] / rates["copy_"], goal)
            ratio = each.seconds / times["fused AdamW"].seconds
            bench.judge(
                "b", setup, f"{name}: time, in steps of fused AdamW", ratio, setup.goal(0.5)
            )
    return table(head, rows)


# Part c: the trajectories

TRAJECTORY_MIB, CAP_MB, TRAINED_STEPS = 0.25, 0.06, 12
SLOW_MOMENTUM = partial(torch.optim.SGD, lr=0.7, momentum=0.5, nesterov=True)
# With model=, so that the first mixes in the forward pass.
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
    "float8": {"comm_dtype": torch.float8_e4m3fn},
    "16 of 256 values": {"comm_dtype": TopKCodec(16)},
}


def tolerance(name: str) -> float:
    """The largest error of a trajectory, as a part of the largest move."""
    # A value between two codes may be rounded to either.
    return CODED_TOLERANCE if "comm_dtype" in TRAJECTORIES[name] else TOLERANCE


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().cpu().double().reshape(-1) for tensor in tensors])


def trajectories(setup: Setup) -> dict[str, list[float]]:
    """Run in every rank: how far its parameters have moved, with nothing left in flight."""
    device = begin(setup)
    moves = {}
    for name, options in TRAJECTORIES.items():
        model = build_model(TRAJECTORY_MIB, device)
        start = flatten(model.parameters())
        base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        optimizer = DecentOptimWrapper(base, model=model, bucket_cap_mb=CAP_MB, **options)
        train(model, optimizer, batch_for(model, device), TRAINED_STEPS)
        optimizer.synchronize()
        moves[name] = (flatten(model.parameters()) - start).tolist()
    return moves


def errors(
    ranks: list[dict[str, list[float]]], wanted: list[dict[str, list[float]]]
) -> dict[str, float]:
    """By trajectory, the largest error of a value, as a part of the largest move."""
    found = {}
    for name in TRAJECTORIES:
        here, there = (torch.tensor([rank[name] for rank in each]) for each in (ranks, wanted))
        found[name] = ((here - there).abs().max() / there.abs().max()).item()
    return found


# Part c: the step time


def ddp(model: nn.Module, size: Size) -> tuple[nn.Module, Any]:
    network = DistributedDataParallel(model, bucket_cap_mb=size.bucket_cap_mb)
    return network, adamw(network.parameters())


def by_steps(model: nn.Module, size: Size, **options: Any) -> tuple[nn.Module, Any]:
    return model, gossip(model, size, **options)


def in_backward(model: nn.Module, size: Size) -> tuple[nn.Module, Any]:
    network = DecentralizedDataParallel(
        model, adamw, topology="ring", bucket_size_in_mb=size.bucket_cap_mb
    )
    return network, None


TRAINERS: dict[str, Callable[[nn.Module, Size], tuple[nn.Module, Any]]] = {
    "no communication": lambda model, size: (model, adamw(model.parameters())),
    "DDP": ddp,
    "ring": by_steps,
    "ring, views": partial(by_steps, param_as_bucket_view=True),
    "complete": partial(by_steps, topology="complete"),
    "ring, in the backward pass": in_backward,
}


def train(network: nn.Module, optimizer: Any, batch: Tensor, steps: int) -> None:
    for _ in range(steps):
        network(batch).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def synchronize(network: nn.Module, optimizer: Any) -> None:
    """Finish the round in flight, if the method has any."""
    ours = network.optimizer if optimizer is None else optimizer
    if isinstance(ours, DecentOptimWrapper):
        ours.synchronize()


def batch_for(model: nn.Module, device: torch.device) -> Tensor:
    """A batch that differs from rank to rank."""
    width = next(model.parameters()).shape[1]
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(64, width, generator=generator).to(device)


def step_times(setup: Setup, size: Size) -> dict[str, float]:
    """Run in every rank: mean seconds per step."""
    device = begin(setup)
    times = {}
    for name, make in TRAINERS.items():
        network, optimizer = make(build_model(size.mib, device), size)
        batch = batch_for(network, device)
        train(network, optimizer, batch, WARMUP)
        finish(device)
        start = time.perf_counter()
        train(network, optimizer, batch, size.steps)
        finish(device)
        times[name] = (time.perf_counter() - start) / size.steps
        synchronize(network, optimizer)
        del network, optimizer
        gc.collect()
    return times


def part_c(bench: Bench, setups: Setups, size: Size) -> str:
    # A quarter, since over gloo the bytes travel through the memory of the machine.
    quarter = size._replace(mib=size.mib / 4)
    return f"{compared(bench, setups)}\n{timed(bench, setups, quarter)}"


def compared(bench: Bench, setups: Setups) -> str:
    """The trajectories of all setups, against as many ranks on the CPU."""
    rows = []
    for setup in setups.exchanging:
        ranks = bench.run(setup, trajectories)
        on_cpu = Setup("cpu", "gloo", setup.ranks)
        wanted = bench.run(on_cpu, trajectories) if ranks else None
        found = errors(ranks, wanted) if ranks and wanted else dict.fromkeys(TRAJECTORIES)
        for name, error in found.items():
            cell = bench.missing(setup) if error is None else f"{error:.1e}"
            rows.append([str(setup), name, cell, f"{tolerance(name):g}"])
            goal = Goal(tolerance(name), otherwise=FAILED)
            bench.judge("c", setup, f"{name}: {TRAJECTORY}", error, goal)
    return table(["ranks", "trajectory", "error", "at most"], rows)


def timed(bench: Bench, setups: Setups, size: Size) -> str:
    """The step times of all setups."""
    rows = []
    for setup in setups.exchanging:
        ranks = bench.run(setup, step_times, size)
        for name in TRAINERS:
            cells, ratio = [bench.missing(setup)] * 2, None
            if ranks is not None:
                slowest, theirs = (max(rank[each] for rank in ranks) for each in (name, "DDP"))
                ratio = slowest / theirs
                cells = [f"{1000 * slowest:.1f}", f"{ratio:.2f}"]
            rows.append([str(setup), name, *cells])
            if name not in ("DDP", "no communication"):
                bench.judge("c", setup, f"{name}: time of a step, in steps of DDP", ratio)
    return table(["ranks", f"{size.mib:g} MiB", "ms per step", "times DDP"], rows)


# Part d


def one_rank(setup: Setup, folder: str) -> bool:
    """Run in the only rank: raises unless all of it works."""
    device = begin(setup)
    size = Size(mib=1, steps=2)
    parts = []
    for _ in range(2):
        model = build_model(size.mib, device)
        optimizer = gossip(model, size, buffers=model.buffers())
        parts.append((model, optimizer, Checkpoints(folder, optimizer)))
    (model, optimizer, checkpoints), (resumed, resumed_optimizer, reader) = parts
    batch = batch_for(model, device)
    start = flatten(model.parameters())
    train(model, optimizer, batch, size.steps)
    own = flatten(model.parameters())
    with optimizer.averaged():
        average = flatten(model.parameters())
    if torch.equal(own, start) or not torch.equal(own, average):
        raise ValueError("expected steps to move the parameters, and an average of one not to")
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoints.save(optimizer.round, states)
    saved = reader.load()
    if saved is None:
        raise ValueError("expected to load what was saved, found nothing")
    resumed.load_state_dict(saved.state["model"])
    resumed_optimizer.load_state_dict(saved.state["optimizer"])
    for network, stepped in ((model, optimizer), (resumed, resumed_optimizer)):
        train(network, stepped, batch, size.steps)
    if not torch.equal(flatten(model.parameters()), flatten(resumed.parameters())):
        raise ValueError("expected the resumed run to continue bit for bit")
    return True


def part_d(bench: Bench, setups: Setups, size: Size) -> str:
    rows = []
    for setup in setups.alone:
        with tempfile.TemporaryDirectory() as folder:
            ranks = bench.run(setup, one_rank, folder)
        rows.append([str(setup), bench.missing(setup) if ranks is None else "yes"])
        bench.say("d", setup, ONE_RANK, bench.missing(setup) if ranks is None else PASSED)
    return table(["ranks", ONE_RANK], rows)


# Part e


class Mode(NamedTuple):
    """A way to train, and how much more it holds than AdamW alone, as the guide says.

    Args:
        nccl: copies of the parameters over NCCL, at most; all on the GPU.
        gpu: copies on the GPU over gloo.
        pinned: pinned copies over gloo.
        make: as in `TRAINERS`.
    """

    nccl: float
    gpu: float
    pinned: float
    make: Callable[[nn.Module, Size], tuple[nn.Module, Any]]


MODES = {
    "fused AdamW": Mode(0, 0, 0, TRAINERS["no communication"]),
    "copies": Mode(2, 1, 4.5, by_steps),
    "views": Mode(1, 1, 4.5, TRAINERS["ring, views"]),
    "complete, copies": Mode(2, 1, 4.5, TRAINERS["complete"]),
    "bf16": Mode(3, 2.1, 3, partial(by_steps, comm_dtype=torch.bfloat16)),
    # A reference for the only pair, messages, and a copy of the parameters.
    "int8": Mode(2.5, 2.15, 2.35, partial(by_steps, comm_dtype=torch.int8)),
    "int8, views": Mode(
        1.5, 1.1, 2.25, partial(by_steps, comm_dtype=torch.int8, param_as_bucket_view=True)
    ),
    "DecentralizedDataParallel": Mode(1, 1, 4.5, in_backward),
    "gradient tracking": Mode(6, 4, 7.5, partial(by_steps, extensions=[GradientTracking()])),
    "staleness": Mode(
        2, 1, 4.5, partial(by_steps, schedule=Schedule(gossip_every=2), overlap=Late(2))
    ),
}


class Memory(NamedTuple):
    """The peaks of a mode, in copies of the parameters; None where they are not counted."""

    gpu: float | None
    pinned: float | None


def peaks(setup: Setup, size: Size) -> dict[str, Memory]:
    """Run in every rank."""
    device = begin(setup)
    found = {}
    for name, mode in MODES.items():
        finish(device)
        gc.collect()
        before = allocated(device, "current")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.reset_peak_host_memory_stats()
        network, optimizer = mode.make(build_model(size.mib, device), size)
        nbytes = sum(param.nbytes for param in network.parameters())
        train(network, optimizer, batch_for(network, device), WARMUP + 1)
        finish(device)
        after = allocated(device, "peak")
        copies = (
            None if end is None or start is None else (end - start) / nbytes
            for start, end in zip(before, after, strict=True)
        )
        found[name] = Memory(*copies)
        synchronize(network, optimizer)
        del network, optimizer
    return found


def allocated(device: torch.device, which: str) -> tuple[int | None, int | None]:
    """Bytes that this process has on the GPU, and pinned in the memory of the machine."""
    if device.type == "cpu":
        return None, None
    gpu = torch.cuda.memory_stats(device)[f"allocated_bytes.all.{which}"]
    return gpu, torch.cuda.host_memory_stats().get(f"active_bytes.{which}")


def part_e(bench: Bench, setups: Setups, size: Size) -> str:
    rows = []
    # Each further pair of a rank would need a reference of its own.
    for setup in setups.pairs:
        ranks = bench.run(setup, peaks, size)
        for name in MODES:
            cells = [bench.missing(setup)] * 3
            if ranks is None:
                bench.say("e", setup, f"{name}: {MEMORY}", bench.missing(setup))
            else:
                here, bare = (max(rank[each] for rank in ranks) for each in (name, "fused AdamW"))
                more = None if here.gpu is None or bare.gpu is None else here.gpu - bare.gpu
                judge_memory(bench, setup, name, more, here.pinned)
                values = (here.gpu, more, here.pinned)
                cells = [NOT_MEASURED if v is None else f"{v:.2f}" for v in values]
            rows.append([str(setup), name, *cells])
    head = ["ranks", "copies of the parameters", "peak on the GPU", "more than AdamW", "pinned"]
    return table(head, rows)


def judge_memory(
    bench: Bench, setup: Setup, name: str, more: float | None, pinned: float | None
) -> None:
    """Judge whether a mode takes no more than the guide says."""
    mode, what = MODES[name], f"{name}: {MEMORY}"
    over_nccl = "nccl" in setup.backend
    for where, value, bound in (
        ("on the GPU", more, mode.nccl if over_nccl else mode.gpu),
        ("pinned", pinned, 0 if over_nccl else mode.pinned),
    ):
        if value is None:
            bench.say("e", setup, f"{what}, {where}", NOT_MEASURED)
        else:
            # Buckets are padded, and small tensors come on top.
            bench.judge("e", setup, f"{what}, {where}", value, Goal(bound + 0.05))


PARTS = {"a": part_a, "b": part_b, "c": part_c, "d": part_d, "e": part_e}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--size-mib", type=float, default=1024, help="of float32 parameters")
    parser.add_argument("--steps", type=int, default=10, help="that are timed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, help="within which the page is done")
    parser.add_argument("--tables", action="store_true", help="print them before the verdicts")
    return parser.parse_args()


def machine(device: str) -> str:
    """What the figures were measured on."""
    if device == "cpu":
        return f"torch {torch.__version__}, CPU"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}, {', '.join(names)}"


def page(verdicts: list[Verdict]) -> str:
    """The verdicts, and how many there are of each kind."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    total = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    rows = [[each.outcome, each.part, each.ranks, each.what, each.figure] for each in verdicts]
    return f"{table(['verdict', 'part', 'ranks', 'what', 'figure'], rows)}\n{total}"


def main() -> int:
    args = parse_arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no GPU: nothing was measured (--device cpu runs the same code)")
        return 0
    print(f"{machine(args.device)}; {args.size_mib:g} MiB of float32 parameters\n")
    setups, size = Setups.on(args.device), Size(args.size_mib, args.steps)
    several = setups.several is not None and setups.several.ranks > 0
    bench = Bench(60 * (args.minutes or (10 if several else 5)))
    for part in args.parts:
        print(f"part {part} ...", file=sys.stderr, flush=True)
        text = PARTS[part](bench, setups, size)
        if args.tables:
            print(f"Part {part}\n\n{text}", flush=True)
    print(page(bench.verdicts))
    return int(bool(bench.failures))


if __name__ == "__main__":
    sys.exit(main())
