"""What is special to single extensions: averages, loads, missing entries, NaN, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering_arrays import named, pairwise
from problem import (
    MODES,
    Masters,
    adamw,
    backward,
    draw_gradients,
    flatten,
    make_params,
    nesterov,
    sgd,
    take_drawn_steps,
    take_steps,
    wrap,
)
from ranks import run_threads
from scripted_ranks import listed
from torch import Tensor
from torch.optim import ASGD, LBFGS, SGD, AdamW, Optimizer
from torch.testing._internal.two_tensor import TwoTensor
from warning_texts import warned_texts

from decent_optim_wrapper import (
    AsItArrives,
    CallOrderError,
    DecentOptimWrapper,
    Extension,
    GradientTracking,
    Group,
    Late,
    NonFiniteError,
    OuterOptimizer,
    Schedule,
    StateAverage,
    StateGossip,
)
from decent_optim_wrapper.config import OnNonfinite
from decent_optim_wrapper.extensions.own_copy import OwnCopyCheck
from decent_optim_wrapper.gossip.extension import ReceivedBucket
from decent_optim_wrapper.wire.bucket import Bucket


@pytest.mark.parametrize("change", ["appended", "dropped"])
def test_anchors_follow_the_order_of_parameters_that_are_added_or_dropped(change: str) -> None:
    """A resumed run has them in the order of the groups."""

    def make(params: list[list[Tensor]], group: dist.ProcessGroup) -> DecentOptimWrapper:
        base = SGD([{"params": each} for each in params], lr=0.05)
        outer = OuterOptimizer(partial(SGD, lr=0.7, momentum=0.5))
        return wrap([], group, base, topology="ring", overlap=False, extensions=[outer])

    def train(optimizer: DecentOptimWrapper, rank: int, steps: range) -> Tensor:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        take_drawn_steps(optimizer, params, rank, steps)
        return flatten(params)

    def main(rank: int, group: dist.ProcessGroup) -> None:
        one, two, three = (torch.full((40,), 10.0**n, requires_grad=True) for n in range(3))
        dropped = change == "dropped"
        optimizer = make([[one, three], [two]] if dropped else [[one], [two]], group)
        train(optimizer, rank, range(3))
        first: list[Tensor] = optimizer.param_groups[0]["params"]
        first[1:] = [] if dropped else [three]
        optimizer.rebuild_buckets()
        started = train(optimizer, rank, range(3, 6))
        state = copy.deepcopy(optimizer.state_dict())
        copies = [
            [param.detach().clone().requires_grad_() for param in group["params"]]
            for group in optimizer.param_groups
        ]
        resumed = make(copies, group)
        resumed.load_state_dict(state)
        ended = train(optimizer, rank, range(6, 9))
        assert torch.equal(train(resumed, rank, range(6, 9)), ended)
        assert not torch.equal(started, ended)

    run_threads(2, main)


@pytest.mark.parametrize("overlap", ["forward", False])
def test_parameters_that_leave_the_base_are_only_averaged_by_an_outer_optimizer(
    overlap: Any,
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)).double()
        base = SGD([{"params": [*layer.parameters()]} for layer in model], lr=0.05)
        outer = OuterOptimizer(partial(SGD, lr=0.7, momentum=0.5))
        options: Any = {"overlap": overlap, "comm_dtype": torch.float32, "extensions": [outer]}
        optimizer = wrap([], group, base, model=model, **options)

        def steps(first: int, last: int) -> tuple[Tensor, Tensor]:
            for step in range(first, last):
                optimizer.zero_grad()
                inputs = torch.full((2, 4), 1.0 + rank + step, dtype=torch.float64)
                model(inputs).square().sum().backward()
                optimizer.step()
            optimizer.synchronize()
            return flatten([*model[0].parameters()]), flatten([*model[1].parameters()])

        first = steps(0, 2)
        model[0].requires_grad_(False)
        del optimizer.param_groups[0]
        optimizer.synchronize()
        kept = flatten([*model[0].parameters()])
        last = steps(2, 6)
        assert not torch.equal(first[1], last[1])
        return kept, last[0]

    rows = run_threads(2, main)
    # Two ranks agree on the mean of what they had, and nothing steps it.
    mean = torch.stack([kept for kept, _ in rows]).mean(0)
    for _, left in rows:
        torch.testing.assert_close(left, mean)


def test_an_average_that_is_kept_is_where_the_next_outer_step_starts() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params()
        base, outer = SGD(params, lr=0.0), OuterOptimizer(partial(SGD, lr=0.5))
        options: Any = {"schedule": Schedule(gossip_every=2), "sync_at_start": False}
        optimizer = wrap(params, group, base, extensions=[outer], **options)
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

    # Older anchors would pull the ranks apart again.
    expected = flatten(make_params()) + 0.5
    for row in run_threads(2, main):
        torch.testing.assert_close(row, expected)


def test_the_mixing_rate_can_be_assigned_and_is_checked() -> None:
    optimizer = wrap(make_params())
    optimizer.mixing_rate = 0.25
    assert optimizer.mixing_rate == 0.25
    with pytest.raises(ValueError, match="at most 1"):
        optimizer.mixing_rate = 2


def test_what_is_not_finite_heals_under_outer_momentum_too() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[list[bool], list[int]]:
        params = make_params()
        outer = OuterOptimizer(nesterov(0.5))
        options: Any = {"extensions": [outer], "on_nonfinite": "skip", "topology": "ring"}
        optimizer = wrap(params, group, SGD(params, lr=0.01), **options)
        finite: list[bool] = []
        # In which steps the momentum of a parameter has begun anew.
        anew: list[int] = []
        for step in range(8):
            backward(params, rank, step)
            for param in params:
                assert param.grad is not None
                param.grad.nan_to_num_()
                if step == 2 and rank < 2:
                    param.data.fill_(float("nan"))
            optimizer.step()
            finite.append(bool(flatten(params).isfinite().all()))
            rows = optimizer.state_dict()["gossip"]["extensions"]["outer_optimizer"]["params"]
            anew += [step] * any(not row["started"] for row in rows)
        optimizer.synchronize()
        return finite, anew

    for rank, (finite, anew) in enumerate(run_threads(4, main)):
        assert finite[:3] == [True, True, rank > 1]
        assert all(finite[-2:])
        # While the mean of two bad neighbours was what they had.
        assert anew == ([2, 3] if rank < 2 else [])


tracked = partial(wrap, topology="ring", extensions=[GradientTracking()])


def tracked_of(optimizer: DecentOptimWrapper) -> list[dict[str, Any]]:
    """What a checkpoint has of each parameter."""
    saved = optimizer.state_dict()["gossip"]["extensions"]["gradient_tracking"]
    rows: list[dict[str, Any]] = saved["params"]
    return rows


def sums(rows: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """What a rank adds to the sums of y and of the means."""
    return flatten([row["y"] for row in rows]), flatten([row["mean"] for row in rows])


def check_that_the_sums_agree(results: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Compare the sums of y and of the means, which differ on each rank."""
    y, means = (sum(result[k] for result in results) for k in range(2))
    torch.testing.assert_close(y, means, rtol=0, atol=1e-12)
    assert all((own - mean).abs().max() > 1e-4 for own, mean in results)


def test_the_sum_of_the_estimates_is_that_of_the_gradients_in_every_step() -> None:
    """Also where a rank skips its update, or has no gradient."""

    def main(rank: int, group: dist.ProcessGroup) -> list[tuple[Tensor, Tensor]]:
        params = make_params()
        optimizer = tracked(params, group, adamw(params))
        history = []
        for step in range(8):
            backward(params, rank, step)
            if (rank, step) == (1, 2):
                params[0].grad = None
            overflow = torch.tensor(float((rank, step) == (2, 4)))
            vars(optimizer).update(found_inf=overflow, grad_scale=None)
            optimizer.step()
            assert (params[0].grad is None) == ((rank, step) == (1, 2))
            history.append(sums(tracked_of(optimizer)))
        optimizer.synchronize()
        return history

    # In the first step nothing has been mixed yet.
    _, *steps = zip(*run_threads(4, main), strict=True)
    for results in steps:
        check_that_the_sums_agree(results)


@pytest.mark.parametrize("in_average", [False, True])
@pytest.mark.parametrize(("takes", "is_saved_again"), [(1, False), (3, True), (3, False)])
def test_the_state_of_another_rank_starts_the_estimates_again_on_all_ranks(
    takes: int, is_saved_again: bool, in_average: bool
) -> None:
    """The corrections would sum to something else than zero, and bias all gradients for good."""
    states: dict[int, Any] = {}

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params()
        optimizer = tracked(params, group, adamw(params))
        take_steps(optimizer, params, rank, range(3))
        with optimizer.averaged() if in_average else nullcontext():
            states[rank] = copy.deepcopy(optimizer.state_dict())
        assert states[rank]["gossip"]["kept"] is in_average
        optimizer.all_gather(torch.zeros(1))
        optimizer.load_state_dict(states[0 if rank < takes else rank])
        if is_saved_again:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        take_steps(optimizer, params, rank, range(3))
        optimizer.synchronize()
        return sums(tracked_of(optimizer))

    # With the first one, every rank has loaded its own: the sums have gone on.
    check_that_the_sums_agree(run_threads(4, main))


AUTO = AsItArrives(3)
LOADING: dict[str, dict[str, Any]] = {
    "every step": {},
    "every third": {"schedule": Schedule(gossip_every=3)},
    "late": {"overlap": Late(2), "schedule": Schedule(gossip_every=3)},
    # Ranks meet after a load there also without an extension.
    "auto": {"extensions": [], "overlap": AUTO},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:GradientTracking")
@pytest.mark.parametrize(
    ("options", "loading", "topology", "at"),
    pairwise(
        LOADING,
        {"only rank 1": (1,), "all but one": (0, 2, 3)},
        named("ring", "complete"),
        {"this round": 5, "an earlier round": 3},
    ),
)
def test_ranks_of_which_only_some_have_loaded_raise(
    options: dict[str, Any], loading: tuple[int, ...], topology: str, at: int
) -> None:
    """All of them an error that names the call; one that had waited would miss a peer."""

    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params()
        optimizer = tracked(params, group, **{**options, "topology": topology})
        assert len(optimizer.buckets) > 1
        for step in range(5 + rank * (options.get("overlap") is AUTO)):
            if step == at:
                saved = copy.deepcopy(optimizer.state_dict())
            take_steps(optimizer, params, rank, [step])
        optimizer.synchronize()
        if rank in loading:
            optimizer.load_state_dict(optimizer.state_dict() if at == 5 else saved)
        with pytest.raises(CallOrderError) as caught:
            take_steps(optimizer, params, rank, range(50))
        return str(caught.value)

    for text in run_threads(4, main):
        assert "after load_state_dict()" in text
        assert "on all ranks, or on none" in text


def test_tracking_that_is_given_up_frees_its_memory_and_trains_on() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params()
        optimizer = tracked(params, group, adamw(params))
        take_steps(optimizer, params, rank, range(4))
        before = optimizer.stats().bytes_sent
        optimizer.drop_extension(GradientTracking)
        given_up = flatten(params)
        take_steps(optimizer, params, rank, range(4, 8))
        assert before == 2 * optimizer.stats().bytes_sent > 0
        optimizer.synchronize()
        assert (flatten(params) - given_up).abs().max() > 1e-2
        assert "extensions" not in optimizer.state_dict()["gossip"]

    run_threads(4, main)


class Counted(Extension):
    """Counts the buckets that it has seen launched, and not yet mixed."""

    in_flight = 0

    def launch(self, bucket: Bucket) -> Sequence[Bucket]:
        self.in_flight += 1
        return ()

    def mixing(self, received: ReceivedBucket) -> AbstractContextManager[None]:
        self.in_flight -= 1
        return nullcontext()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"param_as_bucket_view": True},
        {"overlap": Late(2), "schedule": Schedule(gossip_every=2)},
        {"overlap": AsItArrives(2)},
    ],
    ids=["delayed", "views", "late", "as it arrives"],
)
def test_an_extension_that_is_dropped_still_takes_part_in_the_round_in_flight(
    options: dict[str, Any],
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params, counted = make_params(), Counted()
        optimizer = wrap(params, group, topology="ring", extensions=[counted], **options)
        take_steps(optimizer, params, rank, range(4))
        assert counted.in_flight > 0
        optimizer.global_avg()
        with pytest.raises(
            RuntimeError, match=rf"rank {rank}: drop_extension\(\) expects the rank"
        ):
            optimizer.drop_extension(Counted)
        optimizer.revert_global_avg()
        before = flatten(params)
        optimizer.drop_extension(Counted)
        assert counted.in_flight == 0
        assert not optimizer.extensions
        assert not torch.equal(flatten(params), before)
        take_steps(optimizer, params, rank, range(4, 6))
        optimizer.synchronize()
        assert counted.in_flight == 0

    run_threads(4, main)


def test_an_extension_is_dropped_on_all_ranks_if_the_round_in_flight_fails_on_some() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> bool:
        params = make_params()
        options: Any = {"topology": "ring", "extensions": [Counted()]}
        optimizer = wrap(params, group, SGD(params, lr=0.01), **options)
        take_steps(optimizer, params, rank, [0])
        own = [param.detach().clone() for param in params]
        backward(params, rank, 1)
        if rank == 3:
            params[2].data[0] = torch.nan
        optimizer.step()
        refused = False
        try:
            optimizer.drop_extension(Counted)
        except NonFiniteError as error:
            refused = error.ranks == (3,)
            torch._foreach_copy_([param.data for param in params], own)
        assert not optimizer.extensions
        take_steps(optimizer, params, rank, range(2, 5))
        optimizer.synchronize()
        assert flatten(params).isfinite().all()
        return refused

    # Rank 3 and its partner of the second phase.
    assert run_threads(4, main) == [True, False, False, True]


MOMENTS = ("exp_avg", "exp_avg_sq")


def test_state_gossip_that_is_dropped_leaves_what_one_rank_has_as_it_is() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params()
        base = SGD(params, lr=0.01, momentum=0.9)
        optimizer = wrap(params, group, base, extensions=[StateGossip("momentum_buffer")])
        for step in range(2):
            backward(params, rank, step)
            if rank == 1:
                params[1].grad = None
            optimizer.step()
        own, shared = (base.state[params[place]].get("momentum_buffer") for place in (1, 2))
        assert (own is None) == (rank == 1)
        before = [each.clone() for each in (own, shared) if each is not None]
        optimizer.drop_extension(StateGossip)
        if own is not None:
            assert torch.equal(own, before[0])
            assert own.abs().min() > 0
        assert not torch.equal(shared, before[-1])

    run_threads(2, main)


class Wide(SGD):
    """Keeps one entry in the dtype of its parameter, and one in float32, as its rank makes them."""

    rank = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None and not self.state[param]:
                low = torch.full_like(param, self.rank + 1)
                self.state[param] = {"low": low, "high": 1.001 * low.float()}


@pytest.mark.parametrize(
    ("world_size", "dtype", "code"),
    pairwise(
        {"pair": 2, "group": 3},
        {"of bf16": torch.bfloat16, "of fp16": torch.float16},
        {"exact": None, "as bf16": torch.bfloat16},
    ),
)
def test_state_is_mixed_in_its_own_precision_whichever_rank_lacks_some_of_it(
    world_size: int, dtype: torch.dtype, code: torch.dtype | None
) -> None:
    """One rank has no entry at first, and for long none of one parameter."""
    bad = 1
    options: Any = {"topology": "complete", "extensions": [StateGossip("low", "high")]}

    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params(dtype=dtype)
        base = Wide(params, lr=0.0)
        base.rank = rank
        optimizer = wrap(params, group, base, comm_dtype=code, **options)
        assert len(optimizer.buckets) > 1

        def check(place: int, expected: float, rounding: float) -> None:
            state = base.state[params[place]]
            assert state["low"].dtype is dtype
            for name, factor in (("low", 1.0), ("high", 1.001)):
                right = factor * torch.full_like(state[name], expected)
                torch.testing.assert_close(state[name], right, rtol=rounding, atol=0)

        for step in range(5):
            for place, param in enumerate(params):
                lacks = rank == bad and (step < 2 or place == 1)
                param.grad = None if lacks else torch.ones_like(param)
            optimizer.step()
            if step == 2:
                check(2, rank + 1, 0.0)
        optimizer.synchronize()
        if rank != bad:
            check(1, rank + 1, 0.0)
        # All means of the lower entries are exact.
        check(2, (world_size + 1) / 2, 1e-6 if code is None else 0.01)

    run_threads(world_size, main)


@pytest.mark.parametrize("mode", ["copies", "bf16-views"])
def test_a_rank_without_an_entry_does_not_change_the_entries_of_the_others(mode: str) -> None:
    """One skips its first updates, as GradScaler makes it do, and one has no gradient for long."""

    def main(rank: int, group: dist.ProcessGroup) -> Tensor | None:
        params = make_params()
        base = AdamW(params, lr=0.0)
        options: Any = {"topology": "ring", "extensions": [StateGossip(*MOMENTS)]}
        optimizer = wrap(params, group, base, **options, **MODES[mode])
        for step in range(4):
            for param in params:
                param.grad = torch.ones_like(param)
            if rank == 1:
                params[1].grad = None
            overflow = torch.tensor(float(rank == 2 and step < 2))
            vars(optimizer).update(found_inf=overflow, grad_scale=None)
            optimizer.step()
        optimizer.synchronize()
        assert ("exp_avg_sq" in base.state[params[1]]) == (rank != 1)
        return None if rank == 1 else flatten([base.state[p]["exp_avg_sq"] for p in params])

    def after(updates: int) -> float:
        """The entries of a rank alone."""
        return 1 - 0.999**updates

    for entries in run_threads(4, main):
        # Nothing was mixed with zeros, but with what rank 2 has after its two updates.
        if entries is not None:
            assert (entries > 0.99 * after(2)).all()
            assert (entries < 0.99 * after(4)).all()


@pytest.mark.parametrize("views", [False, True])
def test_only_entries_of_all_ranks_of_a_group_are_mixed(views: bool) -> None:
    """One rank has none of two parameters: for long, and at first."""
    phases = [[[0, 1], [2, 3]], [[0, 2, 3], [1]]]
    lacks, steps = {1: range(9), 2: range(3)}, range(9)

    def has_gradient(rank: int, place: int, step: int) -> bool:
        return rank != 1 or step not in lacks.get(place, ())

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params()
        base = SGD(params, lr=0.0, momentum=0.9)
        options: Any = {"extensions": [StateGossip("momentum_buffer")]}
        topology = listed(4, [[Group(each) for each in phase] for phase in phases])
        optimizer = wrap(
            params, group, base, topology=topology, param_as_bucket_view=views, **options
        )
        for step in steps:
            draw_gradients(params, rank, step)
            for place, param in enumerate(params):
                if not has_gradient(rank, place, step):
                    param.grad = None
            optimizer.step()
        optimizer.synchronize()
        found = [base.state[param].get("momentum_buffer") for param in params]
        assert [row is None for row in found] == [place == rank == 1 for place in range(5)]
        zeros = map(torch.zeros_like, params)
        return flatten([z if row is None else row for row, z in zip(found, zeros, strict=True)])

    expected = [[torch.zeros_like(param) for param in make_params()] for _ in range(4)]
    for step in steps:
        for rank, row in enumerate(expected):
            for place, gradient in enumerate(make_params(1000 * rank + step)):
                if has_gradient(rank, place, step):
                    row[place] = 0.9 * row[place] + gradient.detach()
        for ranks in phases[step % 2]:
            for place in range(5):
                if all(has_gradient(rank, place, step) for rank in ranks):
                    mean = torch.stack([expected[rank][place] for rank in ranks]).mean(dim=0)
                    for rank in ranks:
                        expected[rank][place] = mean
    rows = run_threads(4, main)
    torch.testing.assert_close(torch.stack(rows), torch.stack([*map(flatten, expected)]))


class Quantised(SGD):
    """Keeps a state that is made of two tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param]["momentum"] = TwoTensor(param * 0, param * 0)


class ScheduleFree(SGD):
    """Optimizers of Defazio et al. converge only if their own iterate z is mixed, too."""


def test_an_iterate_that_is_not_mixed_is_warned_of() -> None:
    params = make_params()
    with warned_texts() as texts:
        wrap(params, None, ScheduleFree(params, lr=0.1))
        wrap(params, None, ScheduleFree(params, lr=0.1), extensions=[StateGossip("z")])
        wrap(params, None, sgd(params))
    (text,) = texts
    assert 'extensions=[StateGossip("z")]' in text


class Offloads(SGD):
    """Updates copies beside its state, to which the backward pass copies the parameters."""

    def __init__(self, params: list[Tensor], lr: float) -> None:
        super().__init__(params, lr)
        self.host = [param.detach().clone() for param in params]
        for index, param in enumerate(params):
            hook = partial(self.read, index)
            param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def read(self, index: int, param: Tensor) -> None:
        self.host[index] = param.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for copied, param in zip(self.host, group["params"], strict=True):
            if param.grad is not None:
                copied.sub_(param.grad, alpha=group["lr"])
            param.copy_(copied)


VIEWED: dict[str, Any] = {"param_as_bucket_view": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "warns"),
    [
        (Masters, {"overlap": False, **VIEWED}, True),
        (Masters, {"extensions": [StateGossip("master")]}, False),
        (Offloads, VIEWED, True),
        (Offloads, {"overlap": False}, False),
        # It keeps a copy that it never reads.
        (ASGD, {}, False),
    ],
)
def test_a_base_that_overwrites_what_was_mixed_is_warned_of_and_no_other(
    kind: Any, options: dict[str, Any], warns: bool
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> float:
        dtype = torch.bfloat16 if "param_as_bucket_view" in options else torch.float32
        params = make_params(dtype=dtype)
        base = kind(params, lr=0.005)
        wrapper = wrap(params, group, base, topology="ring", **options)
        take_steps(wrapper, params, rank, range(34))
        assert not any(isinstance(each, OwnCopyCheck) for each in wrapper.extensions)
        return wrapper.consensus_distance()

    with warned_texts() as texts:
        distance = max(run_threads(4, main))
    wrong = [text for text in texts if "keeps its own copy of the weights" in text]
    assert len(wrong) == 4 * warns, texts
    assert all(kind.__name__ in text for text in wrong)
    assert distance > 0
    # Of random shards: without mixing it grows with the steps.
    assert (distance > 0.1) == warns, distance


def moments(base: Optimizer, params: list[Tensor]) -> Tensor:
    """The moments of Adam, as one vector."""
    return flatten([base.state[param][name] for name in MOMENTS for param in params])


def average_at_once(optimizer: DecentOptimWrapper, params: list[Tensor]) -> None:
    optimizer.global_avg(may_revert=False)


def average_in_a_step(optimizer: DecentOptimWrapper, params: list[Tensor]) -> None:
    # The fourth step launches the scheduled average, and synchronize() finishes it.
    optimizer.zero_grad()
    optimizer.step()
    optimizer.synchronize()


def keep_an_average(optimizer: DecentOptimWrapper, params: list[Tensor]) -> None:
    own = moments(optimizer, params)
    optimizer.global_avg()
    assert torch.equal(moments(optimizer, params), own), "it may be reverted still"
    optimizer.zero_grad()
    optimizer.step()


@pytest.mark.parametrize("average", [average_at_once, keep_an_average])
def test_moments_are_averaged_where_the_average_is_kept(average: Any) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params()
        options: Any = {"topology": "ring", "extensions": [StateAverage()]}
        optimizer = wrap(params, group, adamw(params), **options)
        take_steps(optimizer, params, rank, range(3))
        own = moments(optimizer, params)
        with optimizer.averaged():
            assert torch.equal(moments(optimizer, params), own)
        average(optimizer, params)
        return own, moments(optimizer, params)

    rows = run_threads(4, main)
    mean = torch.stack([own for own, _ in rows]).mean(dim=0)
    for own, after in rows:
        torch.testing.assert_close(after, mean, rtol=1e-13, atol=1e-14)
        assert not torch.allclose(own, mean)


def test_counters_and_what_one_rank_has_no_momentum_for_are_left_alone() -> None:
    """Also the counter of a parameter without dimensions, which has its shape."""

    def main(rank: int, group: dist.ProcessGroup) -> list[tuple[float, ...]]:
        params = make_params()
        base = torch.optim.Adam(params, lr=0.1, betas=(0.0, 0.999))
        optimizer = wrap(params, group, base, extensions=[StateAverage()])
        for step in range(3):
            for index, param in enumerate(params):
                missing = (rank == 1 and index < 2) or (rank, step) == (0, 1)
                param.grad = None if missing else torch.full_like(param, 1.0 + rank)
            optimizer.step()
        optimizer.global_avg(may_revert=False)
        states = [base.state.get(param, {}) for param in params]
        return [(s["exp_avg"].mean().item(), s["step"].item()) if s else () for s in states]

    first, second = run_threads(2, main)
    assert first == [(1.0, 2.0), (1.0, 2.0), (1.5, 2.0), (1.5, 2.0), (1.5, 2.0)]
    assert second == [(), (), (1.5, 3.0), (1.5, 3.0), (1.5, 3.0)]


def poison(base: Optimizer, params: list[Tensor]) -> None:
    """As a single bad batch may leave it: the parameters themselves stay finite."""
    for index, name, value in ((1, "exp_avg", float("nan")), (2, "exp_avg_sq", float("inf"))):
        base.state[params[index]][name].view(-1)[0] = value


@pytest.mark.parametrize(
    ("average", "policy"),
    pairwise({"at once": average_at_once, "in a step": average_in_a_step}, named("raise", "skip")),
)
def test_momenta_that_are_not_finite_reach_nobody(average: Any, policy: OnNonfinite) -> None:
    bad, world_size = 1, 3
    schedule = Schedule(global_avg_every=4)

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params(dtype=torch.float32)
        base = adamw(params)
        options: Any = {"schedule": schedule, "extensions": [StateAverage()]}
        optimizer = wrap(params, group, base, on_nonfinite=policy, **options)
        take_steps(optimizer, params, rank, range(3))
        optimizer.synchronize()
        if rank == bad:
            poison(base, params)
        own = moments(base, params)
        if policy == "raise":
            refusal = r"finite momenta in StateAverage.*but ranks \[1\] have NaN"
            with pytest.raises(NonFiniteError, match=refusal) as caught:
                average(optimizer, params)
            assert caught.value.ranks == (bad,)
            torch.testing.assert_close(moments(base, params), own, rtol=0, atol=0, equal_nan=True)
            optimizer.load_state_dict(optimizer.state_dict())
        else:
            average(optimizer, params)
        assert flatten(params).isfinite().all()
        return own, moments(base, params)

    rows = run_threads(world_size, main)
    assert not rows[bad][0].isfinite().all()
    if policy == "skip":
        good = torch.stack([own for rank, (own, _) in enumerate(rows) if rank != bad]).mean(dim=0)
        spoilt = ~rows[bad][0].isfinite()
        for own, averaged in rows:
            assert torch.equal(averaged, rows[0][1])
            torch.testing.assert_close(averaged[spoilt], good[spoilt])
            assert not torch.equal(own, averaged)


def an_optimizer_of_others(anchors: list[Tensor]) -> Optimizer:
    return sgd(make_params())


class Nameless(Extension):
    """Has a state, but no place for it."""

    def state_dict(self) -> dict[str, Any]:
        return {"total": 0.0}


# Untyped, to pass what a type checker refuses.
OUTER: Any = OuterOptimizer
STATE: Any = StateGossip
GOSSIP = StateGossip(*MOMENTS)
LATE: dict[str, Any] = {"overlap": Late(2), "schedule": Schedule(gossip_every=2)}
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (lambda: [OUTER(an_optimizer_of_others)], {}, ValueError, "expects .* the tensors"),
    (lambda: [OUTER(partial(SGD, lr=-1.0))], {}, ValueError, "Invalid learning rate"),
    (lambda: [STATE("no")], {}, RuntimeError, r"\['momentum_buffer'\], got 'no'"),
    (lambda: GradientTracking(), {}, TypeError, "extensions expects a sequence of instances"),
    (lambda: [Nameless()], {}, ValueError, r"set Nameless\.name"),
    (lambda: [GOSSIP, GOSSIP], {}, ValueError, r"several of \['StateGossip'\]"),
    (lambda: [GOSSIP], LATE, ValueError, "second moments"),
    (lambda: [GOSSIP], {"overlap": AsItArrives()}, ValueError, "second moments"),
    (lambda: [StateAverage()], {"overlap": AsItArrives()}, ValueError, "mix in the same step"),
    (
        lambda: [StateAverage()],
        {"base": Quantised, "schedule": Schedule(global_avg_every=1), "overlap": False},
        TypeError,
        "plain tensors, got a TwoT.*leave",
    ),
    (lambda: [STATE("momentum")], {"base": Quantised}, TypeError, "plain tensors, got a TwoT"),
    (lambda: [GradientTracking()], {"on_nonfinite": "skip"}, ValueError, "on_nonfinite"),
    (
        lambda: [GradientTracking()],
        {"base": LBFGS, "overlap": False},
        ValueError,
        "GradientTracking",
    ),
]


@pytest.mark.parametrize(("extensions", "options", "error", "words"), REFUSED)
def test_what_an_extension_cannot_do_or_does_not_go_with_is_refused(
    extensions: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    def train() -> None:
        params = make_params()
        base = options.get("base", sgd)(params)
        optimizer = wrap(params, **{**options, "base": base, "extensions": extensions()})
        take_steps(optimizer, params, 0, [0])

    with pytest.raises(error, match=words):
        train()
