"""The records that a user passes check themselves, and reach every rank."""

from __future__ import annotations

import dataclasses
import inspect
import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, get_type_hints

import pytest
import torch
import torch.distributed as dist
from problem import TINY_CAP_MB, backward, flatten, make_params, nesterov, sgd, take_steps
from ranks import run_threads
from restartable_processes import RestartableProcesses
from torch._C._distributed_c10d import HashStore

from decent_optim_wrapper import (
    DecentOptimWrapper,
    DecentralizedDataParallel,
    Elastic,
    Pacing,
    Schedule,
)
from decent_optim_wrapper.checks import checks_of
from decent_optim_wrapper.comm.store import BoundedStore
from decent_optim_wrapper.config import Settings
from decent_optim_wrapper.elastic.heartbeat import Heartbeat
from decent_optim_wrapper.start.arguments import Arguments


def defaults(record: Any) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(record)}


def test_the_records_have_the_promised_fields() -> None:
    assert defaults(Schedule) == {
        "gossip_every": 1,
        "mixing_rate": 1.0,
        "global_avg_every": None,
        "average_state": "keep",
        "outer": None,
        "staleness": 1,
        "max_staleness": 16,
    }
    assert defaults(Elastic) == {"store": None, "on_membership_change": None, "stale_after": 2.0}
    signature = inspect.signature(DecentOptimWrapper.__init__)
    assert signature.parameters["schedule"].default == Schedule()
    assert signature.parameters["elastic"].default is None


@pytest.mark.parametrize("record", [Schedule(gossip_every=2), Elastic(stale_after=1.0)])
def test_the_records_cannot_be_changed(record: Any) -> None:
    for field in dataclasses.fields(record):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field.name, None)


SGD = torch.optim.SGD([torch.zeros(1)], lr=0.1)
OUT_OF_RANGE: list[tuple[Any, dict[str, Any], str]] = [
    (Schedule, {"mixing_rate": 0.0}, "mixing_rate must be above 0"),
    (Schedule, {"mixing_rate": 1.5}, "at most 1"),
    (Schedule, {"mixing_rate": float("nan")}, "mixing_rate must be"),
    (Schedule, {"gossip_every": 0}, "gossip_every must be 1 step or more"),
    (Schedule, {"global_avg_every": 0}, "global_avg_every must be 1 step or more"),
    (Schedule, {"average_state": "forget"}, "average_state expects one of"),
    (Schedule, {"average_state": "reset"}, "average_state expects one of"),
    (Elastic, {"stale_after": 0}, "stale_after must be above 0 seconds"),
    (Elastic, {"stale_after": -1.0}, "stale_after must be above 0 seconds"),
    (Elastic, {"stale_after": float("inf")}, "stale_after must be above 0 seconds"),
]
OF_ANOTHER_TYPE: list[tuple[Any, dict[str, Any], str]] = [
    (Schedule, {"mixing_rate": "1"}, "mixing_rate expects"),
    (Schedule, {"mixing_rate": None}, "mixing_rate expects"),
    (Schedule, {"gossip_every": 1.5}, "gossip_every expects"),
    (Schedule, {"gossip_every": None}, "gossip_every expects"),
    (Schedule, {"global_avg_every": True}, "global_avg_every expects"),
    (Schedule, {"global_avg_every": "x"}, "global_avg_every expects"),
    (Schedule, {"average_state": 1}, "average_state expects"),
    (Schedule, {"outer": 0.5}, "outer expects"),
    (Schedule, {"outer": SGD}, "outer expects"),
    (Elastic, {"store": {}}, r"store expects a torch\.distributed\.Store"),
    (Elastic, {"on_membership_change": 5}, "on_membership_change expects a function"),
    (Elastic, {"stale_after": "1"}, "stale_after expects a number of seconds"),
    (Elastic, {"stale_after": None}, "stale_after expects a number of seconds"),
]


@pytest.mark.parametrize(
    ("error", "record", "options", "text"),
    [
        *((ValueError, *each) for each in OUT_OF_RANGE),
        *((TypeError, *each) for each in OF_ANOTHER_TYPE),
    ],
)
def test_a_wrong_field_of_a_record_is_refused(
    error: type[Exception], record: Any, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(error, match=text):
        record(**options)


# What the wrapper is built from, beside its options.
OBJECTS = {"optimizer", "topology", "buffers", "model", "extensions"}
# Checked together with the process group.
CHECKED_APART = {"process_group", "mesh", "gossip_dim", "timeout"}


def documented(kind: type) -> list[str]:
    """The names in the section Args of a docstring, in its order."""
    args = (kind.__doc__ or "").partition("    Args:\n")[2].partition("\n\n")[0]
    return re.findall(r"^        (\w+): ", args, re.MULTILINE)


def test_an_option_of_the_wrapper_is_documented_checked_and_compared() -> None:
    """The signature, the docstring and the records name the same options, with the same types."""
    signature = [*inspect.signature(DecentOptimWrapper).parameters]
    assert documented(DecentOptimWrapper) == signature
    settings, arguments = ([*defaults(record)] for record in (Settings, Arguments))
    assert {*settings, *arguments, *OBJECTS} == {*signature}
    assert not OBJECTS & {*settings, *arguments}
    hints = get_type_hints(DecentOptimWrapper.__init__)
    for record in (Settings, Arguments):
        for name, hint in get_type_hints(record).items():
            assert name == "_" or hint == hints[name], name
    assert [*checks_of(Settings)] == settings
    assert {*arguments} - {*checks_of(Arguments)} == CHECKED_APART


@pytest.mark.parametrize("record", [Schedule, Elastic])
def test_a_field_of_a_record_is_documented_and_checked(record: type) -> None:
    assert documented(record) == [*defaults(record)] == [*checks_of(record)]


def test_the_ranks_compare_every_setting() -> None:
    """Except functions; an extension says what is compared of those."""
    options = {
        name: p.default for name, p in inspect.signature(DecentOptimWrapper).parameters.items()
    }
    settings = Settings(**{name: options[name] for name in defaults(Settings)})
    compared = [line.partition("=")[0] for line in settings.lines()]
    assert compared == [
        *(name for name in defaults(Settings) if name != "schedule"),
        *(name for name in defaults(Schedule) if name != "outer"),
    ]
    changed = dataclasses.replace(settings, bucket_cap_mb=3, schedule=Schedule(mixing_rate=0.5))
    assert {*changed.lines()} - {*settings.lines()} == {"bucket_cap_mb=3.0", "mixing_rate=0.5"}


GONE = [
    *("split_update", "on_peer_failure", "on_membership_change", "store", "mixing_rate"),
    *("gossip_every", "global_avg_every", "slow_momentum", "outer_momentum", "average_state"),
]


@pytest.mark.parametrize("name", GONE)
def test_what_is_in_a_record_or_gone_is_no_argument(name: str) -> None:
    unexpected = f"unexpected keyword argument '{name}'"
    options: dict[str, Any] = {name: None}
    with pytest.raises(TypeError, match=unexpected):
        DecentOptimWrapper(sgd(make_params()), **options)
    with pytest.raises(TypeError, match=unexpected):
        DecentralizedDataParallel(
            torch.nn.Linear(2, 2), lambda named: sgd([p for _, p in named]), **options
        )


OTHERS = {
    "gossip_every=2": Schedule(gossip_every=2),
    "mixing_rate=0.5": Schedule(mixing_rate=0.5),
    "global_avg_every=3": Schedule(global_avg_every=3),
    "average_state='average'": Schedule(average_state="average"),
    "outer=SGD": Schedule(outer=nesterov(0.5)),
}


@pytest.mark.parametrize("words", OTHERS)
def test_ranks_with_different_schedules_do_not_start(words: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        schedule = OTHERS[words] if rank else Schedule()
        with pytest.raises(ValueError, match="the ranks disagree") as raised:
            DecentOptimWrapper(sgd(make_params()), process_group=group, schedule=schedule)
        return str(raised.value)

    assert all(f"rank 1 has <{words}" in text for text in run_threads(2, main))


@pytest.mark.parametrize("apart", [False, True])
def test_outer_optimizers_are_compared_by_what_they_are(apart: bool) -> None:
    """Not by the functions that make them, of which every process has its own."""

    def main(rank: int, group: dist.ProcessGroup) -> float:
        lr = 0.5 + rank * apart
        schedule = Schedule(outer=lambda anchors: torch.optim.SGD(anchors, lr=lr))
        params = make_params()
        optimizer = DecentOptimWrapper(
            sgd(params), process_group=group, bucket_cap_mb=TINY_CAP_MB, schedule=schedule
        )
        take_steps(optimizer, params, rank, range(3))
        return float((flatten(params) - flatten(make_params())).abs().max())

    if not apart:
        assert min(run_threads(2, main)) > 1e-3
        return
    with pytest.raises(RuntimeError) as caught:
        run_threads(2, main)
    assert "outer=SGD({'lr': 1.5" in str(caught.value.__cause__)


def test_a_rate_of_one_is_the_same_as_an_integer() -> None:
    rates: list[Any] = [1, 1.0]

    def main(rank: int, group: dist.ProcessGroup) -> float:
        schedule = Schedule(mixing_rate=rates[rank])
        base = sgd(make_params())
        return DecentOptimWrapper(base, process_group=group, schedule=schedule).mixing_rate

    assert run_threads(2, main) == [1.0, 1.0]


def test_all_learn_of_a_dead_rank_and_a_second_process_of_a_rank_replaces_the_first() -> None:
    store, started = HashStore(), []

    def heartbeat(rank: int, life: int = 1) -> Heartbeat:
        started.append(Heartbeat(BoundedStore(store, timedelta(seconds=10)), rank, 1.0))
        started[-1].start(life)
        return started[-1]

    def misses(heartbeat: Heartbeat, rank: int) -> bool:
        return not heartbeat.alive(rank)

    def await_(found: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not found() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found()

    try:
        ranks = [heartbeat(rank) for rank in range(8)]
        for each in ranks:
            each.watch(range(8), epoch=1)
        # Ranks 4 and 5 watch it; the next to die is one of these.
        for lost, left in ((6, [0, 1, 2, 3, 4, 5, 7]), (5, [0, 1, 2, 3, 4, 7])):
            ranks[lost].stop()
            for here in left:
                await_(partial(misses, ranks[here], lost))
            assert all(ranks[here].alive(there) for here in left for there in left)
        ranks[0].watch([0, 1, 2, 3, 4, 7], epoch=2)
        assert not ranks[0].is_over
        second = heartbeat(3, life=2)
        await_(lambda: ranks[3].is_replaced)
        assert ranks[3].is_over
        assert not second.is_over
    finally:
        for each in started:
            each.stop()


def step_until_alone(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> float | None:
    params = make_params()
    optimizer = DecentOptimWrapper(
        *(sgd(params), rank, world_size),
        timeout=3,
        bucket_cap_mb=TINY_CAP_MB,
        elastic=Elastic(store=store, stale_after=1000.0),
    )
    while True:
        start = time.monotonic()
        backward(params, rank, optimizer.round)
        optimizer.step()
        if len(optimizer.members) < world_size:
            return time.monotonic() - start
        report(f"round {optimizer.round}", None)


@pytest.mark.slow
def test_the_wrapper_waits_for_a_silent_rank_for_as_long_as_stale_after_says() -> None:
    with RestartableProcesses(2, step_until_alone) as processes:
        processes.wait_for(1, "round 5")
        processes.kill(1)
        # Its timeout, not the seconds after which a heartbeat is stale otherwise.
        assert processes.wait_for(0, "result") > 2.9


def step_with_other_patience(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> str:
    elastic = Elastic(store=store, stale_after=1.0 + rank)
    with pytest.raises(ValueError, match="the ranks disagree") as raised:
        DecentOptimWrapper(*(sgd(make_params()), rank, world_size), timeout=30, elastic=elastic)
    return str(raised.value)


@pytest.mark.slow
def test_ranks_that_call_others_dead_at_different_times_do_not_start() -> None:
    with RestartableProcesses(2, step_with_other_patience) as processes:
        texts = [processes.wait_for(rank, "result") for rank in range(2)]
    for text in texts:
        assert "rank 1 has <stale_after=2.0> where rank 0 has <stale_after=1.0>" in text


@dataclasses.dataclass(frozen=True)
class TwoSteps(Pacing):
    """A round travels under two steps."""

    needs_snapshot: ClassVar[bool] = True

    def is_due(self, age: int, has_arrived: Callable[[], bool]) -> bool:
        return age >= 2


def test_a_round_that_would_be_left_out_because_another_travels_is_an_error() -> None:
    """The odd phases of a ring would never be mixed."""

    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params(seed=rank)
        options: dict[str, Any] = {"process_group": group, "overlap": TwoSteps()}
        optimizer = DecentOptimWrapper(sgd(params), bucket_cap_mb=TINY_CAP_MB, **options)
        with pytest.raises(
            RuntimeError, match=r"TwoSteps\(\) leaves a round in flight while round 1"
        ):
            take_steps(optimizer, params, rank, range(3))
        options["schedule"] = Schedule(gossip_every=2)
        take_steps(DecentOptimWrapper(sgd(params), **options), params, rank, range(6))

    run_threads(2, main)
