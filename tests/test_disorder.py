"""Ranks that call different things, and parameters that are not finite: found within the round."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import problem
import pytest
import torch
import torch.distributed as dist
from covering import VIEWS, named, pairwise
from problem import backward, flatten, make_params, take_steps
from ranks import run_threads
from torch import Tensor

from decent_optim_wrapper import CallOrderError, DecentOptimWrapper, NonFiniteError, PeerError

PATIENCE = 3.0


wrap = partial(problem.wrap, timeout=PATIENCE)


OTHER_CALLS: dict[str, Callable[[Any], object]] = {
    "global_avg()": lambda optimizer: optimizer.global_avg(),
    "consensus_distance()": lambda optimizer: optimizer.consensus_distance(),
    "add_param_group()": lambda optimizer: optimizer.rebuild_buckets(),
}


@pytest.mark.parametrize("call", OTHER_CALLS)
@pytest.mark.parametrize("topology", ["ring", "complete", "hypercuboid"])
def test_a_rank_in_another_method_is_found_within_the_round(topology: str, call: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params()
        optimizer = wrap(params, group, topology=topology)
        take_steps(optimizer, params, rank, range(2))

        def go_on() -> None:
            for step in range(2, 20):
                if rank == 1 and step == 3:
                    OTHER_CALLS[call](optimizer)
                backward(params, rank, step)
                optimizer.step()

        with pytest.raises((CallOrderError, PeerError)) as caught:
            go_on()
        return f"{type(caught.value).__name__}: {caught.value}"

    texts = run_threads(4, main)
    assert texts[1].startswith("CallOrderError")
    assert "as here, but it is in step()" in texts[1]
    theirs = [text for text in texts if text.startswith("CallOrderError") and call in text]
    assert len(theirs) >= 2
    # A rank that rank 1 closes before it has read rank 1's header quotes what rank 1 raises.
    ways = ("expected rank 1 in step()", "but it is in step()")
    assert all(any(way in text for way in ways) for text in theirs)


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_a_skipped_step_is_found_at_the_next_average(topology: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params()
        optimizer = wrap(params, group, topology=topology)

        def go_on() -> None:
            for step in range(4):
                backward(params, rank, step)
                if (rank, step) != (2, 1):
                    optimizer.step()
            optimizer.global_avg()

        with pytest.raises((CallOrderError, PeerError)) as caught:
            go_on()
        return f"{type(caught.value).__name__}: {caught.value}"

    texts = run_threads(4, main)
    assert sum("CallOrderError" in text for text in texts) >= 1
    assert any("step() equally often" in text for text in texts)


BAD = 2


@pytest.mark.parametrize(("has_names", "views"), [(True, True), (False, False)])
def test_a_parameter_replaced_in_its_group_is_named_by_whatever_comes_next(
    has_names: bool, views: bool
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params()
        names = [f"layer{index}" for index in range(len(params))]
        base = torch.optim.SGD([*zip(names, params, strict=True)] if has_names else params, lr=0.1)
        optimizer = wrap(params, group, base=base, param_as_bucket_view=views)
        assert len(optimizer.buckets) > 1
        take_steps(optimizer, params, rank, range(2))
        before = flatten(params)
        whole = optimizer.param_groups[0]["params"]
        old, whole[2] = whole[2], params[2].detach().clone().requires_grad_()
        name = "layer2" if has_names else r"0\.2"
        for call in (optimizer.step, optimizer.synchronize, optimizer.consensus_distance):
            with pytest.raises(RuntimeError, match=rf"rank {rank}: .* but {name} was replaced"):
                call()
        assert torch.equal(flatten(params), before)
        whole[2] = old
        backward(params, rank, 2)
        optimizer.step()
        # A group that is taken out is none that is replaced: it is gossiped on.
        late = torch.ones(2, requires_grad=True)
        optimizer.add_param_group({"params": [("late", late) if has_names else late]})
        optimizer.param_groups.pop()
        optimizer.step()
        optimizer.synchronize()
        assert not torch.equal(flatten(params), before)

    run_threads(2, main)


def spoil(params: list[Tensor]) -> None:
    with torch.no_grad():
        params[2][0, 0] = float("nan")
        params[4][0, 0, 0] = float("inf")


@pytest.mark.parametrize(("topology", "views"), pairwise(named("ring", "complete"), VIEWS))
def test_non_finite_parameters_raise_on_every_rank_of_the_group(topology: str, views: bool) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> bool:
        params = make_params()
        optimizer = wrap(params, group, topology=topology, param_as_bucket_view=views)
        backward(params, rank, 0)
        optimizer.step()
        optimizer.synchronize()
        if rank == BAD:
            spoil(params)
        before = flatten(params)
        optimizer.step()
        partner = topology == "complete" or rank in (1, 2)
        if not partner:
            optimizer.synchronize()
            return bool(flatten(params).isfinite().all())
        after = flatten(params)
        with pytest.raises(NonFiniteError, match=r"those of ranks \[2\] hold NaN") as caught:
            optimizer.step()
        assert caught.value.ranks == (BAD,)
        torch.testing.assert_close(flatten(params), after, rtol=0, atol=0, equal_nan=True)
        assert not torch.equal(before, after)
        return bool(flatten(params).isfinite().all())

    assert run_threads(4, main) == [rank != BAD for rank in range(4)]


@pytest.mark.parametrize("mode", ["copies", "views", "bf16"])
@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_a_rank_that_is_not_finite_is_left_out_and_healed_by_the_others(
    topology: str, mode: str
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params(seed=rank)
        optimizer = wrap(
            params,
            group,
            topology=topology,
            on_nonfinite="skip",
            sync_at_start=False,
            base=torch.optim.SGD(params, lr=0.0),
            param_as_bucket_view=mode == "views",
            comm_dtype=torch.bfloat16 if mode == "bf16" else None,
        )
        optimizer.step()
        optimizer.synchronize()
        if rank == BAD:
            spoil(params)
        before = flatten(params)
        optimizer.step()
        optimizer.synchronize()
        return before, flatten(params)

    rows = run_threads(4, main)
    assert not rows[BAD][0].isfinite().all()
    for _, after in rows:
        assert after.isfinite().all()
    good = torch.stack([row[0] for rank, row in enumerate(rows) if rank != BAD])
    tainted = ~rows[BAD][0].isfinite()
    for rank, (before, after) in enumerate(rows):
        if topology == "complete":
            expected = good.mean(dim=0)
        else:
            expected = rows[1][0] if rank in (1, 2) else before
        tolerance = 0.02 if mode == "bf16" else 1e-12
        if topology == "complete" or rank in (1, 2):
            torch.testing.assert_close(after[tainted], expected[tainted], rtol=0, atol=tolerance)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_an_average_takes_in_only_what_is_finite(policy: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, on_nonfinite=policy, sync_at_start=False)
        if rank == BAD:
            spoil(params)
        before = flatten(params)
        if policy == "raise":
            with pytest.raises(NonFiniteError, match=r"in global_avg\(\), but .* ranks \[2\]"):
                optimizer.global_avg()
            torch.testing.assert_close(flatten(params), before, rtol=0, atol=0, equal_nan=True)
            return before
        with optimizer.averaged():
            average = flatten(params)
        torch.testing.assert_close(flatten(params), before, rtol=0, atol=0, equal_nan=True)
        return average

    rows = run_threads(4, main)
    if policy == "skip":
        assert all(torch.equal(row, rows[0]) and row.isfinite().all() for row in rows)


def averaged(optimizer: DecentOptimWrapper) -> None:
    with optimizer.averaged():
        pass


AVERAGES: dict[str, Callable[[DecentOptimWrapper], object]] = {
    "averaged": averaged,
    "global_avg": lambda optimizer: optimizer.global_avg(),
    "global_avg to keep": lambda optimizer: optimizer.global_avg(may_revert=False),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "average", "views"), pairwise(named("ring", "complete"), AVERAGES, VIEWS)
)
def test_a_round_that_was_refused_is_refused_again_until_it_is_dropped(
    topology: str, average: Callable[[DecentOptimWrapper], object], views: bool
) -> None:
    world_size = 2 if topology == "ring" else 3
    bad = world_size - 1

    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params()
        optimizer = wrap(params, group, topology=topology, param_as_bucket_view=views)
        assert len(optimizer.buckets) > 1
        good = optimizer.state_dict()
        start = flatten(params)
        take_steps(optimizer, params, rank, range(2))
        optimizer.synchronize()
        assert not torch.equal(flatten(params), start)
        if rank == bad:
            spoil(params)
        optimizer.step()
        before = flatten(params)
        refusal = rf"those of ranks \[{bad}\] hold NaN"
        for call in (average, average, DecentOptimWrapper.step):
            with pytest.raises(NonFiniteError, match=refusal):
                call(optimizer)
            torch.testing.assert_close(flatten(params), before, rtol=0, atol=0, equal_nan=True)
        # That step has dropped the round, and this one launches another.
        optimizer.step()
        with pytest.raises(NonFiniteError, match=refusal):
            optimizer.synchronize()
        assert bool(flatten(params).isfinite().all()) == (rank != bad)
        assert not torch.equal(flatten(params), before)
        # A checkpoint ends it at once, whatever is in flight.
        optimizer.step()
        with pytest.raises(NonFiniteError):
            average(optimizer)
        with torch.no_grad():
            for param, value in zip(params, make_params(), strict=True):
                param.copy_(value)
        optimizer.load_state_dict(good)
        backward(params, rank, 0)
        optimizer.step()
        optimizer.global_avg(may_revert=False)
        assert flatten(params).isfinite().all()
        assert not torch.equal(flatten(params), start)

    run_threads(world_size, main)


def test_without_the_check_nan_spreads() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> bool:
        params = make_params()
        optimizer = wrap(params, group, topology="ring", on_nonfinite="ignore")
        if rank == BAD:
            spoil(params)
        optimizer.step()
        optimizer.synchronize()
        return bool(flatten(params).isfinite().all())

    # To its partner of the first round.
    assert run_threads(4, main) in ([True, False, False, True], [True, True, False, False])
