"""Stopping at any step and resuming on every rank from its own file."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from covering import OVERLAP, pairwise
from problem import CODED, MODES, TINY_CAP_MB, adamw, backward, flatten, make_params, nesterov
from ranks import run_threads
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from decent_optim_wrapper import DecentOptimWrapper, PeerError, Schedule
from decent_optim_wrapper.optim import AccumAdam

EVERY_MODE = MODES | CODED
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
    ("stop", "topology", "overlap", "mode"),
    pairwise(
        {str(stop): stop for stop in (0, 1, 2, 5)},
        {name: name for name in ("ring", "alternating-exp-ring")},
        OVERLAP,
        {mode: mode for mode in EVERY_MODE},
    ),
)
def test_a_resumed_run_continues_bit_for_bit(
    topology: str, stop: int, overlap: bool, mode: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "topology": topology,
        "overlap": overlap,
        "local_world_size": 2 if topology == "alternating-exp-ring" else 1,
        **EVERY_MODE[mode],
    }

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


def test_a_run_with_a_group_added_resumes_with_both_groups_from_the_start(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[list[Tensor], list[Tensor]]:
        return (
            make_params(seed=seed, dtype=torch.float32),
            make_params(seed=seed + 1, dtype=torch.float32),
        )

    def wrap(params: Any, group: dist.ProcessGroup) -> DecentOptimWrapper:
        return DecentOptimWrapper(torch.optim.AdamW(params, lr=0.02), process_group=group)

    def steps(optimizer: DecentOptimWrapper, params: list[Tensor], rank: int, to: range) -> None:
        for step in to:
            backward(params, rank, step)
            optimizer.step()

    def uninterrupted(rank: int, group: dist.ProcessGroup) -> Tensor:
        early, late = make(0)
        optimizer = wrap(early, group)
        steps(optimizer, early, rank, range(2))
        optimizer.add_param_group({"params": late})
        steps(optimizer, early + late, rank, range(2, 4))
        saved = {"model": [p.detach() for p in early + late], "optimizer": optimizer.state_dict()}
        torch.save(saved, tmp_path / f"{rank}.pt")
        steps(optimizer, early + late, rank, range(4, 7))
        optimizer.synchronize()
        return flatten(early + late)

    def resumed(rank: int, group: dist.ProcessGroup) -> Tensor:
        early, late = make(5)
        optimizer = wrap([{"params": early}, {"params": late}], group)
        saved = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        optimizer.load_state_dict(saved["optimizer"])
        with torch.no_grad():
            for param, value in zip(early + late, saved["model"], strict=True):
                param.copy_(value)
        steps(optimizer, early + late, rank, range(4, 7))
        optimizer.synchronize()
        return flatten(early + late)

    expected = run_threads(3, uninterrupted)
    assert all(map(torch.equal, run_threads(3, resumed), expected))
    assert not torch.equal(expected[0], torch.cat([flatten(part) for part in make(0)]))


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


def outer_of(params: list[Tensor]) -> dict[str, Any]:
    """The state of an outer optimizer of these parameters."""
    run = DecentOptimWrapper(
        torch.optim.SGD([{"params": params}, {"params": [torch.zeros(2, requires_grad=True)]}]),
        schedule=Schedule(outer=nesterov(0.5)),
    )
    state: dict[str, Any] = run.state_dict()["gossip"]["extensions"]
    return {"outer_optimizer": {"params": state["outer_optimizer"]["params"][:-1]}}


def without_settings(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"outer_optimizer": {"params": [{**row, "settings": None} for row in rows]}}


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
    "no outer state": {"extensions": {"outer_optimizer": {}}},
    "outer state of fewer parameters": {"extensions": outer_of([])},
    "outer state without the optimizer's": {
        "extensions": without_settings(outer_of(make_params())["outer_optimizer"]["params"])
    },
    "outer state of other parameters": {"extensions": outer_of([torch.zeros(1) for _ in range(5)])},
}


@pytest.mark.slow
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_state_that_is_refused_changes_nothing(broken: str, views: bool) -> None:
    options = {
        "schedule": Schedule(outer=nesterov(0.5)),
        "topology": "ring",
        "param_as_bucket_view": views,
    }

    def main(rank: int, group: dist.ProcessGroup, loads: bool) -> Tensor:
        run = start(group, seed=0, **options)
        assert len(run.optimizer.buckets) > 1
        early = copy.deepcopy(run.optimizer.state_dict())
        advance(run, rank, range(3))
        if loads:
            early["gossip"].update(BROKEN[broken])
            early["param_groups"][0]["lr"] = 7.0
            text = (
                rf"rank {rank}: load_state_dict expects what state_dict\(\) .* nothing was loaded"
            )
            with pytest.raises(ValueError, match=text):
                run.optimizer.load_state_dict(early)
            assert run.optimizer.round == 3
        advance(run, rank, range(3, STEPS))
        run.optimizer.synchronize()
        return flatten(run.params)

    refused = run_threads(2, partial(main, loads=True))
    undisturbed = run_threads(2, partial(main, loads=False))
    assert all(map(torch.equal, refused, undisturbed))
    assert not torch.equal(refused[0], flatten(make_params()))


def test_a_state_that_the_base_refuses_changes_nothing_either() -> None:
    params = make_params()
    base = AccumAdam(params, lr=0.02)
    optimizer = DecentOptimWrapper(base, bucket_cap_mb=TINY_CAP_MB)
    for step in range(3):
        backward(params, 0, step)
        optimizer.step()
    early = optimizer.state_dict()
    early["gossip"]["round"] = 1
    others = {"wrong sizes": {**early, "param_groups": [{"params": [0]}]}}
    # As of Adam, which this base does not notice before it has taken over the groups.
    state = {key: {"step": slots["step"]} for key, slots in early["state"].items()}
    groups = [{**group, "lr": 7.0} for group in early["param_groups"]]
    others["other state"] = {**early, "state": state, "param_groups": groups}
    for refused in others.values():
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises((ValueError, KeyError)):
            optimizer.load_state_dict(refused)
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        assert after["gossip"] == before["gossip"]
        for key, slots in before["state"].items():
            for name, value in slots.items():
                same = torch.as_tensor(after["state"][key][name]) == torch.as_tensor(value)
                assert same.all()
        assert optimizer.param_groups is base.param_groups
    optimizer.load_state_dict(early)
    assert optimizer.round == 1


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
