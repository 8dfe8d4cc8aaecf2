"""Rounds that are mixed when they have arrived: the mean, the calls, and nobody waits for ever."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import modules
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problem import MODES, TINY_CAP_MB, flatten, make_params, nesterov
from ranks import run_threads
from torch import Tensor

from decent_optim_wrapper import (
    CallOrderError,
    DecentOptimWrapper,
    NonFiniteError,
    PeerError,
    Schedule,
)
from decent_optim_wrapper.checkpoint import Checkpoints
from decent_optim_wrapper.gossip.round import Round
from decent_optim_wrapper.wire.bucket import Bucket

AUTO = Schedule(gossip_every="auto")
LR = 0.05


def wrap(
    params: Sequence[Tensor], group: dist.ProcessGroup, topology: str = "ring", **options: Any
) -> DecentOptimWrapper:
    optimizer = DecentOptimWrapper(
        torch.optim.SGD(params, lr=LR),
        process_group=group,
        topology=topology,
        bucket_cap_mb=TINY_CAP_MB,
        **{"schedule": AUTO, **options},
    )
    assert len(optimizer.buckets) > 1
    return optimizer


def draw_gradients(params: Sequence[Tensor], rank: int, step: int) -> Tensor:
    """Gradients that do not depend on the parameters; returns them."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
    return torch.cat([param.grad.reshape(-1) for param in params if param.grad is not None])


def check_that_the_mean_stays(results: list[tuple[Tensor, Tensor]]) -> None:
    """Of each rank what it has, and what it would have without the others."""
    ours, alone = (torch.stack(rows) for rows in zip(*results, strict=True))
    torch.testing.assert_close(ours.mean(0), alone.mean(0), rtol=0, atol=1e-12)
    assert (ours - alone).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["ring", "complete"])
@pytest.mark.parametrize("views", [True, False])
def test_the_mean_is_that_of_the_local_updates(topology: str, views: bool) -> None:
    steps = [30, 12, 25, 40]

    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, int, int]:
        params = make_params(seed=rank)
        optimizer = wrap(
            params,
            group,
            topology,
            sync_at_start=False,
            param_as_bucket_view=views,
            schedule=Schedule(gossip_every="auto", max_staleness=3),
        )
        expected = flatten(params)
        chance = random.Random(rank)
        mixed = 0
        for step in range(steps[rank]):
            time.sleep(chance.uniform(0, 0.01))
            expected -= LR * draw_gradients(params, rank, step)
            optimizer.step()
            mixed += optimizer.stats().staleness > 0
        optimizer.synchronize()
        return flatten(params), expected, optimizer.round, mixed

    ours, expected, rounds, mixed = zip(*run_threads(4, main), strict=True)
    assert len(set(rounds)) == 1
    assert rounds[0] > 5
    # Rank 1 makes 12 steps, and mixes at the latest in the fourth, seventh and tenth of them.
    assert min(mixed) >= 3
    torch.testing.assert_close(
        torch.stack(ours).mean(0), torch.stack(expected).mean(0), rtol=0, atol=1e-12
    )
    assert (torch.stack(ours) - torch.stack(expected)).abs().max() > 0.1


@pytest.mark.slow
def test_a_slow_rank_and_averages_on_the_way() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[list[float], list[float]]:
        params = make_params()
        optimizer = wrap(params, group, schedule=Schedule(gossip_every="auto", max_staleness=3))
        means, distances = [], list[float]()
        for step in range(60):
            time.sleep(0.003 if rank == 2 else 0.001)
            draw_gradients(params, rank, step)
            optimizer.step()
            if step % 20 == 19:
                with optimizer.averaged():
                    means.append(flatten(params).sum().item())
                distances.append(optimizer.consensus_distance())
        optimizer.synchronize()
        return means, distances

    means, distances = zip(*run_threads(4, main), strict=True)
    assert all(each == means[0] for each in means)
    assert all(each == distances[0] for each in distances)
    assert len(set(means[0])) == 3


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


@pytest.mark.slow
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    topology=st.sampled_from(["ring", "complete", "one-peer-exp", "alternating-exp-ring"]),
    delays=st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=4), min_size=4, max_size=4),
    blocks=st.lists(
        st.tuples(*[st.integers(0, 9)] * 4), min_size=1, max_size=3
    ),  # steps of every rank until the next call
    max_staleness=st.integers(1, 8),
    mode=st.sampled_from(["copies", "views"]),
)
def test_whatever_arrives_when_each_round_is_mixed_once_and_the_mean_stays(
    script: Script,
    topology: str,
    delays: list[list[int]],
    blocks: list[tuple[int, ...]],
    max_staleness: int,
    mode: str,
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, int, int]:
        script.delays = itertools.cycle(delays[rank])
        params = make_params(seed=rank)
        optimizer = wrap(
            params,
            group,
            topology,
            sync_at_start=False,
            local_world_size=2,
            schedule=Schedule(gossip_every="auto", max_staleness=max_staleness),
            **MODES[mode],
        )
        expected = flatten(params)
        for call, block in enumerate(blocks):
            for step in range(block[rank]):
                expected -= LR * draw_gradients(params, rank, 100 * call + step)
                optimizer.step()
                assert optimizer.stats().staleness <= max_staleness
            if call % 2:
                optimizer.consensus_distance()
            else:
                with optimizer.averaged():
                    pass
        optimizer.synchronize()
        return flatten(params), expected, optimizer.round, script.mixed

    ours, expected, rounds, mixed = zip(*run_threads(4, main), strict=True)
    assert len(set(rounds)) == 1
    assert mixed == rounds
    torch.testing.assert_close(
        torch.stack(ours).mean(0), torch.stack(expected).mean(0), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("options", [{}, {"outer": nesterov(0.5)}, {"global_avg_every": 3}])
def test_rounds_of_every_kind_can_be_late(options: dict[str, Any]) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, int]:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, schedule=Schedule(gossip_every="auto", **options))
        for step in range(30 - 5 * rank):
            draw_gradients(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        optimizer.global_avg(may_revert=False)
        return flatten(params), optimizer.round

    (first, rounds), *others = run_threads(4, main)
    assert rounds > 3
    for params, theirs in others:
        assert torch.equal(params, first)
        assert theirs == rounds
    assert (first - flatten(make_params())).abs().max() > 0.1


def test_a_rank_in_another_call_raises_on_all() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params()
        optimizer = wrap(params, group)
        for step in range(3 + 4 * rank):
            draw_gradients(params, rank, step)
            optimizer.step()
        call = optimizer.consensus_distance if rank == 1 else optimizer.synchronize
        with pytest.raises(CallOrderError) as caught:
            call()
        return str(caught.value)

    texts = run_threads(4, main)
    assert "rank 1 is in consensus_distance()" in texts[0]
    assert all("is in synchronize()" in texts[1] for _ in texts)


def test_a_state_is_loaded_when_no_round_is_in_flight() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, sync_at_start=False)
        for step in range(4 + rank):
            draw_gradients(params, rank, step)
            optimizer.step()
        saved = optimizer.state_dict()
        with pytest.raises(RuntimeError, match="call synchronize\\(\\) on all ranks before"):
            optimizer.load_state_dict(saved)
        optimizer.synchronize()
        # Saved at different rounds.
        optimizer.load_state_dict(saved)
        expected = flatten(params)
        for step in range(4 + 3 * rank):
            expected -= LR * draw_gradients(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        return flatten(params), expected

    check_that_the_mean_stays(run_threads(4, main))


@pytest.mark.parametrize("loading", [(0,), (1,), (0, 2)])
def test_ranks_of_which_only_some_have_loaded_raise_at_once(loading: tuple[int, ...]) -> None:
    """They would wait for the others before they go on at one round."""

    def main(rank: int, group: dist.ProcessGroup) -> tuple[str, float]:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, sync_at_start=False)
        for step in range(4 + rank):
            draw_gradients(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        if rank in loading:
            optimizer.load_state_dict(optimizer.state_dict())

        def go_on() -> None:
            for step in range(50):
                draw_gradients(params, rank, step)
                optimizer.step()

        start = time.monotonic()
        with pytest.raises(CallOrderError) as caught:
            go_on()
        return str(caught.value), time.monotonic() - start

    texts, seconds = zip(*run_threads(4, main), strict=True)
    assert all("after load_state_dict()" in text for text in texts), texts
    assert max(seconds) < 5


def test_a_module_that_steps_in_its_backward_pass_never_waits_either() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, int]:
        model = modules.wrap(modules.make_model(), group, topology="ring", schedule=AUTO)
        modules.train(model, rank, range(6 + 3 * rank))
        model.optimizer.synchronize()
        model.optimizer.global_avg(may_revert=False)
        return modules.flat(model), model.optimizer.round

    (first, rounds), *others = run_threads(4, main)
    assert rounds >= 2
    for params, theirs in others:
        assert torch.equal(params, first)
        assert theirs == rounds
    assert (first - modules.flat(modules.make_model())).abs().max() > 1e-2


@pytest.mark.parametrize("schedule", [AUTO, Schedule(gossip_every=2, staleness=2)])
@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_nan_is_left_out_of_a_late_round(schedule: Schedule, topology: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, topology, schedule=schedule, on_nonfinite="skip")
        for step in range(20):
            draw_gradients(params, rank, step)
            if rank == 1 and step == 3:
                assert params[0].grad is not None
                params[0].grad[0] = math.nan
            optimizer.step()
        optimizer.synchronize()
        optimizer.global_avg(may_revert=False)
        return flatten(params)

    first, *others = run_threads(4, main)
    assert first.isfinite().all()
    assert all(torch.equal(params, first) for params in others)


# With rounds of up to 16 steps, a rank that is far ahead could end before the NaN arrives.
@pytest.mark.parametrize(
    "schedule",
    [Schedule(gossip_every="auto", max_staleness=4), Schedule(gossip_every=2, staleness=2)],
)
def test_nan_in_a_late_round_is_raised_by_its_whole_group(schedule: Schedule) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[int, ...]:
        params = make_params()
        optimizer = wrap(params, group, "complete", schedule=schedule)

        def go_on() -> None:
            for step in range(40):
                draw_gradients(params, rank, step)
                if rank == 1 and step == 3:
                    assert params[0].grad is not None
                    params[0].grad[0] = math.nan
                optimizer.step()
            # A rank may have made all its steps before rank 1 comes to its fourth one.
            optimizer.synchronize()

        with pytest.raises(NonFiniteError) as caught:
            go_on()
        assert flatten(params).isfinite().all() or rank == 1
        return caught.value.ranks

    assert run_threads(4, main) == [(1,)] * 4


def test_checkpoints_of_uneven_ranks_are_saved_and_loaded_at_one_round(tmp_path: Path) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, int]:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, sync_at_start=False)
        for step in range(5 + 3 * rank):
            draw_gradients(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        state = {"params": params, "optimizer": optimizer.state_dict()}
        Checkpoints(tmp_path, optimizer).save(1, state)
        saved = flatten(params)
        # As a run that starts again: load() lets the ranks meet before any of them has made a step.
        params = make_params(seed=9)
        optimizer = wrap(params, group, sync_at_start=False)
        loaded = Checkpoints(tmp_path, optimizer).load()
        assert loaded is not None
        with torch.no_grad():
            for param, value in zip(params, loaded.state["params"], strict=True):
                param.copy_(value)
        optimizer.load_state_dict(loaded.state["optimizer"])
        with optimizer.averaged():
            pass
        for step in range(5):
            saved -= LR * draw_gradients(params, rank, 100 + step)
            optimizer.step()
        optimizer.synchronize()
        return flatten(params), saved, optimizer.round

    ours, expected, rounds = zip(*run_threads(4, main), strict=True)
    assert len(set(rounds)) == 1
    torch.testing.assert_close(
        torch.stack(ours).mean(0), torch.stack(expected).mean(0), rtol=0, atol=1e-12
    )
    assert (torch.stack(ours) - torch.stack(expected)).abs().max() > 0.1


def test_the_state_of_another_schedule_goes_on_at_its_round() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> int:
        params = make_params()
        optimizer = wrap(params, group, schedule=Schedule())
        for step in range(5):
            draw_gradients(params, rank, step)
            optimizer.step()
        state = optimizer.state_dict()
        optimizer.synchronize()
        optimizer = wrap(params, group)
        optimizer.load_state_dict(state)
        with optimizer.averaged():
            pass
        draw_gradients(params, rank, 5)
        optimizer.step()
        optimizer.synchronize()
        return optimizer.round

    rounds = run_threads(4, main)
    assert len(set(rounds)) == 1
    assert rounds[0] > 5


def test_nan_in_the_rounds_of_a_call_is_raised_when_all_have_come() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[bool, float]:
        params = make_params()
        optimizer = wrap(params, group)
        for step in range(3):
            draw_gradients(params, rank, step)
            if rank == 1 and step == 2:
                assert params[0].grad is not None
                params[0].grad[0] = math.nan
            with suppress(NonFiniteError):
                optimizer.step()
        raised = False
        # The round that is in flight first may have been launched before.
        for _ in range(2):
            try:
                optimizer.synchronize()
            except NonFiniteError:
                raised = True
        if rank == 1:
            with torch.no_grad():
                params[0].nan_to_num_()
        # What was launched before that is raised once more.
        for _ in range(2):
            with suppress(NonFiniteError):
                optimizer.synchronize()
        # All ranks are at the same round, and no message of the last call is left.
        return raised, optimizer.consensus_distance()

    raised, distances = zip(*run_threads(4, main), strict=True)
    assert any(raised)
    assert len(set(distances)) == 1
    assert math.isfinite(distances[0])


def test_the_lowest_mixing_rate_of_a_group_counts() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, sync_at_start=False)
        expected = flatten(params)
        for step in range(12 + 2 * rank):
            # By the steps of each rank, which are at other rounds.
            optimizer.mixing_rate = 0.9**step
            expected -= LR * draw_gradients(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        return flatten(params), expected

    check_that_the_mean_stays(run_threads(4, main))


def test_bytes_are_rounded_and_the_mean_stays_where_rounds_are_late() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, sync_at_start=False, comm_dtype=torch.bfloat16)
        expected = flatten(params)
        for step in range(12 + 2 * rank):
            expected -= LR * draw_gradients(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        return flatten(params), expected

    check_that_the_mean_stays(run_threads(4, main))


@pytest.mark.parametrize("schedule", [AUTO, Schedule(gossip_every=2, staleness=2)])
def test_an_overflow_skips_one_ranks_update_and_nobody_waits(schedule: Schedule) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, schedule=schedule, sync_at_start=False)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        expected = flatten(params)
        for step in range(8):
            gradient = draw_gradients(params, rank, step)
            overflows = rank == 1 and step == 3
            scaler.scale(torch.zeros(()))
            scale = scaler.get_scale()
            for param in params:
                assert param.grad is not None
                param.grad.mul_(math.inf if overflows else scale)
            scaler.step(optimizer)
            scaler.update()
            expected -= 0.0 if overflows else LR * gradient
        optimizer.synchronize()
        return flatten(params), expected

    check_that_the_mean_stays(run_threads(4, main))


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["ring", "complete", "hierarchical"])
def test_every_average_on_the_way_is_exact_whoever_comes_first(topology: str) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> list[tuple[Tensor, Tensor]]:
        params = make_params(seed=rank)
        options = {"sync_at_start": False, "local_world_size": 2}
        optimizer = wrap(params, group, topology, **options)
        own, seen = flatten(params), []
        for call in range(12):
            for step in range(1 + (rank + call) % 4):
                own -= LR * draw_gradients(params, rank, 100 * call + step)
                optimizer.step()
            if call % 3 == 2:
                optimizer.global_avg(may_revert=False)
                seen.append((flatten(params), own.clone()))
            else:
                with optimizer.averaged():
                    seen.append((flatten(params), own.clone()))
        optimizer.synchronize()
        return [*seen, (flatten(params), own)]

    calls = list(zip(*run_threads(4, main), strict=True))
    for call, ranks in enumerate(calls):
        ours, local = (torch.stack(rows) for rows in zip(*ranks, strict=True))
        torch.testing.assert_close(ours.mean(0), local.mean(0), rtol=0, atol=1e-12)
        if call < 12:
            assert torch.equal(ours[0], ours[1])
        assert (ours - local).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("late", [Schedule(gossip_every=3, staleness=3)])
@pytest.mark.parametrize(
    "other",
    [
        Schedule(),
        Schedule(gossip_every=3),
        Schedule(gossip_every=2, staleness=2),
        Schedule(gossip_every=4, staleness=4),
        AUTO,
    ],
    ids=str,
)
@pytest.mark.parametrize("stop", [3, 4, 5])
def test_the_mean_stays_if_a_run_is_resumed_with_another_staleness(
    late: Schedule, other: Schedule, stop: int
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        params = make_params(seed=rank)
        optimizer = wrap(params, group, schedule=late, sync_at_start=False)
        own = flatten(params)
        for step in range(10):
            if step == stop:
                state = optimizer.state_dict()
                optimizer = wrap(params, group, schedule=other, sync_at_start=False)
                optimizer.load_state_dict(state)
            own -= LR * draw_gradients(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        return flatten(params), own

    ours, local = (torch.stack(rows) for rows in zip(*run_threads(4, main), strict=True))
    torch.testing.assert_close(ours.mean(0), local.mean(0), rtol=0, atol=1e-12)
    assert (ours - local).abs().max() > 1e-3


def test_a_peer_lost_before_a_call_is_named() -> None:
    stepped = threading.Barrier(4)

    def main(rank: int, group: dist.ProcessGroup) -> str:
        params = make_params()
        optimizer = wrap(params, group, timeout=5)
        for step in range(3):
            draw_gradients(params, rank, step)
            optimizer.step()
        # Or a slow rank would meet the loss in a step.
        stepped.wait(30)
        if rank == 1:
            with pytest.raises(ZeroDivisionError):
                optimizer.step(lambda: 1 / 0)
            return "ended"
        # Until its connections are closed.
        time.sleep(0.5)
        with pytest.raises(PeerError) as caught:
            optimizer.consensus_distance()
        return str(caught.value)

    texts = run_threads(4, main)
    assert all("rank 1" in texts[rank] for rank in (0, 2, 3)), texts


def test_late_rounds_of_a_step_in_the_backward_pass_resume_bit_for_bit() -> None:
    late = Schedule(gossip_every=3, staleness=3)

    def main(rank: int, group: dist.ProcessGroup, stops: tuple[int, ...]) -> Tensor:
        model = modules.wrap(modules.make_model(seed=rank), group, topology="ring", schedule=late)
        for step in range(8):
            if step in stops:
                state = model.optimizer.state_dict()
                values = [param.detach().clone() for param in model.parameters()]
                model = modules.wrap(
                    modules.make_model(seed=9), group, topology="ring", schedule=late
                )
                model.optimizer.load_state_dict(state)
                with torch.no_grad():
                    for param, value in zip(model.parameters(), values, strict=True):
                        param.copy_(value)
            modules.train(model, rank, range(step, step + 1))
        model.optimizer.synchronize()
        return modules.flat(model)

    whole = run_threads(4, lambda rank, group: main(rank, group, ()))
    resumed = run_threads(4, lambda rank, group: main(rank, group, (4, 5, 6)))
    assert all(map(torch.equal, whole, resumed))
    assert not torch.equal(whole[0], whole[1])
