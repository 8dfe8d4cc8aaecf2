"""What does not fit a mesh, and what fails in one shard: an error on every rank of it, and soon."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from meshes import CAP_MB, Layout, Replica, Spread, make_mesh, run_on_mesh, run_spread
from ranks import run_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from decent_optim_wrapper import (
    AsItArrives,
    DecentOptimWrapper,
    Elastic,
    NonFiniteError,
    PeerError,
    Schedule,
    StateAverage,
)
from decent_optim_wrapper.comm.process_groups import store_of
from decent_optim_wrapper.optim.shards import local

pytestmark = [
    pytest.mark.slow,
    # One run of the processes is for all tests here.
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("ranks_on_a_mesh"),
]

SIZES = {"pp": 2, "gossip": 2, "tp": 2}
# It has the last coordinate of every dimension: its error has the longest way.
ODD = 7


def plain() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 4, dtype=torch.float64).requires_grad_() for _ in range(3)]


def wrap(params: list[Tensor], **options: Any) -> DecentOptimWrapper:
    # Nothing waits for so long, unless a rank is not told.
    options = {"bucket_cap_mb": CAP_MB, "topology": "ring", "timeout": 60.0, **options}
    return DecentOptimWrapper(torch.optim.SGD(params, lr=0.1), **options)


def over(mesh: DeviceMesh, params: list[Tensor], **options: Any) -> DecentOptimWrapper:
    model = nn.ParameterList(params)
    return wrap(params, **{"mesh": mesh, "gossip_dim": "gossip", "model": model, **options})


def placed(mesh: DeviceMesh, *placements: Any) -> list[Tensor]:
    return [nn.Parameter(distribute_tensor(p.detach(), mesh, placements)) for p in plain()]


def shards(mesh: DeviceMesh) -> list[Tensor]:
    return placed(mesh["tp"], Shard(0))


def summed(mesh: DeviceMesh) -> list[Tensor]:
    parts = [DTensor.from_local(p.detach(), mesh["tp"], [Partial()]) for p in plain()]
    return [nn.Parameter(part) for part in parts]


def diagonal(mesh: DeviceMesh) -> list[Tensor]:
    """Shards over pairs within a replica along no dimension of the mesh."""
    ranks = mesh.mesh.clone()
    ranks[1] = ranks[1].flip(-1)
    other = DeviceMesh(mesh.device_type, ranks.movedim(0, 2), mesh_dim_names=("gossip", "tp", "pp"))
    return placed(other["pp"], Shard(0))


def add(optimizer: DecentOptimWrapper, group: list[Tensor]) -> None:
    """Add a group that is refused, after which the wrapper goes on without it."""
    before = optimizer.members, len(optimizer.buckets)
    try:
        optimizer.add_param_group({"params": group})
    finally:
        assert len(optimizer.param_groups) == 1
        assert (optimizer.members, len(optimizer.buckets)) == before
        optimizer.step()
        optimizer.synchronize()


def add_on_one_rank(mesh: DeviceMesh, rank: int) -> None:
    tied = torch.zeros(4, 4, dtype=torch.float64)
    views = [tied.detach().requires_grad_(), tied.detach().requires_grad_()]
    add(over(mesh, plain()), views if rank == ODD else plain()[:2])


def add_shards(mesh: DeviceMesh, rank: int) -> None:
    """Add the first shards: what is whole has copies from then on, and counts once."""
    whole, added = plain(), shards(mesh)
    holder = nn.ParameterList([*whole, *added])
    optimizer = over(mesh, whole, model=holder)
    for param in [*whole, *added]:
        param.grad = torch.ones_like(param)
    stages = optimizer.clip_grad_norm_(1e9).item()
    optimizer.add_param_group({"params": added})
    norm = optimizer.clip_grad_norm_(1e9).item()
    # 16 elements in each of 3 tensors, of two stages and two ranks that were taken for stages.
    assert stages == pytest.approx((3 * 16 * 4) ** 0.5)
    assert norm == pytest.approx((6 * 16 * 2) ** 0.5)
    optimizer.step()
    optimizer.synchronize()


Build = Callable[[DeviceMesh, int], object]


class Case(NamedTuple):
    """A wrapper that cannot be built, and the error of every rank, or of one of them."""

    build: Build
    text: str
    kind: str = "ValueError"
    one: bool = False


def using(**options: Any) -> Build:
    """A wrapper of shards."""
    return lambda mesh, rank: over(mesh, shards(mesh), **options)


def over_tensors(make: Callable[[DeviceMesh], list[Tensor]]) -> Build:
    return lambda mesh, rank: over(mesh, make(mesh))


def differing(**options: Any) -> Build:
    """Along "pp", from one stage to the other."""
    return lambda mesh, rank: over(mesh, plain(), **options if mesh.get_local_rank("pp") else {})


def odd(**options: Any) -> Build:
    return lambda mesh, rank: over(mesh, plain(), **options if rank == ODD else {})


def odd_sums(mesh: DeviceMesh, rank: int) -> object:
    return over(mesh, summed(mesh) if rank == ODD else plain(), model=nn.Identity())


CASES = {
    "rates differ": Case(
        differing(schedule=Schedule(mixing_rate=0.5)), r"the ranks disagree.*mixing_rate=0\.5"
    ),
    "bad cap on one rank": Case(
        odd(bucket_cap_mb="x"), "bucket_cap_mb expects", "TypeError", one=True
    ),
    "other dimension on one rank": Case(odd(gossip_dim="tp"), "gossip_dim=", one=True),
    "partial on one rank": Case(odd_sums, "model does not have it", one=True),
    "added on one rank": Case(add_on_one_rank, "overlap", one=True),
    "sharded over the gossip": Case(
        over_tensors(lambda mesh: placed(mesh["gossip"], Shard(0))),
        "replicas of their own on the ranks",
    ),
    "views": Case(using(param_as_bucket_view=True), "pass param_as_bucket_view=False"),
    "elastic": Case(using(elastic=Elastic()), "elastic expects replicas of one rank each"),
    "process group": Case(
        lambda mesh, rank: over(mesh, plain(), process_group=mesh.get_group("gossip")),
        "mesh and process_group both say who gossips",
    ),
    "no dimension": Case(using(gossip_dim=None), "gossip_dim expects the dimension of the mesh"),
    "no mesh": Case(
        lambda mesh, rank: wrap(plain(), mesh="gossip", gossip_dim="gossip"),
        r"mesh expects a torch\.distributed\.DeviceMesh",
        "TypeError",
    ),
    "no model": Case(using(model=None), "there is no model"),
    "another model": Case(using(model=nn.Linear(2, 2)), "model does not have it"),
    "shards without a mesh": Case(
        lambda mesh, rank: wrap(shards(mesh)), "pass mesh=, gossip_dim= and model=", "TypeError"
    ),
    "part of the mesh": Case(
        lambda mesh, rank: over(mesh["gossip"], shards(mesh)), "pass the whole mesh"
    ),
    "shards across the dimensions": Case(over_tensors(diagonal), "pass the whole mesh"),
    "added shards": Case(add_shards, "", ""),
    "added shards that the model lacks": Case(
        lambda mesh, rank: add(over(mesh, plain()), shards(mesh)), "model does not have it"
    ),
    "auto": Case(
        lambda mesh, rank: over(mesh, plain(), overlap=AsItArrives()),
        "expects a whole replica on every rank",
    ),
}


def outcome(build: Build, mesh: DeviceMesh, rank: int) -> tuple[str, str]:
    """The error of a case, if it has one."""
    try:
        build(mesh, rank)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def moved(mesh: DeviceMesh) -> bool:
    """Return whether a correct wrapper is built after it on the same groups, and gossips."""
    params = plain()
    optimizer = over(mesh, params)
    for param in params:
        param.grad = torch.full_like(param, float(mesh.get_local_rank("gossip")))
    start = params[0].detach().clone()
    optimizer.step()
    optimizer.synchronize()
    # The mean of gradients 0 and 1, with a learning rate of 0.1.
    return len(optimizer.buckets) >= 2 and torch.allclose(params[0], start - 0.05, atol=1e-12)


def run_all() -> dict[str, tuple[str, str]]:
    mesh, rank = make_mesh(tuple(SIZES.items()), None), dist.get_rank()
    outcomes = {}
    for name, case in CASES.items():
        outcomes[name] = outcome(case.build, mesh, rank)
        # Ranks that fail together stay in step.
        assert not case.one or moved(mesh), f"no correct wrapper could follow {name}"
    assert moved(mesh)
    return outcomes


def test_what_does_not_fit_a_mesh_is_an_error_on_every_rank() -> None:
    for rank, by_name in enumerate(run_on_mesh(8, run_all)):
        for name, (kind, text) in by_name.items():
            case = CASES[name]
            assert re.search(case.text, text, re.DOTALL), (name, text)
            if case.one and rank != ODD:
                # Ranks that disagree with the odd one notice it themselves.
                told = kind == "OtherRankError" and f"rank {ODD} raised {case.kind}" in text
                assert told or "the ranks disagree" in text, (name, text)
            else:
                assert kind == case.kind, (name, text)


LAYOUTS_OF_4 = {
    "fsdp": Layout({"gossip": 2, "fsdp": 2}),
    "tp": Layout({"tp": 2, "gossip": 2}),
    "pipeline": Layout({"gossip": 2, "pp": 2}),
}
FAILING = 3
# A rank that stops is noticed by nothing else. No other fault may take until the end of a wait,
# which comes after the time limit of the test.
TIMEOUT, NEVER = 4.0, 600.0


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def train(rank: int, name: str, fault: str) -> tuple[str, str]:
    """How a rank ends."""
    timeout = TIMEOUT if fault == "stopped" else NEVER
    dist.init_process_group("gloo")
    spread = Spread(LAYOUTS_OF_4[name], timeout=timedelta(seconds=timeout))
    optimizer = spread.wrap(sgd, timeout=timeout)
    assert len(optimizer.buckets) >= 2
    try:
        for step in range(6):
            spread.backward(step)
            if (rank, step) == (FAILING, 2):
                fail(spread, fault)
            optimizer.step()
        optimizer.synchronize()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def fail(spread: Spread, fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raises":
        raise ZeroDivisionError("of the user")
    with torch.no_grad():
        local(next(iter(spread.model.parameters()))).fill_(torch.nan)


# What becomes of one shard, the layout, and what all ranks end with.
FAULTS = [
    ("killed", "fsdp", "PeerError"),
    ("stopped", "pipeline", "PeerError"),
    ("raises", "tp", "ZeroDivisionError"),
    ("nan", "pipeline", "NonFiniteError"),
]


@pytest.mark.parametrize(("fault", "name", "error"), FAULTS)
def test_all_ranks_end_soon_where_one_fails_in_one_shard(fault: str, name: str, error: str) -> None:
    lost = [FAILING] if fault in ("killed", "stopped") else []
    found = run_processes(4, train, name, fault, lost=lost)
    assert all(kind for kind, _ in found)
    if lost:
        assert any(kind == error and "lost rank" in text for kind, text in found)
    else:
        assert found[FAILING][0] == error


def lose_on_the_way(rank: int) -> tuple[str, str]:
    """As `train`, where nobody ends before all have noticed: no connection closes by itself."""
    dist.init_process_group("gloo")
    spread = Spread(LAYOUTS_OF_4["pipeline"])
    optimizer = spread.wrap(sgd, timeout=NEVER)
    assert len(optimizer.buckets) >= 2
    calls = {"clip": lambda: optimizer.clip_grad_norm_(1.0), "step": optimizer.step}
    begun = []

    def advance() -> None:
        for step, call in product(range(4), calls):
            begun.append(call)
            if (rank, step, call) == (3, 1, "step"):
                os.kill(os.getpid(), signal.SIGKILL)
            for param in spread.model.parameters():
                param.grad = torch.ones_like(param)
            calls[call]()

    with pytest.raises(PeerError) as caught:
        advance()
    with pytest.raises(PeerError):
        optimizer.all_gather(torch.zeros(1))
    store: Any = store_of(dist.group.WORLD)
    store.set(f"ended {rank}", "")
    store.wait([f"ended {each}" for each in (0, 1, 2)], timedelta(seconds=60))
    return str(caught.value), begun[-1]


def test_a_loss_is_passed_on_along_other_dimensions() -> None:
    found = run_processes(4, lose_on_the_way, lost=[3])
    # Rank 0 meets the lost rank along no dimension.
    texts = [f"lost rank {rank}, which failed with PeerError" for rank in (1, 2, 3)]
    assert any(text in found[0][0] for text in texts)
    assert {call for _, call in found} == {"clip", "step"}


def average(spread: Replica, kind: str) -> tuple[str, set[float]]:
    """The error of an average of NaN, and the values of one that leaves NaN out."""
    for on_nonfinite in ("raise", "skip"):
        optimizer = spread.wrap(
            lambda params: torch.optim.SGD(params, lr=0.0, momentum=0.9),
            on_nonfinite=on_nonfinite,
            extensions=[StateAverage()],
        )
        spread.backward(0)
        optimizer.step()
        optimizer.synchronize()
        momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
        whole = momenta if kind == "momenta" else spread.model.parameters()
        shards_now = [local(each).detach() for each in whole]
        for tensor in shards_now:
            tensor.fill_(spread.replica)
        if dist.get_rank() == FAILING:
            shards_now[0].fill_(torch.nan)
        if on_nonfinite == "raise":
            with pytest.raises(NonFiniteError) as caught:
                optimizer.global_avg(may_revert=False)
    optimizer.global_avg(may_revert=False)
    return str(caught.value), set().union(*(tensor.flatten().tolist() for tensor in shards_now))


@pytest.mark.parametrize("kind", ["momenta", "parameters"])
def test_averages_leave_out_the_whole_replica_of_a_shard_with_nan(kind: str) -> None:
    for error, values in run_spread(Layout({"gossip": 4, "fsdp": 2}), average, kind):
        assert f"but ranks [{FAILING // 2}] have NaN" in error
        assert f"finite {kind}" in error
        assert values == {(0 + 2 + 3) / 3}
