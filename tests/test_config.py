"""The records that a user passes check themselves, and reach every rank."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any, get_type_hints
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from modules import make_model
from problem import flatten, make_params, take_steps, wrap
from ranks import run_threads
from torch._C._distributed_c10d import HashStore

from decent_optim_wrapper import (
    AsItArrives,
    DecentOptimWrapper,
    Elastic,
    Extension,
    GradientTracking,
    Late,
    OuterOptimizer,
    Pacing,
    Schedule,
    StateAverage,
    StateGossip,
)
from decent_optim_wrapper.checks import checks_of
from decent_optim_wrapper.codecs import INT3, INT4, Codec, codec_of
from decent_optim_wrapper.comm.store import part_of_run
from decent_optim_wrapper.config import Settings, default_comm_dtype
from decent_optim_wrapper.elastic.membership.ended import key_prefix, mark_end
from decent_optim_wrapper.elastic.membership.heartbeat import Heartbeat, beat_key
from decent_optim_wrapper.elastic.membership.liveness import ENDED
from decent_optim_wrapper.start.meeting import Meeting
from decent_optim_wrapper.topo import Topology, TopologyFactory, default_name


def defaults(record: Any) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(record)}


# A field of a record, values that it does not take, and what is said of each.
WRONG: list[tuple[Any, str, list[Any], type[Exception], str]] = [
    (Schedule, "mixing_rate", [0.0, 1.5, float("nan")], ValueError, "above 0 and at most 1"),
    (Schedule, "mixing_rate", ["1", None], TypeError, "mixing_rate expects"),
    (Schedule, "gossip_every", [0], ValueError, "gossip_every must be 1 step or more"),
    (Schedule, "gossip_every", [1.5, None], TypeError, "gossip_every expects"),
    (Schedule, "global_avg_every", [True, "x"], TypeError, "global_avg_every expects"),
    (Late, "steps", [1, 0], ValueError, "steps must be 2 steps or more"),
    (Late, "steps", [2.5, None, True], TypeError, "steps expects a number of steps"),
    (AsItArrives, "max_steps", [0], ValueError, "max_steps must be 1 step or more"),
    (Elastic, "store", [{}, "tcp://"], TypeError, r"store expects a torch\.distributed\.Store"),
    (Elastic, "on_membership_change", [5], TypeError, "expects a function .* got 5"),
    (Elastic, "stale_after", [0, -1.0, float("inf")], ValueError, "must be above 0 seconds"),
    (Elastic, "stale_after", ["1", None], TypeError, "stale_after expects a number of seconds"),
]


@pytest.mark.parametrize(("record", "field", "values", "error", "text"), WRONG)
def test_a_wrong_field_of_a_record_is_refused(
    record: Any, field: str, values: list[Any], error: type[Exception], text: str
) -> None:
    for value in values:
        with pytest.raises(error, match=text):
            record(**{field: value})


# What the wrapper is built from, beside its options.
OBJECTS = {"optimizer", "topology", "buffers", "model", "extensions"}
# Checked together with the process group.
CHECKED_APART = {"process_group", "gossip_dim"}


def documented(kind: type) -> list[str]:
    """The names in the section Args of a docstring, in its order."""
    args = (inspect.getdoc(kind) or "").partition("Args:\n")[2].partition("\n\n")[0]
    return re.findall(r"^    (\w+): ", args, re.MULTILINE)


def test_an_option_of_the_wrapper_is_documented_checked_and_compared() -> None:
    """The signature, the docstring and the records name the same options, with the same types."""
    signature = [*inspect.signature(DecentOptimWrapper).parameters]
    assert documented(DecentOptimWrapper) == signature
    settings, arguments = ([*defaults(record)] for record in (Settings, Meeting))
    assert {*settings, *arguments, *OBJECTS} == {*signature}
    assert not OBJECTS & {*settings, *arguments}
    hints = get_type_hints(DecentOptimWrapper.__init__)
    for record in (Settings, Meeting):
        for name, hint in get_type_hints(record).items():
            # Settings have its default.
            assert hint == hints[name] or name == "overlap", name
    assert [*checks_of(Settings)] == settings
    assert {*arguments} - {*checks_of(Meeting)} == CHECKED_APART


@pytest.mark.parametrize("record", [Schedule(), Elastic(), Late(2), AsItArrives()])
def test_a_field_of_a_record_is_documented_and_checked(record: Any) -> None:
    kind: Any = type(record)
    names = [*defaults(kind)]
    assert documented(kind) == names == [*checks_of(kind)]


def test_the_ranks_compare_every_setting() -> None:
    """Except functions; an extension says what is compared of those."""
    options = {
        name: p.default for name, p in inspect.signature(DecentOptimWrapper).parameters.items()
    }
    options["overlap"] = True
    settings = Settings(**{name: options[name] for name in defaults(Settings)})
    compared = [line.partition("=")[0] for line in settings.lines()]
    assert compared == [
        *(name for name in defaults(Settings) if name != "schedule"),
        *defaults(Schedule),
    ]
    changed = dataclasses.replace(settings, bucket_cap_mb=3, schedule=Schedule(mixing_rate=0.5))
    assert {*changed.lines()} - {*settings.lines()} == {"bucket_cap_mb=3.0", "mixing_rate=0.5"}


ALL, PAIRS = ("complete", INT3), ("greedy", torch.float32)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model": True}, ALL),
        ({"model": True, "overlap": True}, ALL),
        ({"model": True, "overlap": False, "topology": "ring"}, ("ring", INT3)),
        ({"model": True, "comm_dtype": torch.float32}, ("complete", torch.float32)),
        ({"model": True, "extensions": [GradientTracking()]}, ("complete", INT4)),
        ({"model": True, "overlap": AsItArrives()}, PAIRS),
        ({}, PAIRS),
    ],
    ids=str,
)
def test_all_ranks_mix_in_int3_by_default_where_the_model_is_known(
    options: dict[str, Any], expected: tuple[str, torch.dtype]
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Topology, Codec | None]:
        model = make_model(rank)
        given = {**options, "model": model} if "model" in options else options
        optimizer = wrap([*model.parameters()], group, **given)
        assert len(optimizer.buckets) > 1
        return optimizer.topology, optimizer.buckets[0].codec(2)

    size = 4 if "topology" in options else 3
    topology, codec = run_threads(size, main)[0]
    name, dtype = expected
    assert repr(topology) == repr(TopologyFactory.create(name, size))
    assert repr(codec) == repr(codec_of(dtype))


def test_pairs_are_the_default_in_worlds_that_are_larger_than_the_measured_ones() -> None:
    sizes = (2, 16, 17, 32)
    names = [default_name(size, mixes_all=True) for size in sizes]
    assert names == ["complete", "complete", "greedy", "one-peer-exp"]
    # They have too many groups for references, without which int3 is coarse.
    topologies = map(TopologyFactory.create, names, sizes)
    dtypes = [default_comm_dtype(each, mixes_all=True, sends_more=False) for each in topologies]
    assert dtypes == [INT3, INT3, torch.float32, torch.float32]


def outer(lr: float) -> Extension:
    """One with a function of its own in each rank."""
    return OuterOptimizer(lambda anchors: torch.optim.SGD(anchors, lr=lr))


TRACKED: dict[str, Any] = {"extensions": [GradientTracking()]}
LATE: dict[str, Any] = {"schedule": Schedule(gossip_every=4), "overlap": Late(2)}
# The options of the ranks, and what both say about rank 1.
DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"schedule": Schedule(mixing_rate=0.5)}, "mixing_rate=0.5"),
    (LATE, {**LATE, "overlap": Late(4)}, "overlap=Late(steps=4)"),
    ({}, {"timeout": 77}, "timeout=datetime.timedelta(seconds=77)"),
    ({}, {"extensions": [StateAverage()]}, "StateAverage"),
    (TRACKED, {"extensions": [StateGossip("momentum_buffer")]}, "StateGossip('momentum"),
    ({"extensions": [outer(0.5)]}, {"extensions": [outer(1.5)]}, "OuterOptimizer(SGD({'lr': 1.5"),
]


def test_ranks_start_with_the_same_schedule_and_extensions_only() -> None:
    """By their values: 1 is 1.0, and outer optimizers are compared by what they are."""

    def main(rank: int, group: dist.ProcessGroup) -> float:
        params = make_params()
        for *options, words in DIFFERENT:
            with pytest.raises(ValueError, match=re.escape(f"rank 1 has <{words}")):
                wrap(params, group, **options[rank])
        same = Schedule(mixing_rate=(1, 1.0)[rank])
        # Each rank may list them in its own order.
        extensions = [GradientTracking(), outer(0.5)][:: 1 - 2 * rank]
        optimizer = wrap(params, group, schedule=same, extensions=extensions)
        assert optimizer.mixing_rate == 1.0
        take_steps(optimizer, params, rank, range(3))
        return float((flatten(params) - flatten(make_params())).abs().max())

    assert min(run_threads(2, main)) > 1e-3


def await_(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not found() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found()


@pytest.mark.slow
@pytest.mark.parametrize("marked", [False, True])
def test_all_learn_of_dead_ranks_and_a_later_process_replaces_an_earlier(marked: bool) -> None:
    store, stale_after = HashStore(), 1000.0 if marked else 1.0
    # The ranks have built two wrappers, the first one in vain.
    bound = timedelta(seconds=10)
    parts = [part_of_run(store, key_prefix(number), bound) for number in range(2)]
    for part, rank in product(parts, range(8)):
        part.add(f"starts/{rank}", 1)
    # Of eight ranks, and of a second process of rank 3.
    beats = [
        Heartbeat(part_of_run(store, key_prefix(1), bound), rank, stale_after)
        for rank in (*range(8), 3)
    ]
    *ranks, second = beats
    try:
        for each in ranks:
            each.start(1)
            each.watch(range(8), epoch=1)
            each.say(f"steps of {each.rank}")
        left = [*range(8)]
        await_(lambda: all(ranks[0].heard(there) == f"steps of {there}" for there in left))
        # Ranks 4 and 5 watched the first of them.
        for lost in (6, 5):
            left.remove(lost)
            ranks[lost].close()
            # Other processes of rank 0 have ended, one of them on another host.
            mark_end(lambda: store, 0, pid=0)
            with mock.patch("socket.gethostname", return_value="another"):
                mark_end(lambda: store, 0, os.getpid())

            def all_know(lost: int = lost) -> bool:
                # Again: the last heartbeat may be on its way.
                mark_end(lambda: store, lost, os.getpid() if marked else 0)
                return not any(ranks[here].alive(lost) for here in left)

            await_(all_know)
            # What it has said last does not get lost with it.
            assert ranks[0].heard(lost) == f"steps of {lost}"
            assert all(ranks[here].alive(there) for here in left for there in left)
        ranks[0].watch(left, epoch=2)
        assert not ranks[0].is_over()
        second.start(2)
        # Before it says something itself.
        assert ranks[0].heard(3) == "steps of 3"
        # The launcher tells of the end of a later process.
        part.set(beat_key(2), ENDED)
        await_(lambda: ranks[2].is_replaced and ranks[3].is_replaced)
        assert not second.is_over()
    finally:
        for each in beats:
            each.close()


@dataclasses.dataclass(frozen=True)
class TwoSteps(Pacing):
    """A round travels under two steps, as with `Late(2)`."""

    def is_due(self, age: int, has_arrived: Callable[[], bool]) -> bool:
        return age >= 2


def test_a_round_that_would_be_left_out_because_another_travels_is_an_error() -> None:
    """The odd phases of a ring would never be mixed."""

    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params(seed=rank)
        for overlap, every in ((TwoSteps(), 1), (Late(2), 1), (AsItArrives(), 2)):
            with pytest.raises(ValueError, match=re.escape(f"overlap={overlap!r} expects")):
                wrap(params, group, overlap=overlap, schedule=Schedule(gossip_every=every))
        ends = []
        for overlap in (TwoSteps(), Late(2)):
            params = make_params(seed=rank)
            optimizer = wrap(params, group, overlap=overlap, schedule=Schedule(gossip_every=2))
            take_steps(optimizer, params, rank, range(6))
            ends.append(flatten(params))
        assert torch.equal(*ends)
        assert not torch.equal(ends[0], flatten(make_params(seed=rank)))

    run_threads(2, main)
