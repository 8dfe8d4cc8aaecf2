"""What does not fit a mesh: an error on every rank of it, and a correct wrapper can follow."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes import make_mesh, run_on_mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from decent_optim_wrapper import (
    DecentOptimWrapper,
    DecentralizedDataParallel,
    Elastic,
    Schedule,
)

# Two runs of the processes are for all tests here.
PARTS = 2
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("ranks_on_a_mesh"),
]

SIZES = {"pp": 2, "gossip": 2, "tp": 2}
RANKS = 8
# It has the last coordinate of every dimension: its error has the longest way.
ODD = 7
CAP_MB = 150 / 2**20
# Nothing waits for so long, unless a rank is not told.
TIMEOUT = 60.0


def plain(rows: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, 4, dtype=torch.float64).requires_grad_() for _ in range(3)]


def wrap(params: list[Tensor], **options: Any) -> DecentOptimWrapper:
    options = {"bucket_cap_mb": CAP_MB, "topology": "ring", "timeout": TIMEOUT, **options}
    return DecentOptimWrapper(torch.optim.SGD(params, lr=0.1), **options)


def on(mesh: DeviceMesh, **options: Any) -> DecentOptimWrapper:
    return wrap(options.pop("params", None) or plain(), mesh=mesh, gossip_dim="gossip", **options)


def placed(mesh: DeviceMesh, *placements: Any) -> list[Tensor]:
    return [nn.Parameter(distribute_tensor(p.detach(), mesh, placements)) for p in plain()]


def summed(mesh: DeviceMesh) -> list[Tensor]:
    parts = [DTensor.from_local(p.detach(), mesh, [Partial()]) for p in plain()]
    return [nn.Parameter(part) for part in parts]


def over(mesh: DeviceMesh, params: list[Tensor], **options: Any) -> DecentOptimWrapper:
    holder = nn.ParameterList(params)
    return on(mesh, params=params, **{"model": holder, **options})


def sharded(mesh: DeviceMesh, **options: Any) -> DecentOptimWrapper:
    """Tensors that are sharded along "tp"."""
    return over(mesh, placed(mesh["tp"], Shard(0)), **options)


def arranged(mesh: DeviceMesh, ranks: Tensor, *names: str) -> DeviceMesh:
    """The same ranks in another order."""
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names)


def inner(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks of a replica in one dimension."""
    ranks = mesh.mesh.movedim(1, 0).reshape(2, 4)
    return arranged(mesh, ranks, "gossip", "inner")["inner"]


def crossed(mesh: DeviceMesh) -> DeviceMesh:
    """Pairs along "tp", in which every second replica counts the other way round."""
    ranks = mesh.mesh.clone()
    ranks[:, 1] = ranks[:, 1].flip(-1)
    return arranged(mesh, ranks, *SIZES)["tp"]


def diagonal(mesh: DeviceMesh) -> DeviceMesh:
    """Pairs within a replica along no dimension of the mesh."""
    ranks = mesh.mesh.clone()
    ranks[1] = ranks[1].flip(-1)
    return arranged(mesh, ranks, *SIZES)["pp"]


def add(mesh: DeviceMesh, group: list[Tensor], held: list[Tensor]) -> None:
    """Add a group that is refused, after which the wrapper goes on without it."""
    params = plain()
    optimizer = over(mesh, params, model=nn.ParameterList([*params, *held]))
    before = optimizer.members, len(optimizer.buckets)
    try:
        optimizer.add_param_group({"params": group})
    finally:
        assert len(optimizer.param_groups) == 1
        assert (optimizer.members, len(optimizer.buckets)) == before
        optimizer.step()
        optimizer.synchronize()


def add_without_mesh(group: list[Tensor]) -> None:
    optimizer = wrap(plain())
    try:
        optimizer.add_param_group({"params": group})
    finally:
        assert len(optimizer.param_groups) == 1
        optimizer.step()
        optimizer.synchronize()


def add_on_one_rank(mesh: DeviceMesh, rank: int) -> None:
    tied = torch.zeros(4, 4, dtype=torch.float64)
    views = [tied.detach().requires_grad_(), tied.detach().requires_grad_()]
    add(mesh, views if rank == ODD else plain()[:2], [])


def add_shards(mesh: DeviceMesh) -> None:
    """Add the first shards: what is whole has copies from then on, and counts once."""
    whole = [nn.Parameter(param.detach()) for param in plain()]
    shards = placed(mesh["tp"], Shard(0))
    holder = nn.ParameterList([*whole, *shards])
    for param in holder:
        param.grad = torch.ones_like(param)
    optimizer = over(mesh, list[Tensor](whole), model=holder)
    stages = optimizer.clip_grad_norm_(1e9).item()
    optimizer.add_param_group({"params": shards})
    norm = optimizer.clip_grad_norm_(1e9).item()
    # 16 elements in each of 3 tensors, of two stages and two ranks that were taken for stages.
    assert stages == pytest.approx((3 * 16 * 4) ** 0.5)
    assert norm == pytest.approx((6 * 16 * 2) ** 0.5)
    optimizer.step()
    optimizer.synchronize()


Build = Callable[[DeviceMesh, int], object]

# What differs along "pp", the line of the one stage and that of the other.
DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "topology": ({"topology": "complete"}, "topology Complete"),
    "overlap": ({"overlap": False}, "overlap=False"),
    "gossip_every": ({"schedule": Schedule(gossip_every=2)}, "gossip_every=2"),
    "mixing_rate": ({"schedule": Schedule(mixing_rate=0.5)}, "mixing_rate=0.5"),
    "bucket_cap_mb": ({"bucket_cap_mb": 2 * CAP_MB}, "bucket_cap_mb="),
    "on_nonfinite": ({"on_nonfinite": "skip"}, "on_nonfinite='skip'"),
}


def differing(options: dict[str, Any]) -> Build:
    return lambda mesh, rank: on(mesh, **options if mesh.get_local_rank("pp") else {})


# What one rank passes, and its error.
ONE_RANK: dict[str, tuple[Callable[[DeviceMesh], dict[str, Any]], str, str]] = {
    "unknown topology": (lambda mesh: {"topology": "rign"}, "ValueError", "unknown topology"),
    "bad cap": (lambda mesh: {"bucket_cap_mb": "x"}, "TypeError", "bucket_cap_mb expects"),
    "bad elastic": (lambda mesh: {"elastic": 3}, "TypeError", "elastic expects"),
    "unknown dimension": (lambda mesh: {"gossip_dim": "dp"}, "ValueError", "gossip_dim expects"),
    "other dimension": (lambda mesh: {"gossip_dim": "tp"}, "ValueError", "gossip_dim="),
    "partial": (
        lambda mesh: {"params": summed(mesh["tp"]), "model": nn.Identity()},
        "ValueError",
        "model does not hold it",
    ),
    "other shapes": (lambda mesh: {"params": plain(rows=5)}, "ValueError", "the ranks disagree"),
}


def odd(make: Callable[[DeviceMesh], dict[str, Any]]) -> Build:
    def build(mesh: DeviceMesh, rank: int) -> object:
        options = make(mesh) if rank == ODD else {}
        options = {"gossip_dim": "gossip", "mesh": mesh, **options}
        return wrap(options.pop("params", None) or plain(), **options)

    return build


def module(mesh: DeviceMesh, **options: Any) -> DecentralizedDataParallel:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    for name, param in model.named_parameters():
        shard = nn.Parameter(distribute_tensor(param.detach(), mesh["tp"], [Shard(0)]))
        model.get_submodule(name.partition(".")[0]).register_parameter(name[2:], shard)
    options = {"mesh": mesh, "gossip_dim": "gossip", "bucket_size_in_mb": CAP_MB, **options}
    return DecentralizedDataParallel(
        model, lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), **options
    )


# The same on all ranks: the error of each, or nothing where it works.
ALL_RANKS: dict[str, tuple[Build, str, str]] = {
    "sharded over the gossip": (
        lambda mesh, rank: over(mesh, placed(mesh["gossip"], Shard(0))),
        *("ValueError", "replicas of their own on the ranks"),
    ),
    "replicated over the gossip": (
        lambda mesh, rank: over(mesh, placed(mesh["gossip", "tp"], Replicate(), Shard(0))),
        *("ValueError", "replicas of their own on the ranks"),
    ),
    "partial": (
        lambda mesh, rank: over(mesh, summed(mesh["tp"])),
        *("ValueError", "redistribute()"),
    ),
    "views": (
        lambda mesh, rank: sharded(mesh, param_as_bucket_view=True),
        *("ValueError", "pass param_as_bucket_view=False"),
    ),
    "elastic": (
        lambda mesh, rank: sharded(mesh, elastic=Elastic()),
        *("ValueError", "elastic expects replicas of one rank each"),
    ),
    "process group": (
        lambda mesh, rank: on(mesh, process_group=mesh.get_group("gossip")),
        *("ValueError", "mesh and process_group both say who gossips"),
    ),
    "unknown dimension": (
        lambda mesh, rank: wrap(plain(), mesh=mesh, gossip_dim="dp"),
        *("ValueError", "gossip_dim expects the dimension of the mesh"),
    ),
    "no dimension": (
        lambda mesh, rank: wrap(plain(), mesh=mesh),
        *("ValueError", "gossip_dim expects the dimension of the mesh"),
    ),
    "dimension of no mesh": (
        lambda mesh, rank: wrap(plain(), gossip_dim="gossip"),
        *("ValueError", "gossip_dim='gossip' expects a mesh"),
    ),
    "no mesh": (
        lambda mesh, rank: wrap(plain(), mesh="gossip", gossip_dim="gossip"),
        *("TypeError", "mesh expects a torch.distributed.DeviceMesh"),
    ),
    "no names": (
        lambda mesh, rank: wrap(plain(), mesh=DeviceMesh("cpu", mesh.mesh), gossip_dim="gossip"),
        *("ValueError", "init_device_mesh(mesh_dim_names=...)"),
    ),
    "no model": (
        lambda mesh, rank: sharded(mesh, model=None),
        *("ValueError", "there is no model"),
    ),
    "wrong model": (
        lambda mesh, rank: sharded(mesh, model="gpt"),
        *("TypeError", "model expects a torch.nn.Module"),
    ),
    "another model": (
        lambda mesh, rank: sharded(mesh, model=nn.Linear(2, 2)),
        *("ValueError", "model does not hold it"),
    ),
    "shards without a mesh": (
        lambda mesh, rank: wrap(placed(mesh["tp"], Shard(0))),
        *("TypeError", "pass mesh=, gossip_dim= and model="),
    ),
    "shards in a process group": (
        lambda mesh, rank: wrap(
            placed(mesh["tp"], Shard(0)), process_group=mesh.get_group("gossip")
        ),
        *("TypeError", "pass mesh=, gossip_dim= and model="),
    ),
    "part of the mesh": (
        lambda mesh, rank: over(mesh["gossip"], placed(mesh["tp"], Shard(0))),
        *("ValueError", "pass the whole mesh"),
    ),
    "shards across the dimensions": (
        lambda mesh, rank: over(mesh, placed(diagonal(mesh), Shard(0))),
        *("ValueError", "pass the whole mesh"),
    ),
    "shards in another order": (
        lambda mesh, rank: over(mesh, placed(crossed(mesh), Shard(0))),
        *("ValueError", "the ranks disagree"),
    ),
    "shards over two dimensions at once": (
        lambda mesh, rank: over(mesh, placed(inner(mesh), Shard(0))),
        *("", ""),
    ),
    "added shards": (lambda mesh, rank: add_shards(mesh), "", ""),
    "added shards that the model lacks": (
        lambda mesh, rank: add(mesh, placed(mesh["tp"], Shard(0)), []),
        *("ValueError", "model does not hold it"),
    ),
    "added parameters without a mesh": (
        lambda mesh, rank: add_without_mesh(placed(mesh["tp"], Shard(0))),
        *("TypeError", "pass mesh=, gossip_dim= and model="),
    ),
    "module with views": (
        lambda mesh, rank: module(mesh, param_as_bucket_view=True),
        *("ValueError", "pass param_as_bucket_view=False"),
    ),
    "module": (lambda mesh, rank: module(mesh), "", ""),
    "auto": (
        lambda mesh, rank: on(mesh, params=plain(), schedule=Schedule(gossip_every="auto")),
        *("ValueError", "expects a whole replica on every rank"),
    ),
    "stage in a process group": (
        lambda mesh, rank: wrap(plain(), process_group=mesh.get_group("gossip")),
        *("", ""),
    ),
}

ADDED = "overlapping parameters added"

CASES: dict[str, Build] = {
    f"{ADDED} on one rank": add_on_one_rank,
    **{f"{name} differs": differing(options) for name, (options, _) in DIFFERENT.items()},
    **{f"{name} on one rank": odd(make) for name, (make, _, _) in ONE_RANK.items()},
    **{f"{name} on all ranks": build for name, (build, _, _) in ALL_RANKS.items()},
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
    optimizer = on(mesh, params=params)
    for param in params:
        param.grad = torch.full_like(param, float(mesh.get_local_rank("gossip")))
    start = params[0].detach().clone()
    optimizer.step()
    optimizer.synchronize()
    # The mean of gradients 0 and 1, with a learning rate of 0.1.
    return len(optimizer.buckets) >= 2 and torch.allclose(params[0], start - 0.05, atol=1e-12)


def run_all(part: int) -> dict[str, tuple[str, str, bool]]:
    rank = dist.get_rank()
    mesh = make_mesh(tuple(SIZES.items()), None)
    cases = list(CASES.items())[part::PARTS]
    return {name: (*outcome(build, mesh, rank), moved(mesh)) for name, build in cases}


@cache
def outcomes(part: int) -> list[dict[str, tuple[str, str, bool]]]:
    return run_on_mesh(RANKS, run_all, part)


def of_case(name: str) -> list[tuple[str, str]]:
    """The errors by rank."""
    part = list(CASES).index(name) % PARTS
    found = [by_name[name] for by_name in outcomes(part)]
    assert all(moved for _, _, moved in found), "no correct wrapper could follow"
    return [(kind, text) for kind, text, _ in found]


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_between_stages_is_an_error_on_all_ranks(name: str) -> None:
    for kind, text in of_case(f"{name} differs"):
        assert kind == "ValueError"
        assert "the ranks disagree" in text
        assert DIFFERENT[name][1] in text


@pytest.mark.parametrize("name", ONE_RANK)
def test_the_error_of_one_rank_is_told_to_all_ranks_of_the_mesh(name: str) -> None:
    _, own_kind, own_text = ONE_RANK[name]
    for rank, (kind, text) in enumerate(of_case(f"{name} on one rank")):
        assert own_text in text
        if kind == "OtherRankError":
            assert rank != ODD
            assert f"rank {ODD} raised {own_kind}" in text or "the ranks disagree" in text
        else:
            # Ranks that disagree with the odd one notice it themselves.
            assert kind == own_kind
            assert rank == ODD or "the ranks disagree" in text


def test_what_one_rank_may_not_add_is_added_on_no_rank_of_the_mesh() -> None:
    for rank, (kind, text) in enumerate(of_case(f"{ADDED} on one rank")):
        assert kind == ("ValueError" if rank == ODD else "OtherRankError")
        assert "overlap" in text


@pytest.mark.parametrize("name", ALL_RANKS)
def test_what_does_not_fit_a_mesh_is_an_error_of_every_rank_itself(name: str) -> None:
    _, own_kind, own_text = ALL_RANKS[name]
    for kind, text in of_case(f"{name} on all ranks"):
        assert (kind, own_text in text) == (own_kind, True), text
