"""Values that are not finite: the whole group is told or goes on without them, on every way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering_arrays import VIEWS, named, pairwise
from fake_cuda import WAYS, Way
from problem import backward, flatten, make_params, take_steps, wrap
from ranks import run_threads
from scripted_ranks import listed
from test_coded_rounds import SHAPES, Case, distance
from test_coded_rounds import make_params as make_long_params
from test_coded_rounds import wrap as wrap_long
from torch import Tensor

from decent_optim_wrapper import DecentOptimWrapper, Group, Late, NonFiniteError, Schedule
from decent_optim_wrapper.codecs import INT2, INT3, INT4
from decent_optim_wrapper.config import OnNonfinite

pytestmark = pytest.mark.slow

COMM = {
    "exact": None,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "int4": INT4,
    "int3": INT3,
    "int2": INT2,
}
BAD = 2


def spoil(params: list[Tensor]) -> None:
    with torch.no_grad():
        params[2].view(-1)[0] = math.nan
        params[4].view(-1)[0] = math.inf


def assert_same(params: list[Tensor], before: Tensor) -> None:
    torch.testing.assert_close(flatten(params), before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("way", "topology", "comm", "views"), pairwise(WAYS, named("ring", "complete"), COMM, VIEWS)
)
def test_the_whole_group_raises_and_mixes_nothing(
    way: Way, topology: str, comm: torch.dtype | None, views: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> bool:
        params = make_params(seed=rank)
        options = {"comm_dtype": comm, "param_as_bucket_view": views, "topology": topology}
        optimizer = wrap(params, group, None, sync_at_start=False, **options)
        # In int4 the first three rounds of each pair do not mix.
        take_steps(optimizer, params, rank, range(7))
        optimizer.synchronize()
        if rank == BAD:
            spoil(params)
        optimizer.step()
        before = flatten(params)
        if topology == "complete" or rank in (1, BAD):
            with pytest.raises(NonFiniteError, match=r"but ranks \[2\] have NaN") as caught:
                optimizer.synchronize()
            assert caught.value.ranks == (BAD,)
            assert_same(params, before)
        else:
            optimizer.synchronize()
            assert not torch.equal(flatten(params), before)
        return bool(flatten(params).isfinite().all())

    way(monkeypatch)
    assert run_threads(4, main) == [rank != BAD for rank in range(4)]


@pytest.mark.parametrize(
    ("way", "comm", "views"), pairwise(named(*WAYS), {"exact": None, "int8": torch.int8}, VIEWS)
)
def test_a_caught_error_drops_the_round_that_follows_from_it(
    way: str, comm: torch.dtype | None, views: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> list[int]:
        params = make_params(dtype=torch.float32)
        # Without momentum, which would not be finite either.
        base = torch.optim.SGD(params, lr=0.05)
        options = {"comm_dtype": comm, "param_as_bucket_view": views}
        optimizer = wrap(params, group, base, topology="complete", **options)
        raised = []
        for step in range(7):
            backward(params, rank, step)
            if (rank, step) == (1, 1):
                params[0].grad[0] = math.nan  # type: ignore[index]
            try:
                optimizer.step()
            except NonFiniteError:
                raised.append(step)
                with torch.no_grad():
                    for param in params:
                        param.fill_(1.0)
        assert flatten(params).isfinite().all()
        return raised

    WAYS[way](monkeypatch)
    # What a GPU has found is read one step later.
    assert run_threads(3, main) == [[3 if way == "on a GPU" else 2]] * 3


def set_values(params: list[Tensor], rank: int, number: int, bad: tuple[int, ...]) -> Tensor:
    """New values for every rank, of which those that are bad are not finite in any bucket."""
    with torch.no_grad():
        for param, value in zip(params, make_long_params(100 * number + rank), strict=True):
            param.copy_(value)
            if rank in bad:
                param.view(-1)[-1] = math.nan
    return flatten(params)


@pytest.mark.parametrize(
    ("way", "size", "comm", "views", "rate", "every", "self_weight"),
    pairwise(
        WAYS,
        {"2": 2, "3": 3, "4": 4},
        named(*COMM),
        VIEWS,
        {"rate 1": 1.0, "rate 0.3": 0.3},
        {"each step": 1, "late": 2},
        {"mean": None, "weighted": 0.7},
    ),
)
def test_ranks_that_are_left_out_take_the_mean_of_the_others_and_do_not_move_it(
    way: Way,
    size: int,
    comm: str,
    views: bool,
    rate: float,
    every: int,
    self_weight: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank, two and all of them; each averages a part of every coded bucket."""
    left_out = [*((rank,) for rank in range(size)), (0, size - 1), tuple(range(size))]

    def main(rank: int, group: dist.ProcessGroup) -> list[tuple[Tensor, Tensor]]:
        params = make_long_params(seed=rank)
        options: dict[str, Any] = {"comm_dtype": COMM[comm], "param_as_bucket_view": views}
        options["schedule"] = Schedule(gossip_every=every, mixing_rate=rate)
        options["overlap"] = Late(every) if every > 1 else True
        case = Case(listed(size, [[Group(range(size), self_weight)]]), size)
        optimizer = wrap_long(params, group, case, 0.0, on_nonfinite="skip", **options)
        # In int4 they do not mix.
        for _ in range(3 * every):
            optimizer.step()
        optimizer.synchronize()
        rows = []
        for number, bad in enumerate(left_out):
            # A round of all ranks moves the references.
            for each in ((), bad):
                before = set_values(params, rank, number, each)
                for _ in range(every):
                    optimizer.step()
                optimizer.synchronize()
            rows.append((before, flatten(params)))
        return rows

    way(monkeypatch)
    rows = zip(*run_threads(size, main), strict=True)
    # One round in int3 or int2 brings values near only roughly: mean and distance tell more.
    rough = {"exact": 1e-9, "int8": 0.1, "int4": 1.5, "int3": 2.0, "int2": 3.0, "bf16": 0.05}[comm]
    pull = rate * ((1 - self_weight) * size / (size - 1) if self_weight else 1.0)
    for bad, row in zip(left_out, rows, strict=True):
        before, after = map(torch.stack, zip(*row, strict=True))
        good = [rank for rank in range(size) if rank not in bad]
        if not good:
            torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
            continue
        mean = before[good].mean(0)
        torch.testing.assert_close(after[good].mean(0), mean, rtol=0, atol=1e-12)
        tainted = ~before[list(bad)].isfinite().all(0)
        assert tainted.sum() == len(SHAPES)
        assert after.isfinite().all()
        assert (after[list(bad)] - mean)[:, tainted].abs().max() < rough
        if len(good) > 1:
            expected = before[good] + pull * (mean - before[good])
            mixed = ((after[good] - expected).abs() < rough).all(0)
            # But for what those that are left out would have averaged.
            assert mixed.float().mean() > 1 - (len(bad) + 0.6) / size
            assert distance(after[good]) < distance(before[good])


@pytest.mark.parametrize("policy", ["raise", "skip", "ignore"])
def test_an_average_takes_in_only_what_is_finite_unless_nobody_checks(policy: OnNonfinite) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, on_nonfinite=policy, sync_at_start=False)
        own = flatten(params)
        with optimizer.averaged():
            mean = flatten(params)
        assert_same(params, own)
        if rank == BAD:
            spoil(params)
        before = average = flatten(params)
        if policy == "raise":
            with pytest.raises(NonFiniteError, match=r"in global_avg\(\), but ranks \[2\]"):
                optimizer.global_avg()
        else:
            with optimizer.averaged():
                average = flatten(params)
            assert average.isfinite().all() == (policy == "skip")
        assert_same(params, before)
        return own, mean if policy == "raise" else average

    rows, averages = map(torch.stack, zip(*run_threads(4, main), strict=True))
    if policy != "ignore":
        assert all(torch.equal(each, averages[0]) for each in averages)
    if policy == "raise":
        torch.testing.assert_close(averages[0], rows.mean(0), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("world_size", "views"), [(2, True), (3, False)])
def test_a_round_that_was_refused_is_refused_again_until_it_is_dropped(
    world_size: int, views: bool
) -> None:
    bad, average = world_size - 1, DecentOptimWrapper.global_avg

    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params()
        optimizer = wrap(params, group, topology="complete", param_as_bucket_view=views)
        good, start = optimizer.state_dict(), flatten(params)
        take_steps(optimizer, params, rank, range(2))
        optimizer.synchronize()
        assert not torch.equal(flatten(params), start)
        if rank == bad:
            spoil(params)
        optimizer.step()
        before = flatten(params)
        refusal = rf"but ranks \[{bad}\] have NaN"
        for call in (average, average, DecentOptimWrapper.step):
            with pytest.raises(NonFiniteError, match=refusal):
                call(optimizer)
            assert_same(params, before)
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
            torch._foreach_copy_(params, make_params())
        optimizer.load_state_dict(good)
        take_steps(optimizer, params, rank, range(1))
        optimizer.global_avg(may_revert=False)
        assert flatten(params).isfinite().all()
        assert not torch.equal(flatten(params), start)

    run_threads(world_size, main)
