"""Rounds that are mixed when they have arrived: the mean, the calls, and nobody waits for ever."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import problem
import pytest
import torch
import torch.distributed as dist
from fake_cuda import WAYS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problem import CODED, MODES, draw_gradients, flatten, make_params, take_drawn_steps
from ranks import run_threads
from torch import Tensor, nn

from decent_optim_wrapper import (
    AsItArrives,
    CallOrderError,
    DecentOptimWrapper,
    Late,
    NonFiniteError,
    Schedule,
)
from decent_optim_wrapper.config import OnNonfinite
from decent_optim_wrapper.gossip.round import Round
from decent_optim_wrapper.wire.bucket import Bucket

AUTO = AsItArrives()
LR = 0.05


def wrap(
    params: Sequence[Tensor], group: dist.ProcessGroup | None, **options: Any
) -> DecentOptimWrapper:
    options = {"topology": "ring", "overlap": AUTO, **options}
    optimizer = problem.wrap(params, group, torch.optim.SGD(params, lr=LR), **options)
    assert len(optimizer.buckets) > 1
    return optimizer


class Walk:
    """A rank that moves by gradients which do not depend on the parameters, so the mean is known.

    Attributes:
        alone: where it would be without the others.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup, **options: Any) -> None:
        self.rank, self.group = rank, group
        self.params = make_params(seed=rank)
        self.alone = flatten(self.params)
        self.steps = 0
        self.wrap(**options)

    def wrap(self, **options: Any) -> None:
        """Go on with a new wrapper."""
        options = {"sync_at_start": False, "local_world_size": 2, **options}
        self.optimizer = wrap(self.params, self.group, **options)

    def step(self, overflows: bool = False) -> None:
        gradient = draw_gradients(self.params, self.rank, self.steps)
        self.alone -= 0.0 if overflows else LR * gradient
        # As GradScaler says it.
        found = torch.tensor(float(overflows))
        vars(self.optimizer).update(found_inf=found, grad_scale=None)
        self.optimizer.step()
        self.steps += 1

    def end(self) -> tuple[Tensor, Tensor]:
        self.optimizer.synchronize()
        return flatten(self.params), self.alone


def check_that_the_mean_stays(
    results: Iterable[tuple[Tensor, Tensor]], moved: float = 1e-3
) -> None:
    """Compare the mean with that without gossip, from which each rank is at least so far away."""
    ours, alone = (torch.stack(rows) for rows in zip(*results, strict=True))
    torch.testing.assert_close(ours.mean(0), alone.mean(0), rtol=0, atol=1e-12)
    assert (ours - alone).abs().max() >= moved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "overlap", "way"),
    [(1, True, "at once"), (4, Late(4), "at once"), (1, AUTO, "at once"), (1, AUTO, "by a thread")],
    ids=str,
)
def test_the_mean_stays_if_a_run_is_resumed_with_another_pacing(
    every: int, overlap: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    WAYS[way](monkeypatch)
    late = {"overlap": Late(3), "schedule": Schedule(gossip_every=3)}
    other = {"overlap": overlap, "schedule": Schedule(gossip_every=every)}

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        walk = Walk(rank, group, **late)
        for step in range(9):
            # From rounds of any age to the other pacing, and back.
            if step > 2:
                if overlap is AUTO and step % 2 == 0:
                    walk.optimizer.synchronize()
                state = walk.optimizer.state_dict()
                walk.wrap(**(other if step % 2 else late))
                walk.optimizer.load_state_dict(state)
            walk.step()
        return walk.end()

    check_that_the_mean_stays(run_threads(4, main))


def test_a_state_is_loaded_when_no_round_is_in_flight() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        walk = Walk(rank, group)
        for _ in range(4 + rank):
            walk.step()
        saved = walk.optimizer.state_dict()
        with pytest.raises(RuntimeError, match="call synchronize\\(\\) on all ranks before"):
            walk.optimizer.load_state_dict(saved)
        walk.optimizer.synchronize()
        # Saved at different rounds.
        walk.optimizer.load_state_dict(saved)
        walk.alone = flatten(walk.params)
        for _ in range(4 + 3 * rank):
            walk.step()
        return walk.end()

    check_that_the_mean_stays(run_threads(4, main))


class Script(threading.local):
    """When the rounds of this thread's rank arrive: so many steps after their launch.

    A step that finds a round arrived by the script waits until it really is.
    """

    def __init__(self) -> None:
        self.delays: Iterator[int] = itertools.repeat(1)
        self.left: dict[Round, int] = {}
        self.mixed = 0

    def arrives(self, round: Round) -> bool:
        """Asked by every step while the round is in flight."""
        if round not in self.left:
            self.left[round] = next(self.delays)
        self.left[round] -= 1
        return self.left[round] <= 0

    def note(self, round: Round) -> None:
        self.mixed += not round.unmixed


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    mix = Round.mix

    def mix_and_note(round: Round, bucket: Bucket) -> None:
        mix(round, bucket)
        script.note(round)

    monkeypatch.setattr(Round, "has_arrived", lambda round: script.arrives(round))
    monkeypatch.setattr(Round, "mix", mix_and_note)
    return script


def average_and_look(walk: Walk, for_good: bool) -> tuple[Tensor, Tensor, float]:
    """The average, where the rank would be alone, and how far apart the ranks are."""
    if for_good:
        walk.optimizer.global_avg(may_revert=False)
        return flatten(walk.params), walk.alone.clone(), 0.0
    with walk.optimizer.averaged():
        average = flatten(walk.params)
    return average, walk.alone.clone(), walk.optimizer.consensus_distance()


@pytest.mark.slow
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    topology=st.sampled_from(["ring", "complete", "one-peer-exp", "alternating-exp-ring"]),
    delays=st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=4), min_size=4, max_size=4),
    blocks=st.lists(
        st.tuples(*[st.integers(0, 9)] * 4), min_size=1, max_size=3
    ),  # steps of every rank until the next call
    max_steps=st.integers(1, 8),
    mode=st.sampled_from([*MODES, "int8"]),
    # Each rank sets its rates by its own steps; the lowest of a group counts.
    slows_down=st.booleans(),
)
def test_whatever_arrives_when_each_round_is_mixed_once_and_averages_are_exact(
    script: Script,
    topology: str,
    delays: list[list[int]],
    blocks: list[tuple[int, ...]],
    max_steps: int,
    mode: str,
    slows_down: bool,
) -> None:
    """Also where one rank skips an update."""
    options: dict[str, Any] = {**(MODES | CODED)[mode], "topology": topology}

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Any, Any, tuple[int, int]]:
        script.delays = itertools.cycle(delays[rank])
        walk = Walk(rank, group, overlap=AsItArrives(max_steps), **options)
        seen = []
        for call, block in enumerate(blocks):
            for _ in range(block[rank]):
                if slows_down:
                    walk.optimizer.mixing_rate = 0.9**walk.steps
                walk.step(overflows=(rank, walk.steps) == (1, 3))
                assert walk.optimizer.stats().staleness <= max_steps
            seen.append(average_and_look(walk, for_good=call == 2))
        return walk.end(), seen, (walk.optimizer.round, script.mixed)

    ends, seen, counts = zip(*run_threads(4, main), strict=True)
    ((rounds, mixed),) = set(counts)
    # An average that is kept drops the round in flight.
    assert rounds - (len(blocks) > 2) <= mixed <= rounds
    check_that_the_mean_stays(ends, moved=0.0)
    for averages, alone, distances in (zip(*call, strict=True) for call in zip(*seen, strict=True)):
        assert all(torch.equal(average, averages[0]) for average in averages)
        assert len(set(distances)) == 1
        check_that_the_mean_stays(zip(averages, alone, strict=True))


def test_a_rank_in_another_call_raises_on_all() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params()
        optimizer = wrap(params, group)
        take_drawn_steps(optimizer, params, rank, range(3 + 4 * rank))
        call = optimizer.consensus_distance if rank == 1 else optimizer.synchronize
        with pytest.raises(CallOrderError) as caught:
            call()
        return str(caught.value)

    for text in run_threads(4, main):
        # A rank that hears of another's error first quotes it.
        assert "CallOrderError: rank" in text or "expected all ranks in" in text
        assert "rank 1 is in consensus_distance()" in text or "rank 0 is in synchronize()" in text


# With rounds of up to 16 steps, a rank that is far ahead could end before the NaN arrives.
SOON, LATE = {"overlap": AsItArrives(4)}, {"overlap": Late(2), "schedule": Schedule(gossip_every=2)}


@pytest.mark.parametrize(
    ("options", "topology", "policy"),
    [(SOON, "complete", "raise"), (LATE, "complete", "raise"), ({}, "ring", "skip")],
)
def test_nan_in_a_late_round_is_raised_by_its_whole_group_or_left_out(
    options: dict[str, Any], topology: str, policy: OnNonfinite
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, tuple[int, ...]]:
        params = make_params()
        optimizer = wrap(params, group, topology=topology, on_nonfinite=policy, **options)
        ranks: tuple[int, ...] = ()
        try:
            take_drawn_steps(optimizer, params, rank, range(4))
            if rank == 1:
                with torch.no_grad():
                    params[0][0] = math.nan
            take_drawn_steps(optimizer, params, rank, range(4, 40))
            # A rank may have made all its steps before rank 1 comes to its fourth one.
            optimizer.synchronize()
            optimizer.global_avg(may_revert=False)
        except NonFiniteError as error:
            ranks = error.ranks
        return flatten(params), ranks

    rows, ranks = zip(*run_threads(4, main), strict=True)
    assert ranks == ((1,) if policy == "raise" else (),) * 4
    for rank, row in enumerate(rows):
        assert row.isfinite().all() or (policy, rank) == ("raise", 1)
        assert torch.equal(row, rows[0]) or policy == "raise"


def test_a_model_with_collectives_is_refused_on_all_ranks() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8))
        build = partial(problem.wrap, list(model.parameters()), group, model=model)
        with pytest.raises(ValueError, match=r"AsItArrives.*got SyncBatchNorm in '1'"):
            build(overlap=AUTO)
        # With a number of steps all ranks come to each of them.
        build()

    run_threads(2, main)
