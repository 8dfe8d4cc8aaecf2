"""Rounds whose buckets travel as codes: means, consensus, bytes, and what both ends share."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from covering import VIEWS, named, pairwise
from problem import flatten, nesterov
from ranks import run_threads
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from warned import warned_texts

from decent_optim_wrapper import (
    CallOrderError,
    DecentOptimWrapper,
    Group,
    NonFiniteError,
    Schedule,
    Topology,
)
from decent_optim_wrapper.codecs import INT4, CastCodec, Codec, TopKCodec
from decent_optim_wrapper.wire import bucket as bucket_module
from decent_optim_wrapper.wire import references

pytestmark = pytest.mark.slow

CODES = {"int8": torch.int8, "int4": INT4}
COMM = {**CODES, "bf16": torch.bfloat16}
# Several blocks and several buckets, one of them smaller than a block.
SHAPES = [(40, 30), (700,), (), (900,), (3, 7)]
CAP_MB = 5620 / 2**20
LR = 0.05


class Case(NamedTuple):
    """A topology, the number of its ranks, and how they are arranged."""

    topology: str
    world_size: int
    local_world_size: int = 1


CASES = {
    "ring": Case("ring", 4),
    "complete": Case("complete", 3),
    "nodes": Case("alternating-exp-ring", 4, 2),
}
SCHEDULES = {
    "each step": Schedule(),
    "late": Schedule(gossip_every=3, staleness=3),
    "averages": Schedule(global_avg_every=5),
}
# The outer step needs the parameters of the launch.
LATE_OUTER = Schedule(gossip_every=2, staleness=2, outer=nesterov(0.5))
WITH_OUTER = SCHEDULES | {"late, outer": LATE_OUTER}


def make_params(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draws = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES)
    return [draw.to(dtype).requires_grad_() for draw in draws]


def draw_gradients(params: list[Tensor], rank: int, step: int, factor: float = 1.0) -> Tensor:
    """Gradients that do not depend on the parameters, so that the mean is known."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    for param in params:
        draw = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        param.grad = (factor * draw).to(param.dtype)
    return flatten([param.grad for param in params if param.grad is not None])


def wrap(params: list[Tensor], group: dist.ProcessGroup, case: Case, **kw: Any) -> Any:
    kw.setdefault("sync_at_start", False)
    kw.setdefault("bucket_cap_mb", CAP_MB)
    optimizer = DecentOptimWrapper(
        torch.optim.SGD(params, lr=kw.pop("lr", LR)),
        topology=case.topology,
        local_world_size=case.local_world_size,
        process_group=group,
        **kw,
    )
    assert len(optimizer.buckets) > 1
    return optimizer


def train(case: Case, steps: int, **kw: Any) -> Tensor:
    """The parameters of every rank after every step: (ranks, steps, parameters)."""

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, case, **kw)
        history = [flatten(params)]
        for step in range(steps):
            draw_gradients(params, rank, step)
            optimizer.step()
            history.append(flatten(params))
        optimizer.synchronize()
        return torch.stack([*history, flatten(params)])

    return torch.stack(run_threads(case.world_size, main))


def distance(rows: Tensor) -> float:
    """Mean distance of the rows to their mean."""
    return float((rows - rows.mean(0)).norm(dim=1).mean())


@pytest.mark.parametrize(
    ("case", "views", "schedule", "overlap"),
    pairwise(named(*CASES), VIEWS, named(*WITH_OUTER), {"overlap": True, "not": False}),
)
def test_codes_without_rounding_give_the_trajectory_without_codes(
    case: str, views: bool, schedule: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlap = overlap or WITH_OUTER[schedule].staleness > 1
    options = {"schedule": WITH_OUTER[schedule], "overlap": overlap, "param_as_bucket_view": views}
    expected = train(CASES[case], 11, **options)
    monkeypatch.setattr(bucket_module, "saving", lambda codec, dtype: codec)
    ours = train(CASES[case], 11, comm_dtype=CastCodec(torch.float64), **options)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    # The references are added and subtracted.
    assert not torch.equal(ours, expected)
    assert (expected[:, -1] - expected[:, 0]).abs().max() > 0.1


# Each way to average, and codes of each kind; each codec has a contract.
@pytest.mark.parametrize(
    ("case", "code", "limit"),
    [
        ("ring", INT4, 1e-6),
        ("complete", torch.int8, 1e-6),
        ("nodes", torch.float8_e4m3fn, 1e-6),
        ("complete", TopKCodec(64), 1e-6),
        ("ring", torch.bfloat16, 1e-6),
        # The smallest step of float16 is 6e-8.
        ("ring", torch.float16, 1e-5),
    ],
    ids=str,
)
def test_ranks_that_do_not_move_apart_come_to_agree(
    case: str, code: torch.dtype | Codec, limit: float
) -> None:
    rows = train(CASES[case], 60, lr=0.0, comm_dtype=code)
    assert distance(rows[:, 0]) > 1
    assert distance(rows[:, -1]) < limit
    torch.testing.assert_close(rows[:, -1].mean(0), rows[:, 0].mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("case", "code"),
    [(Case("ring", 8), torch.int8), (Case("alternating-exp-ring", 8, 2), INT4)],
    ids=["ring-int8", "nodes-int4"],
)
def test_replicas_stay_as_near_to_each_other_as_without_codes(
    case: Case, code: torch.dtype
) -> None:
    exact = train(case, 30, sync_at_start=True)
    coded = train(case, 30, sync_at_start=True, comm_dtype=code)
    last = [sum(distance(rows[:, step]) for step in range(18, 31)) for rows in (exact, coded)]
    assert last[0] > 1
    assert last[1] < (1.02 if code == torch.int8 else 1.1) * last[0]


@pytest.mark.parametrize(
    ("case", "comm", "dtype", "views"),
    pairwise(CASES, COMM, {"float32": torch.float32, "bfloat16": torch.bfloat16}, VIEWS),
)
def test_ranks_in_agreement_stay_together(
    case: Case,
    comm: torch.dtype,
    dtype: torch.dtype,
    views: bool,
    recwarn: pytest.WarningsRecorder,
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(0, dtype)
        optimizer = wrap(params, group, case, comm_dtype=comm, lr=0.0, param_as_bucket_view=views)
        for _ in range(6):
            optimizer.step()
        optimizer.synchronize()
        return flatten(params)

    start = flatten(make_params(0, dtype))
    # A mean of equal values is rounded.
    slack = 8 * torch.finfo(dtype).eps * start.abs().max() if case.topology != "ring" else 0.0
    for row in run_threads(case.world_size, main):
        assert (row - start).abs().max() <= slack
    # At a learning rate of 0, ranks stay the same for a good reason.
    assert not [each for each in recwarn if "the peers have sent" in str(each.message)]


def test_pairs_and_groups_send_codes_and_count_them() -> None:
    elements = sum(math.prod(shape) for shape in SHAPES)

    def sent(case: Case, comm: torch.dtype | None, views: bool = False) -> list[float]:
        def main(rank: int, group: dist.ProcessGroup) -> float:
            params = make_params(0, torch.float32)
            optimizer = wrap(
                *(params, group, case),
                comm_dtype=comm,
                param_as_bucket_view=views,
                bucket_cap_mb=4000 / 2**20,
            )
            optimizer.step()
            return float(optimizer.stats().bytes_sent / elements)

        return run_threads(case.world_size, main)

    # One code per element, and one float32 and up to 255 codes of nothing per block.
    blocks = {torch.int8: 260 * 12 / elements, INT4: 132 * 12 / elements}
    for code, per_element in blocks.items():
        assert sent(CASES["ring"], code) == pytest.approx([per_element] * 4)
        # All together, as by a ring's all-reduce: 2 (n - 1) / n for each of n ranks.
        for case in (CASES["complete"], Case("complete", 4)):
            assert sum(sent(case, code)) == pytest.approx(2 * (case.world_size - 1) * per_element)
    halves = sum(sent(CASES["complete"], torch.bfloat16, views=False))
    assert halves == pytest.approx(sum(sent(CASES["complete"], None)) / 2, rel=1e-3)
    assert halves == pytest.approx(2 * 2 * 2)


@pytest.mark.parametrize(
    ("case", "comm"),
    [
        (CASES["ring"], torch.int8),
        (CASES["complete"], INT4),
        (CASES["complete"], torch.bfloat16),
        (CASES["nodes"], torch.bfloat16),
    ],
    ids=str,
)
def test_values_that_are_not_finite_raise_on_the_whole_group(case: Case, comm: torch.dtype) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[int, ...]:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, case, comm_dtype=comm, lr=0.0)
        optimizer.step()
        optimizer.synchronize()
        if rank == 0:
            params[1].data[3] = math.nan
        before = flatten(params)
        bad: tuple[int, ...] = ()
        try:
            optimizer.step()
            optimizer.step()
        except NonFiniteError as error:
            bad = error.ranks
            torch.testing.assert_close(flatten(params), before, rtol=0, atol=0, equal_nan=True)
        return bad

    raised = run_threads(case.world_size, main)
    assert raised[0] == (0,)
    assert set(raised) <= {(0,), ()}
    assert case.topology != "complete" or raised == [(0,)] * 3


@pytest.mark.parametrize(
    ("case", "views", "comm"),
    # Groups have a test of their own.
    pairwise({name: CASES[name] for name in ("ring", "nodes")}, VIEWS, COMM),
)
def test_a_rank_without_finite_values_is_left_out_and_takes_those_of_the_others(
    case: Case, views: bool, comm: torch.dtype
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(seed=rank)
        optimizer = wrap(
            *(params, group, case),
            comm_dtype=comm,
            lr=0.0,
            on_nonfinite="skip",
            param_as_bucket_view=views,
        )
        for step in range(30):
            if rank == 1 and step == 12:
                with torch.no_grad():
                    optimizer.synchronize()
                    params[0][0, 0] = math.inf
                    params[3][899] = math.nan
            elif step == 12:
                optimizer.synchronize()
            optimizer.step()
        optimizer.synchronize()
        return flatten(params)

    rows = torch.stack(run_threads(case.world_size, main))
    assert rows.isfinite().all()
    start = torch.stack([flatten(make_params(rank)) for rank in range(case.world_size)])
    assert distance(rows) < 0.02 * distance(start)
    # All others had all but agreed on the mean before.
    assert (rows - start.mean(0)).abs().max() < 0.1


class Weighted(Topology):
    """All ranks in one group, with a weight other than that of the mean."""

    def phases(self) -> list[list[Group]]:
        return [[Group(range(self.world_size), self_weight=0.7)]]


def set_values(params: list[Tensor], rank: int, number: int, bad: tuple[int, ...]) -> Tensor:
    """New values for every rank, of which those that are bad are not finite in any bucket."""
    with torch.no_grad():
        for param, value in zip(params, make_params(seed=100 * number + rank), strict=True):
            param.copy_(value)
            if rank in bad:
                param.view(-1)[-1] = math.nan
    return flatten(params)


@pytest.mark.parametrize(
    ("size", "comm", "views", "rate", "every", "weighted"),
    pairwise(
        {"3": 3, "4": 4},
        COMM,
        VIEWS,
        {"rate 1": 1.0, "rate 0.3": 0.3},
        {"each step": 1, "late": 2},
        {"mean": False, "weighted": True},
    ),
)
def test_ranks_that_are_left_out_of_a_group_move_no_mean_of_the_others(
    size: int, comm: torch.dtype, views: bool, rate: float, every: int, weighted: bool
) -> None:
    """Each rank and each two in turn; each of them averages a part of every bucket."""
    ranks = range(size)
    left_out = [*combinations(ranks, 1), *combinations(ranks, 2)]

    def main(rank: int, group: dist.ProcessGroup) -> list[tuple[Tensor, Tensor]]:
        params = make_params(seed=rank)
        optimizer = DecentOptimWrapper(
            torch.optim.SGD(params, lr=0.0),
            topology=Weighted(size) if weighted else "complete",
            process_group=group,
            sync_at_start=False,
            bucket_cap_mb=CAP_MB,
            comm_dtype=comm,
            on_nonfinite="skip",
            param_as_bucket_view=views,
            schedule=Schedule(gossip_every=every, staleness=every, mixing_rate=rate),
        )
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

    rows = zip(*run_threads(size, main), strict=True)
    rough = {"int8": 0.1, "int4": 1.5, "bf16": 0.05}[next(k for k in COMM if COMM[k] == comm)]
    step = rate * (0.3 * size / (size - 1) if weighted else 1.0)
    for bad, row in zip(left_out, rows, strict=True):
        before, after = map(torch.stack, zip(*row, strict=True))
        good = [rank for rank in ranks if rank not in bad]
        mean = before[good].mean(0)
        torch.testing.assert_close(after[good].mean(0), mean, rtol=0, atol=1e-12)
        tainted = ~before[list(bad)].isfinite().all(0)
        assert tainted.sum() == len(SHAPES)
        assert after.isfinite().all()
        assert (after[list(bad)] - mean)[:, tainted].abs().max() < rough
        if len(good) > 1:
            expected = before[good] + step * (mean - before[good])
            mixed = ((after[good] - expected).abs() < rough).all(0)
            assert mixed.float().mean() > 1 - (len(bad) + 0.6) / size
            assert distance(after[good]) < distance(before[good])


def test_a_rank_that_is_left_out_of_every_round_keeps_no_part_of_the_others_from_mixing() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(seed=rank)
        optimizer = wrap(
            *(params, group, Case("complete", 4)),
            comm_dtype=torch.int8,
            lr=0.0,
            on_nonfinite="skip",
        )
        for _ in range(24):
            if rank == 1:
                with torch.no_grad():
                    for param in params:
                        param.fill_(math.nan)
            optimizer.step()
            optimizer.synchronize()
        return flatten(params)

    rows = torch.stack(run_threads(4, main))[[0, 2, 3]]
    start = torch.stack([flatten(make_params(rank)) for rank in (0, 2, 3)])
    torch.testing.assert_close(rows.mean(0), start.mean(0), rtol=0, atol=1e-12)
    assert (rows - start.mean(0)).abs().max() < 0.1
    assert (start - start.mean(0)).abs().max() > 1


def test_ranks_with_other_references_are_told_so() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, Case("ring", 2), comm_dtype=torch.int8)
        for _ in range(3):
            optimizer.step()
        optimizer.synchronize()
        if rank == 0:
            saved = optimizer.state_dict()
            saved["gossip"].pop("references", None)
            optimizer.load_state_dict(saved)
        try:
            for _ in range(2):
                optimizer.step()
        except CallOrderError as error:
            return str(error)
        return ""

    texts = run_threads(2, main)
    assert any("share the reference of" in text and "load" in text for text in texts)


class Rounds5(Topology):
    """Rank 0 meets five partners."""

    def phases(self) -> list[list[list[int]]]:
        return [[[0, peer]] for peer in range(1, self.world_size)]


def test_a_schedule_of_many_partners_codes_the_values_and_says_so() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, int]:
        params = make_params(seed=rank)
        optimizer = DecentOptimWrapper(
            *(torch.optim.SGD(params, lr=0.0),),
            topology=Rounds5(6),
            process_group=group,
            bucket_cap_mb=CAP_MB,
            sync_at_start=False,
            comm_dtype=INT4,
        )
        for _ in range(10):
            optimizer.step()
        optimizer.synchronize()
        return flatten(params), len(optimizer.state_dict()["gossip"].get("references", {}))

    with warned_texts() as texts:
        rows, kept = zip(*run_threads(6, main), strict=True)
    start = torch.stack([flatten(make_params(rank)) for rank in range(6)])
    torch.testing.assert_close(torch.stack(rows).mean(0), start.mean(0), rtol=0, atol=1e-12)
    assert distance(torch.stack(rows)) < 0.9 * distance(start)
    assert set(kept) == {0}
    # By one rank for all.
    assert sum("the parameters themselves are rounded" in text for text in texts) == 1


@pytest.mark.parametrize(("case", "views", "code"), pairwise(named(*CASES), VIEWS, CODES))
def test_a_late_round_in_flight_is_resumed_by_the_names_of_the_parameters(
    case: str, views: bool, code: torch.dtype
) -> None:
    stop, end = 7, 14
    saved: dict[int, Any] = {}

    def run(rank: int, group: dist.ProcessGroup, resumes: bool) -> Tensor:
        model = torch.nn.ParameterList(make_params(seed=rank))
        params: list[Tensor] = list(model.parameters())
        schedule = Schedule(gossip_every=2, staleness=2)
        options = {"schedule": schedule, "comm_dtype": code, "param_as_bucket_view": views}
        optimizer = wrap(params, group, CASES[case], model=model, **options)
        if resumes:
            with torch.no_grad():
                torch._foreach_copy_(params, saved[rank][0])
            optimizer.load_gossip_state_dict(saved[rank][1])
        for step in range(stop if resumes else 0, end):
            if step == stop and not resumes:
                state = optimizer.gossip_state_dict()
                assert state["in_flight"]
                saved[rank] = copy.deepcopy(([param.detach() for param in params], state))
            draw_gradients(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        return flatten(params)

    size = CASES[case].world_size
    expected = run_threads(size, partial(run, resumes=False))
    assert all(map(torch.equal, run_threads(size, partial(run, resumes=True)), expected))
    assert not torch.equal(expected[0], expected[1])


def test_all_ranks_may_load_the_state_of_one() -> None:
    saved: list[Any] = []

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, CASES["ring"], comm_dtype=INT4, lr=0.0)
        for _ in range(6):
            optimizer.step()
        if rank == 0:
            saved.append(optimizer.state_dict())
        optimizer.all_gather(torch.zeros(1))
        optimizer.load_state_dict(copy.deepcopy(saved[0]))
        for _ in range(60):
            optimizer.step()
        optimizer.synchronize()
        return flatten(params)

    rows = torch.stack(run_threads(4, main))
    assert distance(rows) < 1e-6


def test_references_follow_parameters_into_other_buckets() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> float:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, Case("ring", 2), comm_dtype=torch.int8, lr=0.0)
        for _ in range(10):
            optimizer.step()
        optimizer.synchronize()
        before = flatten(params)
        optimizer.add_param_group({"params": [torch.ones(5, dtype=torch.float64)]})
        optimizer.step()
        optimizer.synchronize()
        return float((flatten(params) - before).abs().max())

    # A reference of zeros would round the values themselves: by hundredths, where ranks differ.
    assert max(run_threads(2, main)) < 1e-9


def add_group(optimizer: DecentOptimWrapper) -> None:
    optimizer.add_param_group({"params": [torch.ones(5, dtype=torch.float64)]})


@pytest.mark.parametrize(
    ("case", "views", "change", "schedule"),
    pairwise(
        {"one-peer-exp": Case("one-peer-exp", 4), "nodes": CASES["nodes"]},
        VIEWS,
        {"add_param_group": add_group, "rebuild_buckets": DecentOptimWrapper.rebuild_buckets},
        {"each step": Schedule(), "late": SCHEDULES["late"]},
    ),
)
def test_replaced_references_are_freed(
    case: Case,
    views: bool,
    change: Callable[[DecentOptimWrapper], None],
    schedule: Schedule,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those of groups that were not in flight, and those of two changes in one round."""
    made: list[tuple[Any, int]] = []
    new_reference = references.new_reference

    def noting(bucket: bucket_module.Bucket) -> Tensor:
        vector = new_reference(bucket)
        weak = StorageWeakRef(vector.untyped_storage())  # type: ignore[no-untyped-call]
        made.append((weak, vector.nbytes))
        return vector

    monkeypatch.setattr(references, "new_reference", noting)

    def main(rank: int, group: dist.ProcessGroup) -> tuple[int, int]:
        params = make_params(seed=rank)
        options = {"schedule": schedule, "param_as_bucket_view": views}
        optimizer = wrap(params, group, case, comm_dtype=torch.int8, **options)

        def train(steps: int) -> None:
            for step in range(steps):
                draw_gradients(params, rank, step)
                optimizer.step()

        train(10)
        change(optimizer)
        change(optimizer)
        train(10)
        optimizer.synchronize()
        gc.collect()
        optimizer.all_gather(torch.zeros(1))
        held = sum(nbytes for storage, nbytes in made if not storage.expired())
        optimizer.all_gather(torch.zeros(1))
        groups = {each.ranks for each in optimizer.topology.schedule(rank) if each.size > 1}
        return len(groups) * sum(8 * each.flat_numel for each in optimizer.buckets), held

    own, held = zip(*run_threads(case.world_size, main), strict=True)
    assert set(held) == {sum(own)}
    assert len(made) > len(own) * 4


@pytest.mark.parametrize("views", [False, True])
def test_a_run_resumes_bit_for_bit_from_a_checkpoint_behind_new_buckets(views: bool) -> None:
    """The round in flight still moves the references of the old ones."""
    stop = 5
    saved: dict[int, list[Any]] = {}

    def train(rank: int, group: dist.ProcessGroup, resumes: bool) -> Tensor:
        # One without elements has no address in a view.
        params = [*make_params(seed=rank), torch.zeros(0, dtype=torch.float64, requires_grad=True)]
        options = {"comm_dtype": torch.int8, "param_as_bucket_view": views}
        optimizer = wrap(params, group, Case("ring", 2), **options)
        for step in range(stop if resumes else 0, stop + 3):
            if step == stop:
                optimizer.rebuild_buckets()
            if step == stop and resumes:
                with torch.no_grad():
                    torch._foreach_copy_(params, saved[rank][0])
                optimizer.load_state_dict(saved[rank][1])
            elif step == stop:
                values = [param.detach() for param in params]
                saved[rank] = copy.deepcopy([values, optimizer.state_dict()])
            draw_gradients(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        return flatten(params)

    whole = run_threads(2, partial(train, resumes=False))
    assert all(map(torch.equal, run_threads(2, partial(train, resumes=True)), whole))
    assert not torch.equal(whole[0][:4], saved[0][0][0].flatten()[:4])


@pytest.mark.parametrize(
    ("case", "code"),
    [(CASES["ring"], INT4), (CASES["complete"], torch.int8), (CASES["nodes"], INT4)],
    ids=str,
)
def test_ranks_that_start_the_same_hardly_notice_their_first_meetings(
    case: Case, code: torch.dtype
) -> None:
    """Coded as a difference to zero, weights would change by a seventh of the largest."""
    options = {"lr": 1e-4, "sync_at_start": True}
    coded, exact = (train(case, 4, comm_dtype=each, **options)[:, -1] for each in (code, None))
    assert (coded - exact).abs().max() < 2e-4
    assert (exact[1] - flatten(make_params(seed=0))).abs().max() > 1e-4
