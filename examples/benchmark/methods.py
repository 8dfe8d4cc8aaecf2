"""The methods that `step_time.py`, `overhead.py` and `control.py` compare, with their defaults."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from decent_optim_wrapper import AsItArrives, DecentOptimWrapper, Late, Schedule
from decent_optim_wrapper.codecs import TopKCodec
from decent_optim_wrapper.ddp import DecentralizedDataParallel
from decent_optim_wrapper.topo import Hierarchical


class Recipe(NamedTuple):
    """How parameters are updated.

    Args:
        optimizer: makes the base optimizer.
        scheduler: makes its scheduler, which steps after it; None for none.
    """

    optimizer: Callable[[Any], torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None

    def of_named(self, named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        """The base optimizer of named parameters."""
        return self.optimizer([tensor for _, tensor in named])


class Training:
    """Steps of a model.

    Args:
        network: what is called with the inputs; its result is summed.
        recipe: makes the scheduler of a base.
        base: the base optimizer; None if a module steps in its backward pass.
        optimizer: steps in place of the base.
    """

    def __init__(
        self, network: nn.Module, recipe: Recipe, base: Any = None, optimizer: Any = None
    ) -> None:
        self._network = network
        self._steppers = [optimizer or base] if base is not None else []
        self.ours: DecentOptimWrapper | None = None
        for each in (optimizer, getattr(network, "optimizer", None)):
            if isinstance(each, DecentOptimWrapper):
                self.ours = each
        if base is not None and recipe.scheduler is not None:
            self._steppers.append(recipe.scheduler(base))

    def step(self, inputs: Tensor) -> None:
        """One step."""
        for optimizer in self._steppers[:1]:
            optimizer.zero_grad()
        self._network(inputs).sum().backward()
        for each in self._steppers:
            each.step()

    def finish(self) -> None:
        """Mix what is in flight."""
        if self.ours is not None:
            self.ours.synchronize()


def no_communication(model: nn.Module, recipe: Recipe) -> Training:
    return Training(model, recipe, recipe.optimizer(model.parameters()))


def ddp(
    model: nn.Module, recipe: Recipe, hook: Any = None, state: Any = None, **options: Any
) -> Training:
    """DDP with a communication hook, and the function that makes its state."""
    network = DistributedDataParallel(model, **options)
    if hook is not None:
        network.register_comm_hook(state and state(), hook)
    return no_communication(network, recipe)


def power_sgd(rank: int) -> Callable[[nn.Module, Recipe], Training]:
    """DDP with PowerSGD, which compresses from the third step on."""
    state = partial(
        PowerSGDState, None, rank, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8
    )
    return partial(ddp, hook=powerSGD_hook, state=state)


def post_local_sgd(model: nn.Module, recipe: Recipe, period: int) -> Training:
    base = recipe.optimizer(model.parameters())
    averaged = PostLocalSGDOptimizer(base, PeriodicModelAverager(period=period))
    return Training(model, recipe, base, averaged)


def decent_dp(model: nn.Module, recipe: Recipe) -> Training:
    from decent_dp.ddp import DecentralizedDataParallel as Peer

    return Training(Peer(model, recipe.of_named, recipe.scheduler), recipe)


def wrapper(model: nn.Module, recipe: Recipe, known: bool = True, **options: Any) -> Training:
    """The wrapper with these options; `known` passes the model."""
    base = recipe.optimizer(model.parameters())
    options = {"model": model, **options} if known else options
    return Training(model, recipe, base, DecentOptimWrapper(base, **options))


def module(model: nn.Module, recipe: Recipe, **options: Any) -> Training:
    """The module with these options."""
    network = DecentralizedDataParallel(model, recipe.of_named, recipe.scheduler, **options)
    return Training(network, recipe)


def fours(model: nn.Module, recipe: Recipe, **options: Any) -> Training:
    """The module with groups of four ranks; all ranks, if there are no more."""
    size = dist.get_world_size()
    if size <= 4:
        return module(model, recipe, **options)
    groups = Hierarchical(size, 4, inner="complete")
    return module(model, recipe, topology=groups, local_world_size=4, **options)


ALL_RANKS: dict[str, Any] = {"topology": "complete"}
IN_PAIRS: dict[str, Any] = {"topology": "one-peer-exp"}
FLOAT32, INT8, INT4, INT3, INT2, TOP_K = (
    {"comm_dtype": each}
    for each in (torch.float32, torch.int8, torch.int4, torch.int3, torch.int2, TopKCodec())
)
METHODS: dict[str, Callable[[nn.Module, Recipe], Training]] = {
    "no communication": no_communication,
    "DDP": ddp,
    "DDP, buckets of 2 MiB": partial(ddp, bucket_cap_mb=2),
    "DDP, bf16 hook": partial(ddp, hook=bf16_compress_hook),
    "DDP, PowerSGD 1": power_sgd(1),
    "DDP, PowerSGD 4": power_sgd(4),
    "PostLocalSGD 8": partial(post_local_sgd, period=8),
    "decent-dp": decent_dp,
    "the wrapper": wrapper,
    "the wrapper, float32": partial(wrapper, **FLOAT32),
    "the wrapper, pairs, float32": partial(wrapper, **IN_PAIRS, **FLOAT32),
    "the wrapper, pairs, int8": partial(wrapper, **IN_PAIRS, **INT8),
    "the wrapper, pairs, int4": partial(wrapper, **IN_PAIRS, **INT4),
    "the wrapper, pairs, int3": partial(wrapper, **IN_PAIRS, **INT3),
    "the wrapper, int4": partial(wrapper, **INT4),
    "the wrapper, int2": partial(wrapper, **INT2),
    "the wrapper, pairs, int2": partial(wrapper, **IN_PAIRS, **INT2),
    "the wrapper, delayed": partial(wrapper, overlap=True, **INT4),
    "the wrapper without the model": partial(wrapper, known=False),
    "the wrapper without the model, int8": partial(wrapper, known=False, **INT8),
    "the wrapper, as it arrives": partial(wrapper, overlap=AsItArrives()),
    "the wrapper, as it arrives, int8": partial(wrapper, overlap=AsItArrives(), **INT8),
    "the module": module,
    "the module, int8": partial(module, **INT8),
    "the module, float32": partial(module, **FLOAT32),
    "the module, pairs, float32": partial(module, **IN_PAIRS, **FLOAT32),
    "the module, pairs, int8": partial(module, **IN_PAIRS, **INT8),
    "the module, pairs, int4": partial(module, **IN_PAIRS, **INT4),
    "the module, pairs, int3": partial(module, **IN_PAIRS, **INT3),
    "the module, int4": partial(module, **INT4),
    "the module, fours, int4": partial(fours, **INT4),
    "the module, fours, int3": partial(fours, **INT3),
    "the module, int2": partial(module, **INT2),
    "the module, pairs, int2": partial(module, **IN_PAIRS, **INT2),
    "the module, top-k": partial(module, **TOP_K),
}
# For links at which an all-reduce takes at least 8 times as long as computing.
FAR_METHODS: dict[str, Callable[[nn.Module, Recipe], Training]] = {
    # As many bytes as DiLoCo 30, in as many steps.
    "PostLocalSGD 30": partial(post_local_sgd, period=30),
    "the wrapper, pairs, delayed, top-k": partial(wrapper, overlap=True, **IN_PAIRS, **TOP_K),
    "the module, pairs, top-k": partial(module, **IN_PAIRS, **TOP_K),
    "the module, pairs, top-k 4": partial(module, **IN_PAIRS, comm_dtype=TopKCodec(4)),
    "the module, pairs, every 2 steps, top-k": partial(
        module, schedule=Schedule(gossip_every=2), **IN_PAIRS, **TOP_K
    ),
}
FAR_METHODS |= {
    f"the wrapper, {where}{k} steps late, {code}": partial(
        wrapper, schedule=Schedule(gossip_every=k), overlap=Late(k), **topology, **dtype
    )
    for where, topology in (("", ALL_RANKS), ("pairs, ", IN_PAIRS))
    for code, dtype in (("int4", INT4), ("top-k", TOP_K))
    for k in (2, 4, 8, 16)
}
FAR_METHODS |= {
    f"the wrapper, as it arrives, {code}": partial(wrapper, overlap=AsItArrives(), **dtype)
    for code, dtype in (("int4", INT4), ("top-k", TOP_K))
}
