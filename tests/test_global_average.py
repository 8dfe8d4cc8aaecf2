"""Averaging over the world, and reverting it."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modules import Training, flat
from problem import flatten, make_params, take_steps, wrap
from ranks import run_threads
from torch import Tensor

from decent_optim_wrapper import AsItArrives, CallOrderError


@pytest.mark.parametrize("differs", [False, True])
def test_frozen_parameters_that_are_the_same_on_all_ranks_are_neither_sent_nor_rounded(
    differs: bool,
) -> None:
    """Among them the integers of a quantised base, whether or not they differ."""

    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params(seed=rank)
        frozen = [torch.full((7,), 0.1 + rank**2 * differs, dtype=torch.bfloat16)]
        frozen += [torch.linspace(0.1, 1, 99), torch.full((5,), rank, dtype=torch.uint8)]
        base = torch.optim.SGD([*params, *(torch.nn.Parameter(f, False) for f in frozen)], lr=0.1)
        optimizer = wrap(params, group, base, topology="complete", sync_at_start=False)
        own, kept = flatten(params), [f.clone() for f in frozen]
        with optimizer.averaged():
            assert not torch.equal(flatten(params), own)
            assert torch.equal(frozen[0], kept[0]) == (not differs)
            assert all(torch.equal(f, k) for f, k in zip(frozen[1:], kept[1:], strict=True))
        assert torch.equal(flatten([*params, *frozen]), torch.cat([own, flatten(kept)]))
        optimizer.step()

    run_threads(3, main)


class Counting(torch.nn.Module):
    """Replaces a buffer in every forward pass."""

    count: Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.register_buffer("count", torch.zeros(1))
        self.coarse = torch.nn.Buffer(torch.full((3,), float(rank), dtype=torch.bfloat16))
        self.number = torch.nn.Buffer(torch.tensor(rank))

    def forward(self, inputs: Tensor) -> Tensor:
        self.count = self.count + inputs.sum().detach()
        out: Tensor = self.layer(inputs)
        return out


def test_buffers_are_averaged_and_reverted_also_one_that_the_forward_pass_replaces() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = Counting(rank)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        options: Any = {"model": model, "sync_at_start": False}
        options["bucket_cap_mb"] = 1e-6
        optimizer = wrap([], group, base, **options)
        for own, mean in ((2 * rank + 1, 2), (4 * rank + 2, 4)):
            model(torch.full((1, 1), 2.0 * rank + 1)).sum().backward()
            optimizer.step()
            assert model.count.item() == own
            with optimizer.averaged():
                assert model.count.item() == mean
                assert model.coarse.tolist() == [0.5] * 3
                assert model.number.item() == rank, "an integer has no mean"
                model(torch.ones(1, 1))
                assert model.count.item() == mean + 1
            assert model.count.item() == own
            assert model.coarse.tolist() == [rank] * 3

    run_threads(2, main)


@pytest.mark.parametrize("overlap", [True, False, "forward"])
def test_a_step_inside_a_temporary_average_is_an_error_that_changes_nothing(overlap: Any) -> None:
    """Also in one that is nested, and that ends by an error. Afterwards training goes on."""

    def main(rank: int, group: dist.ProcessGroup, tries: bool) -> Tensor:
        training = Training(rank, group, overlap=overlap)
        model, optimizer = training.model, training.optimizer
        for step in range(4):
            training.train([step])
            with suppress(ZeroDivisionError), optimizer.averaged(), optimizer.averaged():
                average = flat(model)
                if tries:
                    with pytest.raises(CallOrderError, match=f"rank {rank}: step"):
                        optimizer.step()
                assert torch.equal(flat(model), average)
                assert optimizer.is_averaged
                if tries:
                    raise ZeroDivisionError
        optimizer.synchronize()
        return flat(model)

    disturbed, others = (run_threads(2, partial(main, tries=each)) for each in (True, False))
    assert all(map(torch.equal, disturbed, others))
    assert not torch.equal(disturbed[0], disturbed[1])


@pytest.mark.parametrize("views", [False, True])
def test_weights_that_were_swapped_in_and_out_around_an_average_are_not_overwritten(
    views: bool,
) -> None:
    """As by callbacks that run first in both of their hooks: swap, average, swap back, revert."""

    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params(dtype=torch.bfloat16)
        optimizer = wrap(params, group, topology="ring", param_as_bucket_view=views)
        take_steps(optimizer, params, rank, range(2))
        optimizer.synchronize()
        smooth = [param.detach() * 0.9 for param in params]

        def swap() -> None:
            for param, value in zip(params, smooth, strict=True):
                kept = param.detach().clone()
                param.data.copy_(value)
                value.copy_(kept)

        own = flatten(params)
        swap()
        optimizer.global_avg()
        average = flatten(params)
        swap()
        with pytest.raises(RuntimeError, match=rf"rank {rank}: revert_global_avg\(\) .* swap"):
            optimizer.revert_global_avg()
        assert torch.equal(flatten(params), own)
        swap()
        assert torch.equal(flatten(params), average)
        optimizer.revert_global_avg()
        swap()
        assert torch.equal(flatten(params), own)
        assert not torch.equal(average, own)

    run_threads(2, main)


@pytest.mark.parametrize("overlap", [True, AsItArrives()], ids=repr)
def test_an_average_that_could_not_be_kept_can_still_be_reverted(overlap: Any) -> None:
    """One rank looks at the distance where the other keeps the average."""

    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, topology="ring", overlap=overlap, sync_at_start=False)
        take_steps(optimizer, params, rank, range(2))
        optimizer.synchronize()
        with torch.no_grad():
            torch._foreach_add_(params, rank)
        own = flatten(params)
        optimizer.global_avg()
        assert not torch.equal(flatten(params), own)
        keep = partial(optimizer.global_avg, may_revert=False)
        with pytest.raises(CallOrderError, match=r"expected rank .* in (global|consensus)_"):
            (optimizer.consensus_distance if rank else keep)()
        optimizer.revert_global_avg()
        assert overlap is not True or torch.equal(flatten(params), own)

    run_threads(2, main)
