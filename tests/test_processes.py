"""Real processes: the default process group, sub-groups, and scripts that end mid-round."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dense import oracle
from problem import TINY_CAP_MB, backward, flatten, make_params, nesterov, sgd
from ranks import environment, launcher_store, run_processes
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from decent_optim_wrapper import DecentOptimWrapper, Schedule, TopologyFactory
from decent_optim_wrapper.comm import connections
from decent_optim_wrapper.comm.process_groups import new_communicator

pytestmark = pytest.mark.slow

STEPS = 5


def train_on_default_group(rank: int, topology: str) -> list[float]:
    dist.init_process_group("gloo")
    params = make_params(seed=rank)
    optimizer = DecentOptimWrapper(sgd(params), topology=topology, bucket_cap_mb=TINY_CAP_MB)
    assert (optimizer.rank, optimizer.world_size) == (rank, int(os.environ["WORLD_SIZE"]))
    assert optimizer.topology.local_world_size == int(os.environ["LOCAL_WORLD_SIZE"])
    for step in range(STEPS):
        backward(params, rank, step)
        optimizer.step()
    optimizer.synchronize()
    dist.destroy_process_group()
    return list(flatten(params).tolist())


@pytest.mark.parametrize(
    ("name", "world_size", "local"),
    [
        ("complete", 4, 2),
        ("ring", 4, 2),
        ("alternating-exp-ring", 8, 2),
        # Ranks that make different numbers of communicators.
        ("greedy", 7, 1),
        ("hypercuboid", 6, 1),
    ],
)
def test_the_default_group_and_torchruns_variables_are_found(
    name: str, world_size: int, local: int
) -> None:
    rows = torch.tensor(
        run_processes(world_size, train_on_default_group, name, local_world_size=local),
        dtype=torch.float64,
    )
    topology = TopologyFactory.create(name, world_size, local)
    torch.testing.assert_close(rows, oracle(topology, STEPS, True, sgd), rtol=1e-11, atol=1e-12)


def train_in_halves(rank: int) -> tuple[list[float], int]:
    dist.init_process_group("gloo")
    halves: list[Any] = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    mine, other = halves[rank // 3], halves[1 - rank // 3]
    with pytest.raises(ValueError, match="not a member"):
        DecentOptimWrapper(sgd(make_params()), process_group=other)
    params = make_params()
    optimizer = DecentOptimWrapper(sgd(params), process_group=mine, bucket_cap_mb=TINY_CAP_MB)
    for step in range(STEPS):
        backward(params, rank, step)
        optimizer.step()
    optimizer.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    return list(flatten(params).tolist()), optimizer.rank


def test_a_process_group_restricts_the_gossip_to_its_ranks() -> None:
    rows = run_processes(6, train_in_halves)
    assert [rank for _, rank in rows] == [0, 1, 2, 0, 1, 2]
    values = torch.tensor([row for row, _ in rows], dtype=torch.float64)
    expected = oracle(TopologyFactory.create("complete", 3), STEPS, True, sgd)
    torch.testing.assert_close(values[:3], expected, rtol=1e-11, atol=1e-12)
    assert (values[:3] - values[3:]).abs().max() > 1e-3


def two_wrappers_with_communicators(rank: int) -> tuple[bool, float]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=77))
    known = len(dist.distributed_c10d._world.pg_map)
    distances = []
    wrappers = []
    timeouts = []

    def noting(like: Any, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        made = new_communicator(like, store, rank, size, timeout)
        timeouts.append(made.options._timeout)
        return made

    connections.new_communicator = noting  # type: ignore[attr-defined]
    for seed in (0, 1):
        params = make_params(seed=seed)
        topology = TopologyFactory.create("alternating-exp-ring", 6, 3)
        wrapper = DecentOptimWrapper(sgd(params), topology=topology, bucket_cap_mb=TINY_CAP_MB)
        for step in range(3):
            backward(params, rank, step)
            wrapper.step()
        wrapper.global_avg(may_revert=False)
        distances.append(wrapper.consensus_distance())
        wrappers.append(wrapper)
    # One of all ranks and one of each larger group.
    assert len(timeouts) > 2
    assert set(timeouts) == {timedelta(seconds=77)}
    del wrapper
    wrappers.clear()
    freed = len(dist.distributed_c10d._world.pg_map) == known
    dist.destroy_process_group()
    return freed, max(distances)


def test_communicators_keep_the_users_timeout_and_go_with_their_wrapper() -> None:
    for freed, distance in run_processes(6, two_wrappers_with_communicators, local_world_size=3):
        assert freed
        assert distance < 1e-12


class Trained(NamedTuple):
    model: nn.Module
    optimizer: DecentOptimWrapper

    def advance(self, rank: int, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            batch = torch.full((2, 3), float(rank + step))
            self.model(batch).square().mean().backward()
            self.optimizer.step()


def fresh(seed: int, **options: Any) -> Trained:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    base = torch.optim.AdamW(model.parameters(), lr=0.05)
    return Trained(
        model, DecentOptimWrapper(base, topology="ring", bucket_cap_mb=TINY_CAP_MB, **options)
    )


def parameters(run: Trained) -> Tensor:
    return flatten(list(run.model.parameters()))


def states(run: Trained) -> dict[str, Any]:
    return {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}


def resume_by_distributed_checkpoint(
    rank: int, folder: str, options: dict[str, Any]
) -> tuple[list[float], list[float]]:
    """The recipe of the guide to checkpoints: a key per rank, and state to load into."""
    dist.init_process_group("gloo")
    whole = fresh(seed=0, **options)
    whole.advance(rank, range(3))
    with warnings.catch_warnings(action="error"):
        dcp.state_dict_saver.save({f"rank_{rank}": states(whole)}, checkpoint_id=folder)
    whole.advance(rank, range(3, 6))

    resumed = fresh(seed=1, **options)
    get_optimizer_state_dict(resumed.model, resumed.optimizer.optimizer)
    saved = states(resumed)
    dcp.state_dict_loader.load({f"rank_{rank}": saved}, checkpoint_id=folder)
    resumed.model.load_state_dict(saved["model"])
    resumed.optimizer.load_state_dict(saved["optimizer"])
    assert resumed.optimizer.round == 3
    assert resumed.optimizer.state_dict()["gossip"]["in_flight"]
    resumed.advance(rank, range(3, 6))
    dist.destroy_process_group()
    return parameters(whole).tolist(), parameters(resumed).tolist()


@pytest.mark.parametrize(
    "options", [{}, {"schedule": Schedule(outer=nesterov(0.5))}], ids=["plain", "outer"]
)
def test_distributed_checkpoint_resumes_every_rank_bit_for_bit(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    rows = run_processes(4, resume_by_distributed_checkpoint, str(tmp_path), options)
    for whole, resumed in rows:
        assert whole == resumed
    assert len({tuple(whole) for whole, _ in rows}) == 4


def go_back(rank: int, folder: str) -> list[list[float]]:
    """The same recipe in a run that goes on, by the dict and as an object, with all warnings."""
    dist.init_process_group("gloo")
    run = fresh(seed=0)
    run.advance(rank, range(3))
    seen = [parameters(run).tolist()]
    with warnings.catch_warnings(action="error"):
        dcp.state_dict_saver.save({f"rank_{rank}": states(run)}, checkpoint_id=f"{folder}/dict")
        dcp.state_dict_saver.save({f"rank_{rank}": Whole(run)}, checkpoint_id=f"{folder}/object")
        for name in ("dict", "object"):
            run.advance(rank, range(3, 6))
            seen.append(parameters(run).tolist())
            get_optimizer_state_dict(run.model, run.optimizer.optimizer)
            if name == "dict":
                saved = states(run)
                dcp.state_dict_loader.load({f"rank_{rank}": saved}, checkpoint_id=f"{folder}/dict")
                Whole(run).load_state_dict(saved)
            else:
                place = {f"rank_{rank}": Whole(run)}
                dcp.state_dict_loader.load(place, checkpoint_id=f"{folder}/object")
            assert run.optimizer.round == 3
            seen.append(parameters(run).tolist())
        # To load into, by keys that are the same on all ranks: what is loaded is the same anyway.
        with run.optimizer.averaged():
            dcp.state_dict_saver.save({"app": App(run)}, checkpoint_id=f"{folder}/average")
        dcp.state_dict_loader.load({"app": App(run)}, checkpoint_id=f"{folder}/average")
        seen.append(parameters(run).tolist())
    dist.destroy_process_group()
    return seen


def test_loading_is_not_warned_of_while_a_round_is_in_flight(tmp_path: Path) -> None:
    rows = run_processes(2, go_back, str(tmp_path))
    for saved, *later, average in rows:
        assert later[1] == later[3] == saved
        assert later[0] == later[2] != saved
        assert average != saved
    assert rows[0][0] != rows[1][0]
    assert rows[0][-1] == rows[1][-1]


NO_ROUND = r"get_state_dict\(\) leaves out .* starts at round 0.*gossip_state_dict"


def save_without_the_round(rank: int, folder: str) -> list[int]:
    """The rounds at which runs continue from what torch's function takes from the wrapper."""
    dist.init_process_group("gloo")
    run = fresh(seed=0)
    run.advance(rank, range(3))
    key, rounds = f"rank_{rank}", []
    with pytest.warns(UserWarning, match=NO_ROUND) as caught:
        model, optim = get_state_dict(run.model, run.optimizer)
    assert {Path(each.filename).name for each in caught} == {Path(__file__).name}
    dcp.state_dict_saver.save({key: {"model": model, "optim": optim}}, checkpoint_id=folder)
    with pytest.warns(UserWarning, match=NO_ROUND):
        # Also in an object that is saved.
        dcp.state_dict_saver.save({key: ByTorch(run)}, checkpoint_id=f"{folder}/object")
    with warnings.catch_warnings(action="error"):
        saved = with_the_round(run)
        dcp.state_dict_saver.save({key: saved}, checkpoint_id=f"{folder}/round")
    own = parameters(run)
    for name in (folder, f"{folder}/object", f"{folder}/round"):
        resumed = fresh(seed=1)
        get_optimizer_state_dict(resumed.model, resumed.optimizer.optimizer)
        state = with_the_round(resumed)
        if name != f"{folder}/round":
            del state["gossip"]
        dcp.state_dict_loader.load({key: state}, checkpoint_id=name)
        gossip = state.pop("gossip", None)
        set_state_dict(
            resumed.model,
            resumed.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )
        if gossip is not None:
            resumed.optimizer.load_gossip_state_dict(gossip)
        assert torch.equal(parameters(resumed), own)
        rounds.append(resumed.optimizer.round)
    dist.destroy_process_group()
    return rounds


def test_a_state_without_the_round_is_warned_of(tmp_path: Path) -> None:
    for rounds in run_processes(2, save_without_the_round, str(tmp_path)):
        assert rounds == [0, 0, 3]


def with_the_round(run: Trained) -> dict[str, Any]:
    model, optim = get_state_dict(run.model, run.optimizer.optimizer)
    return {"model": model, "optim": optim, "gossip": run.optimizer.gossip_state_dict()}


def plain_states(run: Trained) -> dict[str, Any]:
    """What torch's manual saves."""
    base = run.optimizer.optimizer
    return {
        "model": get_model_state_dict(run.model),
        "optim": get_optimizer_state_dict(run.model, base),
    }


def save_with_equal_keys(rank: int, folder: str) -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    run = fresh(seed=0)
    run.advance(rank, range(3))
    seen = {"own": parameters(run).tolist()}
    with pytest.warns(UserWarning, match=r"inside `with .* would store a mixture"):
        dcp.state_dict_saver.save(plain_states(run), checkpoint_id=f"{folder}/own")
    with warnings.catch_warnings(action="error"), run.optimizer.averaged():
        dcp.state_dict_saver.save(plain_states(run), checkpoint_id=f"{folder}/average")
        seen["average"] = parameters(run).tolist()
    for name in ("own", "average"):
        loaded = fresh(seed=1)
        state = plain_states(loaded)
        dcp.state_dict_loader.load(state, checkpoint_id=f"{folder}/{name}")
        set_model_state_dict(loaded.model, state["model"])
        seen[f"{name} loaded"] = parameters(loaded).tolist()
    dist.destroy_process_group()
    return seen


def test_distributed_checkpoint_stores_the_average_inside_averaged_and_warns_outside(
    tmp_path: Path,
) -> None:
    ranks = run_processes(4, save_with_equal_keys, str(tmp_path))
    own = [seen["own"] for seen in ranks]
    assert len({tuple(row) for row in own}) == 4
    for seen in ranks:
        assert seen["average loaded"] == seen["average"] == ranks[0]["average"]
        assert seen["average"] not in own
        # One state for all, whatever torch takes from which rank.
        assert seen["own loaded"] == ranks[0]["own loaded"] != seen["average"]


class App(NamedTuple):
    """The object with a state that torch's tutorial saves."""

    run: Trained

    def state_dict(self) -> dict[str, Any]:
        return plain_states(self.run)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.run.model, state["model"])


class Whole(NamedTuple):
    """An object that holds the wrapper, as the guide saves it."""

    run: Trained

    def state_dict(self) -> dict[str, Any]:
        return states(self.run)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run.model.load_state_dict(state["model"])
        self.run.optimizer.load_state_dict(state["optimizer"])


class ByTorch(NamedTuple):
    """An object that takes from the wrapper what torch's function finds."""

    run: Trained

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.run.model, self.run.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def save_objects(rank: int, folder: str) -> list[tuple[str, bool]]:
    """Whether a save of each form is warned of."""
    dist.init_process_group("gloo")
    run = fresh(seed=0)

    def warned(name: str, state: dict[str, Any]) -> tuple[str, bool]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dcp.state_dict_saver.save(state, checkpoint_id=f"{folder}/{name}")
        return name, any("a mixture" in str(each.message) for each in caught)

    seen = [warned("before the first step", {"optim": run.optimizer})]
    run.advance(rank, range(3))
    seen.append(warned("optimizer", {"optim": run.optimizer}))
    seen.append(warned("optimizer by rank", {f"optim_{rank}": run.optimizer}))
    seen.append(warned("optimizer of a second model", {"optim2": run.optimizer}))
    seen.append(warned("object", {"app": App(run)}))
    seen.append(warned("object by rank", {f"app_{rank}": App(run)}))
    with run.optimizer.averaged():
        seen.append(warned("optimizer on the average", {"optim": run.optimizer}))
    run.optimizer.global_avg(may_revert=False)
    seen.append(warned("optimizer on an average that stays", {"optim": run.optimizer}))
    with warnings.catch_warnings(action="error"):
        torch.save(run.optimizer.state_dict(), f"{folder}/{rank}.pt")
    base = run.optimizer.optimizer
    hooks = len(base._optimizer_state_dict_pre_hooks)
    del run
    gc.collect()
    assert len(base._optimizer_state_dict_pre_hooks) == hooks - 1
    dist.destroy_process_group()
    return seen


def test_objects_saved_with_equal_keys_are_warned_of_and_with_keys_by_rank_are_not(
    tmp_path: Path,
) -> None:
    for seen in run_processes(2, save_objects, str(tmp_path)):
        names = [name for name, warned in seen if warned]
        assert names == ["optimizer", "optimizer of a second model", "object"]
        assert len(seen) == 8


SCRIPT = """
import gc, os, sys, time
import torch, torch.distributed as dist
import torch._dynamo  # which the first step would import, on every rank
from decent_optim_wrapper import DecentOptimWrapper

def main(topology, lag, destroy):
    dist.init_process_group("gloo")
    params = [torch.zeros(100_000, requires_grad=True) for _ in range(3)]
    base = torch.optim.SGD(params, lr=0.1)
    optimizer = DecentOptimWrapper(base, topology=topology, local_world_size=1, bucket_cap_mb=0.5)
    for step in range(2):
        if step and dist.get_rank() == 1:
            time.sleep(lag)
        optimizer.step()
    assert optimizer.state_dict()["gossip"]["in_flight"]
    if destroy:
        dist.destroy_process_group()
    return optimizer

lag, *worlds = sys.argv[1:]
# The collector would copy what is imported into every rank, for seconds.
gc.freeze()
ends = {}
for world in worlds:
    topology, end, size, port = world.split(":")
    for rank in range(int(size)):
        child = os.fork()
        if not child:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": size, "MASTER_PORT": port}
            # Until the interpreter itself ends.
            kept = main(topology, float(lag), end == "destroy")
            sys.exit()
        ends[child] = f"{topology}, {end}, rank {rank}"
for child, where in ends.items():
    if os.waitpid(child, 0)[1]:
        print(where)
"""


def test_a_script_that_ends_with_a_round_in_flight_exits_cleanly() -> None:
    """Rank 1 takes its last step long after the others have ended."""
    # A pair, and a larger group: the end of each interpreter takes half a second of CPU time.
    cases = [
        f"{topology}:{end}:{size}"
        for topology, size in (("ring", 2), ("complete", 3))
        for end in ("destroy", "leave")
    ]
    stores = [launcher_store() for _ in cases]
    worlds = [f"{case}:{store.port}" for case, store in zip(cases, stores, strict=True)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "7", *worlds],
        env={**os.environ, **environment(stores[0], 1, 1)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout, f"{done.stdout} did not exit cleanly:\n{done.stderr}"
