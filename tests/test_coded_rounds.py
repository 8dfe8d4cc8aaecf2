"""Rounds whose buckets travel as codes: means, consensus, bytes, and what both ends share."""

from __future__ import annotations

import copy
import math
import threading
from collections import Counter
from functools import partial
from typing import Any, ClassVar, NamedTuple

import problem
import pytest
import torch
import torch.distributed as dist
from covering_arrays import VIEWS, named, pairwise
from problem import flatten, nesterov, of_guide, take_drawn_steps
from ranks import run_threads
from torch import Tensor
from warning_texts import warned_texts

from decent_optim_wrapper import (
    CallOrderError,
    DecentOptimWrapper,
    Late,
    NonFiniteError,
    OuterOptimizer,
    PeerError,
    Schedule,
    Topology,
)
from decent_optim_wrapper.codecs import (
    INT2,
    INT3,
    INT4,
    CastCodec,
    Codec,
    Int8Codec,
    Place,
    TopKCodec,
    base,
)
from decent_optim_wrapper.wire import bucket as bucket_module
from decent_optim_wrapper.wire import coded

pytestmark = pytest.mark.slow

CODES = {
    "int8": torch.int8,
    "int4": INT4,
    "int3": INT3,
    "int2": INT2,
    "bf16": torch.bfloat16,
}
# Several blocks and several buckets, one of them smaller than a block.
SHAPES = [(40, 30), (700,), (), (900,), (3, 7)]
CAP_MB = 5620 / 2**20


class Case(NamedTuple):
    """A topology, the number of its ranks, and how they are arranged."""

    topology: str | Topology
    world_size: int
    local_world_size: int = 1


CASES = {
    "ring": Case("ring", 4),
    "complete": Case("complete", 3),
    "nodes": Case("alternating-exp-ring", 4, 2),
}
PAIR = Case("ring", 2)
SCHEDULES: dict[str, dict[str, Any]] = {
    "each step": {},
    "averages": {"schedule": Schedule(global_avg_every=5)},
    # The outer step needs the parameters of the launch.
    "late, outer": {
        "schedule": Schedule(gossip_every=3),
        "overlap": Late(3),
        "extensions": [OuterOptimizer(nesterov(0.5))],
    },
}


make_params = partial(problem.make_params, shapes=SHAPES)


def wrap(
    params: list[Tensor], group: dist.ProcessGroup, case: Case, lr: float = 0.05, **options: Any
) -> DecentOptimWrapper:
    options = {"sync_at_start": False, "bucket_cap_mb": CAP_MB, **options}
    optimizer = DecentOptimWrapper(
        torch.optim.SGD(params, lr=lr),
        topology=case.topology,
        local_world_size=case.local_world_size,
        process_group=group,
        **options,
    )
    assert len(optimizer.buckets) > 1
    return optimizer


def take_rounds(optimizer: DecentOptimWrapper, count: int) -> None:
    """Steps without gradients."""
    for _ in range(count):
        optimizer.step()
    optimizer.synchronize()


def train(case: Case, steps: int, **options: Any) -> Tensor:
    """The parameters of every rank after every step: (ranks, steps, parameters)."""

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, case, **options)
        history = [flatten(params)]
        for step in range(steps):
            take_drawn_steps(optimizer, params, rank, [step])
            history.append(flatten(params))
        optimizer.synchronize()
        return torch.stack([*history, flatten(params)])

    return torch.stack(run_threads(case.world_size, main))


def distance(rows: Tensor) -> float:
    """Mean distance of the rows to their mean."""
    return float((rows - rows.mean(0)).norm(dim=1).mean())


@pytest.mark.parametrize(
    ("case", "views", "schedule", "overlap"),
    pairwise(named(*CASES), VIEWS, named(*SCHEDULES), {"overlap": True, "not": False}),
)
def test_codes_without_rounding_give_the_trajectory_without_codes(
    case: str, views: bool, schedule: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"overlap": overlap, "param_as_bucket_view": views, **SCHEDULES[schedule]}
    expected = train(CASES[case], 11, **options)
    monkeypatch.setattr(bucket_module, "saving", lambda codec, dtype: codec)
    ours = train(CASES[case], 11, comm_dtype=CastCodec(torch.float64), **options)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    # The references are added and subtracted.
    assert not torch.equal(ours, expected)
    assert (expected[:, -1] - expected[:, 0]).abs().max() > 0.1


# Each way to average, and codes of each kind; each codec has a contract.
@pytest.mark.parametrize(
    ("case", "code", "views", "rounds"),
    [
        ("ring", INT4, True, 30),
        ("complete", torch.int8, True, 30),
        ("nodes", torch.int8, False, 30),
        ("ring", torch.bfloat16, False, 30),
        ("complete", INT3, False, 40),
        ("ring", INT3, True, 60),
        ("complete", INT2, False, 200),
        ("ring", INT2, True, 200),
    ],
    ids=str,
)
def test_ranks_that_do_not_move_apart_come_to_agree(
    case: str, code: torch.dtype | Codec, views: bool, rounds: int
) -> None:
    rows = train(CASES[case], rounds, lr=0.0, comm_dtype=code, param_as_bucket_view=views)
    assert distance(rows[:, 0]) > 1
    # Values are rounded by a hundredth in bfloat16.
    assert distance(rows[:, -1]) < (1e-4 if code == INT2 else 2e-6)
    torch.testing.assert_close(rows[:, -1].mean(0), rows[:, 0].mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("code", [torch.int8, INT4, INT2, TopKCodec(16)], ids=str)
def test_a_mean_does_not_depend_on_how_much_is_coded_at_once(
    code: torch.dtype | Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block, some blocks of a chunk, two chunks of three, or all of them."""
    expected = train(CASES["complete"], 6, comm_dtype=code)
    for at_once in (1 << 8, 1 << 9, 1 << 11):
        monkeypatch.setattr(base, "SLICE", at_once)
        assert torch.equal(train(CASES["complete"], 6, comm_dtype=code), expected)
    assert (expected[:, -1] - expected[:, 0]).abs().max() > 0.1


def test_a_mean_is_coded_with_zeros_behind_its_values() -> None:
    """Also by a codec that makes something else of the zeros behind those of the ranks."""
    signs = of_guide()["Signs"]
    behind, within = list[float](), list[float]()

    class Noted(signs):  # type: ignore[misc, valid-type]
        def write(self, messages: Tensor, place: Place, values: Tensor) -> None:
            # One chunk: the mean of an owner.
            if len(messages) == 1:
                behind.append(float(values.view(-1)[-14:].abs().max()))
                within.append(float(values.view(-1)[:14].abs().max()))
            super().write(messages, place, values)

        def __repr__(self) -> str:
            return "Noted()"

    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = problem.make_params(seed=rank, shapes=[(50,), (40,)])
        optimizer = DecentOptimWrapper(
            torch.optim.SGD(params, lr=0.0),
            topology="complete",
            process_group=group,
            comm_dtype=Noted(),
            bucket_cap_mb=400 / 2**20,
            sync_at_start=False,
        )
        assert len(optimizer.buckets) == 2
        take_rounds(optimizer, 4)

    run_threads(3, main)
    assert max(behind) == 0
    assert min(within) > 0


def test_a_group_agrees_no_more_slowly_than_pairs_if_few_elements_are_sent() -> None:
    options = {"lr": 0.0, "comm_dtype": TopKCodec(16), "param_as_bucket_view": True}
    pair, group = (train(case, 15, **options) for case in (PAIR, CASES["complete"]))
    left = [distance(rows[:, -1]) / distance(rows[:, 0]) for rows in (pair, group)]
    # With means of 16 elements of each block, and not 48, it would be four times as much.
    assert 0.005 < left[1] < 2 * left[0]
    torch.testing.assert_close(group[:, -1].mean(0), group[:, 0].mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("case", "comm", "dtype", "views"),
    pairwise(CASES, CODES, {"float32": torch.float32, "bfloat16": torch.bfloat16}, VIEWS),
)
def test_ranks_in_agreement_stay_together(
    case: Case, comm: torch.dtype, dtype: torch.dtype, views: bool
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(0, dtype)
        optimizer = wrap(params, group, case, 0.0, comm_dtype=comm, param_as_bucket_view=views)
        # In codes of few levels the first three rounds of each group do not mix.
        take_rounds(optimizer, 12)
        return flatten(params)

    start = flatten(make_params(0, dtype))
    # A mean of equal values is rounded.
    slack = 8 * torch.finfo(dtype).eps * start.abs().max() if case.topology != "ring" else 0.0
    for row in run_threads(case.world_size, main):
        assert (row - start).abs().max() <= slack


def test_pairs_and_groups_send_codes_and_count_them() -> None:
    elements = sum(math.prod(shape) for shape in SHAPES)

    def sent(case: Case, comm: torch.dtype | None) -> list[float]:
        def main(rank: int, group: dist.ProcessGroup) -> float:
            params = make_params(0, torch.float32)
            options = {"bucket_cap_mb": 4000 / 2**20, "sync_at_start": True}
            optimizer = wrap(params, group, case, comm_dtype=comm, **options)
            optimizer.step()
            return optimizer.stats().bytes_sent / elements

        return run_threads(case.world_size, main)

    # One code per element, and one float32 and up to 255 codes of nothing per block. Groups of
    # three and four cut the first bucket, with 5 of the 12 blocks, into chunks of two blocks.
    for code, block in ((torch.int8, 260), (INT4, 132)):
        assert sent(CASES["ring"], code) == pytest.approx([12 * block / elements] * 4)
        # All together, as by a ring's all-reduce: 2 (n - 1) / n for each of n ranks.
        for case in (CASES["complete"], Case("complete", 4)):
            expected = 2 * (case.world_size - 1) * 13 * block / elements
            assert sum(sent(case, code)) == pytest.approx(expected)
    # Its blocks are larger: 4, 3 and 3 of them.
    assert sent(CASES["ring"], INT2) == pytest.approx([10 * 68 / elements] * 4)
    halves = sum(sent(CASES["complete"], torch.bfloat16))
    assert halves == pytest.approx(sum(sent(CASES["complete"], None)) / 2, rel=1e-3)
    assert halves == pytest.approx(2 * 2 * 2, rel=1e-3)


def test_ranks_with_other_references_are_told_so() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, PAIR, comm_dtype=torch.int8)
        take_rounds(optimizer, 3)
        if rank == 0:
            saved = optimizer.state_dict()
            del saved["gossip"]["references"]
            optimizer.load_state_dict(saved)
        with pytest.raises(CallOrderError) as caught:
            take_rounds(optimizer, 2)
        return str(caught.value)

    texts = run_threads(2, main)
    assert any("rounds of its references" in text and "load" in text for text in texts)


def test_a_schedule_of_many_partners_codes_the_values_and_says_so() -> None:
    # Rank 0 has five partners.
    star = of_guide()["Star"](6)

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params(seed=rank)
        start = flatten(params)
        optimizer = wrap(params, group, Case(star, 6), 0.0, comm_dtype=INT4)
        take_rounds(optimizer, 10)
        assert not optimizer.state_dict()["gossip"].get("references")
        return start, flatten(params)

    with warned_texts() as texts:
        start, rows = map(torch.stack, zip(*run_threads(6, main), strict=True))
    torch.testing.assert_close(rows.mean(0), start.mean(0), rtol=0, atol=1e-12)
    assert distance(rows) < 0.9 * distance(start)
    # By one rank for all.
    assert sum("the parameters themselves are rounded" in text for text in texts) == 1


@pytest.mark.parametrize(("case", "views"), [("ring", True), ("nodes", False)])
def test_references_that_are_replaced_in_flight_move_with_their_round(
    case: str, views: bool
) -> None:
    def main(rank: int, group: dist.ProcessGroup, rebuilds: bool) -> Tensor:
        params = make_params(seed=rank)
        options: dict[str, Any] = {"comm_dtype": INT4, "param_as_bucket_view": views}
        options |= {"schedule": Schedule(gossip_every=2), "overlap": Late(2)}
        optimizer = wrap(params, group, CASES[case], **options)
        take_drawn_steps(optimizer, params, rank, range(7))
        assert optimizer.state_dict()["gossip"]["in_flight"]
        if rebuilds:
            optimizer.rebuild_buckets()
        take_drawn_steps(optimizer, params, rank, range(7, 12))
        optimizer.synchronize()
        return flatten(params)

    whole, rebuilt = (run_threads(4, partial(main, rebuilds=each)) for each in (False, True))
    assert all(map(torch.equal, rebuilt, whole))
    assert not torch.equal(whole[0], whole[1])


def test_all_ranks_may_load_the_state_of_one() -> None:
    saved: list[Any] = []

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, CASES["ring"], 0.0, comm_dtype=INT4)
        for _ in range(6):
            optimizer.step()
        if rank == 0:
            saved.append(optimizer.state_dict())
        optimizer.all_gather(torch.zeros(1))
        optimizer.load_state_dict(copy.deepcopy(saved[0]))
        take_rounds(optimizer, 30)
        return flatten(params)

    assert distance(torch.stack(run_threads(4, main))) < 1e-6


@pytest.mark.parametrize("code", [INT4, INT3, INT2], ids=str)
@pytest.mark.parametrize("case", ["ring", "complete"])
def test_ranks_that_agree_are_not_thrown_apart_where_references_start_at_zero(
    case: str, code: torch.dtype
) -> None:
    """As after a loss: whole values in int4 are rounded by a fourteenth of the largest."""

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(seed=0)
        for param, noise in zip(params, make_params(seed=1 + rank), strict=True):
            param.data.add_(noise.data, alpha=1e-3)
        optimizer = wrap(params, group, CASES[case], 0.0, comm_dtype=code)
        rows = [flatten(params)]
        for _ in range(12):
            take_rounds(optimizer, 1)
            rows.append(flatten(params))
        return torch.stack(rows)

    rows = torch.stack(run_threads(CASES[case].world_size, main))
    apart = [distance(rows[:, round]) for round in range(13)]
    assert 0.01 < apart[0] < 0.1
    assert max(apart) < 1.01 * apart[0]
    assert apart[-1] < (0.15 if code == INT2 else 0.1) * apart[0]
    torch.testing.assert_close(rows[:, -1].mean(0), rows[:, 0].mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("resumed_after", [None, 0, 1, 2])
def test_parameters_that_are_added_later_are_not_thrown_apart(resumed_after: int | None) -> None:
    """Nor if the run is saved and resumed soon afterwards."""

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params, (late, noise) = make_params(seed=0), map(make_params, (7, 8 + rank))
        make = partial(wrap, lr=0.0, comm_dtype=INT4, sync_at_start=True)
        optimizer = make(params, group, CASES["complete"])
        take_rounds(optimizer, 4)
        # One joins a bucket of others, which is replaced before a round has begun.
        optimizer.add_param_group({"params": late[4:]})
        optimizer.add_param_group({"params": late[:4]})
        for param, change in zip(late, noise, strict=True):
            param.data.add_(change.data, alpha=1e-3)
        rows = [flatten(late)]
        for number in range(10):
            if number == resumed_after:
                saved = copy.deepcopy(optimizer.state_dict())
                groups: Any = [{"params": each} for each in (params, late[4:], late[:4])]
                optimizer = make(groups, group, CASES["complete"], sync_at_start=False)
                optimizer.load_state_dict(saved)
            take_rounds(optimizer, 1)
            rows.append(flatten(late))
        return torch.stack(rows)

    rows = torch.stack(run_threads(3, main))
    apart = [distance(rows[:, round]) for round in range(11)]
    assert 0.01 < apart[0] < 0.1
    assert max(apart) < 1.01 * apart[0]
    assert apart[-1] < 0.1 * apart[0]


class NotedThreads(Int8Codec):
    """Counts how often each thread codes, and fails at one of the calls if it is told to."""

    threads: ClassVar[Counter[int]] = Counter()

    def __init__(self, fails_at: int = 0, kind: type[Exception] = ArithmeticError) -> None:
        self.fails_at, self.kind, self.calls = fails_at, kind, 0

    # What the ranks compare.
    def __repr__(self) -> str:
        return type(self).__name__

    def encode(self, values: Tensor, message: Tensor, reference: Tensor | None = None) -> None:
        type(self).threads[threading.get_ident()] += 1
        self.calls += 1
        if self.calls == self.fails_at:
            raise self.kind("this codec fails")
        super().encode(values, message, reference)


@pytest.mark.parametrize("few", [0, 2**14])
@pytest.mark.parametrize("case", ["ring", "complete"])
def test_what_is_sent_is_coded_beside_the_training_unless_it_is_little(
    case: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    NotedThreads.threads = Counter()
    monkeypatch.setattr(coded, "FEW", few)

    def main(rank: int, group: dist.ProcessGroup) -> tuple[int, int, Tensor]:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, CASES[case], comm_dtype=NotedThreads())
        take_drawn_steps(optimizer, params, rank, range(4))
        optimizer.synchronize()
        return threading.get_ident(), len(optimizer.buckets), flatten(params)

    ranks = run_threads(CASES[case].world_size, main)
    own = {thread for thread, *_ in ranks}
    each = ranks[0][1] if few else 0
    assert {NotedThreads.threads[thread] for thread in own} == {4 * each}
    # The means of a group are coded by another one in any case.
    assert bool(NotedThreads.threads.keys() - own) == (case == "complete" or not few)
    monkeypatch.setattr(coded, "FEW", 0)
    expected = train(CASES[case], 4, comm_dtype=torch.int8)[:, -1]
    assert torch.equal(torch.stack([params for *_, params in ranks]), expected)


def train_two_layers(
    group: dist.ProcessGroup, code: torch.dtype | Codec, **options: Any
) -> DecentOptimWrapper:
    """Four steps of a model that mixes before its forward pass; the last round stays in flight."""
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 30))
    optimizer = DecentOptimWrapper(
        torch.optim.SGD(model.parameters(), lr=0.05),
        model=model,
        process_group=group,
        topology="complete",
        comm_dtype=code,
        bucket_cap_mb=CAP_MB,
        **options,
    )
    assert len(optimizer.buckets) > 1
    before = flatten([*model.parameters()])
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 30)).sum().backward()
        optimizer.step()
    assert not torch.equal(flatten([*model.parameters()]), before)
    return optimizer


def test_the_bucket_for_which_a_forward_pass_waits_first_is_coded_by_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    NotedThreads.threads = Counter()
    monkeypatch.setattr(coded, "FEW", 0)

    def main(rank: int, group: dist.ProcessGroup) -> int:
        train_two_layers(group, NotedThreads()).synchronize()
        return threading.get_ident()

    own = run_threads(3, main)
    # Once in a round, and all else by others.
    assert [NotedThreads.threads[thread] for thread in own] == [4, 4, 4]
    assert NotedThreads.threads.total() > 2 * 12


def test_a_bucket_of_codes_is_packed_once_in_a_round_that_may_be_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packs = list[int]()
    pack = bucket_module.Bucket.pack

    def main(rank: int, group: dist.ProcessGroup) -> int:
        return len(train_two_layers(group, INT4, sync_at_start=False).buckets)

    def noted(self: bucket_module.Bucket, *args: Any, **options: Any) -> Any:
        packs.append(id(self))
        return pack(self, *args, **options)

    monkeypatch.setattr(bucket_module.Bucket, "pack", noted)
    (buckets,) = {*run_threads(3, main)}
    assert buckets > 1
    assert len(packs) == 3 * 4 * buckets


@pytest.mark.parametrize("case", ["ring", "complete"])
def test_a_codec_that_fails_is_the_error_of_its_rank_and_the_others_name_that_rank(
    case: str,
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params(seed=rank)
        # The first call codes what is sent; later ones may code the mean of a group.
        codec = NotedThreads(fails_at=1 if rank == 1 else 0)
        optimizer = wrap(params, group, CASES[case], comm_dtype=codec, timeout=20)
        try:
            take_drawn_steps(optimizer, params, rank, range(12))
            optimizer.synchronize()
        except (ArithmeticError, PeerError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    errors = run_threads(CASES[case].world_size, main)
    assert errors[1].startswith("ArithmeticError: this codec fails")
    partners = [0, 2]
    for partner in partners:
        assert errors[partner].startswith("PeerError"), errors


class FailingMeans(Int8Codec):
    """Codes what is sent, and fails with an error of torch when it codes a mean."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __repr__(self) -> str:
        return type(self).__name__

    def of_means(self, size: int) -> Codec:
        # An error of torch, as if shapes did not fit.
        return NotedThreads(1, RuntimeError) if self.fails else self


@pytest.mark.parametrize("overlap", [True, False])
def test_a_codec_that_fails_at_a_mean_is_the_error_of_its_rank_and_named_by_the_others(
    overlap: bool,
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params(seed=rank)
        options: dict[str, Any] = {"comm_dtype": FailingMeans(rank == 1), "overlap": overlap}
        optimizer = wrap(params, group, CASES["complete"], timeout=20, **options)
        start = flatten(params)
        with pytest.raises(RuntimeError) as caught:
            take_drawn_steps(optimizer, params, rank, range(3))
        assert not torch.equal(flatten(params), start)
        return f"{caught.type.__name__}: {caught.value}"

    texts = run_threads(3, main)
    assert texts[1] == "RuntimeError: this codec fails"
    for text in (texts[0], texts[2]):
        assert text.startswith("PeerError")
        assert "RuntimeError: this codec fails" in text


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("size", [3, 4])
def test_the_messages_of_a_group_say_which_ranks_are_not_finite(nonfinite: str, size: int) -> None:
    """Also in a bucket that is so small that not every rank owns a part of it."""

    def main(rank: int, group: dist.ProcessGroup) -> tuple[str, Tensor]:
        params = make_params(seed=rank)
        options: Any = {"comm_dtype": INT4, "on_nonfinite": nonfinite}
        optimizer = wrap(params, group, Case("complete", size), **options)
        take_drawn_steps(optimizer, params, rank, range(3))
        if rank == 1:
            # The smallest parameter, and one of several blocks.
            optimizer.synchronize()
            with torch.no_grad():
                params[2].fill_(torch.nan)
                params[0][3, 3] = torch.inf
        else:
            optimizer.synchronize()
        try:
            for _ in range(3):
                optimizer.step()
            optimizer.synchronize()
        except NonFiniteError as error:
            return str([*error.ranks]), flatten(params)
        return "", flatten(params)

    ranks = run_threads(size, main)
    for text, params in ranks:
        if nonfinite == "raise":
            assert text == "[1]"
        else:
            assert not text
            assert params.isfinite().all()
