"""decent-dp 0.2.3 and this library, from the same start on the same data.

What decent-dp does, read from its source and held here. Its iteration k (from 1 on) is the k-th
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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from decent_dp.ddp import DecentralizedDataParallel as DecentDP
from decent_dp.topo import TopologyReg
from loguru import logger
from problem import flatten, in_one_call
from ranks import run_processes
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from decent_optim_wrapper import DecentOptimWrapper, Group, Topology, TopologyFactory
from decent_optim_wrapper.ddp import DecentralizedDataParallel
from decent_optim_wrapper.topo.base import REGISTRY

pytestmark = pytest.mark.slow

STEPS = 9
# Several buckets, of one and of several parameters, in both libraries and dtypes.
CAP_MB = 600 / 2**20
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}

Named = Sequence[tuple[str, Tensor]]
Rows = list[list[float]]


def sgd(named: Named) -> Optimizer:
    return torch.optim.SGD([tensor for _, tensor in named], lr=0.05, momentum=0.9)


def adam(named: Named) -> Optimizer:
    return torch.optim.Adam([tensor for _, tensor in named], lr=0.01, weight_decay=0.01)


decaying = partial(ExponentialLR, gamma=0.9)


class InTheirOrder(Topology):
    """A topology with its phases in the order in which decent-dp mixes them in `STEPS` steps."""

    def __init__(self, inner: Topology) -> None:
        self._inner = inner
        super().__init__(inner.world_size, inner.local_world_size)

    def assign_groups(self) -> list[list[Group]]:
        rounds = (1, *range(3, STEPS + 2))
        ranks = range(self.world_size)
        return [[self._inner.group_of(rank, round) for round in rounds] for rank in ranks]


class Case(NamedTuple):
    """The model that both libraries train."""

    optim_fn: Callable[[Named], Optimizer]
    dtype: torch.dtype
    # Their adaptive factor, our mixing rate.
    rate: float
    # Of `OURS`, by their names.
    variants: Sequence[str]


def cases(rate: float, swapped: bool) -> list[Case]:
    """Two optimizers, each with one half of `OURS`, or with the other one where swapped."""
    halves = list(OURS)[::2], list(OURS)[1::2]
    one, other = halves[::-1] if swapped else halves
    return [Case(sgd, torch.float64, rate, one), Case(adam, torch.float32, rate, other)]


class Training(NamedTuple):
    """One library at work."""

    model: nn.Module
    # Takes the loss of a forward pass through `model`.
    update: Callable[[Tensor], None]
    average: Callable[[], None]


Build = Callable[[nn.Module, Case, Any], Training]


def decent_dp(model: nn.Module, case: Case, topology: str) -> Training:
    network = DecentDP(model, case.optim_fn, decaying, topology, bucket_size_in_mb=CAP_MB)
    network.set_adaptive_factor(case.rate)

    def average() -> None:
        assert 1 < len(network._param_buckets) < len(list(model.parameters()))
        network.global_avg(will_revert=False)

    return Training(network, Tensor.backward, average)


def wrapper(model: nn.Module, case: Case, topology: Any, whole: bool = False) -> Training:
    base = case.optim_fn(list(model.named_parameters()))
    if whole:
        in_one_call(base)
    optimizer = DecentOptimWrapper(base, topology=topology, bucket_cap_mb=CAP_MB, overlap=True)
    optimizer.mixing_rate = case.rate
    scheduler = decaying(optimizer)

    def update(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()

    def average() -> None:
        assert 1 < optimizer.stats().buckets < len(list(model.parameters()))
        optimizer.global_avg(may_revert=False)

    return Training(model, update, average)


def module(model: nn.Module, case: Case, topology: Any, **options: Any) -> Training:
    network = DecentralizedDataParallel(
        model, case.optim_fn, decaying, topology, bucket_size_in_mb=CAP_MB, overlap=True, **options
    )
    network.optimizer.mixing_rate = case.rate

    def average() -> None:
        assert 1 < network.optimizer.stats().buckets < len(list(model.parameters()))
        network.global_avg(will_revert=False)

    return Training(network, Tensor.backward, average)


OURS: dict[str, Build] = {
    "wrapper": wrapper,
    "wrapper that updates in one call": partial(wrapper, whole=True),
    "module": module,
    "module that updates at the end": partial(module, update_in_backward=False),
}


def make_model(rank: int, dtype: torch.dtype) -> nn.Module:
    """Different on every rank: both libraries start from what rank 0 has."""
    torch.manual_seed(rank)
    layers = nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)
    return nn.Sequential(*layers).to(dtype)


def trajectory(build: Build, case: Case, topology: Any) -> Rows:
    """Parameters at the start, after every step, and of the world average after the last step."""
    rank = dist.get_rank()
    training = build(make_model(rank, case.dtype), case, topology)
    data = torch.Generator().manual_seed(100 + rank)
    rows = [flatten(list(training.model.parameters()))]
    for _ in range(STEPS):
        batch = torch.randn(8, 9, generator=data).to(case.dtype)
        training.update((training.model(batch[:, :6]) - batch[:, 6:]).square().mean())
        rows.append(flatten(list(training.model.parameters())))
    training.average()
    rows.append(flatten(list(training.model.parameters())))
    return [row.tolist() for row in rows]


class Run(NamedTuple):
    """What became of one case on one rank."""

    theirs: Rows
    ours: dict[str, Rows]
    from_phase_zero: Rows


def train_cases(rank: int, name: str, rate: float, swapped: bool) -> list[Run]:
    quiet()
    dist.init_process_group("gloo")
    register_lazy_ring()
    topology = TopologyFactory.create(name, dist.get_world_size(), local_world_size())
    assert 2 * topology.period < STEPS
    shifted = InTheirOrder(topology)
    runs = [
        Run(
            trajectory(decent_dp, case, name),
            {which: trajectory(OURS[which], case, shifted) for which in case.variants},
            trajectory(wrapper, case, topology),
        )
        for case in cases(rate, swapped)
    ]
    dist.destroy_process_group()
    return runs


def quiet() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # decent-dp moves the model to a GPU that it sees.
    logger.disable("decent_dp")


def local_world_size() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])


@pytest.mark.parametrize(
    ("name", "world_size", "local", "rate", "swapped"),
    [
        ("complete", 4, 4, 1.0, False),
        ("ring", 4, 4, 0.6, False),
        ("one-peer-exp", 8, 8, 1.0, True),
        ("alternating-exp-ring", 8, 2, 1.0, False),
        ("lazy-ring", 4, 4, 1.0, True),
    ],
)
def test_both_libraries_go_the_same_way(
    name: str, world_size: int, local: int, rate: float, swapped: bool
) -> None:
    ranks = run_processes(world_size, train_cases, name, rate, swapped, local_world_size=local)
    for case, runs in zip(cases(rate, swapped), zip(*ranks, strict=True), strict=True):
        theirs = by_rank([run.theirs for run in runs])
        beginning, after_first, average = theirs[:, 0], theirs[:, 1], theirs[:, -1]
        assert torch.equal(after_first, beginning), "they update at the second forward"
        assert torch.equal(average, average[:1].expand_as(average))
        moves = theirs[:, 1:-1].diff(dim=1)
        assert moves.abs().amax(-1).min() > 1e-3, "every rank moves in every step"
        apart = theirs[:, 2:-1] - theirs[:, 2:-1].mean(0)
        assert apart.abs().amax(-1).min() > 1e-3, "every rank has a model of its own"
        for which in case.variants:
            ours = by_rank([run.ours[which] for run in runs])
            assert (ours[:, 1] - beginning).abs().amax(-1).min() > 1e-3, "we update in step()"
            same(ours, theirs, case, which)
        plain = by_rank([run.from_phase_zero for run in runs])
        if name == "complete":
            same(plain, theirs, case, "of one phase")
        else:
            away = (plain - theirs)[:, 2:-1].abs().amax((0, 2))
            assert away.min() > 100 * TOLERANCE[case.dtype], "the order of the phases shows"


def by_rank(rows: list[Rows]) -> Tensor:
    """Shape (world_size, STEPS + 2, number of parameters)."""
    return torch.tensor(rows, dtype=torch.float64)


def same(ours: Tensor, theirs: Tensor, case: Case, which: str) -> None:
    torch.testing.assert_close(
        ours[:, 2:],
        theirs[:, 2:],
        rtol=0,
        atol=TOLERANCE[case.dtype],
        msg=lambda text: f"{which}, {case}: {text}",
    )


@pytest.fixture
def registries() -> Iterator[None]:
    """What is registered in the test is gone after it."""
    pairs = [(kinds, dict(kinds)) for kinds in (REGISTRY, TopologyReg.registry)]
    yield
    for kinds, before in pairs:
        kinds.clear()
        kinds.update(before)


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize(
    ("name", "world_size", "local"),
    [
        ("complete", 5, 1),
        ("ring", 2, 1),
        ("ring", 10, 5),
        ("one-peer-exp", 32, 8),
        ("alternating-exp-ring", 12, 3),
        ("alternating-exp-ring", 32, 2),
        ("lazy-ring", 6, 1),
    ],
)
def test_a_name_stands_for_the_same_groups_and_weights_in_every_phase(
    name: str, world_size: int, local: int
) -> None:
    register_lazy_ring()
    theirs = their_edges(name, world_size, local)
    ours = TopologyFactory.create(name, world_size, local)
    assert ours.period == len(theirs)
    for phase, edges in enumerate(theirs):
        expected = {Group(edge.ranks, edge.weight) for edge in edges}
        assert set(ours.groups(phase)) == expected


def their_edges(name: str, world_size: int, local: int) -> Any:
    """Phase by phase, made without the process group that their constructor needs."""
    kind = TopologyReg.registry[name]
    topology = kind.__new__(kind)
    sizes = {"_world_size": world_size, "_local_world_size": local}
    vars(topology).update(sizes, _n_nodes=world_size // local)
    return topology._get_topo_edges()


GUIDE = Path(__file__).parent.parent / "examples" / "guides" / "from_decent_dp.md"


def code(title: str) -> str:
    """The block of the guide under that comment."""
    found = re.search(rf"<!-- {title} -->\n```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None, title
    return found[1]


def register_lazy_ring() -> None:
    for title in ("a topology in decent-dp", "a topology here"):
        exec(code(title), {})


def run_script(rank: int, title: str) -> list[float]:
    quiet()
    torch.manual_seed(rank)
    script: dict[str, Any] = {}
    exec(code("what is trained") + code(title), script)
    return flatten(list(script["model"].parameters())).tolist()


def test_the_scripts_of_the_guide_end_with_the_same_model() -> None:
    theirs, *_ = ranks = torch.tensor(run_processes(4, run_script, "decent-dp"))
    assert torch.equal(ranks, theirs.expand_as(ranks))
    for title in ("the class", "the wrapper"):
        ours = torch.tensor(run_processes(4, run_script, title))
        torch.testing.assert_close(ours, ranks, rtol=0, atol=1e-6)


def test_a_model_saved_by_decent_dp_is_loaded_as_the_guide_says() -> None:
    script: dict[str, Any] = {}
    exec(code("what is trained"), script)
    trained = script["build_model"]()
    holder = nn.Module()
    holder.add_module("_model", trained)  # As DecentralizedDataParallel holds it.
    script["saved"] = holder.state_dict()
    exec(code("a saved model"), script)
    for ours, theirs in zip(script["model"].parameters(), trained.parameters(), strict=True):
        assert torch.equal(ours, theirs)
