"""FSDP2 within a replica: uneven shards, gathered parameters and steps in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from meshes import (
    STEPS,
    Layout,
    Oracle,
    Spread,
    difference,
    make_model,
    run_on_mesh,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.ddp import DecentralizedDataParallel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("ranks_on_a_mesh"),
]

EXACT = 1e-12
CLIP = 0.02
# By its own shards, each rank of a replica would fill its buckets otherwise.
CAP_MB = 130 / 2**20
REPLICAS = 2
# An odd width: the shards of two ranks have different sizes.
SHARDED = Layout({"gossip": REPLICAS, "fsdp": 2})
BLOCKS_ONLY = Layout({"gossip": REPLICAS, "fsdp": 2}, outermost=False)


def sgd(params: Sequence[Tensor]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def on_all(work: Callable[..., Any], *args: Any) -> list[Any]:
    return run_on_mesh(4, work, *args)


def module(spread: Spread, **options: Any) -> DecentralizedDataParallel:
    return DecentralizedDataParallel(
        spread.model,
        lambda named: sgd([param for _, param in named]),
        topology="ring",
        mesh=spread.mesh,
        gossip_dim="gossip",
        bucket_size_in_mb=CAP_MB,
        **options,
    )


class Trained(NamedTuple):
    """What a rank has after the training."""

    replica: int
    parameters: dict[str, Any]
    rounds: int
    buckets: list[list[str]]


def train(layout: Layout, keeps_gathered: bool, options: dict[str, Any]) -> Trained:
    spread = Spread(layout)
    model = module(spread, **options)
    if keeps_gathered:
        for part in spread.model.modules():
            if isinstance(part, FSDPModule):
                part.set_reshard_after_backward(False)
    for step in range(STEPS):
        spread.backward(step, through=model)
    model.optimizer.synchronize()
    return trained(spread, model.optimizer)


def trained(spread: Spread, optimizer: DecentOptimWrapper) -> Trained:
    names = {id(param): name for name, param in spread.model.named_parameters()}
    buckets = [[names[id(member)] for member in bucket.members] for bucket in optimizer.buckets]
    return Trained(spread.replica, spread.full(), optimizer.round, buckets)


def check(ranks: Sequence[Trained], expected: Oracle) -> None:
    start = dict(make_model().named_parameters())
    for rank in ranks:
        assert rank.rounds == STEPS
        assert len(rank.buckets) >= 2
        assert difference(rank.parameters, expected.parameters(rank.replica)) < EXACT
        assert difference(rank.parameters, start) > 1e-3


class ClippedByBucket(Oracle):
    """Clips the gradients of each bucket by their own norm."""

    buckets: Sequence[Sequence[str]] = ()

    def _compute(self, replica: int, step: int) -> None:
        super()._compute(replica, step)
        named = dict(self._models[replica].named_parameters())
        for bucket in self.buckets:
            norm = nn.utils.clip_grad_norm_([named[name] for name in bucket], CLIP)
            assert norm > CLIP


def test_buckets_of_uneven_shards_are_the_same_on_all_ranks_and_clipped_together() -> None:
    ranks = on_all(train, SHARDED, False, {"grad_clip_norm": CLIP})
    (first, *others) = [rank.buckets for rank in ranks]
    assert all(buckets == first for buckets in others)
    expected = ClippedByBucket(REPLICAS, sgd)
    expected.buckets = first
    check(ranks, expected.train())


@pytest.mark.parametrize("in_backward", [True, False])
def test_a_backward_pass_is_one_step_if_only_the_blocks_are_sharded(in_backward: bool) -> None:
    ranks = on_all(train, BLOCKS_ONLY, False, {"update_in_backward": in_backward})
    check(ranks, Oracle(REPLICAS, sgd).train())


@pytest.mark.parametrize("in_backward", [True, False])
def test_parameters_that_stay_gathered_after_a_backward_pass_are_gathered_again(
    in_backward: bool,
) -> None:
    ranks = on_all(train, SHARDED, True, {"update_in_backward": in_backward})
    check(ranks, Oracle(REPLICAS, sgd).train())


class Tracked(torch.optim.SGD):
    """A subclass, which is updated as a whole: without overlap it runs the closure itself."""


def step_with_closure(make: type[torch.optim.SGD], overlap: bool) -> Trained:
    # Each block keeps its parameters gathered after a forward pass without gradients.
    spread = Spread(BLOCKS_ONLY)
    optimizer = spread.wrap(lambda params: make(params, lr=0.1, momentum=0.9), overlap=overlap)

    def closure(step: int) -> float:
        spread.backward(step)
        with torch.no_grad():
            return spread.forward(step).sum().item()

    for step in range(STEPS):
        if step % 2:
            spread.backward(step)
            optimizer.step()
        else:
            optimizer.step(partial(closure, step))
    optimizer.synchronize()
    return trained(spread, optimizer)


@pytest.mark.parametrize("make", [torch.optim.SGD, Tracked])
@pytest.mark.parametrize("overlap", [True, False])
def test_what_a_closure_gathers_is_gathered_again_after_the_step(
    make: type[torch.optim.SGD], overlap: bool
) -> None:
    ranks = on_all(step_with_closure, make, overlap)
    expected = Oracle(REPLICAS, lambda params: make(params, lr=0.1, momentum=0.9))
    check(ranks, expected.train(overlap))
