"""Averaging over the world, reverting it, and the distance to it."""

from __future__ import annotations

import gc
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import OVERLAP, named, pairwise
from problem import TINY_CAP_MB, backward, flatten, in_one_call, make_params, sgd, take_steps
from ranks import run_threads
from torch import Tensor

from decent_optim_wrapper import DecentOptimWrapper

TOPOLOGIES = ["ring", "complete"]


def wrap(params: list[Tensor], group: dist.ProcessGroup | None, **kw: Any) -> DecentOptimWrapper:
    kw.setdefault("bucket_cap_mb", TINY_CAP_MB)
    return DecentOptimWrapper(kw.pop("make", sgd)(params), process_group=group, **kw)


def trained(
    rank: int, group: dist.ProcessGroup | None, steps: int, **kw: Any
) -> tuple[list[Tensor], DecentOptimWrapper]:
    params = make_params()
    optimizer = wrap(params, group, **kw)
    take_steps(optimizer, params, rank, range(steps))
    return params, optimizer


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_rank_holds_the_exact_average(topology: str, steps: int) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params, optimizer = trained(rank, group, steps, topology=topology)
        if steps == 0:
            for param in params:
                param.data.add_(rank)
        own = flatten(params)
        optimizer.global_avg()
        return own, flatten(params)

    rows = run_threads(4, main)
    mean = torch.stack([own for own, _ in rows]).mean(dim=0)
    for own, averaged in rows:
        assert torch.equal(averaged, rows[0][1])
        torch.testing.assert_close(averaged, mean, rtol=1e-14, atol=1e-14)
        assert not torch.allclose(own, averaged)


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "overlap"), pairwise(named(*TOPOLOGIES), OVERLAP))
def test_evaluating_changes_nothing_in_the_training(topology: str, overlap: bool) -> None:
    def main(rank: int, group: dist.ProcessGroup, evaluating: bool) -> Tensor:
        params = make_params()
        halves = torch.full((3,), float(rank), dtype=torch.bfloat16)
        statistics = [torch.full((3,), float(rank)), torch.tensor(rank), halves]
        options = {"overlap": overlap, "buffers": statistics, "sync_at_start": False}
        optimizer = wrap(params, group, topology=topology, **options)
        for step in range(4):
            if evaluating:
                own = flatten(params)
                with optimizer.averaged():
                    agreed = step == 0 or (topology == "complete" and not overlap)
                    assert agreed or not torch.equal(flatten(params), own)
                    assert statistics[0].tolist() == halves.tolist() == [1.5] * 3
                    assert statistics[1].item() == rank, "integers are not averaged"
                assert torch.equal(flatten(params), own)
                assert statistics[0].tolist() == halves.tolist() == [rank] * 3
                optimizer.consensus_distance()
                optimizer.state_dict()
            backward(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        return flatten(params)

    evaluated, plain = (run_threads(4, partial(main, evaluating=each)) for each in (True, False))
    assert all(map(torch.equal, evaluated, plain))
    assert not torch.equal(plain[0], flatten(make_params()))


def test_what_is_reverted_is_what_was_there_before_the_first_average() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params, optimizer = trained(rank, group, 2, topology="ring")
        own = flatten(params)
        with optimizer.averaged():
            average = flatten(params)
            assert not torch.equal(average, own)
            with optimizer.averaged():
                assert torch.equal(flatten(params), average)
            assert torch.equal(flatten(params), average)
            assert optimizer.is_averaged
        assert torch.equal(flatten(params), own)
        with pytest.raises(ZeroDivisionError), optimizer.averaged():
            raise ZeroDivisionError
        assert not optimizer.is_averaged
        optimizer.global_avg()
        optimizer.global_avg()
        with pytest.raises(RuntimeError, match=f"rank {rank}: synchronize"):
            optimizer.synchronize()
        optimizer.revert_global_avg()
        assert torch.equal(flatten(params), own)
        with optimizer.averaged():
            optimizer.zero_grad()
            optimizer.step()
            assert not optimizer.is_averaged
        optimizer.synchronize()
        assert not torch.equal(flatten(params), own)
        before = flatten(params)
        with pytest.raises(RuntimeError, match=rf"rank {rank}: revert_global_avg.*call global_avg"):
            optimizer.revert_global_avg()
        optimizer.global_avg(may_revert=False)
        with pytest.raises(RuntimeError, match="call global_avg"):
            optimizer.revert_global_avg()
        assert torch.allclose(flatten(params), before)

    run_threads(2, main)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "overlap", "split", "may_revert"),
    pairwise(
        named(*TOPOLOGIES),
        OVERLAP,
        {"split": True, "whole": False},
        {"may_revert": True, "for_good": False},
    ),
)
def test_a_step_on_an_unreverted_average_keeps_it(
    topology: str, overlap: bool, split: bool, may_revert: bool
) -> None:
    make = sgd if split else lambda params: in_one_call(sgd(params))

    def main(rank: int, group: dist.ProcessGroup) -> None:
        params, optimizer = trained(rank, group, 3, topology=topology, overlap=overlap, make=make)
        if not may_revert:
            optimizer.global_avg(may_revert=True)
        optimizer.global_avg(may_revert)
        assert may_revert or not optimizer.state_dict()["gossip"]["in_flight"]
        average = flatten(params)
        optimizer.zero_grad()
        for group_ in optimizer.param_groups:
            group_.update(lr=0.0)
        for _ in range(2):
            optimizer.step()
            torch.testing.assert_close(flatten(params), average, rtol=1e-15, atol=1e-15)
        assert optimizer.round == 5
        assert optimizer.consensus_distance() < 1e-12
        with pytest.raises(RuntimeError, match="call global_avg"):
            optimizer.revert_global_avg()

    run_threads(4, main)


def test_frozen_parameters_that_differ_are_averaged_too() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> float:
        params = make_params()
        params[1].requires_grad_(False).fill_(rank)
        optimizer = wrap(params, group, sync_at_start=False)
        optimizer.global_avg()
        averaged = params[1].mean().item()
        optimizer.revert_global_avg()
        assert params[1].mean().item() == rank
        return averaged

    assert run_threads(2, main) == [0.5, 0.5]


@pytest.mark.slow
def test_the_snapshot_is_freed_by_revert_and_by_step() -> None:
    def tensors() -> list[Tensor]:
        gc.collect()
        return [t for t in gc.get_objects() if type(t) is Tensor and t.layout == torch.strided]

    def storage_bytes(tensors: list[Tensor]) -> dict[int, int]:
        storages = [tensor.untyped_storage() for tensor in tensors]
        return {storage.data_ptr(): storage.nbytes() for storage in storages}

    params = [torch.randn(300_000, requires_grad=True) for _ in range(2)]
    optimizer = DecentOptimWrapper(torch.optim.SGD(params, lr=0.1), bucket_cap_mb=1)
    size = sum(param.nbytes for param in params)
    # Kept, so that no tensor of an earlier test is freed meanwhile.
    before = tensors()

    def added() -> float:
        new = storage_bytes(tensors())
        return sum(new[pointer] for pointer in new.keys() - storage_bytes(before).keys()) / size

    for end in (optimizer.revert_global_avg, optimizer.step):
        optimizer.global_avg()
        assert 1.0 <= added() < 1.01
        end()
        assert added() < 0.01


def test_consensus_distance_is_the_root_mean_square_over_ranks() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, float]:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, sync_at_start=False)
        own = flatten(params)
        distance = optimizer.consensus_distance()
        assert torch.equal(flatten(params), own)
        return own, distance

    rows = run_threads(4, main)
    stacked = torch.stack([own for own, _ in rows])
    expected = math.sqrt((stacked - stacked.mean(dim=0)).square().sum().item() / 4)
    assert expected > 1
    assert [distance for _, distance in rows] == pytest.approx([expected] * 4, rel=1e-12)
