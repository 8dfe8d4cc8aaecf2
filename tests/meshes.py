"""A model that is spread over the ranks of a mesh in several ways, and its training."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from ranks import KeptRanks, run_threads
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

from decent_optim_wrapper import DecentOptimWrapper

# FSDP splits an odd width unevenly, and leaves nothing of it to the last of four ranks; tensor
# parallelism wants an even one.
WIDTH, HIDDEN, BATCH = 5, 4, 8
# One for each of two stages.
BLOCKS = 2
# Several buckets on every rank.
CAP_MB = 150 / 2**20
STEPS = 4

# Every rank would say that a sum over two dimensions takes two calls.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

MakeOptimizer = Callable[[Sequence[Tensor]], Optimizer]
Result = TypeVar("Result")


class Block(nn.Module):
    """Two layers that tensor parallelism splits, and a scale that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.leave = nn.Linear(HIDDEN, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.scale * self.leave(torch.tanh(self.enter(x)))
        return out


def make_model(seed: int = 0, blocks: int = BLOCKS) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(blocks))).double()


def batch(replica: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one replica in one step."""
    generator = torch.Generator().manual_seed(1000 * replica + step)
    draw = torch.randn(2, BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return draw[0], draw[1].sin()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@dataclass(frozen=True)
class Layout:
    """How 4 or 8 ranks are arranged: the sizes of the dimensions, outermost first.

    "gossip" is one of them; "fsdp", "replicate", "tp" and "pp" are the others. `outermost` is
    whether FSDP shards the outermost module, too, and not only the blocks.
    """

    sizes: dict[str, int]
    schedule: Any = Schedule1F1B
    outermost: bool = True
    cap_mb: float = CAP_MB

    @property
    def replicas(self) -> int:
        return self.sizes["gossip"]

    def mesh(self, timeout: timedelta | None = None) -> DeviceMesh:
        """The mesh; `timeout` is that of torch's own exchanges, 30 minutes for None."""
        return make_mesh(tuple(self.sizes.items()), timeout)


@cache
def make_mesh(sizes: tuple[tuple[str, int], ...], timeout: timedelta | None) -> DeviceMesh:
    """One mesh in a process for all models that are spread in the same way."""
    names, counts = zip(*sizes, strict=True)
    override: dict[int | str, Any] = {}
    for name in names if timeout else ():
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        override[name] = options
    return init_device_mesh("cpu", counts, mesh_dim_names=names, backend_override=override or None)


LAYOUTS = {
    "tp inside": Layout({"gossip": 4, "tp": 2}),
    "fsdp inside": Layout({"gossip": 2, "fsdp": 2}),
    # Each block keeps its parameters gathered after a forward pass without gradients.
    "only blocks": Layout({"gossip": 2, "fsdp": 2}, outermost=False),
    "fsdp with empty shards": Layout({"gossip": 2, "fsdp": 4}, cap_mb=CAP_MB / 2),
    "hsdp": Layout({"gossip": 2, "replicate": 2, "fsdp": 2}),
    "pipeline gpipe": Layout({"pp": 2, "gossip": 4}, schedule=ScheduleGPipe),
    "fsdp and tp": Layout({"gossip": 2, "fsdp": 2, "tp": 2}),
    "pipeline and tp": Layout({"gossip": 2, "pp": 2, "tp": 2}),
    "pipeline and fsdp": Layout({"pp": 2, "gossip": 2, "fsdp": 2}),
}


class Replica:
    """An unsharded replica.

    Args:
        replica: which one.
        model: of this replica.
        gossip: arguments of the wrapper: who gossips.
    """

    def __init__(self, replica: int, model: nn.Module, **gossip: Any) -> None:
        self.replica, self.model, self.gossip = replica, model, gossip
        self.cap_mb = CAP_MB
        # The ranks that share a batch, and this rank's part of it.
        self._parts, self._part = 1, 0

    def wrap(self, make_base: MakeOptimizer, **options: Any) -> DecentOptimWrapper:
        defaults = {"topology": "ring", "comm_dtype": torch.float32, "bucket_cap_mb": self.cap_mb}
        options = {**defaults, **self.gossip, **options}
        base = make_base(list(self.model.parameters()))
        return DecentOptimWrapper(base, model=self.model, **options)

    def backward(
        self,
        step: int,
        scaler: torch.amp.GradScaler | None = None,
        through: nn.Module | None = None,
    ) -> None:
        """Set the gradients of a step.

        Args:
            step: which one.
            scaler: scales the loss.
            through: a module around the model.
        """
        x, y = self._batch(step)
        self.model.zero_grad()

        def scaled_loss(output: Tensor, target: Tensor) -> Tensor:
            loss = loss_of(output, target)
            return loss if scaler is None else scaler.scale(loss)

        self._run(x, y, scaled_loss, through or self.model)
        if scaler is not None:
            # It starts with the first loss, which only the last stage has.
            scaler.scale(x.new_zeros(()))

    def forward(self, step: int) -> Tensor:
        """Run the model; of a pipeline, only this stage."""
        x, _ = self._batch(step)
        output: Tensor = self.model(x)
        return output

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        x, y = batch(self.replica, step)
        rows = slice(self._part * BATCH // self._parts, (self._part + 1) * BATCH // self._parts)
        return x[rows], y[rows]

    def full(self) -> dict[str, Any]:
        """The parameters of this rank's stage as a whole, as arrays: tensors would be shared."""
        found = {}
        for name, param in self.model.named_parameters():
            whole = param.full_tensor() if isinstance(param, DTensor) else param
            found[name] = whole.detach().clone().numpy()
        return found

    def _run(self, x: Tensor, y: Tensor, loss: Callable[..., Tensor], model: nn.Module) -> None:
        loss(model(x), y).backward()  # type: ignore[no-untyped-call]


class Spread(Replica):
    """One replica's part on this rank.

    Args:
        layout: of the mesh.
        seed: of the parameters.
        blocks: of the model.
        timeout: of torch's own exchanges.
    """

    def __init__(
        self, layout: Layout, seed: int = 0, blocks: int = BLOCKS, timeout: timedelta | None = None
    ) -> None:
        self.mesh, self._layout = layout.mesh(timeout), layout
        model = self._spread(make_model(seed, blocks))
        replica = self.mesh.get_local_rank("gossip")
        super().__init__(replica, model, mesh=self.mesh, gossip_dim="gossip")
        self.cap_mb = layout.cap_mb
        for name in ("replicate", "fsdp"):
            if name in layout.sizes:
                self._part = self._part * layout.sizes[name] + self.mesh.get_local_rank(name)
                self._parts *= layout.sizes[name]

    def _run(self, x: Tensor, y: Tensor, loss: Callable[..., Tensor], model: nn.Module) -> None:
        if "pp" not in self._layout.sizes:
            super()._run(x, y, loss, model)
            return
        if not hasattr(self, "_schedule"):
            place, stages = self.mesh.get_local_rank("pp"), self._layout.sizes["pp"]
            group, device = self.mesh.get_group("pp"), torch.device("cpu")
            self._stage = PipelineStage(self.model, place, stages, device, group=group)
            microbatches = max(2, stages)
            self._schedule = self._layout.schedule(self._stage, microbatches, loss_fn=loss)
        if self._stage.is_first:
            self._schedule.step(x)
        else:
            self._schedule.step(target=y)

    def _spread(self, model: nn.Sequential) -> nn.Module:
        sizes = self._layout.sizes
        spread: nn.Module = model
        if "pp" in sizes:
            at, per_stage = self.mesh.get_local_rank("pp"), len(model) // sizes["pp"]
            spread = nn.Sequential()
            for number in range(at * per_stage, (at + 1) * per_stage):
                spread.add_module(str(number), model[number])
        if "tp" in sizes:
            plan = {"enter": ColwiseParallel(), "leave": RowwiseParallel()}
            for block in spread.children():
                parallelize_module(block, self.mesh["tp"], plan)
        if "fsdp" in sizes:
            names = ("replicate", "fsdp") if "replicate" in sizes else "fsdp"
            for block in spread.children():
                fully_shard(block, mesh=self.mesh[names])
            if self._layout.outermost:
                fully_shard(spread, mesh=self.mesh[names])
        return spread


def start() -> dict[str, Any]:
    """The parameters with which all replicas start."""
    return Replica(0, make_model()).full()


def difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """The largest difference in the parameters of a stage."""
    # NumPy's maximum, unlike Python's, is NaN if anything is.
    return float(np.max([abs(value - expected[name]).max() for name, value in found.items()]))


def run_whole(replicas: int, work: Callable[..., Result], *args: Any) -> list[Result]:
    """Run `work(replica, *args)` on unsharded replicas, whose ranks are threads."""
    # Not in the threads, which share torch's generator.
    models = [make_model() for _ in range(replicas)]

    def main(rank: int, group: dist.ProcessGroup) -> Result:
        # The default on a mesh.
        return work(Replica(rank, models[rank], process_group=group, overlap=True), *args)

    return run_threads(replicas, main)


@cache
def kept_ranks(world_size: int) -> KeptRanks:
    """The ranks of all tests of a file."""
    return KeptRanks(world_size)


def run_on_mesh(world_size: int, work: Callable[..., Result], *args: Any) -> list[Result]:
    """Run `work(*args)` on the ranks of a default group; results by rank."""
    return kept_ranks(world_size).run(work, *args)


def run_spread(
    layout: Layout, work: Callable[..., Result], *args: Any, seed: int = 0
) -> list[Result]:
    """Run `work(replica, *args)` on replicas that are spread over a mesh; results by rank."""
    return run_on_mesh(math.prod(layout.sizes.values()), _spread, layout, seed, work, args)


def _spread(layout: Layout, seed: int, work: Callable[..., Result], args: Any) -> Result:
    return work(Spread(layout, seed), *args)


def end_ranks() -> None:
    """End those that were kept."""
    for world_size in (2, 4, 8):
        kept_ranks(world_size).end()
