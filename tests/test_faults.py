"""Peers that die, stop, raise or end: one clear error on every other rank, in bounded time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from covering import OVERLAP, named, pairwise
from dense import mix, train_densely
from problem import TINY_CAP_MB, backward, flatten, make_params, sgd
from ranks import run_processes, threads_end

from decent_optim_wrapper import DecentOptimWrapper, PeerError, Schedule, TopologyFactory
from decent_optim_wrapper.wire.bucket import Bucket

pytestmark = pytest.mark.slow

PATIENCE = 3.0
# What two busy cores and the roll call of a large group may add to the timeout.
SLACK = 12.0
FAULTY, FAULTY_STEP = 1, 3
FAULTS = named("kill", "stop", "kill mid-round", "stop mid-round", "raise", "end")


class Outcome(NamedTuple):
    """What a survivor saw."""

    text: str
    rank: int | None
    round: int | None
    bucket: int | None
    seconds: float
    untouched: bool


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def in_the_middle_of_packing(fault: Callable[[], None]) -> None:
    """Arrange for the fault to come when the second bucket of a round is packed."""
    pack, packed = Bucket.pack, 0

    def pack_or_fail(bucket: Bucket, flat: object, *others: object, **options: object) -> object:
        nonlocal packed
        packed += 1
        if packed == 2:
            fault()
        return pack(bucket, flat, *others, **options)  # type: ignore[arg-type]

    Bucket.pack = pack_or_fail  # type: ignore[method-assign, assignment]


def survive(
    rank: int, topology: str, overlap: bool, fault: str, comm: torch.dtype | None
) -> Outcome | None:
    """Train until a peer is lost; the faulty rank fails at its FAULTY_STEP."""
    dist.init_process_group("gloo")
    params = make_params()
    optimizer = DecentOptimWrapper(
        *(torch.optim.SGD(params, lr=0.05),),
        topology=topology,
        bucket_cap_mb=TINY_CAP_MB,
        overlap=overlap,
        timeout=PATIENCE,
        comm_dtype=comm,
    )
    assert len(optimizer.buckets) > 2
    for step in range(100):
        if rank == FAULTY and step == FAULTY_STEP:
            if fault == "end":
                return None
            if fault == "raise":
                raise ArithmeticError("in the user's code")
            if "mid-round" in fault:
                in_the_middle_of_packing(stop if "stop" in fault else kill)
            else:
                (stop if "stop" in fault else kill)()
        backward(params, rank, step)
        expected = flatten(params)
        if not overlap:
            expected -= 0.05 * flatten([param.grad for param in params if param.grad is not None])
        start = time.monotonic()
        try:
            optimizer.step()
        except PeerError as error:
            untouched = torch.allclose(flatten(params), expected, rtol=0, atol=1e-15)
            seconds = time.monotonic() - start
            assert threads_end(SLACK)
            return Outcome(str(error), error.rank, error.round, error.bucket, seconds, untouched)
        assert not torch.equal(flatten(params), expected) or topology == "ring"
    raise AssertionError("nothing failed")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("fault", "topology", "overlap", "comm"),
    pairwise(FAULTS, named("ring", "complete"), OVERLAP, {"exact": None, "int8": torch.int8}),
)
def test_every_survivor_gets_one_clear_error_in_time(
    fault: str, topology: str, overlap: bool, comm: torch.dtype | None
) -> None:
    lost = {FAULTY} if fault != "end" else set()
    outcomes = [
        outcome
        for outcome in run_processes(4, survive, topology, overlap, fault, comm, lost=lost)
        if outcome is not None
    ]
    assert len(outcomes) == 3
    for outcome in outcomes:
        assert outcome.untouched
        assert outcome.seconds < PATIENCE + SLACK
        assert outcome.round in range(FAULTY_STEP - 1, FAULTY_STEP + 3)
        assert outcome.bucket in range(5)
        assert "Ring(" in outcome.text or "Complete(" in outcome.text
        assert "restart from a checkpoint" in outcome.text
    # Of a pair it is known who was lost; whoever lost that one is lost to the next.
    assert topology == "complete" or FAULTY in {outcome.rank for outcome in outcomes}
    assert all("rank" in outcome.text for outcome in outcomes)


def end_early(rank: int, topology: str, overlap: bool) -> tuple[int | None, str]:
    """Rank 0 makes fewer steps than the others, and ends."""
    dist.init_process_group("gloo")
    params = make_params()
    optimizer = DecentOptimWrapper(
        *(torch.optim.SGD(params, lr=0.05),),
        topology=topology,
        bucket_cap_mb=TINY_CAP_MB,
        overlap=overlap,
        timeout=60,
    )
    assert len(optimizer.buckets) > 2
    for step in range(5 if rank == 0 else 15):
        backward(params, rank, step)
        try:
            optimizer.step()
        except PeerError as error:
            return error.rank, str(error)
    return None, "ended well"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("topology", "overlap"), [("ring", True), ("ring", False), ("complete", True)]
)
def test_a_rank_that_has_made_fewer_calls_is_named_as_such(topology: str, overlap: bool) -> None:
    own, *others = run_processes(4, end_early, topology, overlap)
    assert own == (None, "ended well")
    for rank, text in others:
        assert rank == 0, text
        assert "lost rank 0, which ended, or has made fewer calls, in round" in text
        assert "if there is none, make the same number of calls on every rank" in text
        assert "look there for the first error" not in text


def close_too_early(rank: int) -> list[str]:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    params = make_params()
    optimizer = DecentOptimWrapper(sgd(params), topology="ring", bucket_cap_mb=TINY_CAP_MB)
    optimizer.step()
    optimizer.synchronize()
    dist.destroy_process_group()
    texts = []
    for call in (optimizer.step, optimizer.global_avg, optimizer.consensus_distance):
        with pytest.raises(RuntimeError) as caught:
            call()
        texts.append(str(caught.value))
    with pytest.raises(ValueError, match="process_group has been destroyed"):
        DecentOptimWrapper(sgd(params), process_group=group)
    return texts


@pytest.mark.timeout(60)
def test_a_closed_process_group_is_named() -> None:
    for rank, texts in enumerate(run_processes(2, close_too_early)):
        assert len(texts) == 3
        for text in texts:
            assert f"rank {rank}: expected the process group to be open" in text


def join_at_will(rank: int) -> str:
    from torch.distributed.algorithms.join import Join

    dist.init_process_group("gloo")
    optimizer = DecentOptimWrapper(sgd(make_params()), schedule=Schedule(gossip_every="auto"))
    with pytest.raises(ValueError, match="does not go with Join") as caught, Join([optimizer]):
        pass
    dist.destroy_process_group()
    return str(caught.value)


def test_join_is_refused_where_ranks_may_make_any_number_of_steps() -> None:
    assert all("call synchronize() at the end" in text for text in run_processes(2, join_at_will))


def run_uneven(rank: int, overlap: bool) -> list[float]:
    from torch.distributed.algorithms.join import Join

    dist.init_process_group("gloo")
    params = make_params()
    optimizer = DecentOptimWrapper(
        sgd(params), topology="ring", bucket_cap_mb=TINY_CAP_MB, overlap=overlap
    )
    with Join([optimizer]):
        for step in range(2 + 2 * rank):
            backward(params, rank, step)
            optimizer.step()
    assert optimizer.round == 8
    optimizer.synchronize()
    dist.destroy_process_group()
    return list(flatten(params).tolist())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no_overlap"])
def test_ranks_with_fewer_batches_join_in_the_rounds_of_the_others(overlap: bool) -> None:
    rows = torch.tensor(run_processes(4, run_uneven, overlap), dtype=torch.float64)
    topology = TopologyFactory.create("ring", 4)
    worlds = [make_params() for _ in range(4)]
    bases = [sgd(params) for params in worlds]

    def compute(rank: int, step: int) -> None:
        if step < 2 + 2 * rank:
            backward(worlds[rank], rank, step)

    def update(rank: int, step: int) -> None:
        if step < 2 + 2 * rank:
            bases[rank].step()

    expected = train_densely(
        worlds,
        8,
        overlap,
        compute,
        update,
        land=lambda step: mix(worlds, topology.mixing_matrix(step)),
    )
    torch.testing.assert_close(rows, expected, rtol=1e-11, atol=1e-12)
    assert not torch.equal(rows[0], flatten(make_params()))
