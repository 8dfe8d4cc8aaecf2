"""What does not fit a mesh: an error on every rank of it, and a correct wrapper can follow."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from meshes import CAP_MB, make_mesh, run_on_mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from decent_optim_wrapper import AsItArrives, DecentOptimWrapper, Elastic, OuterOptimizer, Schedule

pytestmark = [
    pytest.mark.slow,
    # One run of the processes is for all tests here.
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("ranks_on_a_mesh"),
]

SIZES = {"pp": 2, "gossip": 2, "tp": 2}
# It has the last coordinate of every dimension: its error has the longest way.
ODD = 7


def plain(rows: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, 4, dtype=torch.float64).requires_grad_() for _ in range(3)]


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


def without_mesh(**options: Any) -> Build:
    return lambda mesh, rank: wrap(plain(), **options)


def holding(make: Callable[[DeviceMesh], list[Tensor]]) -> Build:
    return lambda mesh, rank: over(mesh, make(mesh))


def differing(**options: Any) -> Build:
    """Along "pp", from one stage to the other."""
    return lambda mesh, rank: over(mesh, plain(), **options if mesh.get_local_rank("pp") else {})


def odd(**options: Any) -> Build:
    return lambda mesh, rank: over(mesh, plain(), **options if rank == ODD else {})


def odd_params(make: Callable[[DeviceMesh], list[Tensor]]) -> Build:
    def build(mesh: DeviceMesh, rank: int) -> object:
        return over(mesh, make(mesh) if rank == ODD else plain(), model=nn.Identity())

    return build


NEEDS_MESH = "pass mesh=, gossip_dim= and model="
CASES = {
    "rates differ": Case(
        differing(schedule=Schedule(mixing_rate=0.5)), r"the ranks disagree.*mixing_rate=0\.5"
    ),
    "bad cap on one rank": Case(
        odd(bucket_cap_mb="x"), "bucket_cap_mb expects", "TypeError", one=True
    ),
    "unknown topology on one rank": Case(odd(topology="rign"), "unknown topology", one=True),
    "bad extension on one rank": Case(
        odd(extensions=[OuterOptimizer(cast(Any, len))]), "list of tensors", "TypeError", one=True
    ),
    "unknown dimension on one rank": Case(odd(gossip_dim="dp"), "gossip_dim expects", one=True),
    "other dimension on one rank": Case(odd(gossip_dim="tp"), "gossip_dim=", one=True),
    "partial on one rank": Case(odd_params(summed), "model does not hold it", one=True),
    "other shapes on one rank": Case(
        odd_params(lambda _: plain(rows=5)), "the ranks disagree", one=True
    ),
    "added on one rank": Case(add_on_one_rank, "overlap", one=True),
    "sharded over the gossip": Case(
        holding(lambda mesh: placed(mesh["gossip"], Shard(0))), "replicas of their own on the ranks"
    ),
    "replicated over the gossip": Case(
        holding(lambda mesh: placed(mesh["gossip", "tp"], Replicate(), Shard(0))),
        "replicas of their own on the ranks",
    ),
    "partial": Case(holding(summed), r"redistribute\(\)"),
    "views": Case(using(param_as_bucket_view=True), "pass param_as_bucket_view=False"),
    "elastic": Case(using(elastic=Elastic()), "elastic expects replicas of one rank each"),
    "process group": Case(
        lambda mesh, rank: over(mesh, plain(), process_group=mesh.get_group("gossip")),
        "mesh and process_group both say who gossips",
    ),
    "no dimension": Case(using(gossip_dim=None), "gossip_dim expects the dimension of the mesh"),
    "dimension of no mesh": Case(
        without_mesh(gossip_dim="gossip"), "gossip_dim='gossip' expects a mesh"
    ),
    "no mesh": Case(
        without_mesh(mesh="gossip", gossip_dim="gossip"),
        r"mesh expects a torch\.distributed\.DeviceMesh",
        "TypeError",
    ),
    "no names": Case(
        lambda mesh, rank: over(DeviceMesh("cpu", mesh.mesh), plain()),
        r"init_device_mesh\(mesh_dim_names=...\)",
    ),
    "no model": Case(using(model=None), "there is no model"),
    "wrong model": Case(using(model="gpt"), r"model expects a torch\.nn\.Module", "TypeError"),
    "another model": Case(using(model=nn.Linear(2, 2)), "model does not hold it"),
    "shards without a mesh": Case(lambda mesh, rank: wrap(shards(mesh)), NEEDS_MESH, "TypeError"),
    "part of the mesh": Case(
        lambda mesh, rank: over(mesh["gossip"], shards(mesh)), "pass the whole mesh"
    ),
    "shards across the dimensions": Case(holding(diagonal), "pass the whole mesh"),
    "added shards": Case(add_shards, "", ""),
    "added shards that the model lacks": Case(
        lambda mesh, rank: add(over(mesh, plain()), shards(mesh)), "model does not hold it"
    ),
    "added shards without a mesh": Case(
        lambda mesh, rank: add(wrap(plain()), shards(mesh)), NEEDS_MESH, "TypeError"
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
    """Whether a correct wrapper is built after it on the same groups, and gossips."""
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


@cache
def outcomes() -> list[dict[str, tuple[str, str]]]:
    return run_on_mesh(8, run_all)


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_a_mesh_is_an_error_on_every_rank(name: str) -> None:
    case = CASES[name]
    for rank, (kind, text) in enumerate(by_name[name] for by_name in outcomes()):
        assert re.search(case.text, text, re.DOTALL), text
        if case.one and rank != ODD:
            # Ranks that disagree with the odd one notice it themselves.
            told = kind == "OtherRankError" and f"rank {ODD} raised {case.kind}" in text
            assert told or "the ranks disagree" in text
        else:
            assert kind == case.kind
