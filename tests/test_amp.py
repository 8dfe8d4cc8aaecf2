"""GradScaler drives the wrapper as it drives the base, and an overflow keeps no rank waiting."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import modules
import pytest
import torch
import torch.distributed as dist
from covering import OVERLAP, named, pairwise
from dense import mix, train_densely
from modules import backward, flat, loss_of, wrap_base
from problem import MODES, flatten, make_params, wrap
from ranks import run_threads
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from decent_optim_wrapper import TopologyFactory

STEPS = 5
# The rank whose gradients overflow, and the step.
BAD = (1, 2)
KERNELS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "unfused": {},
}
# Unlike that of Adam its update depends on the scale of a gradient.
sgd = partial(torch.optim.SGD, lr=0.2, momentum=0.9)
make_model = partial(modules.make_model, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "norm", "mode", "overlap"),
    pairwise(KERNELS, {"as it is": 0.0, "clipped": 0.1}, named(*MODES), OVERLAP),
)
def test_gradients_are_unscaled_once_and_an_overflow_skips_one_ranks_local_update_only(
    kernel: dict[str, Any], norm: float, mode: str, overlap: bool
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, int, float]:
        model = make_model()
        options = {"topology": "ring", "overlap": overlap, **MODES[mode]}
        optimizer = wrap_base(model, group, partial(sgd, **kernel), **options)
        scaler = GradScaler("cpu", init_scale=1024.0)
        assert len(optimizer.buckets) >= 2
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(scaler.scale(loss_of(model, rank, step)))
            if (rank, step) == BAD:
                weight = model.get_parameter("0.weight")
                assert weight.grad is not None
                weight.grad[0, 0] = float("inf")
            if norm:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), norm)
            scaler.step(optimizer)
            assert optimizer.stats().skipped is ((rank, step) == BAD)
            scaler.update()
        optimizer.synchronize()
        assert not hasattr(optimizer.optimizer, "found_inf")
        return flat(model), optimizer.round, scaler.get_scale()

    results = run_threads(4, main)
    assert [rounds for _, rounds, _ in results] == [STEPS] * 4
    assert [scale for *_, scale in results] == [1024.0, 512.0, 1024.0, 1024.0]
    expected = train_without_scaler(norm, overlap)
    # Rounding to bfloat16 errs by 2^-9 of a parameter, once per round.
    tolerance = 1e-6 if "bf16" not in mode else STEPS * 2**-9
    rows = torch.stack([row for row, *_ in results])
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=tolerance)
    assert (rows - flat(make_model())).abs().max() > 0.05


@cache
def train_without_scaler(norm: float, overlap: bool) -> Tensor:
    """The ring of four; one rank makes no update in one step."""
    topology = TopologyFactory.create("ring", 4)
    models = [make_model() for _ in range(4)]
    worlds = [list(model.parameters()) for model in models]
    bases = [sgd(params) for params in worlds]

    def compute(rank: int, step: int) -> None:
        bases[rank].zero_grad()
        backward(loss_of(models[rank], rank, step))
        if norm:
            nn.utils.clip_grad_norm_(worlds[rank], norm)

    def update(rank: int, step: int) -> None:
        if (rank, step) != BAD:
            bases[rank].step()

    def land(step: int) -> None:
        mix(worlds, topology.mixing_matrix(step))

    return train_densely(worlds, STEPS, overlap, compute, update, land).to(torch.float32)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_rank_without_any_gradient_takes_part(kernel: dict[str, Any]) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(dtype=torch.float32)
        optimizer = wrap(params, group, torch.optim.SGD(params, lr=0.1, **kernel), topology="ring")
        unwrapped = torch.ones((), requires_grad=True)
        other = torch.optim.SGD([unwrapped], lr=0.1)
        scaler = GradScaler("cpu", init_scale=8.0)
        for _ in range(3):
            used = [unwrapped, *params] if rank == 0 else [unwrapped]
            backward(scaler.scale(torch.stack([each.sum() for each in used]).sum()))
            for each in (optimizer, other):
                scaler.step(each)
                each.zero_grad()
            assert not optimizer.stats().skipped
            scaler.update()
        optimizer.synchronize()
        return flatten(params) - flatten(make_params(dtype=torch.float32))

    assert run_threads(2, main)[1].abs().max() > 1e-2


def test_float16_gradients_are_refused_as_torch_refuses_them() -> None:
    param = torch.ones(3, dtype=torch.float16, requires_grad=True)
    optimizer = wrap([param], base=torch.optim.SGD([param], lr=0.1))
    scaler = GradScaler("cpu", init_scale=4.0)
    backward(scaler.scale(param.sum()))
    with pytest.raises(ValueError, match="float16"):
        scaler.step(optimizer)


def test_a_fused_update_counts_as_a_change_of_the_parameters() -> None:
    """Its kernels do not count it, and a graph that still needs the old values would not notice."""
    params = make_params(dtype=torch.float32)
    optimizer = wrap(params, base=torch.optim.SGD(params, lr=0.1, fused=True))
    assert len(optimizer.buckets) > 1
    backward(torch.stack([param.square().sum() for param in params]).sum())
    before, versions = flatten(params), [param._version for param in params]
    optimizer.step()
    assert not torch.equal(flatten(params), before)
    assert all(param._version > old for param, old in zip(params, versions, strict=True))
