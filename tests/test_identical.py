"""Ranks that stay the same although they train are warned of, and nobody else is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import OVERLAP, pairwise
from problem import MODES, TINY_CAP_MB, backward, flatten, make_params, take_steps
from ranks import run_processes, run_threads
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.codecs import CastCodec
from decent_optim_wrapper.extensions.identical_ranks import LONGEST_SEARCH, IdenticalRanks
from decent_optim_wrapper.gossip.schedule import RoundKind
from decent_optim_wrapper.wire.exchange import PlainPair

WORLDS = {name: (name, size) for name, size in (("ring", 4), ("complete", 3), ("greedy", 5))}
WIRES = {name: MODES[name] for name in ("copies", "bf16-views")}
WORDS = "the peers have sent the same values as this rank"


@contextmanager
def caught() -> Iterator[Callable[[], int]]:
    """The number of warnings so far; those of all threads."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        yield lambda: sum(WORDS in str(each.message) for each in record)


def train(
    rank: int,
    group: dist.ProcessGroup,
    data: Callable[[int], int],
    steps: int = 5,
    lr: Callable[[int], float] = lambda step: 0.05,
    **options: Any,
) -> Tensor:
    """Train on the data of rank `data(rank)`."""
    params = make_params(dtype=options.pop("dtype", torch.float32))
    base = torch.optim.SGD(params, lr=0.05)
    optimizer = DecentOptimWrapper(base, process_group=group, bucket_cap_mb=TINY_CAP_MB, **options)
    assert len(optimizer.buckets) >= 2
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr(step)
        backward(params, data(rank), step)
        optimizer.step()
    optimizer.synchronize()
    return flatten(params)


def same(rank: int) -> int:
    return 0


def own(rank: int) -> int:
    return rank


@pytest.mark.slow
@pytest.mark.parametrize(("world", "mode", "overlap"), pairwise(WORLDS, WIRES, OVERLAP))
def test_the_same_data_on_every_rank_is_warned_of_once(
    world: tuple[str, int], mode: dict[str, Any], overlap: bool
) -> None:
    topology, size = world
    options: dict[str, Any] = {"topology": topology, "overlap": overlap, **mode}
    with caught() as count:
        rows = run_threads(size, lambda rank, group: train(rank, group, same, **options))
        assert count() == 1
        for row in rows:
            torch.testing.assert_close(row, rows[0], rtol=1e-6, atol=0)
        assert not torch.equal(rows[0], flatten(make_params(dtype=torch.float32)))
        rows = run_threads(size, lambda rank, group: train(rank, group, own, **options))
        assert count() == 1, "ordinary training is not warned of"


def test_the_warning_comes_with_the_third_round() -> None:
    with caught() as count:
        run_threads(2, lambda rank, group: train(rank, group, same, steps=2, overlap=False))
        assert count() == 0
        run_threads(2, lambda rank, group: train(rank, group, same, steps=3, overlap=False))
        assert count() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_sums_of_many_ranks_do_not_hide_that_they_are_the_same(dtype: torch.dtype) -> None:
    with caught() as count:
        run_threads(7, lambda rank, group: train(rank, group, same, dtype=dtype))
    assert count() == 1


# A warm-up that starts at 0, of ranks with data of their own.
@pytest.mark.parametrize("start", [1, 30])
def test_parameters_that_do_not_change_are_no_reason_to_warn(start: int) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        return train(rank, group, own, start + 6, lambda step: 0.01 * (step >= start))

    with caught() as count:
        rows = run_threads(2, main)
    assert count() == 0
    assert not torch.equal(rows[0], flatten(make_params(dtype=torch.float32)))


@pytest.mark.parametrize("gradients", ["none", "zero"])
def test_steps_without_gradients_are_no_reason_to_warn(gradients: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params()
        optimizer = DecentOptimWrapper(
            torch.optim.SGD(params, lr=0.1), process_group=group, bucket_cap_mb=TINY_CAP_MB
        )
        for _ in range(6):
            for param in params:
                param.grad = torch.zeros_like(param) if gradients == "zero" else None
            optimizer.step()

    with caught() as count:
        run_threads(2, main)
    assert count() == 0


def test_updates_below_the_rounding_of_the_wire_are_no_reason_to_warn() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        # A reference would make the steps of the codes as small as the updates.
        codec = CastCodec(torch.bfloat16, uses_reference=False)
        return train(rank, group, own, lr=lambda step: 1e-6, comm_dtype=codec)

    with caught() as count:
        rows = run_threads(2, main)
    assert count() == 0
    assert not torch.equal(rows[0], rows[1])


def test_looking_ends_with_the_first_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    compare = PlainPair.compare

    def counted(exchange: PlainPair) -> tuple[Tensor, Tensor]:
        looks.append(1)
        return compare(exchange)

    monkeypatch.setattr(PlainPair, "compare", counted)
    run_threads(2, lambda rank, group: train(rank, group, own))
    assert len(looks) == 1
    looks.clear()
    run_threads(2, lambda rank, group: train(rank, group, own, 30, lambda step: 0.0))
    assert 0 < len(looks) <= 20 * 3


def test_looking_ends_where_there_is_nobody_to_compare_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds: list[int] = []
    end_round = IdenticalRanks.end_round

    def counted(extension: IdenticalRanks, kind: RoundKind) -> None:
        rounds.append(1)
        end_round(extension, kind)

    monkeypatch.setattr(IdenticalRanks, "end_round", counted)
    params = make_params()
    before = flatten(params)
    optimizer = DecentOptimWrapper(torch.optim.SGD(params, lr=0.1), bucket_cap_mb=TINY_CAP_MB)
    take_steps(optimizer, params, 0, range(LONGEST_SEARCH + 5))
    assert len(rounds) == LONGEST_SEARCH
    assert not torch.equal(flatten(params), before)


def train_under_ddp(rank: int, wraps: bool) -> tuple[int, list[float]]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    network: nn.Module = DistributedDataParallel(model) if wraps else model
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DecentOptimWrapper(base, topology="ring", bucket_cap_mb=TINY_CAP_MB)
    generator = torch.Generator().manual_seed(rank)
    with caught() as count:
        for _ in range(6):
            optimizer.zero_grad()
            network(torch.randn(8, 4, generator=generator)).square().mean().backward()
            optimizer.step()
        values = flatten(list(model.parameters())).tolist()
        optimizer.synchronize()
        warned = count()
    dist.destroy_process_group()
    return warned, list(values)


@pytest.mark.slow
@pytest.mark.parametrize("wraps", [True, False])
def test_ddp_left_around_the_model_is_warned_of_on_rank_0(wraps: bool) -> None:
    rows = run_processes(2, train_under_ddp, wraps)
    assert [warned for warned, _ in rows] == [int(wraps), 0]
    assert (rows[0][1] == rows[1][1]) == wraps
