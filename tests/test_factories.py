"""The functions that build optimizers and the learning-rate schedule."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from decent_dp.optim import lr_scheduler_fn_cosine_with_warmup as schedule_of_decent_dp
from problem import make_params
from torch import nn

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
    weights = {"fc.weight": (3, 2), "subnet.0.weight": (2, 2, 3, 3)}
    others = {
        "fc.bias": (3,),
        "scale": (),
        "layers.0.weight": (3,),
        "final_norm.weight": (4, 4),
        "layer1.bn2.weight": (1, 4, 1),
        "attention.relative_position_bias_table": (9, 2),
    }
    shapes = weights | others
    made = {name: torch.ones(shapes[name], requires_grad=True) for name in shapes}
    optimizer = optim_fn([*made.items()])
    assert type(optimizer) is kind
    groups = optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [decay, 0.0]
    for group, names in zip(groups, (weights, others), strict=True):
        assert [*map(id, group["params"])] == [id(made[name]) for name in names]
    (only,) = optim_fn([("fc.bias", made["fc.bias"])]).param_groups
    assert only["weight_decay"] == 0.0


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


def rates_of(schedule: Any, steps: int, lr: float = 0.1, resumes: bool = False) -> list[float]:
    """The rate of each step of a run that may be resumed after every step."""

    def make() -> torch.optim.Optimizer:
        return torch.optim.SGD(make_params(), lr=lr)

    optimizer = make()
    scheduler = schedule(optimizer)
    rates = [optimizer.param_groups[0]["lr"]]
    while len(rates) < steps:
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        if resumes:
            saved, optimizer = optimizer.state_dict(), make()
            optimizer.load_state_dict(saved)
            saved, scheduler = scheduler.state_dict(), schedule(optimizer)
            scheduler.load_state_dict(saved)
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
    assert rates_of(schedule, 16, resumes=True) == rates
    for t_max, t_warmup in ((0, 1), (1, -1)):
        with pytest.raises(ValueError, match="t_max >= 1"):
            rates_of(partial(schedule, t_max=t_max, t_warmup=t_warmup), 1)


def test_the_schedule_is_decent_dps_as_far_as_that_is_defined() -> None:
    for kwargs in ({"t_max": 20, "t_warmup": 5}, {"t_max": 7, "t_warmup": 3, "warmup_decay": 0.3}):
        steps = int(kwargs["t_max"] + kwargs["t_warmup"]) + 1
        ours, theirs = (
            rates_of(partial(each, **kwargs), steps)
            for each in (lr_scheduler_fn_cosine_with_warmup, schedule_of_decent_dp)
        )
        assert ours == pytest.approx(theirs, rel=1e-9)
