"""Gossip schedules and outer optimizers in float64 against dense matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from covering import OVERLAP, VIEWS, pairwise
from dense import due_matrix, mix, put, train_densely
from problem import (
    TINY_CAP_MB,
    MakeOptimizer,
    adamw,
    backward,
    flatten,
    in_one_call,
    make_params,
    nesterov,
    sgd,
    take_steps,
)
from ranks import run_threads
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer

from decent_optim_wrapper import (
    CallOrderError,
    DecentOptimWrapper,
    Schedule,
    Topology,
    TopologyFactory,
)
from decent_optim_wrapper.extensions.outer_optimizer import MakeOptimizer as MakeOuter
from decent_optim_wrapper.optim import mixing_rate_from_lr

STEPS = 10


# What an outer step makes of the anchors and of what has been mixed; it keeps a momentum, and knows
# the mixing matrix and the learning rate.
Rule = Callable[[dict[str, Tensor], Tensor, Tensor, float], Tensor]


class Plan(NamedTuple):
    """The schedule of the wrapper, in the terms of the oracle."""

    gossip_every: int = 1
    global_avg_every: int | None = None
    mixing_rate: Callable[[int], float] = lambda step: 1.0
    lr: Callable[[int], float] = lambda step: rate_at(step)
    outer: MakeOuter | None = None
    rule: Rule | None = None
    staleness: int = 1

    def schedule(self) -> Schedule:
        return Schedule(
            gossip_every=self.gossip_every,
            mixing_rate=self.mixing_rate(0),
            global_avg_every=self.global_avg_every,
            outer=self.outer,
            staleness=self.staleness,
        )


def rate_at(step: int) -> float:
    """A learning rate that changes, and is 0 for a while."""
    return 0.0 if step in (5, 6) else 0.05 * 0.9**step


def steady(step: int) -> float:
    return 0.04


def halving(step: int) -> float:
    return 0.5 ** (step // 4)


def slowmo(beta: float, alpha: float) -> Rule:
    """SlowMo (Wang et al., 2020): u <- β u + (x_0 - x̄) / η, x <- x_0 - α η u."""

    def rule(outer: dict[str, Tensor], mixed: Tensor, matrix: Tensor, lr: float) -> Tensor:
        outer["momentum"] = beta * outer["momentum"] + (outer["anchor"] - mixed) / lr
        return outer["anchor"] - alpha * lr * outer["momentum"]

    return rule


def diloco(momentum: float, lr: float) -> Rule:
    """DiLoCo (Douillard et al., 2023): Nesterov's m <- μ m + g, φ <- φ - η (g + μ m)."""

    def rule(outer: dict[str, Tensor], mixed: Tensor, matrix: Tensor, _: float) -> Tensor:
        away = outer["anchor"] - mixed
        outer["momentum"] = momentum * outer["momentum"] + away
        return outer["anchor"] - lr * (away + momentum * outer["momentum"])

    return rule


def noloco(alpha: float, beta: float) -> Rule:
    """NoLoCo (Kolehmainen et al., 2025) with γ = β, means being those of the pair.

    δ <- α δ + β mean(θ - φ) - γ (φ - mean(φ)), φ <- φ + δ.
    """

    def rule(outer: dict[str, Tensor], mixed: Tensor, matrix: Tensor, _: float) -> Tensor:
        mean = matrix @ outer["anchor"]
        moved, apart = mixed - mean, outer["anchor"] - mean
        outer["momentum"] = alpha * outer["momentum"] + beta * moved - beta * apart
        return outer["anchor"] + outer["momentum"]

    return rule


def adagrad(lr: float, start: float) -> Rule:
    """One whose state is there before its first step."""

    def rule(outer: dict[str, Tensor], mixed: Tensor, matrix: Tensor, _: float) -> Tensor:
        away = outer["anchor"] - mixed
        outer["momentum"] = outer["momentum"] + away.square()
        return outer["anchor"] - lr * away / ((start + outer["momentum"]).sqrt() + 1e-10)

    return rule


SLOWMO = Plan(
    global_avg_every=3,
    lr=steady,
    outer=partial(SGD, lr=1.0, momentum=0.6),
    rule=slowmo(beta=0.6, alpha=1.0),
)
NESTEROV = Plan(outer=nesterov(0.5), rule=diloco(0.5, 0.7))
OUTER = {
    "SlowMo": SLOWMO,
    "SlowMo, small steps": Plan(
        gossip_every=2,
        global_avg_every=4,
        lr=steady,
        outer=partial(SGD, lr=0.7, momentum=0.4),
        rule=slowmo(beta=0.4, alpha=0.7),
    ),
    "DiLoCo": Plan(
        gossip_every=100, global_avg_every=4, outer=nesterov(0.9), rule=diloco(0.9, 0.7)
    ),
    "NoLoCo": Plan(gossip_every=2, outer=partial(SGD, lr=0.7, momentum=0.5), rule=noloco(0.5, 0.7)),
    "Nesterov in every round": NESTEROV,
    "Nesterov and slower mixing": Plan(
        gossip_every=2, mixing_rate=halving, outer=nesterov(0.6, 0.8), rule=diloco(0.6, 0.8)
    ),
    "Adagrad": Plan(
        global_avg_every=3,
        outer=partial(Adagrad, lr=0.1, initial_accumulator_value=0.2),
        rule=adagrad(0.1, 0.2),
    ),
}
PLANS = {
    "slower mixing": Plan(mixing_rate=lambda step: 0.3),
    "mixing that slows down": Plan(mixing_rate=halving),
    "every third step": Plan(gossip_every=3),
    "an average every third step": Plan(global_avg_every=3),
    "both": Plan(gossip_every=2, global_avg_every=6, mixing_rate=halving),
    "averages only": Plan(gossip_every=100, global_avg_every=4),
    **OUTER,
}
# Their rounds travel under several steps.
LATE = {
    "every third step, as late": Plan(gossip_every=3, staleness=3),
    "every third step, a bit late": Plan(gossip_every=3, staleness=2, mixing_rate=halving),
    "late averages": Plan(gossip_every=2, global_avg_every=4, staleness=2),
    "late averages in between": Plan(gossip_every=4, global_avg_every=6, staleness=2),
    "late NoLoCo": Plan(
        gossip_every=2,
        outer=partial(SGD, lr=0.7, momentum=0.5),
        rule=noloco(0.5, 0.7),
        staleness=2,
    ),
    "late DiLoCo": Plan(
        gossip_every=100,
        global_avg_every=4,
        outer=nesterov(0.9),
        rule=diloco(0.9, 0.7),
        staleness=4,
    ),
}


PLAIN = Plan()
create = cache(TopologyFactory.create)


def adamw_in_one_call(params: Sequence[Tensor]) -> Optimizer:
    return in_one_call(adamw(params))


@cache
def simulate(
    topology: Topology, plan: Plan, overlap: bool, make_optimizer: MakeOptimizer, steps: int = STEPS
) -> Tensor:
    """Train all ranks in one place; float64 of shape (world_size, number of parameters)."""
    worlds = [make_params() for _ in range(topology.world_size)]
    bases = [make_optimizer(params) for params in worlds]
    start = torch.stack([flatten(params) for params in worlds])
    outer = {"anchor": start, "momentum": torch.zeros_like(start)}

    def land(step: int) -> None:
        matrix, kind = due(topology, plan, step)
        mix(worlds, matrix)
        due_at = "gossip" if plan.global_avg_every is None else "average"
        if plan.rule is not None and kind == due_at:
            lr = plan.lr(min(step + overlap, steps - 1))
            after = torch.stack([flatten(params) for params in worlds])
            outer["anchor"] = plan.rule(outer, after, matrix, lr)
            put(worlds, outer["anchor"])

    def update(rank: int, step: int) -> None:
        bases[rank].param_groups[0]["lr"] = plan.lr(step)
        bases[rank].step()

    return train_densely(
        worlds,
        steps,
        overlap,
        compute=lambda rank, step: backward(worlds[rank], rank, step),
        update=update,
        land=land,
        staleness=plan.staleness,
    )


def due(topology: Topology, plan: Plan, step: int) -> tuple[Tensor, str]:
    every, rate = (plan.gossip_every, plan.global_avg_every), plan.mixing_rate(step)
    matrix = due_matrix(topology, *every, rate, step)
    if plan.global_avg_every and (step + 1) % plan.global_avg_every == 0:
        return matrix, "average"
    return matrix, "idle" if (step + 1) % plan.gossip_every else "gossip"


def wrap(
    base: Optimizer,
    group: dist.ProcessGroup | None,
    topology: Topology | str,
    plan: Plan,
    **options: Any,
) -> DecentOptimWrapper:
    return DecentOptimWrapper(
        base,
        topology=topology,
        bucket_cap_mb=TINY_CAP_MB,
        process_group=group,
        schedule=plan.schedule(),
        **options,
    )


def advance(
    optimizer: DecentOptimWrapper, params: list[Tensor], rank: int, step: int, plan: Plan
) -> None:
    backward(params, rank, step)
    optimizer.param_groups[0]["lr"] = plan.lr(step)
    if plan.mixing_rate(step) != optimizer.mixing_rate:
        optimizer.mixing_rate = plan.mixing_rate(step)
    optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "topology", "make_optimizer", "overlap", "views"),
    pairwise(
        PLANS | LATE,
        {"ring": ("ring", 4), "greedy": ("greedy", 5)},
        {"sgd": sgd, "adamw in one call": adamw_in_one_call},
        OVERLAP,
        VIEWS,
    ),
)
def test_follows_the_oracle(
    plan: Plan,
    topology: tuple[str, int],
    make_optimizer: MakeOptimizer,
    overlap: bool,
    views: bool,
) -> None:
    overlap, mixed = overlap or plan.staleness > 1, create(*topology)

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params()
        options = {"overlap": overlap, "param_as_bucket_view": views}
        optimizer = wrap(make_optimizer(params), group, mixed, plan, **options)
        for step in range(STEPS):
            advance(optimizer, params, rank, step, plan)
        optimizer.synchronize()
        return flatten(params)

    rows = run_threads(mixed.world_size, main)
    expected = simulate(mixed, plan, overlap, make_optimizer)
    torch.testing.assert_close(torch.stack(rows), expected, rtol=1e-11, atol=1e-11)
    plain = simulate(mixed, PLAIN, overlap, make_optimizer)
    assert (plain - expected).abs().max() > 1e-4, "the schedule made no difference"


def test_an_average_that_is_kept_is_where_the_next_outer_step_starts() -> None:
    plan = Plan(gossip_every=2, outer=partial(SGD, lr=0.5))

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params()
        optimizer = wrap(SGD(params, lr=0.0), group, "complete", plan, sync_at_start=False)
        with torch.no_grad():
            for param in params:
                param.add_(rank)
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
    plan = Plan(outer=nesterov(0.5, 1.0))

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params()
        plain = wrap(sgd(params), group, "ring", Plan())
        for step in range(2):
            advance(plain, params, rank, step, Plan())
        fresh = [param.detach().clone().requires_grad_() for param in params]
        optimizer = wrap(sgd(fresh), group, "ring", plan, sync_at_start=False)
        optimizer.load_state_dict(plain.state_dict())
        before = flatten(fresh)
        plain.synchronize()
        optimizer.synchronize()
        # m = g = x - mixed: the outer step goes 1.5 times as far as the mixing.
        return flatten(fresh), before + 1.5 * (flatten(params) - before)

    for ours, expected in run_threads(2, main):
        torch.testing.assert_close(ours, expected)
        assert (ours - flatten(make_params())).abs().max() > 1e-2


def test_idle_rounds_send_nothing() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> list[int]:
        params = make_params()
        optimizer = wrap(sgd(params), group, "ring", Plan(gossip_every=3, global_avg_every=6))
        sent = []
        for step in range(6):
            backward(params, rank, step)
            optimizer.step()
            sent.append(optimizer.stats().bytes_sent)
        assert optimizer.round == 6
        optimizer.synchronize()
        return sent

    copy_bytes = 8 * flatten(make_params()).numel()
    # As by a ring of 4, in whole bytes bucket by bucket: 2 * 3 / 4 copies.
    for sent in run_threads(4, main):
        assert sent[:5] == [0, 0, copy_bytes, 0, 0]
        assert sent[5] == pytest.approx(1.5 * copy_bytes, abs=8)


def test_a_rate_that_differs_is_an_error_on_both_ranks() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params()
        optimizer = wrap(sgd(params), group, "complete", Plan())
        backward(params, rank, 0)
        optimizer.step()
        optimizer.mixing_rate = 1.0 if rank else 0.25
        backward(params, rank, 1)
        optimizer.step()
        with pytest.raises(CallOrderError, match="set the same rate on every rank") as raised:
            optimizer.step()
        return str(raised.value)

    texts = run_threads(2, main)
    own = ["mixing_rate=0.25, as here, but it has 1.0", "mixing_rate=1.0, as here, but it has 0.25"]
    # A rank that is closed by the other one before it has read the header quotes the other's text.
    assert any(text in texts[0] for text in own)
    assert any(text in texts[1] for text in own)
    assert own[0] in texts[0] or own[1] in texts[1]


def test_another_method_is_noticed_in_an_idle_round() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params()
        optimizer = wrap(sgd(params), group, "complete", Plan(gossip_every=3), timeout=10)
        backward(params, rank, 0)
        optimizer.step()
        if rank == 0:
            optimizer.step()
            optimizer.step()
        with pytest.raises(CallOrderError) as raised:
            (optimizer.global_avg if rank else optimizer.step)()
        return str(raised.value)

    texts = run_threads(2, main)
    assert "global_avg() at round 1" in texts[0]
    assert "step() at round 2" in texts[1]


def test_the_rate_follows_the_learning_rate() -> None:
    optimizer = SGD(make_params(), lr=0.1)
    assert mixing_rate_from_lr(optimizer, lr_max=0.1) == 1.0
    optimizer.param_groups[0]["lr"] = 0.05
    assert mixing_rate_from_lr(optimizer, lr_max=0.1) == pytest.approx(0.5)
    assert mixing_rate_from_lr(optimizer, lr_max=0.1, power=2) == pytest.approx(0.25)
    assert mixing_rate_from_lr(optimizer, lr_max=0.01) == 1.0
    optimizer.param_groups[0]["lr"] = 0.0
    assert mixing_rate_from_lr(optimizer, lr_max=0.1, at_least=0.02) == 0.02
    with pytest.raises(ValueError, match="lr_max above 0"):
        mixing_rate_from_lr(optimizer, lr_max=0.0)


def an_optimizer_of_others(anchors: list[Tensor]) -> Optimizer:
    return sgd(make_params())


@pytest.mark.parametrize(
    ("outer", "error", "text"),
    [
        (lambda anchors: len(anchors), TypeError, "outer expects .* returned a int"),
        (an_optimizer_of_others, ValueError, "outer expects .* the tensors that it is given"),
        (partial(SGD, lr=-1.0), ValueError, "Invalid learning rate"),
    ],
)
def test_what_makes_no_outer_optimizer_is_refused(
    outer: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        DecentOptimWrapper(sgd(make_params()), schedule=Schedule(outer=outer))


def test_the_rate_can_be_set_and_is_checked() -> None:
    optimizer = DecentOptimWrapper(sgd(make_params()), schedule=Schedule(mixing_rate=0.5))
    assert optimizer.mixing_rate == 0.5
    optimizer.mixing_rate = 1
    assert optimizer.mixing_rate == 1.0
    with pytest.raises(ValueError, match="at most 1"):
        optimizer.mixing_rate = 2


def test_what_is_not_finite_heals_under_outer_momentum_too() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> list[bool]:
        params = make_params()
        optimizer = wrap(SGD(params, lr=0.01), group, "ring", NESTEROV, on_nonfinite="skip")
        finite = []
        for step in range(8):
            backward(params, rank, step)
            if step == 2 and rank < 2:
                for param in params:
                    param.data.fill_(float("nan"))
            for param in params:
                assert param.grad is not None
                param.grad.nan_to_num_()
            optimizer.step()
            finite.append(bool(flatten(params).isfinite().all()))
        optimizer.synchronize()
        return finite

    for rank, finite in enumerate(run_threads(4, main)):
        assert all(finite[:2])
        assert finite[2] == (rank > 1)
        assert all(finite[-2:])


def test_an_exact_average_of_two_ranks_is_not_rounded() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params()
        plan = Plan(global_avg_every=3)
        optimizer = wrap(sgd(params), group, "complete", plan, comm_dtype=torch.bfloat16)
        take_steps(optimizer, params, rank, range(3))
        before = flatten(params)
        optimizer.synchronize()
        assert not torch.equal(flatten(params), before)
        return flatten(params)

    one, other = run_threads(2, main)
    assert torch.equal(one, other)
