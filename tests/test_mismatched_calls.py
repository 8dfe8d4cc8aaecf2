"""Ranks that call different things, and parameters that are replaced: named by what comes next."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import problem
import pytest
import torch
import torch.distributed as dist
from covering_arrays import named, pairwise
from problem import backward, flatten, make_params, take_steps
from ranks import run_threads
from torch import Tensor

from decent_optim_wrapper import AsItArrives, CallOrderError, PeerError, Schedule, StateAverage
from decent_optim_wrapper.comm import tags
from decent_optim_wrapper.comm.waiting import PendingMessage
from decent_optim_wrapper.gossip.header import RoundHeader
from decent_optim_wrapper.wire.messages import Messages

wrap = partial(problem.wrap, timeout=3.0)

OTHER_CALLS: dict[str, Callable[[Any], object]] = {
    "global_avg()": lambda optimizer: optimizer.global_avg(),
    "consensus_distance()": lambda optimizer: optimizer.consensus_distance(),
    "add_param_group()": lambda optimizer: optimizer.rebuild_buckets(),
    "all_gather() or report()": lambda optimizer: optimizer.report(),
    "drop_extension()": lambda optimizer: optimizer.drop_extension(StateAverage),
}


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises((CallOrderError, PeerError)) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("topology", "call", "every"),
    pairwise(named("ring", "complete"), named(*OTHER_CALLS), {"each step": 1, "some idle": 3}),
)
def test_a_rank_in_another_method_is_found_within_the_round(
    topology: str, call: str, every: int
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params()
        schedule = Schedule(gossip_every=every)
        options: Any = {"topology": topology, "extensions": [StateAverage()]}
        optimizer = wrap(params, group, schedule=schedule, **options)

        def train() -> None:
            take_steps(optimizer, params, rank, range(3))
            if rank == 1:
                OTHER_CALLS[call](optimizer)
            take_steps(optimizer, params, rank, range(3, 20))

        return error_of(train)

    texts = run_threads(4, main)
    assert texts[1].startswith("CallOrderError")
    assert "as here, but it is in step()" in texts[1]
    theirs = [text for text in texts if text.startswith("CallOrderError") and call in text]
    assert len(theirs) >= 2
    # A rank that rank 1 closes before it has read rank 1's header quotes what rank 1 raises.
    ways = ("expected rank 1 in step()", "but it is in step()")
    assert all(any(way in text for way in ways) for text in theirs)


def test_each_field_of_a_header_is_read_as_it_was_written() -> None:
    written = RoundHeader(*range(1, 1 + len(RoundHeader._fields)))
    read = RoundHeader.decode(written.encode())
    rows = zip(RoundHeader._fields, written, read, strict=True)
    differing = {name: f"written {one}, read {other}" for name, one, other in rows if one != other}
    assert not differing, f"encode() and decode() of RoundHeader disagree: {differing}"


@pytest.mark.parametrize(
    ("overlap", "field", "value"),
    [
        (overlap, field, value)
        for field, overlap in zip(RoundHeader._fields, cycle([True, AsItArrives()]))
        for value in (math.nan, -1.0, 1e300)
    ]
    # One that differs, where the lowest does not count.
    + [(True, "mixing_rate", 0.25)],
)
def test_numbers_that_no_rank_sends_are_an_error_that_names_the_peer(
    monkeypatch: pytest.MonkeyPatch, overlap: Any, field: str, value: float
) -> None:
    send, wrong = Messages.send, dict[str, Any]({field: value})

    def send_wrong(self: Messages, message: Tensor, tag: int, bucket: int) -> list[PendingMessage]:
        if tag == tags.HEADER and self._round.transport.rank == 1:
            header = RoundHeader.decode(message)
            if header.round >= 2:
                message = header._replace(**wrong).encode()
        return send(self, message, tag, bucket)

    monkeypatch.setattr(Messages, "send", send_wrong)

    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params()
        optimizer = wrap(params, group, overlap=overlap, comm_dtype=torch.int8)

        def train() -> None:
            while optimizer.round < 200:
                take_steps(optimizer, params, rank, [optimizer.round])

        return error_of(train)

    text, _ = run_threads(2, main)
    if value == 0.25:
        assert "set the same rate on every rank" in text
    assert text.startswith("CallOrderError: rank 0: expected rank 1 ")
    # Only the rate is no whole number.
    assert field == "mixing_rate" or not re.search(r"\d\.0\b|\de\+", text)


@pytest.mark.parametrize(("has_names", "views"), [(True, True), (False, False)])
def test_a_parameter_replaced_in_its_group_is_named_by_whatever_comes_next(
    has_names: bool, views: bool
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        params = make_params()
        names = [f"layer{index}" for index in range(len(params))]
        base = torch.optim.SGD([*zip(names, params, strict=True)] if has_names else params, lr=0.1)
        optimizer = wrap(params, group, base=base, param_as_bucket_view=views)
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
        # Added without a name, which the others of its group may have.
        whole.append(torch.ones(3, requires_grad=True))
        optimizer.rebuild_buckets()
        # A group that is taken out is none that is replaced: it is gossiped on.
        late = torch.ones(2, requires_grad=True)
        optimizer.add_param_group({"params": [("late", late) if has_names else late]})
        optimizer.param_groups.pop()
        optimizer.step()
        optimizer.synchronize()
        assert not torch.equal(flatten(params), before)

    run_threads(2, main)
