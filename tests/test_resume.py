"""Stopping at any step and resuming on every rank from its own file."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from covering import OVERLAP, named, pairwise
from problem import TINY_CAP_MB, adamw, backward, flatten, make_params, nesterov
from ranks import run_threads
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from decent_optim_wrapper import DecentOptimWrapper, PeerError, Schedule
from decent_optim_wrapper.optim import AccumAdam

RATES = {"mixing_rate": 1.0, "last_rate": 1.0}
STEPS = 6


class Run(NamedTuple):
    params: list[Tensor]
    optimizer: DecentOptimWrapper
    scheduler: CosineAnnealingLR


def start(group: dist.ProcessGroup, seed: int, **kw: Any) -> Run:
    params = make_params(seed=seed)
    optimizer = DecentOptimWrapper(
        adamw(params), process_group=group, bucket_cap_mb=TINY_CAP_MB, **kw
    )
    return Run(params, optimizer, CosineAnnealingLR(optimizer, T_max=STEPS))


def advance(run: Run, rank: int, steps: range) -> None:
    for step in steps:
        backward(run.params, rank, step)
        run.optimizer.step()
        run.scheduler.step()


def save(run: Run, path: Path) -> None:
    torch.save(
        {
            "model": [param.detach() for param in run.params],
            "optimizer": run.optimizer.state_dict(),
            "scheduler": run.scheduler.state_dict(),
        },
        path,
    )


def load(run: Run, path: Path, optimizer_first: bool) -> None:
    saved = torch.load(path, weights_only=True)
    if optimizer_first:
        run.optimizer.load_state_dict(saved["optimizer"])
    with torch.no_grad():
        for param, value in zip(run.params, saved["model"], strict=True):
            param.copy_(value)
    if not optimizer_first:
        run.optimizer.load_state_dict(saved["optimizer"])
    run.scheduler.load_state_dict(saved["scheduler"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "topology", "overlap"),
    pairwise(
        {str(stop): stop for stop in (0, 1, 2, 5)}, named("ring", "alternating-exp-ring"), OVERLAP
    ),
)
def test_a_resumed_run_continues_bit_for_bit(
    topology: str, stop: int, overlap: bool, tmp_path: Path
) -> None:
    options = {"topology": topology, "overlap": overlap, "local_world_size": 2}

    def uninterrupted(rank: int, group: dist.ProcessGroup) -> Tensor:
        run = start(group, seed=0, **options)
        advance(run, rank, range(stop))
        save(run, tmp_path / f"{rank}.pt")
        advance(run, rank, range(stop, STEPS))
        run.optimizer.synchronize()
        return flatten(run.params)

    def resumed(rank: int, group: dist.ProcessGroup) -> Tensor:
        run = start(group, seed=7, **options)
        load(run, tmp_path / f"{rank}.pt", optimizer_first=stop % 2 == 0)
        assert run.optimizer.round == stop
        advance(run, rank, range(stop, STEPS))
        run.optimizer.synchronize()
        return flatten(run.params)

    expected = run_threads(4, uninterrupted)
    assert all(map(torch.equal, run_threads(4, resumed), expected))
    assert not torch.equal(expected[0], flatten(make_params()))


def test_what_is_loaded_in_flight_is_dropped_by_an_average_that_is_kept() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        run = start(group, seed=0, topology="ring")
        advance(run, rank, range(3))
        run.optimizer.load_state_dict(run.optimizer.state_dict())
        run.optimizer.global_avg(may_revert=False)
        average = flatten(run.params)
        assert not run.optimizer.state_dict()["gossip"]["in_flight"]
        run.optimizer.synchronize()
        assert torch.equal(flatten(run.params), average)

    run_threads(4, main)


def test_loading_and_saving_communicate_nothing(tmp_path: Path) -> None:
    """Only rank 0 saves and loads, and nobody waits for it."""

    def main(rank: int, group: dist.ProcessGroup) -> Tensor:
        run = start(group, seed=0, topology="ring")
        advance(run, rank, range(3))
        if rank == 0:
            saved = run.optimizer.state_dict()
            assert saved["gossip"] == {**RATES, "round": 3, "in_flight": True}
        advance(run, rank, range(3, STEPS))
        run.optimizer.synchronize()
        if rank == 0:
            run.optimizer.load_state_dict(saved)
            assert run.optimizer.round == 3
        return flatten(run.params)

    assert len(run_threads(2, main)) == 2


def test_a_file_saved_on_an_average_resumes_from_the_average(tmp_path: Path) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        run = start(group, seed=0, topology="ring")
        advance(run, rank, range(3))
        with run.optimizer.averaged():
            save(run, tmp_path / f"{rank}.pt")
            average = flatten(run.params)
        load(run, tmp_path / f"{rank}.pt", optimizer_first=True)
        assert run.optimizer.state_dict()["gossip"] == {**RATES, "round": 3, "in_flight": False}
        run.optimizer.synchronize()
        assert torch.equal(flatten(run.params), average)

    run_threads(4, main)


def test_loading_drops_the_round_in_flight_and_the_snapshot() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        run = start(group, seed=0, topology="ring")
        fresh = run.optimizer.state_dict()
        advance(run, rank, range(2))
        run.optimizer.global_avg()
        run.optimizer.load_state_dict(fresh)
        assert run.optimizer.round == 0
        own = flatten(run.params)
        run.optimizer.synchronize()
        assert torch.equal(flatten(run.params), own)
        with pytest.raises(RuntimeError, match="call global_avg"):
            run.optimizer.revert_global_avg()

    run_threads(2, main)


BROKEN: dict[str, dict[str, Any]] = {
    "no rate": {"mixing_rate": None},
    "rate that is no number": {"mixing_rate": float("nan")},
    "rate out of range": {"mixing_rate": 0.0},
    "rate in flight that is no number": {"last_rate": float("nan")},
    "rate of text": {"last_rate": "fast"},
    "no round": {"round": None},
    "half a round": {"round": 1.5},
    "negative round": {"round": -1},
    "in flight before the first round": {"round": 0, "in_flight": True},
    "no state of an extension": {"extensions": {"outer_optimizer": {}}},
}


@pytest.mark.parametrize("broken", [None, *BROKEN])
def test_a_state_that_is_refused_changes_nothing(broken: str | None) -> None:
    """Of the gossip, or of the base, which does not notice before it has taken over the groups."""

    def main(rank: int, group: dist.ProcessGroup, loads: bool) -> Tensor:
        params = make_params()
        base = AccumAdam(params, lr=0.02)
        options: Any = {"schedule": Schedule(outer=nesterov(0.5)), "bucket_cap_mb": TINY_CAP_MB}
        optimizer = DecentOptimWrapper(base, process_group=group, topology="ring", **options)
        for step in range(3):
            backward(params, rank, step)
            optimizer.step()
            if step == 0:
                early = copy.deepcopy(optimizer.state_dict())
        if loads:
            early["param_groups"][0]["lr"] = 7.0
            text = ""
            if broken is None:
                early["state"] = {key: {"step": 1} for key in early["state"]}  # as of Adam
            else:
                early["gossip"].update(BROKEN[broken])
                text = rf"rank {rank}: load_state_dict expects what state_dict\(\) .* nothing was"
            with pytest.raises((ValueError, KeyError), match=text or None):
                optimizer.load_state_dict(early)
            with pytest.raises((ValueError, KeyError)):
                optimizer.load_state_dict({**early, "param_groups": [{"params": [0]}]})
            assert optimizer.round == 3
            assert optimizer.param_groups is base.param_groups
        for step in range(3, STEPS):
            backward(params, rank, step)
            optimizer.step()
        optimizer.synchronize()
        return flatten(params)

    refused = run_threads(2, partial(main, loads=True))
    undisturbed = run_threads(2, partial(main, loads=False))
    assert all(map(torch.equal, refused, undisturbed))
    assert not torch.equal(refused[0], flatten(make_params()))


def test_a_round_that_fails_while_it_is_dropped_leaves_all_of_the_state_loaded() -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        run = start(
            group, seed=0, topology="ring", timeout=1.5, schedule=Schedule(outer=nesterov(0.5))
        )
        early = copy.deepcopy(run.optimizer.state_dict())
        early["param_groups"][0]["lr"] = 7.0
        advance(run, rank, range(2 + (rank == 0)))
        if rank == 0:
            with pytest.raises(PeerError):
                run.optimizer.load_state_dict(early)
            assert run.optimizer.round == 0
            assert run.optimizer.param_groups[0]["lr"] == 7.0
            assert not run.optimizer.state

    run_threads(2, main)


@pytest.mark.parametrize("outer", [nesterov(0.5), None], ids=["outer", "plain"])
def test_a_state_loaded_under_inference_mode_is_trained_on(outer: Any) -> None:
    def main(rank: int, group: dist.ProcessGroup, inference: bool) -> Tensor:
        run = start(group, seed=0, topology="ring", schedule=Schedule(outer=outer))
        advance(run, rank, range(3))
        with torch.inference_mode(inference):
            run.optimizer.synchronize()
            run.optimizer.load_state_dict(run.optimizer.state_dict())
        advance(run, rank, range(3, STEPS))
        with torch.inference_mode(inference):
            run.optimizer.synchronize()
        advance(run, rank, range(2))
        return flatten(run.params)

    inside, outside = (run_threads(2, partial(main, inference=each)) for each in (True, False))
    assert all(map(torch.equal, inside, outside))
    assert not torch.equal(inside[0], flatten(make_params()))
