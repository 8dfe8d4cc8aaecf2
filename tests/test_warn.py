"""A warning names the line of the user's script that has to be changed."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problem import TINY_CAP_MB, backward, make_params
from ranks import run_threads
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from decent_optim_wrapper import DecentOptimWrapper, DecentralizedDataParallel, Schedule
from decent_optim_wrapper.comm.transport import Transport
from decent_optim_wrapper.elastic import recovery
from decent_optim_wrapper.gossip.extension import Extensions
from decent_optim_wrapper.wire.layout import Layout

SAME = "the peers have sent the same values as this rank"


@contextmanager
def caught(words: str) -> Iterator[list[warnings.WarningMessage]]:
    """The warnings that contain these words; those of all threads, after the body."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        found: list[warnings.WarningMessage] = []
        yield found
    found += [each for each in record if words in str(each.message)]


def line_of(function: Callable[..., Any], text: str) -> int:
    """The number of the function's only line that contains the text."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [first + place for place, line in enumerate(lines) if text in line]
    return found


def in_module(name: str, source: str, **names: Any) -> Any:
    """What a library's `function` would be."""
    namespace = {"__name__": name, **names}
    exec(compile(source, f"{name}.py", "exec"), namespace)
    return namespace["function"]


def wrap(group: dist.ProcessGroup) -> tuple[list[torch.Tensor], DecentOptimWrapper]:
    params = make_params()
    base = torch.optim.SGD(params, lr=0.05)
    return params, DecentOptimWrapper(base, process_group=group, bucket_cap_mb=TINY_CAP_MB)


def with_a_scheduler(rank: int, group: dist.ProcessGroup) -> None:
    params, optimizer = wrap(group)
    LambdaLR(optimizer, lambda step: 1.0)
    for step in range(5):
        backward(params, 0, step)
        optimizer.step()


def in_a_training_loop(rank: int, group: dist.ProcessGroup) -> None:
    params, optimizer = wrap(group)
    source = "def function(step):\n    step()\n"
    fit = in_module("lightning.pytorch.loops", source)
    for step in range(5):
        backward(params, 0, step)
        fit(optimizer.step)


def in_a_backward_pass(rank: int, group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    model = DecentralizedDataParallel(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        lambda named: torch.optim.SGD([param for _, param in named], lr=0.05),
        process_group=group,
        bucket_size_in_mb=TINY_CAP_MB,
    )
    for _ in range(5):
        model(torch.ones(2, 3)).square().mean().backward()


@pytest.mark.parametrize(
    ("main", "text"),
    [
        (with_a_scheduler, "optimizer.step()"),
        (in_a_training_loop, "fit(optimizer.step)"),
        (in_a_backward_pass, ".backward()"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_warning_of_identical_ranks_points_at_the_line_of_the_step(
    main: Callable[[int, dist.ProcessGroup], None], text: str
) -> None:
    with caught(SAME) as found:
        run_threads(2, main)
    (warning,) = found
    assert Path(warning.filename).name == Path(__file__).name
    assert warning.lineno == line_of(main, text)


def build_with_rare_rounds() -> None:
    DecentOptimWrapper(
        torch.optim.SGD(make_params(), lr=0.05),
        bucket_cap_mb=TINY_CAP_MB,
        gradient_tracking=True,
        schedule=Schedule(gossip_every=2),
    )


def build_alone() -> None:
    DecentOptimWrapper(torch.optim.SGD(make_params(), lr=0.05), bucket_cap_mb=TINY_CAP_MB)


@pytest.mark.parametrize(
    ("build", "words"),
    [(build_with_rare_rounds, "gradient_tracking gains less"), (build_alone, "WORLD_SIZE=4")],
    ids=["rare rounds", "alone"],
)
def test_a_warning_of_the_constructor_points_at_the_line_that_calls_it(
    build: Callable[[], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with caught(words) as found:
        build()
    (warning,) = found
    assert Path(warning.filename).name == Path(__file__).name
    assert warning.lineno == line_of(build, "DecentOptimWrapper(")


def test_a_warning_without_a_line_of_the_user_points_at_the_outermost_line() -> None:
    warn = in_module(
        "decent_optim_wrapper.comm",
        "from decent_optim_wrapper.warn import warn\ndef function():\n    warn('nobody called')\n",
    )
    with caught("nobody called") as found:
        thread = Thread(target=warn)
        thread.start()
        thread.join()
    (warning,) = found
    assert Path(warning.filename).name == "threading.py"


def build_from_a_seed(rank: int, group: dist.ProcessGroup, seed: int) -> None:
    params = make_params(seed)
    base = torch.optim.SGD(params, lr=0.05)
    DecentOptimWrapper(base, process_group=group, bucket_cap_mb=TINY_CAP_MB)


def test_weights_of_other_seeds_are_warned_of_once_and_those_of_one_seed_are_not() -> None:
    with caught("have replaced others") as found:
        run_threads(3, lambda rank, group: build_from_a_seed(rank, group, seed=1))
    assert found == []
    with caught("have replaced others") as found:
        run_threads(3, lambda rank, group: build_from_a_seed(rank, group, seed=rank))
    (warning,) = found
    assert "tensors by rank: {1: 5, 2: 5} (of 5)" in str(warning.message)
    assert Path(warning.filename).name == Path(__file__).name
    assert warning.lineno == line_of(build_from_a_seed, "DecentOptimWrapper(")


@pytest.mark.parametrize(("topology", "said"), [("complete", 1), ("ring", 0)])
def test_codes_that_save_nothing_over_nccl_are_warned_of(
    topology: str, said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transport, "sends_alone", lambda *_: False)

    def main(rank: int, group: dist.ProcessGroup) -> None:
        DecentOptimWrapper(
            torch.optim.SGD(make_params(), lr=0.05),
            process_group=group,
            topology=topology,
            bucket_cap_mb=TINY_CAP_MB,
            comm_dtype=torch.bfloat16,
        )

    with caught("saves nothing in groups of more than two") as found:
        run_threads(4, main)
    assert len(found) == said


class Schedule15:
    """A scheduler that remembers more than can be sent."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 5}}


def test_a_part_that_is_not_sent_to_a_rank_that_comes_back_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(recovery, "broadcast", lambda *_, **__: 0)
    monkeypatch.setattr(recovery, "gossip_state", lambda _: {})
    monkeypatch.setattr(recovery, "send_state", lambda state, _: sent.append(state))
    transport = SimpleNamespace(rank=0, initial_rank=0)
    session = SimpleNamespace(transport=transport)
    pipeline = SimpleNamespace(session=session, extensions=Extensions())
    gossip: Any = SimpleNamespace(pipeline=pipeline)
    base = torch.optim.SGD(make_params(), lr=0.05)
    parts = [LambdaLR(base, lambda step: 1.0), Schedule15()]
    layout = Layout(TINY_CAP_MB, lambda device: device)
    with caught("it is not sent to the rank that comes back") as found:
        recovery.HandOver(base, gossip, (), parts, layout)(donor=0, takes=False)
    (warning,) = found
    assert "the state of Schedule15" in str(warning.message)
    ((_, _, states),) = sent
    assert states[0] is not None
    assert states[1] is None
