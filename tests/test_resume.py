"""Stopping at any step and resuming on every rank from its own file."""

from __future__ import annotations

import copy
import threading
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from covering import OVERLAP, named, pairwise
from problem import CODED, MODES, adamw, flatten, make_params, nesterov, take_steps, wrap
from ranks import run_threads
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from decent_optim_wrapper import DecentOptimWrapper, PeerError, Schedule
from decent_optim_wrapper.optim import AccumAdam

STEPS = 6


class Run(NamedTuple):
    params: list[Tensor]
    optimizer: DecentOptimWrapper
    scheduler: CosineAnnealingLR


def start(group: dist.ProcessGroup, seed: int = 0, **options: Any) -> Run:
    params = make_params(seed)
    optimizer = wrap(params, group, adamw(params), **{"topology": "ring", **options})
    return Run(params, optimizer, CosineAnnealingLR(optimizer, T_max=STEPS))


def advance(run: Run, rank: int, steps: range) -> None:
    for step in steps:
        take_steps(run.optimizer, run.params, rank, [step])
        run.scheduler.step()


def finish(run: Run, rank: int, steps: range) -> Tensor:
    advance(run, rank, steps)
    run.optimizer.synchronize()
    return flatten(run.params)


def save(run: Run, path: Path) -> None:
    torch.save(
        {
            "model": [param.detach() for param in run.params],
            "optimizer": run.optimizer.state_dict(),
            "scheduler": run.scheduler.state_dict(),
        },
        path,
    )


def load(run: Run, path: Path, optimizer_first: bool = True) -> None:
    saved = torch.load(path, weights_only=True)
    if optimizer_first:
        run.optimizer.load_state_dict(saved["optimizer"])
    with torch.no_grad():
        torch._foreach_copy_(run.params, saved["model"])
    if not optimizer_first:
        run.optimizer.load_state_dict(saved["optimizer"])
    run.scheduler.load_state_dict(saved["scheduler"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "topology", "overlap"),
    pairwise({"early": 1, "late": 4}, named("ring", "alternating-exp-ring"), OVERLAP),
)
def test_a_resumed_run_continues_bit_for_bit(
    stop: int, topology: str, overlap: bool, tmp_path: Path
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        options = {"topology": topology, "overlap": overlap, "local_world_size": 2}
        straight, resumed = (start(group, seed, **options) for seed in (0, 7))
        advance(straight, rank, range(stop))
        save(straight, tmp_path / f"{rank}.pt")
        expected = finish(straight, rank, range(stop, STEPS))
        load(resumed, tmp_path / f"{rank}.pt", optimizer_first=overlap)
        assert resumed.optimizer.round == stop
        assert torch.equal(finish(resumed, rank, range(stop, STEPS)), expected)
        assert not torch.equal(expected, flatten(make_params()))

    run_threads(4, main)


def test_saving_and_loading_communicate_nothing_and_drop_what_was_there(tmp_path: Path) -> None:
    """Only rank 0 saves and loads, and nobody waits for it."""
    rates = {"mixing_rate": 1.0, "last_rate": 1.0}

    def main(rank: int, group: dist.ProcessGroup) -> None:
        run, path = start(group), tmp_path / f"{rank}.pt"
        fresh = run.optimizer.state_dict()
        advance(run, rank, range(3))
        if rank == 0:
            save(run, path)
            in_flight = run.optimizer.state_dict()["gossip"]
            assert in_flight == {**rates, "round": 3, "in_flight": True}
        advance(run, rank, range(3, STEPS))
        run.optimizer.global_avg()
        average = flatten(run.params)
        if rank == 0:
            save(run, tmp_path / "average.pt")
            load(run, path)
            assert run.optimizer.round == 3
            load(run, tmp_path / "average.pt")
            on_average = run.optimizer.state_dict()["gossip"]
            assert on_average == {**rates, "round": STEPS, "in_flight": False}
        else:
            run.optimizer.load_state_dict(fresh)
            assert run.optimizer.round == 0
        run.optimizer.synchronize()
        assert torch.equal(flatten(run.params), average)
        with pytest.raises(RuntimeError, match="call global_avg"):
            run.optimizer.revert_global_avg()

    run_threads(2, main)


BROKEN: list[dict[str, Any]] = [
    {"mixing_rate": None},
    {"mixing_rate": float("nan")},
    {"mixing_rate": 0.0},
    {"last_rate": float("nan")},
    {"last_rate": "fast"},
    {"round": None},
    {"round": 1.5},
    {"round": -1},
    {"round": 0, "in_flight": True},
    {"extensions": {"outer_optimizer": {}}},
]


def load_what_does_not_fit(optimizer: DecentOptimWrapper, state: dict[str, Any], rank: int) -> None:
    state["param_groups"][0]["lr"] = 7.0
    not_ours = rf"rank {rank}: load_state_dict expects what state_dict\(\) .* nothing was"
    for broken in BROKEN:
        with pytest.raises(ValueError, match=not_ours):
            optimizer.load_state_dict({**state, "gossip": {**state["gossip"], **broken}})
    of_adam = {"state": {key: {"step": 1} for key in state["state"]}}
    for unfit in (of_adam, {"param_groups": [{"params": [0]}]}):
        with pytest.raises((ValueError, KeyError)):
            optimizer.load_state_dict({**state, **unfit})
    no_dict: Any
    for no_dict in (None, [], "checkpoint.pt"):
        with pytest.raises(TypeError, match=rf"rank {rank}: .* expects the dict that .* got "):
            optimizer.load_state_dict(no_dict)


def test_a_state_that_is_refused_changes_nothing() -> None:
    """Of the gossip, or of the base, which does not notice before it has taken over the groups."""

    def main(rank: int, group: dist.ProcessGroup, loads: bool) -> Tensor:
        params = make_params()
        base = AccumAdam(params, lr=0.02)
        schedule = Schedule(outer=nesterov(0.5))
        optimizer = wrap(params, group, base, topology="ring", schedule=schedule)
        take_steps(optimizer, params, rank, [0])
        early = copy.deepcopy(optimizer.state_dict())
        take_steps(optimizer, params, rank, [1, 2])
        if loads:
            load_what_does_not_fit(optimizer, early, rank)
        assert optimizer.round == 3
        assert optimizer.param_groups is base.param_groups
        take_steps(optimizer, params, rank, range(3, STEPS))
        optimizer.synchronize()
        return flatten(params)

    refused, undisturbed = (run_threads(2, partial(main, loads=each)) for each in (True, False))
    assert all(map(torch.equal, refused, undisturbed))
    assert not torch.equal(refused[0], flatten(make_params()))


def test_a_round_that_fails_while_it_is_dropped_leaves_all_of_the_state_loaded() -> None:
    launched = threading.Event()

    def main(rank: int, group: dist.ProcessGroup) -> None:
        run = start(group, schedule=Schedule(outer=nesterov(0.5)))
        early = copy.deepcopy(run.optimizer.state_dict())
        early["param_groups"][0]["lr"] = 7.0
        advance(run, rank, range(2 + (rank == 0)))
        if rank == 1:
            assert launched.wait(60)
            with pytest.raises(ZeroDivisionError):
                run.optimizer.step(lambda: 1 // 0)
            return
        launched.set()
        with pytest.raises(PeerError):
            run.optimizer.load_state_dict(early)
        assert run.optimizer.round == 0
        assert run.optimizer.param_groups[0]["lr"] == 7.0
        assert not run.optimizer.state

    run_threads(2, main)


@pytest.mark.parametrize(
    "options",
    [{"schedule": Schedule(outer=nesterov(0.5))}, *MODES.values(), CODED["int8"]],
    ids=["outer", *MODES, "int8"],
)
def test_what_is_mixed_and_loaded_under_inference_mode_is_trained_on(
    options: dict[str, Any],
) -> None:
    def main(rank: int, group: dist.ProcessGroup) -> None:
        inside, outside = (start(group, **options) for _ in range(2))
        for run in (inside, outside):
            for begin in (0, 2):
                advance(run, rank, range(begin, begin + 2))
                with torch.inference_mode(run is inside):
                    run.optimizer.synchronize()
                    with run.optimizer.averaged():
                        run.optimizer.consensus_distance()
                    run.optimizer.load_state_dict(run.optimizer.state_dict())
            advance(run, rank, range(4, STEPS))
        assert torch.equal(flatten(inside.params), flatten(outside.params))
        assert not torch.equal(flatten(inside.params), flatten(make_params()))

    run_threads(2, main)
