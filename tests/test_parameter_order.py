"""Optimizers whose parameters have another order on each rank, as in a set: names decide."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from problem import flatten, nesterov
from ranks import run_threads
from restartable_processes import Report, RestartableProcesses
from torch import Tensor, nn
from torch.optim import SGD

from decent_optim_wrapper import DecentOptimWrapper, Elastic, GradientTracking, OuterOptimizer
from decent_optim_wrapper.checkpoint.averaging import Averaging
from decent_optim_wrapper.ddp import DecentralizedDataParallel

Item = TypeVar("Item")
Wrapped = DecentOptimWrapper | DecentralizedDataParallel
# Two parameters in each bucket.
CAP_MB = 300 / 2**20


def make_model(seed: int, layers: int = 3) -> nn.Sequential:
    """Parameters of two shapes, of which each layer has both."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers)))
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.data.normal_(generator=generator).mul_(0.3)
    return model


def turned(items: Iterable[Item], by: int) -> list[Item]:
    """In an order that depends on the rank."""
    listed = list(items)
    place = by % len(listed)
    return [*listed[place:], *listed[:place]]


def sgd(named: Iterable[Any]) -> SGD:
    return SGD(list(named), lr=0.1, momentum=0.9)


def wrapper(model: nn.Module, by: int, **options: Any) -> DecentOptimWrapper:
    base = sgd(turned(model.named_parameters(), by))
    return DecentOptimWrapper(base, model=model, bucket_cap_mb=CAP_MB, **options)


def grown(model: nn.Module, by: int, **options: Any) -> DecentOptimWrapper:
    named = list(model.named_parameters())
    base = sgd(turned(named[:2], by))
    optimizer = DecentOptimWrapper(base, model=model, bucket_cap_mb=CAP_MB, **options)
    optimizer.add_param_group({"params": turned(named[2:], by)})
    return optimizer


def module(model: nn.Module, by: int, **options: Any) -> DecentralizedDataParallel:
    make = lambda named: sgd(turned(named, by))  # noqa: E731
    return DecentralizedDataParallel(model, make, bucket_size_in_mb=CAP_MB, **options)


def train(wrapped: Wrapped, model: nn.Module, rank: int, steps: Iterable[int]) -> None:
    for step in steps:
        draw = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
        if isinstance(wrapped, DecentralizedDataParallel):
            wrapped(draw).square().mean().backward()
            continue
        wrapped.zero_grad()
        model(draw).square().mean().backward()
        wrapped.step()


def synchronized(wrapped: Wrapped, model: nn.Module) -> Tensor:
    (wrapped.optimizer if isinstance(wrapped, DecentralizedDataParallel) else wrapped).synchronize()
    return flatten(list(model.parameters()))


@pytest.mark.parametrize("wrap", [wrapper, grown, module])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "comm_dtype": torch.int8,
            "extensions": [GradientTracking(), OuterOptimizer(nesterov(0.5))],
        },
    ],
)
def test_ranks_with_parameters_in_other_orders_train_as_with_one_order(
    wrap: Callable[..., Wrapped], more: dict[str, Any]
) -> None:
    def main(rank: int, group: dist.ProcessGroup, turns: int) -> tuple[Tensor, Tensor]:
        # Other values than on rank 0.
        model = make_model(rank)
        wrapped = wrap(model, turns * rank, process_group=group, topology="ring", **more)
        start = flatten(list(model.parameters()))
        train(wrapped, model, rank, range(5))
        return start, synchronized(wrapped, model)

    turned, straight = (run_threads(4, partial(main, turns=turns)) for turns in (1, 0))
    first = flatten(list(make_model(0).parameters()))
    for found, expected in zip(turned, straight, strict=True):
        assert torch.equal(found[0], first)
        assert torch.equal(found[1], expected[1])
        assert not torch.equal(found[1], first)


def test_frozen_parameters_in_other_orders_are_averaged_by_name() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        model = make_model(0)
        first, *_, last = model.parameters()
        with torch.no_grad():
            first.requires_grad_(False).add_(rank)
            last.requires_grad_(False)
        optimizer = wrapper(model, rank, process_group=group, sync_at_start=False)
        optimizer.global_avg()
        return [first, last]

    first, *_, last = make_model(0).parameters()
    for found in run_threads(3, main):
        torch.testing.assert_close(found[0], first.detach() + 1)
        assert torch.equal(found[1], last)


def test_parameters_without_names_that_start_in_another_order_are_named_by_position() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[str, str, int]:
        model, late = make_model(0), make_model(1)
        reorder = partial(turned, by=2 * rank)
        with pytest.raises(ValueError, match="another order") as start:
            DecentOptimWrapper(sgd(reorder(model.parameters())), process_group=group)
        optimizer = DecentOptimWrapper(sgd(model.parameters()), process_group=group)
        with pytest.raises(ValueError, match="another order") as added:
            optimizer.add_param_group({"params": reorder(late.parameters())})
        return str(start.value), str(added.value), len(optimizer.param_groups)

    for rank, (start, added, groups) in enumerate(run_threads(2, main)):
        assert start.startswith(f"rank {rank}: ")
        assert "ranks [1] have the values of rank 0 in another order, at 0.0, 0.1, 0.2," in start
        assert "at 1.0, 1.1, 1.2" in added
        assert groups == 1


def test_parameters_that_only_start_with_other_values_are_named_in_a_warning() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = make_model(0)
        with torch.no_grad():
            next(model[1].parameters())[5:].add_(rank)
        DecentOptimWrapper(sgd(model.parameters()), process_group=group)

    with pytest.warns(UserWarning, match=r"by rank: \{1: 1\} \(of 6\), such as 0\.2\."):
        run_threads(2, main)


def test_a_state_is_loaded_by_the_names_of_its_parameters() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        options: dict[str, Any] = {
            "process_group": group,
            "topology": "ring",
            "comm_dtype": torch.int8,
            "extensions": [GradientTracking(), OuterOptimizer(nesterov(0.5))],
        }
        model = make_model(0)
        straight = wrapper(model, rank, **options)
        train(straight, model, rank, range(5))
        saved = copy.deepcopy((model.state_dict(), straight.state_dict()))
        other = make_model(1)
        resumed = wrapper(other, rank + 1, sync_at_start=False, **options)
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        for optimizer, each in ((straight, model), (resumed, other)):
            train(optimizer, each, rank, range(5, 9))
        names = [group["param_names"] for group in resumed.param_groups]
        assert names == [[name for name, _ in turned(other.named_parameters(), rank + 1)]]
        assert torch.equal(synchronized(resumed, other), synchronized(straight, model))

    run_threads(4, main)


def test_groups_in_another_order_keep_their_options_and_other_groups_are_refused() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        def make(order: int, size: int = 2) -> tuple[nn.Module, DecentOptimWrapper]:
            model = make_model(0)
            named = list(model.named_parameters())
            groups: list[Any] = [{"params": named[:size]}, {"params": named[size:], "lr": 0.3}]
            base = SGD(groups[::order], lr=0.1, momentum=0.9)
            options: dict[str, Any] = {"process_group": group, "bucket_cap_mb": CAP_MB}
            return model, DecentOptimWrapper(base, model=model, **options)

        model, straight = make(1)
        train(straight, model, rank, range(3))
        saved = copy.deepcopy((model.state_dict(), straight.state_dict()))
        other, resumed = make(-1)
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        rates = [(each["param_names"][0], each["lr"]) for each in resumed.param_groups]
        assert rates == [("1.weight", 0.3), ("0.weight", 0.1)]
        for optimizer, each in ((straight, model), (resumed, other)):
            train(optimizer, each, rank, range(3, 6))
        assert torch.equal(synchronized(resumed, other), synchronized(straight, model))
        with pytest.raises(ValueError, match="doesn't match the size"):
            make(-1, size=3)[1].load_state_dict(saved[1])

    run_threads(2, main)


def test_states_of_parameters_in_other_orders_are_averaged_by_name() -> None:
    def state(by: int) -> tuple[dict[str, Any], list[str]]:
        model = make_model(by)
        optimizer = wrapper(model, by, extensions=extensions)
        train(optimizer, model, by, range(3))
        return optimizer.state_dict(), [name for name, _ in turned(model.named_parameters(), by)]

    def rows(state: dict[str, Any], names: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
        outer = state["gossip"]["extensions"]["outer_optimizer"]["params"]
        return {
            name: (state["state"][place]["momentum_buffer"], outer[place]["anchor"])
            for place, name in enumerate(names)
        }

    extensions = [OuterOptimizer(nesterov(0.5)), GradientTracking()]
    states = [state(by) for by in range(3)]
    found = Averaging().of({rank: each for rank, (each, _) in enumerate(states)}, 1)
    by_rank, averaged = [rows(*each) for each in states], rows(found, states[1][1])
    model = make_model(9)
    optimizer = wrapper(model, 2, extensions=extensions)
    optimizer.load_state_dict(found)
    for name, pair in rows(optimizer.state_dict(), states[2][1]).items():
        assert all(map(torch.equal, pair, averaged[name]))
    for name, pair in averaged.items():
        for place, value in enumerate(pair):
            expected = torch.stack([each[name][place] for each in by_rank]).mean(0)
            torch.testing.assert_close(value, expected)
            assert not torch.equal(value, by_rank[1][name][place])


def come_back(rank: int, world_size: int, store: Any, report: Report) -> list[list[float]]:
    """Train without a rate, so that only momenta change; parameters are rank 0's for ever."""
    model = make_model(rank)
    base = SGD(turned(model.named_parameters(), store.add("lives", 1)), lr=0.0, momentum=1.0)
    optimizer = DecentOptimWrapper(
        base,
        rank,
        world_size,
        model=model,
        bucket_cap_mb=CAP_MB,
        elastic=Elastic(store=store),
        extensions=[OuterOptimizer(nesterov(0.5)), GradientTracking()],
    )
    report("joined", optimizer.round)
    while not store.check(["finish"]) or optimizer.round < int(store.get("finish")):
        model(torch.zeros(1, 6))
        for place, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, float(place))
        optimizer.step()
        if optimizer.round % 3 == 0:
            report(f"round {optimizer.round}", optimizer.members)
        time.sleep(0.02)
    optimizer.synchronize()
    momenta = [base.state[param]["momentum_buffer"].mean().item() for param in model.parameters()]
    rates = [momentum / optimizer.round for momentum in momenta]
    return [rates, flatten(list(model.parameters())).tolist()]


@pytest.mark.slow
def test_a_rank_that_comes_back_with_another_order_receives_the_state_by_name() -> None:
    with RestartableProcesses(2, come_back) as processes:
        processes.all_reach("joined")
        processes.wait_for(1, "round 3")
        processes.kill(1)
        processes.start(1)
        assert processes.wait_for(1, "joined") >= 3
        processes.finish()
        lives = processes.results()
    start = flatten(list(make_model(0).parameters())).tolist()
    for rates, params in lives:
        assert rates == pytest.approx(range(6))
        assert params == start
