"""QGSGD against its algorithm on dense matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import OVERLAP, pairwise
from dense import mix, train_densely
from problem import backward, flatten, make_params
from torch import Tensor

from decent_optim_wrapper import TopologyFactory
from decent_optim_wrapper.optim import QGSGD


def gradient(x: Tensor, rank: int) -> Tensor:
    return x - rank + x.sin()


def rate(step: int) -> float:
    return 0.2 / (1 + step)


RANKS, STEPS, BETA, MU, DECAY = 4, 9, 0.8, 0.7, 0.05


def quasi_global_by_matrices(matrices: list[Tensor], overlap: bool, nesterov: bool) -> Tensor:
    """All ranks at once, a row each: algorithm 1 of the paper, and with a delayed gradient.

    Returns:
        The rows after the last update, mixed.
    """
    at = torch.linspace(-1, 1, 3, dtype=torch.float64).repeat(RANKS, 1)
    model, momentum = at, torch.zeros_like(at)
    for step, matrix in enumerate(matrices):
        point = model if overlap else at
        grads = torch.stack([gradient(x, rank) for rank, x in enumerate(point)]) + DECAY * at
        local = BETA * momentum + grads
        update = grads + BETA * local if nesterov else local
        model = at - rate(step) * update
        after = matrix @ model
        momentum = MU * momentum + (1 - MU) * (at - after) / rate(step)
        at = after
    return at


@pytest.mark.parametrize(
    ("mixes", "overlap", "nesterov"),
    pairwise(
        # Alone it has a momentum of its own steps.
        {"ring": True, "alone": False},
        OVERLAP,
        {"nesterov": True, "heavy ball": False},
    ),
)
def test_qgsgd_follows_the_mixed_parameters(mixes: bool, overlap: bool, nesterov: bool) -> None:
    ring, alone = TopologyFactory.create("ring", RANKS), torch.eye(RANKS, dtype=torch.float64)
    matrices = [ring.mixing_matrix(step) if mixes else alone for step in range(STEPS)]
    start = torch.linspace(-1, 1, 3, dtype=torch.float64)
    params = [start.clone().requires_grad_() for _ in range(RANKS)]
    optimizers = [QGSGD([p], 0, BETA, MU, DECAY, nesterov=nesterov) for p in params]
    worlds = [[param] for param in params]

    def compute(rank: int, step: int) -> None:
        params[rank].grad = gradient(params[rank].detach(), rank)

    def update(rank: int, step: int) -> None:
        optimizers[rank].param_groups[0]["lr"] = rate(step)
        optimizers[rank].step()

    rows = train_densely(
        worlds, STEPS, overlap, compute, update, land=lambda step: mix(worlds, matrices[step])
    )
    expected = quasi_global_by_matrices(matrices, overlap, nesterov)
    torch.testing.assert_close(rows, expected, rtol=1e-12, atol=1e-13)
    assert (rows - start).abs().max() > 0.1
    assert (rows[0] - rows[2]).abs().max() > 1e-3


def test_steps_at_rate_zero_leave_no_trace_in_the_momentum() -> None:
    def run(pause: bool) -> Tensor:
        params = make_params()
        optimizer = QGSGD(params, lr=0.05)
        for step in range(4):
            backward(params, 0, step)
            # The momentum sees the third step only at the beginning of the next one.
            for lr in (0.0, 0.0, 0.05) if pause and step == 3 else (0.05,):
                optimizer.param_groups[0]["lr"] = lr
                optimizer.step()
        return flatten(params)

    assert torch.equal(run(pause=True), run(pause=False))


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"momentum": 1.0}, {"mu": -0.1}, {"weight_decay": -1.0}]
)
def test_qgsgd_refuses_numbers_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        QGSGD(make_params(), **wrong)
