"""Outer optimizers and mixing rates where no oracle looks: averages, loads, NaN, and refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problem import backward, flatten, make_params, nesterov, sgd, take_steps, wrap
from ranks import run_threads
from torch import Tensor
from torch.optim import SGD, Optimizer

from decent_optim_wrapper import CallOrderError, DecentOptimWrapper, Schedule
from decent_optim_wrapper.optim import mixing_rate_from_lr


def test_an_average_that_is_kept_is_where_the_next_outer_step_starts() -> None:
    schedule = Schedule(gossip_every=2, outer=partial(SGD, lr=0.5))

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params()
        base = SGD(params, lr=0.0)
        optimizer = wrap(params, group, base, schedule=schedule, sync_at_start=False)
        with torch.no_grad():
            torch._foreach_add_(params, rank)
        optimizer.step()
        optimizer.global_avg(may_revert=False)
        for param in params:
            param.grad = torch.ones_like(param)
        for _ in range(4):
            optimizer.step()
        optimizer.synchronize()
        return flatten(params)

    # Were the anchors still those of before, the ranks would be pulled apart again.
    expected = flatten(make_params()) + 0.5
    for row in run_threads(2, main):
        torch.testing.assert_close(row, expected)


def test_a_state_without_an_outer_optimizer_can_be_synchronised_at_once() -> None:
    schedule = Schedule(outer=nesterov(0.5, 1.0))

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params()
        plain = wrap(params, group, topology="ring")
        take_steps(plain, params, rank, range(2))
        fresh = [param.detach().clone().requires_grad_() for param in params]
        optimizer = wrap(fresh, group, topology="ring", schedule=schedule, sync_at_start=False)
        optimizer.load_state_dict(plain.state_dict())
        before = flatten(fresh)
        plain.synchronize()
        optimizer.synchronize()
        # m = g = x - mixed: the outer step goes 1.5 times as far as the mixing.
        return flatten(fresh), before + 1.5 * (flatten(params) - before)

    for ours, expected in run_threads(2, main):
        torch.testing.assert_close(ours, expected)
        assert (ours - flatten(make_params())).abs().max() > 1e-2


def test_a_rate_that_differs_is_an_error_on_both_ranks() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params()
        optimizer = wrap(params, group)
        take_steps(optimizer, params, rank, [0])
        optimizer.mixing_rate = 1.0 if rank else 0.25
        take_steps(optimizer, params, rank, [1])
        with pytest.raises(CallOrderError, match="set the same rate on every rank") as raised:
            optimizer.step()
        return str(raised.value)

    texts = run_threads(2, main)
    own = ["mixing_rate=0.25, as here, but it has 1.0", "mixing_rate=1.0, as here, but it has 0.25"]
    # A rank that is closed by the other one before it has read the header quotes the other's text.
    assert all(any(text in each for text in own) for each in texts)
    assert own[0] in texts[0] or own[1] in texts[1]


def test_another_method_is_noticed_in_an_idle_round() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params()
        optimizer = wrap(params, group, schedule=Schedule(gossip_every=3), timeout=10)
        take_steps(optimizer, params, rank, range(1 if rank else 3))
        with pytest.raises(CallOrderError) as raised:
            (optimizer.global_avg if rank else optimizer.step)()
        return str(raised.value)

    texts = run_threads(2, main)
    assert "global_avg() at round 1" in texts[0]
    assert "step() at round 2" in texts[1]


@pytest.mark.parametrize(
    ("lr", "options", "rate"),
    [
        (0.1, {"lr_max": 0.1}, 1.0),
        (0.05, {"lr_max": 0.1}, 0.5),
        (0.05, {"lr_max": 0.1, "power": 2}, 0.25),
        (0.05, {"lr_max": 0.01}, 1.0),
        (0.0, {"lr_max": 0.1, "at_least": 0.02}, 0.02),
    ],
)
def test_the_rate_follows_the_learning_rate(
    lr: float, options: dict[str, Any], rate: float
) -> None:
    base = SGD(make_params(), lr=lr)
    assert mixing_rate_from_lr(base, **options) == pytest.approx(rate)
    optimizer = wrap(make_params(), schedule=Schedule(mixing_rate=0.5))
    optimizer.mixing_rate = rate
    assert optimizer.mixing_rate == rate


def rate_of_an_optimizer(**wrong: float) -> None:
    mixing_rate_from_lr(sgd(make_params()), **wrong)


def set_rate(rate: float) -> None:
    wrap(make_params()).mixing_rate = rate


def make_outer(outer: Any) -> DecentOptimWrapper:
    return wrap(make_params(), schedule=Schedule(outer=outer))


def an_optimizer_of_others(anchors: list[Tensor]) -> Optimizer:
    return sgd(make_params())


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (partial(rate_of_an_optimizer, lr_max=0.0), ValueError, "lr_max above 0"),
        (partial(set_rate, 2), ValueError, "at most 1"),
        (partial(make_outer, len), TypeError, "outer expects .* returned a int"),
        (partial(make_outer, an_optimizer_of_others), ValueError, "outer expects .* the tensors"),
        (partial(make_outer, partial(SGD, lr=-1.0)), ValueError, "Invalid learning rate"),
    ],
)
def test_wrong_rates_and_what_makes_no_outer_optimizer_are_refused(
    call: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call()


def test_what_is_not_finite_heals_under_outer_momentum_too() -> None:
    schedule = Schedule(outer=nesterov(0.5))

    def main(rank: int, group: dist.ProcessGroup) -> list[bool]:
        params = make_params()
        options: Any = {"schedule": schedule, "on_nonfinite": "skip", "topology": "ring"}
        optimizer = wrap(params, group, SGD(params, lr=0.01), **options)
        finite = []
        for step in range(8):
            backward(params, rank, step)
            for param in params:
                assert param.grad is not None
                param.grad.nan_to_num_()
                if step == 2 and rank < 2:
                    param.data.fill_(float("nan"))
            optimizer.step()
            finite.append(bool(flatten(params).isfinite().all()))
        optimizer.synchronize()
        return finite

    for rank, finite in enumerate(run_threads(4, main)):
        assert finite[:3] == [True, True, rank > 1]
        assert all(finite[-2:])


def test_an_exact_average_of_two_ranks_is_not_rounded() -> None:
    schedule = Schedule(global_avg_every=3)

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params()
        optimizer = wrap(params, group, schedule=schedule, comm_dtype=torch.bfloat16)
        take_steps(optimizer, params, rank, range(3))
        before = flatten(params)
        optimizer.synchronize()
        assert not torch.equal(flatten(params), before)
        return flatten(params)

    one, other = run_threads(2, main)
    assert torch.equal(one, other)
