"""Checkpoints of replicas that are spread over a mesh."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from meshes import (
    Layout,
    Replica,
    Spread,
    difference,
    make_model,
    run_on_mesh,
    run_spread,
    run_whole,
    start,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from warning_texts import warned_texts

from decent_optim_wrapper import DecentOptimWrapper, Late, OuterOptimizer, Schedule
from decent_optim_wrapper.checkpoint import Checkpoints

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("ranks_on_a_mesh"),
]

STOP, STEPS, RATE = 3, 5, 0.6
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
adamw = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)
nesterov = partial(torch.optim.SGD, lr=0.7, momentum=0.5, nesterov=True, foreach=True)


class Recipe(NamedTuple):
    """How to train: what makes the base and the outer optimizer, and how late rounds are mixed."""

    base: Any = sgd
    outer: Any = None
    late: int = 1
    comm_dtype: torch.dtype = torch.float32


class Run:
    """One replica's part on this rank, in training."""

    def __init__(self, spread: Replica, recipe: Recipe, rate: float = RATE) -> None:
        self.spread = spread
        self.optimizer: DecentOptimWrapper = self.spread.wrap(
            recipe.base,
            overlap=Late(recipe.late) if recipe.late > 1 else True,
            schedule=Schedule(gossip_every=recipe.late, mixing_rate=rate),
            extensions=[OuterOptimizer(recipe.outer)] if recipe.outer else [],
            comm_dtype=recipe.comm_dtype,
        )
        assert len(self.optimizer.buckets) >= 2

    def advance(self, to: int) -> None:
        for step in range(self.optimizer.round, to):
            self.spread.backward(step)
            self.optimizer.step()

    def end(self) -> tuple[int, dict[str, Any]]:
        self.advance(STEPS)
        self.optimizer.synchronize()
        return self.spread.replica, self.spread.full()

    def states(self) -> dict[str, Any]:
        """The recipe of the guide to checkpoints."""
        base = self.optimizer.optimizer
        model, optimizer = get_state_dict(self.spread.model, base, options=OPTIONS)
        gossip = self.optimizer.gossip_state_dict()
        return {"model": model, "optimizer": optimizer, "gossip": gossip}

    def save(self, folder: Path) -> None:
        state = {f"replica_{self.spread.replica}": self.states()}
        dcp.state_dict_saver.save(state, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state = self.states()
        key = f"replica_{self.spread.replica}"
        dcp.state_dict_loader.load({key: state}, checkpoint_id=folder)
        set_state_dict(
            self.spread.model,
            self.optimizer.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=OPTIONS,
        )
        self.optimizer.load_gossip_state_dict(state["gossip"])


def save_a_move(replica: Replica, folder: Path, recipe: Recipe) -> None:
    run = Run(replica, recipe)
    run.advance(STOP)
    run.save(folder)
    assert run.optimizer.gossip_state_dict()["in_flight"]


def resume_a_move(replica: Replica, folder: Path, recipe: Recipe) -> tuple[int, dict[str, Any]]:
    run = Run(replica, recipe, rate=1.0)
    run.load(folder)
    assert run.optimizer.round == STOP
    assert run.optimizer.mixing_rate == RATE
    return run.end()


def never_stop(replica: Replica, recipe: Recipe) -> tuple[int, dict[str, Any]]:
    return Run(replica, recipe).end()


@pytest.mark.parametrize(
    ("source", "target", "recipe"),
    [
        pytest.param(
            Layout({"gossip": 2}),
            Layout({"gossip": 2, "pp": 2}),
            Recipe(adamw, outer=partial(torch.optim.Adam, lr=0.01, foreach=True), late=2),
            id="whole models to stages",
        ),
        pytest.param(
            Layout({"gossip": 2, "fsdp": 2, "tp": 2}),
            Layout({"gossip": 2, "fsdp": 4}),
            Recipe(partial(adamw, fused=True), outer=nesterov, late=2),
            id="shards of tensor parallel ones to shards",
        ),
    ],
)
def test_what_one_layout_saves_goes_on_in_another(
    source: Layout, target: Layout, recipe: Recipe, tmp_path: Path
) -> None:
    expected = dict(run_whole(2, never_stop, recipe))
    run_spread(source, save_a_move, tmp_path, recipe)
    for replica, params in run_spread(target, resume_a_move, tmp_path, recipe, seed=1):
        assert difference(params, expected[replica]) < 1e-12
        assert difference(params, start()) > 1e-3
        assert difference(params, expected[1 - replica]) > 1e-6


# Of four ranks, each in a set of files of its own; the gossip is inside and outside.
SMALL = {
    "pipeline": Layout({"pp": 2, "gossip": 2}),
    "fsdp": Layout({"gossip": 2, "fsdp": 2}),
    # DTensors beside plain tensors.
    "tp": Layout({"gossip": 2, "tp": 2}),
}
OTHER = {"fsdp": "tp", "tp": "pipeline"}


CODED = Recipe(comm_dtype=torch.int8)


def code_and_resume(folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """What becomes of a run that does not stop, and of it in the same layout and in another."""
    stopped = Run(Spread(SMALL["fsdp"]), CODED)
    stopped.advance(STOP)
    stopped.save(folder)
    replica, whole = stopped.end()
    ends = [whole]
    for target in ("fsdp", "tp"):
        resumed = Run(Spread(SMALL[target], seed=1), CODED, rate=1.0)
        resumed.load(folder)
        place, end = resumed.end()
        assert place == replica
        ends.append(end)
    return replica, ends


def test_references_go_on_in_the_same_layout_bit_for_bit_and_in_another_one(tmp_path: Path) -> None:
    expected = dict(run_whole(2, never_stop, Recipe()))
    for replica, (whole, same_layout, other_layout) in run_on_mesh(4, code_and_resume, tmp_path):
        assert difference(whole, same_layout) == 0
        for params in (whole, other_layout):
            assert 1e-6 < difference(params, expected[replica]) < 5e-4


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def names_of(*steps: int) -> list[str]:
    """The files of whole sets."""
    files = [f"rank_{rank}_of_2_shard_{shard}_of_2.pt" for rank in (0, 1) for shard in (0, 1)]
    names = [*files, "set_of_2_with_2_shards.sha256"]
    return [f"step_0000000{step}/{name}" for step in steps for name in names]


class Saving:
    """A run that saves a file for every rank."""

    def __init__(self, name: str, folder: Path, seed: int = 0, replicas: int = 2) -> None:
        layout = Layout({**SMALL[name].sizes, "gossip": replicas})
        self.run = Run(Spread(layout, seed), Recipe(outer=nesterov))
        self.checkpoints = Checkpoints(folder, self.run.optimizer)

    def save(self, step: int) -> None:
        model, optimizer = self.run.spread.model, self.run.optimizer
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        self.checkpoints.save(step, state)

    def save_up_to(self, last: int) -> None:
        for step in range(self.run.optimizer.round + 1, last + 1):
            self.run.advance(step)
            self.save(step)

    def load(self) -> int:
        saved = self.checkpoints.load()
        if saved is None:
            return 0
        self.run.spread.model.load_state_dict(saved.state["model"])
        self.run.optimizer.load_state_dict(saved.state["optimizer"])
        return saved.step


def save_and_load(folder: Path, source: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """How a run ends that does not stop and one that does, and the error in another layout."""
    stopped = Saving(source, folder)
    stopped.save(0)
    stopped.save_up_to(STOP)
    dist.barrier()
    assert files(folder) == names_of(STOP - 1, STOP)
    _, whole = stopped.run.end()
    loading = Saving(source, folder, seed=1)
    assert loading.load() == loading.run.optimizer.round == STOP
    _, resumed = loading.run.end()
    other = Saving(OTHER[source], folder, seed=1)
    before = other.run.spread.full()
    text = "was saved with the model in another layout|could not be loaded on rank .* see the error"
    with pytest.raises(ValueError, match=text) as caught:
        other.load()
    assert difference(other.run.spread.full(), before) == 0
    return whole, resumed, str(caught.value)


@pytest.mark.parametrize("source", ["fsdp", "tp"])
def test_a_shard_goes_on_bit_for_bit_in_its_own_layout_only(source: str, tmp_path: Path) -> None:
    for whole, resumed, error in run_on_mesh(4, save_and_load, tmp_path, source):
        assert difference(whole, resumed) == 0
        assert difference(whole, start()) > 1e-3
        assert "another layout" in error or "loaded on rank" in error


def save_twice(folder: Path, kind: str) -> tuple[int, dict[str, Any]]:
    """Two replicas save before their last round is mixed; what each of them had."""
    saving = Saving(kind, folder)
    saving.save_up_to(2)
    return saving.run.spread.replica, saving.run.spread.full()


def load_alone(folder: Path, kind: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """What one replica finds, and has after two more steps."""
    loading = Saving(kind, folder, seed=1, replicas=1)
    try:
        assert loading.load() == loading.run.optimizer.round == 2
    except ValueError as error:
        return str(error), {}, {}
    found = {name: value.copy() for name, value in loading.run.spread.full().items()}
    loading.save_up_to(4)
    return "", found, loading.run.spread.full()


def test_another_number_of_replicas_starts_from_the_average_of_every_stage(tmp_path: Path) -> None:
    saved = run_on_mesh(4, save_twice, tmp_path, "pipeline")
    for error, found, end in run_on_mesh(2, load_alone, tmp_path, "pipeline"):
        assert not error
        for name, value in found.items():
            one, other = (full[name] for _, full in saved if name in full)
            assert abs(value - (one + other) / 2).max() < 1e-14
            assert abs(one - other).max() > 1e-4
        assert difference(end, found) > 0
    run_on_mesh(4, save_twice, tmp_path / "shards", "fsdp")
    for error, *_ in run_on_mesh(2, load_alone, tmp_path / "shards", "fsdp"):
        assert "step_00000002 of 2 ranks contains shards of tensors" in error
        assert "load with 2 replicas only" in error


def meet_trouble(folder: Path) -> tuple[list[int], list[str]]:
    """The sets that are found when something is wrong with a single shard, and the warnings."""
    first = dist.get_rank() == 0
    saving = Saving("pipeline", folder)
    newest, before = (folder / names_of(step)[1] for step in (3, 2))
    found = []

    def look(spoil: Callable[[], object] = lambda: None) -> None:
        dist.barrier()
        if first:
            spoil()
        dist.barrier()
        found.append(Saving("pipeline", folder, seed=1).load())

    with warned_texts() as lines:
        saving.save_up_to(3)
        with pytest.raises(ValueError, match=r"above 3, .* got \[5, 4, 4, 4\] by rank"):
            saving.save(4 + first)
        look()
        look(newest.unlink)
        look(lambda: os.truncate(before, before.stat().st_size // 2))
    return found, lines


def test_what_is_wrong_with_one_shard_makes_the_set_incomplete_for_all(tmp_path: Path) -> None:
    ranks = run_on_mesh(4, meet_trouble, tmp_path)
    assert [found for found, _ in ranks] == [[3, 2, 0]] * 4
    lines = "".join(ranks[0][1])
    assert "step_00000003 of 2 ranks is passed over" in lines
    assert "it is missing, damaged, or of another run on rank 0, shard 1" in lines
    assert "no complete set of 2 ranks, with a marker set_of_2_with_2_shards.sha256" in lines


def alone(model: nn.Module, named_by: Any) -> DecentOptimWrapper:
    """A wrapper with an outer optimizer on a rank without others."""
    extensions = [OuterOptimizer(nesterov)]
    return DecentOptimWrapper(sgd([*model.parameters()]), extensions=extensions, model=named_by)


def outer_of(optimizer: DecentOptimWrapper) -> dict[str, Any]:
    """What a checkpoint has of the outer optimizer, by the names of the parameters."""
    state = optimizer.gossip_state_dict()["extensions"]["outer_optimizer"]
    rows: dict[str, Any] = state["params"]
    return rows


def test_an_outer_state_has_the_names_of_the_model() -> None:
    model = make_model()
    optimizer = alone(model, named_by=torch.compile(model, backend="eager"))
    names = [name for name, _ in model.named_parameters()]
    assert [*outer_of(optimizer)] == names
    recomputed = nn.Sequential(*map(checkpoint_wrapper, model))
    assert [*outer_of(alone(model, named_by=recomputed))] == names
    for other in (None, model[:1]):
        unnamed = alone(model, named_by=other)
        with pytest.raises(ValueError, match=r"store by their names .* of each; pass model="):
            unnamed.gossip_state_dict()
