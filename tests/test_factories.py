"""The functions that build optimizers and the learning-rate schedule."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from decent_dp import optim as theirs
from problem import make_params
from torch import nn
from torch.optim import Optimizer

from decent_optim_wrapper.optim import (
    AccumAdam,
    AccumAdamW,
    lr_scheduler_fn_cosine_with_warmup,
    optim_fn_accum_adam,
    optim_fn_accum_adamw,
    optim_fn_adam,
    optim_fn_adamw,
)

FACTORIES = pytest.mark.parametrize(
    ("optim_fn", "kind", "decay"),
    [
        (optim_fn_adam, torch.optim.Adam, 1 / 32768),
        (optim_fn_adamw, torch.optim.AdamW, 0.1),
        (optim_fn_accum_adam, AccumAdam, 1 / 32768),
        (optim_fn_accum_adamw, AccumAdamW, 0.1),
    ],
)


@FACTORIES
def test_weights_decay_and_biases_and_norms_do_not(optim_fn: Any, kind: Any, decay: float) -> None:
    """decent-dp has it the other way round."""
    shapes = {
        "fc.weight": (3, 2),
        "subnet.0.weight": (2, 2, 3, 3),
        "fc.bias": (3,),
        "scale": (),
        "layers.0.weight": (3,),
        "final_norm.weight": (4, 4),
        "layer1.bn2.weight": (1, 4, 1),
        "attention.relative_position_bias_table": (9, 2),
    }
    params = {name: torch.zeros(shape, requires_grad=True) for name, shape in shapes.items()}
    optimizer = optim_fn(list(params.items()))
    assert type(optimizer) is kind
    decays = {
        name: group["weight_decay"]
        for name, param in params.items()
        for group in optimizer.param_groups
        if any(param is member for member in group["params"])
    }
    weights = ("fc.weight", "subnet.0.weight")
    assert decays == {name: decay if name in weights else 0.0 for name in shapes}


@FACTORIES
def test_partial_sets_what_a_factory_takes(optim_fn: Any, kind: Any, decay: float) -> None:
    named = list(nn.Linear(2, 2).named_parameters())
    wanted = {"lr": 0.5, "beta1": 0.1, "beta2": 0.2, "eps": 0.3, "weight_decay": 0.4}
    if issubclass(kind, AccumAdam):
        wanted["accum_iter"] = 7
        assert optim_fn(named).param_groups[0]["accum_iter"] == 4
    weights, biases = partial(optim_fn, **wanted)(named).param_groups
    for group in (weights, biases):
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.1, 0.2), 0.3)
        assert group.get("accum_iter") == wanted.get("accum_iter")
    assert (weights["weight_decay"], biases["weight_decay"]) == (0.4, 0.0)


def test_a_factory_makes_no_empty_group() -> None:
    (group,) = optim_fn_adamw([("fc.bias", torch.zeros(2, requires_grad=True))]).param_groups
    assert group["weight_decay"] == 0.0


def rates_of(schedule: Any, steps: int, lr: float = 0.1) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = schedule(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_the_schedule_warms_up_anneals_and_stays() -> None:
    schedule = partial(
        lr_scheduler_fn_cosine_with_warmup,
        t_max=8,
        t_warmup=4,
        cosine_eta_min=0.02,
        warmup_decay=0.2,
    )
    rates = rates_of(schedule, 16)
    half = [0.02 + 0.04 * (1 + math.cos(math.pi * i / 8)) for i in range(9)]
    assert rates == pytest.approx([0.02, 0.04, 0.06, 0.08, *half, 0.02, 0.02, 0.02])
    assert rates_of(partial(schedule, t_warmup=0), 9) == pytest.approx(half)
    assert rates_of(schedule, 16, lr=0.0) == [0.0] * 16


def test_the_schedule_is_decent_dps_as_far_as_that_is_defined() -> None:
    for kwargs in ({"t_max": 20, "t_warmup": 5}, {"t_max": 7, "t_warmup": 3, "warmup_decay": 0.3}):
        steps = sum(map(int, (kwargs["t_max"], kwargs["t_warmup"]))) + 1
        ours = rates_of(partial(lr_scheduler_fn_cosine_with_warmup, **kwargs), steps)
        assert ours == pytest.approx(
            rates_of(partial(theirs.lr_scheduler_fn_cosine_with_warmup, **kwargs), steps), rel=1e-9
        )


def test_a_resumed_schedule_continues() -> None:
    def start(lr: float) -> tuple[Optimizer, Any]:
        optimizer = optim_fn_adamw(list(nn.Linear(2, 2).named_parameters()), lr=lr)
        return optimizer, lr_scheduler_fn_cosine_with_warmup(optimizer, t_max=6, t_warmup=2)

    first, scheduler = start(0.1)
    for _ in range(5):
        first.step()
        scheduler.step()
    second = optim_fn_adamw(list(nn.Linear(2, 2).named_parameters()), lr=0.1)
    second.load_state_dict(first.state_dict())
    resumed = lr_scheduler_fn_cosine_with_warmup(second, t_max=6, t_warmup=2)
    resumed.load_state_dict(scheduler.state_dict())
    for optimizer, schedule in ((first, scheduler), (second, resumed)):
        optimizer.step()
        schedule.step()
    assert resumed.get_last_lr() == scheduler.get_last_lr()
    assert 0 < resumed.get_last_lr()[0] < 0.05


@pytest.mark.parametrize(("t_max", "t_warmup"), [(0, 1), (1, -1)])
def test_a_schedule_of_no_steps_is_refused(t_max: int, t_warmup: int) -> None:
    optimizer = torch.optim.SGD(make_params(), lr=0.1)
    with pytest.raises(ValueError, match="t_max >= 1"):
        lr_scheduler_fn_cosine_with_warmup(optimizer, t_max, t_warmup)
