"""The start: ranks that disagree say so on every rank, ranks that agree start from equal values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problem import TINY_CAP_MB, flatten, make_params, sgd
from ranks import run_threads
from torch import Tensor, nn
from warned import warned_texts

from decent_optim_wrapper import DecentOptimWrapper, Group, Topology, TopologyFactory


class Tilted(Topology):
    """Looks the same on every rank and is not."""

    weight = 0.5

    def assign_groups(self) -> list[list[Group]]:
        return [[Group([0, 1], self.weight)]] * 2


def messages(build: Callable[[int, dist.ProcessGroup], Any], world_size: int = 3) -> list[str]:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        with pytest.raises(ValueError, match="the ranks disagree") as caught:
            build(rank, group)
        return str(caught.value)

    return run_threads(world_size, main)


def wrap(params: list[Tensor], group: dist.ProcessGroup, **kw: Any) -> DecentOptimWrapper:
    kw.setdefault("bucket_cap_mb", TINY_CAP_MB)
    return DecentOptimWrapper(sgd(params), process_group=group, **kw)


def change_shape(params: list[Tensor]) -> list[Tensor]:
    params[2] = torch.zeros(6, 5, requires_grad=True, dtype=torch.float64)
    return params


def change_dtype(params: list[Tensor]) -> list[Tensor]:
    params[2] = torch.zeros(5, 6, requires_grad=True)
    return params


def freeze(params: list[Tensor]) -> list[Tensor]:
    params[2].requires_grad_(False)
    return params


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda params: params[:2], "nothing more"),
        (lambda params: [*params[:2], *params[3:]], "parameter 0.2: torch.float64 ()"),
        (lambda params: [*params[:2], params[3], params[2], params[4]], "parameter 0.2"),
        (change_shape, "parameter 0.2: torch.float64 (6, 5)"),
        (change_dtype, "parameter 0.2: torch.float32 (5, 6)"),
        (freeze, "parameter 0.2: torch.float64 (5, 6) on cpu, frozen"),
    ],
    ids=["count", "missing", "order", "shape", "dtype", "frozen"],
)
def test_every_rank_names_the_rank_and_parameter_that_differ(
    change: Callable[[list[Tensor]], list[Tensor]], words: str
) -> None:
    texts = messages(
        lambda rank, group: wrap(change(make_params()) if rank == 2 else make_params(), group)
    )
    for rank, text in enumerate(texts):
        assert "rank 2 has <" in text
        assert words in text
        assert "rank 0 has <parameter 0.2: torch.float64 (5, 6) on cpu>" in text
        assert f"seen on rank {rank}" in text


def test_names_given_to_the_optimizer_are_used() -> None:
    def build(rank: int, group: dist.ProcessGroup) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3 + rank))
        base = torch.optim.SGD(model.named_parameters())
        DecentOptimWrapper(base, process_group=group)

    assert all("parameter 1.weight: " in text for text in messages(build))


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"bucket_cap_mb": 2}, "bucket_cap_mb=2.0"),
        ({"overlap": False}, "overlap=False"),
        ({"topology": "ring"}, "topology Ring"),
        ({"topology": Tilted(2)}, "topology Tilted"),
        ({"sync_at_start": False}, "sync_at_start=False"),
        ({"buffers": [torch.zeros(2)]}, "buffer 0: torch.float32"),
    ],
)
def test_settings_that_differ_are_named(odd: dict[str, Any], words: str) -> None:
    def build(rank: int, group: dist.ProcessGroup) -> None:
        wrap(make_params(), group, **(odd if rank == 1 else {}))

    for text in messages(build, world_size=2):
        assert words in text
        assert "rank 1 has <" in text


def test_schedules_and_optimizers_that_differ_are_found() -> None:
    class Steeper(Tilted):
        weight = 0.7

    Steeper.__name__ = "Tilted"

    def build(rank: int, group: dist.ProcessGroup) -> None:
        wrap(make_params(), group, topology=(Steeper if rank else Tilted)(2))

    assert all("with schedule" in text for text in messages(build, world_size=2))

    def build_bases(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params()
        base = torch.optim.Adam(params) if rank else sgd(params)
        DecentOptimWrapper(base, process_group=group)

    assert all("rank 1 has <optimizer Adam>" in text for text in messages(build_bases, 2))


def test_a_mismatch_is_found_without_synchronising_and_when_a_group_is_added() -> None:
    def build(rank: int, group: dist.ProcessGroup) -> None:
        wrap(make_params()[: 3 + rank], group, sync_at_start=False)

    assert all("parameter 0.3" in text for text in messages(build, world_size=2))

    def add(rank: int, group: dist.ProcessGroup) -> None:
        optimizer = wrap(make_params(), group)
        optimizer.add_param_group({"params": make_params()[: 2 + rank]})

    assert all("parameter 1.2" in text for text in messages(add, world_size=2))


def test_parameters_and_buffers_of_every_dtype_come_from_rank_0() -> None:
    dtypes = [torch.float64, torch.bfloat16, torch.complex64]
    buffer_dtypes = [torch.float32, torch.int64, torch.bool]

    def make(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        params = [torch.full((3,), rank, dtype=dtype, requires_grad=True) for dtype in dtypes]
        params[0].requires_grad_(False)
        return params, [torch.full((2,), rank, dtype=dtype) for dtype in buffer_dtypes]

    def main(rank: int, group: dist.ProcessGroup) -> list[float]:
        values = []
        for sync in (True, False):
            params, buffers = make(rank)
            base = torch.optim.SGD(params, lr=0.1)
            DecentOptimWrapper(base, process_group=group, buffers=buffers, sync_at_start=sync)
            values.append(sum(t.detach().sum().abs().item() for t in params + buffers))
        return values

    rows = run_threads(2, main)
    assert [synced for synced, _ in rows] == [0, 0]
    assert [own for _, own in rows] == [0, 3 * 3 + 2 * 3]


def test_without_synchronising_the_ranks_keep_their_own() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(seed=rank)
        topology = TopologyFactory.create("ring", 2)
        wrap(params, group, sync_at_start=False, topology=topology)
        return flatten(params)

    for rank, row in enumerate(run_threads(2, main)):
        assert torch.equal(row, flatten(make_params(seed=rank)))


def lines_of_a_start(change: Callable[[int, list[Tensor]], object]) -> list[str]:
    """What is said of values that rank 0's have replaced, when every rank has built."""

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params()
        frozen = torch.full((3,), float("nan"))
        change(rank, params)
        wrap(params, group, buffers=[frozen])
        return flatten(params)

    with warned_texts() as lines:
        rows = run_threads(3, main)
    assert all(torch.equal(row, flatten(make_params())) for row in rows)
    return [line for line in lines if "have replaced others" in line]


def test_weights_that_one_rank_alone_has_loaded_are_warned_of_when_they_are_replaced() -> None:
    def load(rank: int, params: list[Tensor]) -> None:
        if rank == 2:
            for param in params[1:4]:
                param.data.add_(1)

    (line,) = lines_of_a_start(load)
    assert line.startswith(
        "the values of rank 0 have replaced others, tensors by rank: {2: 3} (of 6)"
    )


def test_nobody_is_warned_where_ranks_start_from_the_same_values() -> None:
    assert lines_of_a_start(lambda rank, params: None) == []
