"""decent-dp 0.2.3 and this library, from the same start on the same data.

What decent-dp does, read from its source and checked here. Its iteration k (from 1 on) is the k-th
forward in training mode and the backward after it; x_k are the parameters after k updates, g_k is
the gradient of iteration k, always at x_(k-1), and W_p the mixing matrix of phase p mod the period.

- Iteration 1: the backward leaves g_1 and the order of the parameters. Nothing is updated.
- Iteration 2: the forward first makes the update of iteration 1, x_1 = x_0 - u(g_1), launches
  round 1 and waits for it. The backward mixes it, x_2 = W_1 x_1 - u(g_2), and launches round 3.
- Iteration k from 3 on: the backward mixes round k, x_k = W_k x_(k-1) - u(g_k), and launches
  round k + 1.

So decent-dp mixes the phases 1, 3, 4, 5, ... where this library mixes 0, 1, 2, 3, ...: it begins
with phase 1 and leaves out phase 2 once. That, by `InTheirOrder`, and the late first update are all
the allowance that is made here. From the second iteration on both are the same algorithm, and
everything is compared after every step.

Round 1 is launched with the self weight of phase 1 and mixed with that of phase 2. The topologies
here do not show it: every self weight is 1/m, for which the parameters' own factor,
w - (1 - w)/(m - 1), is 0 whatever m, or it is the same in all phases.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from decent_dp.ddp import DecentralizedDataParallel as DecentDP
from loguru import logger
from problem import flatten
from ranks import KeptRanks
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from decent_optim_wrapper import DecentOptimWrapper, Group, Topology, TopologyFactory
from decent_optim_wrapper.topo.base import REGISTRY

pytestmark = pytest.mark.slow

RANKS, STEPS = 4, 7
# Several buckets, of one and of several parameters, in both libraries and dtypes.
CAP_MB = 600 / 2**20

Rows = list[list[float]]


class Base(NamedTuple):
    """An optimizer, the dtype of what it trains, and the tolerance of comparisons."""

    optim_fn: Callable[..., Optimizer]
    dtype: torch.dtype
    tolerance: float


BASES = {
    "sgd": Base(partial(SGD, lr=0.05, momentum=0.9), torch.float64, 1e-12),
    "adam": Base(partial(Adam, lr=0.01, weight_decay=0.01), torch.float32, 1e-6),
}
# With the ranks of a node, and the rate: their adaptive factor, our mixing rate.
TOPOLOGIES = {
    "complete": (1, 1.0),
    "ring": (1, 0.6),
    "one-peer-exp": (1, 1.0),
    "alternating-exp-ring": (2, 1.0),
    "lazy-ring": (1, 1.0),
}
decaying = partial(ExponentialLR, gamma=0.9)


class InTheirOrder(Topology):
    """A topology with its phases in the order in which decent-dp mixes them in `STEPS` steps."""

    def __init__(self, inner: Topology) -> None:
        self._inner = inner
        super().__init__(inner.world_size, inner.local_world_size)

    def phases(self) -> list[tuple[Group, ...]]:
        return [self._inner.groups(round) for round in (1, *range(3, STEPS + 2))]


class Training(NamedTuple):
    """One library at work."""

    model: nn.Module
    # Takes the loss of a forward pass through `model`.
    update: Callable[[Tensor], None]
    average: Callable[[], object]
    buckets: Callable[[], int]


def decent_dp(model: nn.Module, base: Base, topology: str, rate: float) -> Training:
    network = DecentDP(model, base.optim_fn, decaying, topology, bucket_size_in_mb=CAP_MB)
    network.set_adaptive_factor(rate)
    average = partial(network.global_avg, will_revert=False)
    return Training(network, Tensor.backward, average, lambda: len(network._param_buckets))


def wrapper(model: nn.Module, base: Base, topology: Any, rate: float) -> Training:
    inner = base.optim_fn(list(model.named_parameters()))
    optimizer = DecentOptimWrapper(inner, topology=topology, bucket_cap_mb=CAP_MB, overlap=True)
    optimizer.mixing_rate = rate
    scheduler = decaying(optimizer)

    def update(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()

    average = partial(optimizer.global_avg, may_revert=False)
    return Training(model, update, average, lambda: len(optimizer.buckets))


def trajectory(build: Callable[..., Training], base: Base, topology: Any, rate: float) -> Rows:
    """Parameters at the start, after every step, and of the world average after the last step."""
    rank = dist.get_rank()
    # Both libraries start from what rank 0 has.
    torch.manual_seed(rank)
    layers = nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)
    model = nn.Sequential(*layers).to(base.dtype)
    training = build(model, base, topology, rate)
    data = torch.Generator().manual_seed(100 + rank)
    rows = [flatten(list(model.parameters()))]
    for _ in range(STEPS):
        batch = torch.randn(8, 9, generator=data).to(base.dtype)
        training.update((training.model(batch[:, :6]) - batch[:, 6:]).square().mean())
        rows.append(flatten(list(model.parameters())))
    assert 1 < training.buckets() < len(list(model.parameters()))
    training.average()
    rows.append(flatten(list(model.parameters())))
    return [row.tolist() for row in rows]


def train(name: str, base: str) -> list[Rows]:
    """On a rank: theirs, ours with their phases, and ours from the first phase on."""
    local, rate = TOPOLOGIES[name]
    become_a_rank_of_theirs()
    register_lazy_ring()
    topology = TopologyFactory.create(name, RANKS, local)
    assert 2 * topology.period < STEPS
    with patch.dict(os.environ, LOCAL_WORLD_SIZE=str(local)):
        theirs = trajectory(decent_dp, BASES[base], name, rate)
    shifted = trajectory(wrapper, BASES[base], InTheirOrder(topology), rate)
    return [theirs, shifted, trajectory(wrapper, BASES[base], topology, rate)]


def become_a_rank_of_theirs() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # decent-dp moves the model to a GPU that it sees.
    logger.disable("decent_dp")


# How an update is made does not depend on who mixes.
@pytest.mark.parametrize(("name", "base"), [*zip(TOPOLOGIES, cycle(BASES))])
def test_both_libraries_go_the_same_way(name: str, base: str, four_ranks: KeptRanks) -> None:
    results = torch.tensor(four_ranks.run(train, name, base), dtype=torch.float64)
    # Each of shape (ranks, STEPS + 2, number of parameters).
    theirs, found, plain = results.unbind(1)
    tolerance = BASES[base].tolerance
    beginning, after_first, average = theirs[:, 0], theirs[:, 1], theirs[:, -1]
    assert torch.equal(after_first, beginning), "they update at the second forward"
    assert torch.equal(average, average[:1].expand_as(average))
    moves = theirs[:, 1:-1].diff(dim=1)
    assert moves.abs().amax(-1).min() > 1e-3, "every rank moves in every step"
    apart = theirs[:, 2:-1] - theirs[:, 2:-1].mean(0)
    assert apart.abs().amax(-1).min() > 1e-3, "every rank has a model of its own"
    assert (found[:, 1] - beginning).abs().amax(-1).min() > 1e-3, "we update in step()"
    torch.testing.assert_close(found[:, 2:], theirs[:, 2:], rtol=0, atol=tolerance)
    if name == "complete":
        torch.testing.assert_close(plain[:, 2:], theirs[:, 2:], rtol=0, atol=tolerance)
    else:
        away = (plain - theirs)[:, 2:-1].abs().amax((0, 2))
        assert away.min() > 100 * tolerance, "the order of the phases shows"


GUIDE = Path(__file__).parent.parent / "examples" / "guides" / "module.md"


def code(title: str) -> str:
    """The block of the guide under that comment."""
    found = re.search(rf"<!-- {title} -->\n```python.*?\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None, title
    return found[1]


# What comes before the scripts of the guide, and their equals with decent-dp.
TRAINED = """
import torch
from torch import nn


def build_model():
    return nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 1))


def batches(rank, epoch):
    generator = torch.Generator().manual_seed(1000 * rank + epoch)
    for _ in range(10):
        inputs = torch.randn(32, 10, generator=generator)
        yield inputs, inputs.sum(dim=1, keepdim=True).sin()
"""
THEIR_SCRIPT = """
from functools import partial

import torch.distributed as dist
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.optim import lr_scheduler_fn_cosine_with_warmup, optim_fn_adamw
from decent_dp.utils import initialize_dist

rank, world_size = initialize_dist()
model = DecentralizedDataParallel(
    build_model(),
    optim_fn=partial(optim_fn_adamw, lr=0.01, weight_decay=0.0),
    lr_scheduler_fn=partial(lr_scheduler_fn_cosine_with_warmup, t_max=25, t_warmup=5),
    topology="complete",
    grad_clip_norm=1.0,
)
for epoch in range(3):
    model.train()
    for inputs, targets in batches(rank, epoch):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # updates and communicates
    model.global_avg()
    model.eval()  # validate here
    model.revert_global_avg()
model.global_avg(will_revert=False)
dist.destroy_process_group()
"""
THEIR_TOPOLOGY = """
from decent_dp.topo import Edge, Topology, TopologyReg


@TopologyReg.register("lazy-ring")
class LazyRing(Topology):
    def _get_topo_edges(self):
        n = self._world_size
        return [
            [Edge(ranks=[i, (i + 1) % n], weight=0.75) for i in range(start, n, 2)]
            for start in (0, 1)
        ]
"""


def register_lazy_ring() -> None:
    if "lazy-ring" not in REGISTRY:
        for topology in (THEIR_TOPOLOGY, code("a topology here")):
            exec(topology, {})


def run_scripts() -> Rows:
    """On a rank that has a process group."""
    become_a_rank_of_theirs()
    ends = []
    with patch.object(dist, "init_process_group"), patch.object(dist, "destroy_process_group"):
        for part in (THEIR_SCRIPT, code("the class"), code("the wrapper")):
            torch.manual_seed(dist.get_rank())
            script: dict[str, Any] = {}
            exec(TRAINED + part, script)
            ends.append(flatten(list(script["model"].parameters())).tolist())
    return ends


def test_the_scripts_of_the_guide_end_with_the_same_model(four_ranks: KeptRanks) -> None:
    theirs, *ours = torch.tensor(four_ranks.run(run_scripts)).unbind(1)
    assert torch.equal(theirs, theirs[:1].expand_as(theirs))
    for each in ours:
        torch.testing.assert_close(each, theirs, rtol=0, atol=1e-6)


def test_a_model_saved_by_decent_dp_is_loaded_as_the_guide_says() -> None:
    script: dict[str, Any] = {}
    exec(TRAINED, script)
    trained = script["build_model"]()
    holder = nn.Module()
    holder.add_module("_model", trained)  # As in DecentralizedDataParallel.
    script["saved"] = holder.state_dict()
    exec(code("a saved model"), script)
    for ours, theirs in zip(script["model"].parameters(), trained.parameters(), strict=True):
        assert torch.equal(ours, theirs)
