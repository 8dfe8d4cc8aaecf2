"""Resuming with another number of ranks: all start from the exact average of the saved models."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from problem import (
    MakeOptimizer,
    adamw,
    flatten,
    make_params,
    nesterov,
    sgd,
    take_steps,
    wrap,
)
from ranks import run_threads
from test_checkpoint import file_of, flip_a_bit, start
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from warning_texts import warned_texts

from decent_optim_wrapper import (
    AsItArrives,
    GradientTracking,
    NonFiniteError,
    OuterOptimizer,
    Schedule,
)
from decent_optim_wrapper.checkpoint import Checkpoint, averaging, whole_file
from decent_optim_wrapper.checkpoint.saved_set import FileName, SavedSet, folder_of
from decent_optim_wrapper.cli import main as command
from decent_optim_wrapper.optim import AccumAdam

STEPS = 4


def topology_of(size: int) -> str:
    return "complete" if size % 2 else "ring"


class Found(NamedTuple):
    """The parameters and the state of a rank after loading, and its parameters at the end."""

    loaded: Tensor
    state: dict[str, Any]
    end: Tensor
    saved: dict[str, Any]


def journey(
    folder: Path, sizes: Sequence[int], make: MakeOptimizer = sgd, **options: Any
) -> list[list[Found]]:
    """What all ranks find in every part of a run with changing numbers of ranks.

    They go on from the last set for some steps, and save with a round in flight.
    """

    def part(rank: int, group: dist.ProcessGroup, size: int) -> Found:
        run = start(group, folder, size, make=make, topology=topology_of(size), **options)
        step = run.resume()
        loaded, state = flatten(run.params), copy.deepcopy(run.optimizer.state_dict())
        take_steps(run.optimizer, run.params, rank, range(STEPS))
        if not run.optimizer.pacing.synchronous:
            run.optimizer.synchronize()
        saved = copy.deepcopy(run.optimizer.state_dict())
        run.save(step + STEPS)
        return Found(loaded, state, flatten(run.params), saved)

    return [run_threads(size, partial(part, size=size)) for size in sizes]


def test_an_outer_optimizer_goes_on_and_tracked_gradients_start_again(tmp_path: Path) -> None:
    options: Any = {"schedule": Schedule(gossip_every=2)}
    options["extensions"] = [OuterOptimizer(nesterov(0.5)), GradientTracking()]
    before, found = journey(tmp_path, (4, 3), **options)
    check_mean(before, found)
    for rank in found:
        states = rank.state["gossip"]["extensions"]
        tracked, outer = (
            states[name]["params"] for name in ("gradient_tracking", "outer_optimizer")
        )
        assert not any(row["y"].any() or row["steps"] for row in tracked)
        assert all(row["started"] for row in outer)
        assert any(row["state"]["momentum_buffer"].any() for row in outer)


def test_the_outer_optimizers_of_all_wrappers_go_on(tmp_path: Path) -> None:
    """Also of those whose wrapper is not the one that `Checkpoints` knows."""

    def part(rank: int, group: dist.ProcessGroup, size: int) -> tuple[Tensor, Tensor]:
        plain = start(group, tmp_path, make=sgd, topology=topology_of(size))
        outer = [OuterOptimizer(nesterov(0.5))]
        params = make_params(seed=1)
        other = wrap(params, group, sgd(params), topology=topology_of(size), extensions=outer)
        if saved := plain.checkpoints.load():
            other.load_state_dict(saved.state["other"])
        rows = other.state_dict()["gossip"]["extensions"]["outer_optimizer"]["params"]
        loaded = torch.cat([row["anchor"].flatten() for row in rows])
        take_steps(other, params, rank, range(STEPS))
        state = copy.deepcopy(other.state_dict())
        plain.checkpoints.save(STEPS * size, {"other": state})
        rows = state["gossip"]["extensions"]["outer_optimizer"]["params"]
        return loaded, torch.cat([row["anchor"].flatten() for row in rows])

    before, found = (run_threads(size, partial(part, size=size)) for size in (4, 6))
    mean = torch.stack([end for _, end in before]).mean(0)
    for loaded, end in found:
        torch.testing.assert_close(loaded, mean, rtol=0, atol=1e-14)
        assert not torch.equal(loaded, end)


SMALLER_LARGER_ONE = (4, 3, 6, 1)
FEATURES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "sgd": (SMALLER_LARGER_ONE, {}),
    "adamw": (SMALLER_LARGER_ONE, {"make": adamw, "overlap": False}),
    "int8": ((4, 6), {"comm_dtype": torch.int8}),
    "auto": ((4, 6), {"overlap": AsItArrives()}),
    "windows": ((4, 6), {"make": partial(AccumAdam, lr=0.02, accum_iter=3), "overlap": False}),
}


def check_mean(before: list[Found], found: list[Found]) -> None:
    """Check that all start from the means of parameters and state, and train apart again."""
    mean = torch.stack([each.end for each in before]).mean(0)
    saved = [tree_leaves(each.saved["state"]) for each in before]
    for rank in found:
        torch.testing.assert_close(rank.loaded, mean, rtol=0, atol=1e-14)
        assert torch.equal(rank.loaded, found[0].loaded)
        leaves, first = (tree_leaves(each.state["state"]) for each in (rank, found[0]))
        assert leaves
        for one, same, *others in zip(leaves, first, *saved, strict=True):
            expected = torch.stack([torch.as_tensor(each).double() for each in others]).mean(0)
            torch.testing.assert_close(torch.as_tensor(one).double(), expected, rtol=0, atol=1e-13)
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(same))
        assert not rank.state["gossip"]["in_flight"]
        rounds = [each.saved["gossip"]["round"] for each in before]
        assert rank.state["gossip"]["round"] == max(rounds) >= STEPS
        assert (rank.end - rank.loaded).abs().max() > 1e-3
    if topology_of(len(found)) == "ring":
        assert torch.stack([each.end for each in found]).std(0).max() > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "options"), FEATURES.values(), ids=FEATURES)
def test_whatever_takes_part_all_ranks_start_from_the_mean(
    sizes: tuple[int, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    for before, found in pairwise(journey(tmp_path, sizes, **options)):
        check_mean(before, found)


def averaged(*states: Any, rank: int = 0) -> Any:
    return averaging.Averaging().of(dict(enumerate(states)), rank)


def base_state(**row: Any) -> dict[str, Any]:
    return {"state": {0: row}, "param_groups": [{"lr": 0.5, "params": [0]}]}


def test_what_cannot_be_averaged_is_that_of_the_nearest_rank() -> None:
    states = [
        {
            **{"epoch": rank, "random": torch.tensor([rank], dtype=torch.uint8), "best": rank / 2},
            **{"half": torch.tensor(rank / 2, dtype=torch.bfloat16), "flags": (True, None)},
            **{"phase": torch.tensor([1j * rank]), "least": torch.tensor(torch.inf)},
            # As of a spectral norm: their mean is shorter.
            "weight_u": torch.eye(3)[rank],
        }
        for rank in range(3)
    ]
    for rank, own in ((0, 0), (2, 2), (7, 2)):
        mean = averaged(*states, rank=rank)
        assert (mean["epoch"], mean["random"].item(), mean["best"]) == (own, own, own / 2)
        assert mean["half"].item() == 0.5
        assert mean["half"].dtype is torch.bfloat16
        assert (mean["phase"].item(), mean["least"].item()) == (1j, torch.inf)
        assert mean["flags"] == (True, None)
        assert mean["weight_u"].argmax() == own
        assert mean["weight_u"].norm() == 1
    assert averaging.Averaging().of({0: "low", 2: "high"}, rank=1) == "low"


def test_counters_and_what_belongs_together_are_not_averaged() -> None:
    ones = torch.ones(2)
    counts = [base_state(step=torch.tensor(float(k)), exp_avg=k * ones) for k in (1, 4)]
    row = averaged(*counts, rank=1)["state"][0]
    assert row["step"].item() == 4
    assert row["exp_avg"].tolist() == [2.5, 2.5]
    histories = [base_state(d=k * ones, old_dirs=[k * ones] * k) for k in (1, 3)]
    row = averaged(*histories, rank=1)["state"][0]
    assert row["d"].tolist() == [3, 3]
    assert len(row["old_dirs"]) == 3
    # A rank without a gradient has no state of the parameter.
    nothing = {**base_state(), "state": {}}
    assert averaged(nothing, *counts)["state"][0]["exp_avg"].tolist() == [2.5, 2.5]
    assert averaged(nothing, nothing)["state"] == {}


def write(folder: Path, step: int, size: int, states: dict[int, Any]) -> None:
    """A set with these states of the ranks that have saved it."""
    digests = {
        FileName(rank, size): whole_file.write_state(file_of(folder, step, rank, size), state)
        for rank, state in states.items()
    }
    SavedSet(step, folder_of(folder, step), digests).mark(next(iter(digests)))


def save(folder: Path, size: int, step: int, model: int) -> None:
    """A set in which the models of the ranks have this mean."""
    values = [[model + rank - (size - 1) / 2] * 3 for rank in range(size)]
    write(folder, step, size, dict(enumerate(map(of_model, values))))


def of_model(values: Any) -> dict[str, Any]:
    """A state in which the model has one parameter with these values."""
    return {"model": {"weight": torch.as_tensor(values)}}


def load(
    folder: Path | Sequence[Path], size: int, same_world: bool = False
) -> list[tuple[int, int, float]]:
    """Step, size and model that each rank goes on from."""

    def main(rank: int, group: dist.ProcessGroup) -> Checkpoint | None:
        own = folder if isinstance(folder, Path) else folder[rank]
        return start(group, own, topology=topology_of(size)).checkpoints.load(same_world=same_world)

    found = run_threads(size, main)
    return [
        (each.step, each.world_size, each.state["model"]["weight"][0].item()) if each else NOTHING
        for each in found
    ]


NOTHING = (-1, 0, 0.0)


def test_the_newest_complete_set_is_loaded_whatever_its_size(tmp_path: Path) -> None:
    for size, step, model in ((4, 1, 10), (3, 2, 20), (6, 3, 30)):
        save(tmp_path, size, step, model)
    own = [(1, 4, 8.5), (1, 4, 9.5), (1, 4, 10.5), (1, 4, 11.5)]
    with warned_texts() as warned:
        assert load(tmp_path, 4) == [(3, 6, 30.0)] * 4
        assert load(tmp_path, 4, same_world=True) == own
        assert warned == []
        flip_a_bit(file_of(tmp_path, 3, 5, 6))
        assert load(tmp_path, 4) == [(2, 3, 20.0)] * 4
        file_of(tmp_path, 2, 1, 3).unlink()
        assert load(tmp_path, 4) == own
        assert load(tmp_path, 1) == [(1, 4, 10.0)]
        assert load(tmp_path, 1, same_world=True) == [NOTHING]
    text = "".join(warned)
    assert "step_00000003 of 6 ranks is passed over: it is missing, damaged, or of" in text
    assert "another run on rank 0, rank 1, rank 2, rank 3" in text
    assert "rank_5_of_6.pt cannot be used: its bytes are not those that were written" in text
    assert "rank_1_of_3.pt'; looking for an older set" in text
    assert "no complete set of 1 ranks" in warned[-1]
    # Of two sets of one step, the set of the same size is loaded.
    save(tmp_path, 3, 1, 50)
    assert load(tmp_path, 4) == own


def test_ranks_that_see_different_folders_load_what_all_of_them_see(tmp_path: Path) -> None:
    folders = [tmp_path / str(rank) for rank in range(3)]
    save(folders[0], 4, 1, 10)
    save(folders[0], 6, 2, 20)
    shutil.copytree(folders[0], folders[1])
    shutil.copytree(folders[0] / "step_00000001", folders[2] / "step_00000001")
    with warned_texts() as warned:
        assert load(folders, 3) == [(1, 4, 10.0)] * 3
    text = "".join(warned)
    assert "step_00000002 of 6 ranks is passed over: it is missing, damaged, or of" in text
    assert "sets of another number of ranks must be where every rank sees them" in text
    # Another run's set of the same step.
    shutil.rmtree(folders[1])
    save(folders[1], 4, 1, 70)
    with warned_texts() as warned:
        assert load(folders, 3) == [NOTHING] * 3
    assert "of another run on rank" in "".join(warned)


def test_a_set_that_members_with_gaps_have_saved_is_averaged_and_stays(tmp_path: Path) -> None:
    """Rank 1 of three was lost: the files are from ranks 0 and 2."""
    save(tmp_path, 3, 1, 10)
    write(tmp_path, 2, 2, {0: of_model([1.0]), 2: of_model([4.0])})
    assert load(tmp_path, 2) == [(2, 2, 2.5)] * 2
    assert load(tmp_path, 3) == [(2, 2, 2.5)] * 3

    def go_on(rank: int, group: dist.ProcessGroup) -> None:
        checkpoints = start(group, tmp_path, topology="complete").checkpoints
        assert checkpoints.load() is not None
        with pytest.raises(ValueError, match="above 2, the step of the last set"):
            checkpoints.save(2, {})
        checkpoints.save(3, {})

    run_threads(3, go_on)
    assert len(list((tmp_path / "step_00000002").iterdir())) == 3


def test_nan_in_one_file_is_an_error_on_every_rank_of_another_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 3, 3, dict(enumerate(of_model([each]) for each in (1.0, float("nan"), 4.0))))
    file, out = file_of(tmp_path, 3, 1, 3), tmp_path / "model.pt"

    def main(rank: int, group: dist.ProcessGroup) -> None:
        text = f"model/weight in {file} of rank 1 has NaN or infinity"
        with pytest.raises(NonFiniteError, match=text):
            start(group, tmp_path).checkpoints.load()

    run_threads(2, main)
    # Every rank continues from its own file.
    first, _, last = load(tmp_path, 3)
    assert (first[2], last[2]) == (1, 4)
    with pytest.raises(SystemExit):
        command(["average", str(tmp_path), "--out", str(out)])
    assert f"weight in {file} of rank 1 has NaN" in capsys.readouterr().err
    assert not out.exists()


def test_the_command_writes_the_averaged_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "new" / "model.pt"
    models, states = [], {}
    for rank in range(3):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        models.append(model.double().state_dict())
        states[rank] = {"model": {**models[-1], "tied": models[-1]["0.bias"]}, "other": 1}
    write(run, 7, 3, states)
    assert command(["average", str(run), "--out", str(out)]) == 0
    assert f"{out}: the average over 3 ranks of step 7" in capsys.readouterr().out
    mean = torch.load(out, weights_only=True)
    for name, value in models[0].items():
        if value.is_floating_point():
            expected = torch.stack([each[name] for each in models]).mean(0)
            torch.testing.assert_close(mean[name], expected, rtol=0, atol=1e-15)
    assert (mean["0.weight"] - models[0]["0.weight"]).abs().max() > 1e-2
    with pytest.raises(SystemExit):
        command(["average", str(run), "--out", str(out.parent)])
    assert "expected a file for torch.load" in capsys.readouterr().err
    assert [path.name for path in out.parent.iterdir()] == ["model.pt"]
    assert {*tmp_path.iterdir()} == {run, out.parent}


@pytest.mark.filterwarnings("ignore:.*set_of_2.sha256 cannot be used")
def test_the_command_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model.pt"

    def refusal(folder: str, *more: str) -> str:
        with pytest.raises(SystemExit):
            command(["average", str(tmp_path / folder), "--out", str(out), *more])
        return capsys.readouterr().err

    state = {"net": {"weight": torch.ones(2)}, "epoch": 3}
    write(tmp_path / "run", 1, 1, {0: state})
    write(tmp_path / "half", 1, 2, {0: state})
    shards = {
        FileName(0, 1, shard, 2): whole_file.write_state(tmp_path / "mesh/step_1/x.pt", state)
        for shard in range(2)
    }
    SavedSet(1, tmp_path / "mesh/step_1", shards).mark(FileName(0, 1, 0, 2))
    assert "has no part 'model' in ['epoch', 'net']; pass --part" in refusal("run")
    assert "has no part 'epoch/a' in []" in refusal("run", "--part", "epoch/a")
    assert "expected a folder with a complete checkpoint set" in refusal("half")
    assert "expected a folder with a complete checkpoint set" in refusal("none")
    assert "torch.distributed.checkpoint" in refusal("mesh")
    assert "such as model.pt, got a.safetensors" in refusal("run", "--out", "a.safetensors")
    assert "such as model.pt, got ." in refusal("run", "--out", ".")
    assert not out.exists()
    assert command(["average", str(tmp_path / "run"), "--out", str(out), "--part", "net"]) == 0
