"""Gossip on one dimension of a mesh: the trajectory is that of the unsharded model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from meshes import LAYOUTS, STEPS, Spread, difference, make_model, on_mesh, oracle
from ranks import run_processes
from torch import Tensor
from torch.optim import Optimizer

from decent_optim_wrapper.optim import QGSGD, AccumAdamW

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def sgd(params: Sequence[Tensor]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(params: Sequence[Tensor]) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def fused_adamw(params: Sequence[Tensor]) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1, fused=True)


def accum(params: Sequence[Tensor]) -> Optimizer:
    return AccumAdamW(params, lr=0.02, accum_iter=2)


def quasi_global(params: Sequence[Tensor]) -> Optimizer:
    return QGSGD(params, lr=0.1)


BASES = {each.__name__: each for each in (sgd, adamw, fused_adamw, accum, quasi_global)}


def train(name: str, base: str, overlap: bool) -> tuple[int, dict[str, Tensor]]:
    spread = Spread(LAYOUTS[name])
    optimizer = spread.wrap(BASES[base], overlap=overlap)
    assert len(optimizer.buckets) >= 2
    for step in range(STEPS):
        spread.backward(step)
        optimizer.step()
    optimizer.synchronize()
    return spread.replica, spread.full()


def train_all(cases: Sequence[tuple[str, str, bool]]) -> list[tuple[int, dict[str, Tensor]]]:
    return [train(*case) for case in cases]


def check(cases: Sequence[tuple[str, str, bool]]) -> None:
    start = dict(make_model().named_parameters())
    for results in run_processes(8, on_mesh, train_all, cases):
        for (name, base, overlap), (replica, found) in zip(cases, results, strict=True):
            expected = oracle(LAYOUTS[name].replicas, "ring", BASES[base], overlap)[replica]
            assert difference(found, expected) < 1e-12, (name, base, overlap)
            assert difference(found, start) > 1e-3


def test_sgd_follows_the_unsharded_oracle_in_every_layout() -> None:
    check([(name, "sgd", True) for name in LAYOUTS])
