"""Parameters that are views of the buckets: who notices that their values change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modules import fill
from problem import MODES, TINY_CAP_MB, backward, flatten, make_params, sgd
from ranks import run_threads
from torch import Tensor, nn, optim

from decent_optim_wrapper import DecentOptimWrapper


def wrap(params: list[Tensor], group: dist.ProcessGroup | None = None, **kw: Any) -> Any:
    kw.setdefault("bucket_cap_mb", TINY_CAP_MB)
    kw.setdefault("topology", "ring")
    return DecentOptimWrapper(kw.pop("base", None) or sgd(params), process_group=group, **kw)


def synchronize(optimizer: DecentOptimWrapper) -> None:
    optimizer.synchronize()


def keep_average(optimizer: DecentOptimWrapper) -> None:
    optimizer.global_avg(may_revert=False)


def put_average(optimizer: DecentOptimWrapper) -> None:
    optimizer.global_avg()


def average_and_revert(optimizer: DecentOptimWrapper) -> None:
    with optimizer.averaged():
        pass


def step_without_a_gradient(optimizer: DecentOptimWrapper) -> None:
    optimizer.zero_grad()
    optimizer.step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("topology", ["ring", "complete"])
@pytest.mark.parametrize(
    "write",
    [synchronize, keep_average, put_average, average_and_revert, step_without_a_gradient],
)
def test_a_backward_pass_notices_that_values_it_saved_were_mixed(
    write: Callable[[DecentOptimWrapper], None], topology: str, mode: str
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        fill(model, seed=rank)
        params = list(model.parameters())
        optimizer = wrap(
            params,
            group,
            topology=topology,
            base=optim.SGD(params, lr=0.1),
            sync_at_start=False,
            **MODES[mode],
        )
        assert len(optimizer._engine.gossip.buckets) > 1
        x = torch.ones(2, 4)
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
        loss = model(x).square().sum()
        before = flatten(params)
        write(optimizer)
        assert write is average_and_revert or not torch.equal(flatten(params), before)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        # What is computed after the writing is fine.
        if optimizer._engine.average.revertible:
            optimizer.revert_global_avg()
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.synchronize()

    run_threads(4, main)


@pytest.mark.parametrize("mode", MODES)
def test_averages_and_mixing_work_under_inference_mode(mode: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> bool:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, topology="ring", sync_at_start=False, **MODES[mode])
        before = flatten(params)
        for step in range(2):
            backward(params, rank, step)
            optimizer.step()
            with torch.inference_mode():
                optimizer.synchronize()
                with optimizer.averaged():
                    optimizer.consensus_distance()
        backward(params, rank, 2)
        optimizer.step()
        optimizer.synchronize()
        return torch.equal(flatten(params), before)

    assert run_threads(2, main) == [False, False]
