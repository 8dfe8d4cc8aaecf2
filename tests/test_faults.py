"""Peers that die, stop, raise or end: one clear error on every other rank, in bounded time."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from covering_arrays import OVERLAP, named, pairwise
from problem import OneParameter, backward, flatten, make_params, wrap
from ranks import keep_no_idle_threads, run_processes, threads_end
from torch import nn

from decent_optim_wrapper import PeerError
from decent_optim_wrapper.wire.bucket import Bucket

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TIMEOUT = 2.0
# Longer than anything here takes.
LONG = 60.0
# What two busy cores and the roll call of a large group may add to the timeout.
SLACK = 12.0
FAULTY, FAULTY_STEP = 1, 3
COLLECTIVE = ("global_avg", "consensus_distance")
OVERLAPS: dict[str, Any] = {**OVERLAP, "forward": "forward"}
# Fault, topology, `overlap`, `comm_dtype`, and the call before which the rank fails.
CASES = [
    *pairwise(
        *(named("kill", "kill mid-round", "end"), named("ring", "complete"), OVERLAPS),
        {"exact": None, "int8": torch.int8},
        named("step", "synchronize", "global_avg"),
    ),
    # A forked process ends without `atexit`.
    ("end kept", "ring", True, None, "step"),
    # Each takes the timeout.
    ("stop mid-round", "ring", True, None, "step"),
    ("stop mid-round", "ring", False, torch.int8, "synchronize"),
    ("stop mid-round", "complete", "forward", None, "consensus_distance"),
]


# A wrapper that nothing drops before the process ends.
KEPT: list[object] = []


class Outcome(NamedTuple):
    """What a survivor saw."""

    text: str
    rank: int | None
    round: int | None
    bucket: int | None
    seconds: float
    untouched: bool


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def in_the_middle_of_packing(number: signal.Signals) -> None:
    """Arrange for the signal to come when the second bucket of a round is packed."""
    pack, packed = Bucket.pack, 0

    def pack_or_fail(bucket: Bucket, flat: object, *others: object, **options: object) -> object:
        nonlocal packed
        packed += 1
        if packed == 2:
            send(number)
        return pack(bucket, flat, *others, **options)  # type: ignore[arg-type]

    Bucket.pack = pack_or_fail  # type: ignore[method-assign, assignment]


def survive(
    rank: int, topology: str, overlap: Any, fault: str, comm: torch.dtype | None, call: str
) -> Outcome | None:
    """Train until a peer is lost; the faulty rank fails at its FAULTY_STEP, before a call of it."""
    keep_no_idle_threads()
    dist.init_process_group("gloo")
    model = nn.Sequential(*map(OneParameter, make_params()))
    params = list(model.parameters())
    optimizer = wrap(
        params,
        base=torch.optim.SGD(params, lr=0.05),
        topology=topology,
        overlap=overlap,
        model=model,
        comm_dtype=comm or torch.float32,
        param_as_bucket_view=comm is None,
        timeout=TIMEOUT if "stop" in fault else LONG,
    )
    assert len(optimizer.buckets) > 2

    def fail() -> None:
        number = signal.SIGSTOP if "stop" in fault else signal.SIGKILL
        (in_the_middle_of_packing if "mid-round" in fault else send)(number)

    for step in range(100):
        fails = rank == FAULTY and step == FAULTY_STEP
        if fails and "end" in fault:
            if fault == "end kept":
                KEPT.append(optimizer)
            return None
        start, expected = time.monotonic(), flatten(params)
        try:
            model(torch.zeros(()))
            backward(params, rank, step)
            expected = flatten(params)
            if overlap is False:
                grads = [param.grad for param in params if param.grad is not None]
                expected -= 0.05 * flatten(grads)
            if fails and call == "step":
                fail()
            start = time.monotonic()
            optimizer.step()
            assert not torch.equal(flatten(params), expected) or topology == "ring"
            if call != "step":
                expected = flatten(params)
                if fails:
                    fail()
                start = time.monotonic()
                getattr(optimizer, call)()
        except PeerError as error:
            seconds = time.monotonic() - start
            sizes = [param.numel() for param in params]
            is_other = (flatten(params) - expected).abs() > 1e-15
            moved = [bool(each.any()) for each in is_other.split_with_sizes(sizes)]
            # What is collective mixes the round before it.
            is_mixed = overlap == "forward" and call in COLLECTIVE and all(moved)
            untouched = not any(moved) or is_mixed
            assert threads_end(SLACK)
            return Outcome(str(error), error.rank, error.round, error.bucket, seconds, untouched)
    raise AssertionError("nothing failed")


@pytest.mark.parametrize(("fault", "topology", "overlap", "comm", "call"), CASES)
def test_every_survivor_gets_one_clear_error_in_time(
    fault: str, topology: str, overlap: Any, comm: torch.dtype | None, call: str
) -> None:
    lost = {FAULTY} if "end" not in fault else set()
    # Enough for a neighbour of neither the faulty rank nor its neighbours.
    world_size = 6 if (fault, topology, call) == ("kill", "ring", "step") else 4
    found = run_processes(world_size, survive, topology, overlap, fault, comm, call, lost=lost)
    outcomes = [outcome for outcome in found if outcome is not None]
    assert len(outcomes) == world_size - 1
    for outcome in outcomes:
        assert outcome.untouched
        assert outcome.seconds < (TIMEOUT + SLACK if "stop" in fault else LONG / 2)
        if "end" in fault:
            assert outcome.rank == FAULTY
            assert f"lost rank {FAULTY}, which ended, or has made fewer calls" in outcome.text
            assert "if there is none, make the same number of calls on every rank" in outcome.text
            assert "look there for the first error" not in outcome.text
        if outcome.round is None:
            assert call in COLLECTIVE
            assert f"all {world_size} ranks to take part in a collective" in outcome.text
            continue
        assert outcome.round in range(FAULTY_STEP - 1, FAULTY_STEP + 3)
        assert outcome.bucket in range(5)
        assert "Ring(" in outcome.text or "Complete(" in outcome.text
        assert "restart from a checkpoint" in outcome.text
    # Of a pair it is known who was lost.
    named_ranks = {outcome.rank for outcome in outcomes}
    assert topology == "complete" or FAULTY in named_ranks
    # Who loses that one leaves a note for its own neighbours.
    assert world_size == 4 or named_ranks == {FAULTY}
