"""Real processes: the default process group, sub-groups, and scripts that end mid-round."""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dense import oracle
from problem import flatten, make_params, nesterov, sgd, take_steps, wrap
from ranks import (
    PROCESSES,
    KeptRanks,
    begin_process,
    end_interpreter,
    environment,
    launcher_store,
    print_to,
    start_process,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from decent_optim_wrapper import (
    DecentOptimWrapper,
    Elastic,
    OuterOptimizer,
    TopologyFactory,
)
from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.process_groups import store_of

pytestmark = pytest.mark.slow

STEPS = 5
RANKS = 8


@pytest.fixture(scope="module")
def ranks() -> Iterator[KeptRanks]:
    kept = KeptRanks(RANKS)
    yield kept
    kept.end()


def train(params: list[Tensor], rank: int, group: Any = None, **options: Any) -> DecentOptimWrapper:
    optimizer = wrap(params, group, **options)
    take_steps(optimizer, params, rank, range(STEPS))
    optimizer.synchronize()
    return optimizer


def train_on_default_group(local: int) -> list[float]:
    rank = dist.get_rank()
    params = make_params(seed=rank)
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(local)):
        optimizer = train(params, rank, topology="alternating-exp-ring")
    assert (optimizer.rank, optimizer.world_size) == (rank, RANKS)
    assert optimizer.topology.local_world_size == local
    return list(flatten(params).tolist())


@pytest.mark.parametrize("local", [2, 4])
def test_the_default_group_and_torchruns_variables_are_found(local: int, ranks: KeptRanks) -> None:
    rows = torch.tensor(ranks.run(train_on_default_group, local), dtype=torch.float64)
    topology = TopologyFactory.create("alternating-exp-ring", RANKS, local)
    torch.testing.assert_close(rows, oracle(topology, STEPS, True, sgd), rtol=1e-11, atol=1e-12)


def train_in_part(name: str, size: int) -> tuple[int, list[float]]:
    """The first ranks and the others train in groups of their own."""
    first, rank = range(size), dist.get_rank()
    parts: list[Any] = [dist.new_group(list(part)) for part in (first, range(size, RANKS))]
    mine, other = parts if rank < size else reversed(parts)
    with pytest.raises(ValueError, match="not a member"):
        DecentOptimWrapper(sgd(make_params()), process_group=other)
    params = make_params()
    options = {"topology": name if rank < size else "complete", "local_world_size": 1}
    optimizer = train(params, rank, mine, **options)
    return optimizer.rank, list(flatten(params).tolist())


# In both, ranks make different numbers of communicators.
@pytest.mark.parametrize(("name", "size"), [("greedy", 7), ("hypercuboid", 6)])
def test_a_process_group_restricts_the_gossip_to_its_ranks(
    name: str, size: int, ranks: KeptRanks
) -> None:
    places, values = zip(*ranks.run(train_in_part, name, size), strict=True)
    assert places == (*range(size), *range(RANKS - size))
    rows = torch.tensor(values, dtype=torch.float64)
    expected = oracle(TopologyFactory.create(name, size), STEPS, True, sgd)
    torch.testing.assert_close(rows[:size], expected, rtol=1e-11, atol=1e-12)
    assert (rows[0] - rows[size]).abs().max() > 1e-3


def distance_after_training(ddp: bool) -> float:
    """The distance between ranks that train on data of their own, perhaps with DDP left on."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    if ddp:
        model = DistributedDataParallel(model)
    start = flatten(list(model.parameters())).clone()
    optimizer = wrap([], base=torch.optim.SGD(model.parameters(), lr=0.1), topology="ring")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 3, generator=generator)).square().mean().backward()
        optimizer.step()
    optimizer.synchronize()
    assert not torch.equal(flatten(list(model.parameters())), start)
    return optimizer.consensus_distance()


def test_a_distance_of_zero_shows_that_ddp_is_still_on(four_ranks: KeptRanks) -> None:
    assert max(four_ranks.run(distance_after_training, True)) < 1e-6
    assert min(four_ranks.run(distance_after_training, False)) > 1e-3


class Trained(NamedTuple):
    """A model and its wrapper; also an object that holds the wrapper, as the guide saves it."""

    model: nn.Module
    optimizer: DecentOptimWrapper

    def take_steps(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            batch = torch.full((2, 3), float(dist.get_rank() + step))
            self.model(batch).square().mean().backward()
            self.optimizer.step()

    def values(self) -> list[float]:
        return list(flatten(list(self.model.parameters())).tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def fresh(seed: int, steps: int = 0, **options: Any) -> Trained:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    base = torch.optim.AdamW(model.parameters(), lr=0.05)
    run = Trained(model, wrap([], base=base, topology="ring", **options))
    run.take_steps(range(steps))
    return run


def resume_by_distributed_checkpoint(folder: str) -> tuple[list[float], list[list[float]]]:
    """As in the guide to checkpoints, but with an object that has a state: a key per rank."""
    key, ends = f"rank_{dist.get_rank()}", []
    run = fresh(seed=0, steps=3)
    dcp.state_dict_saver.save({key: run}, checkpoint_id=folder)
    run.take_steps(range(3, 6))
    whole = run.values()
    for resumed in (run, fresh(seed=1)):
        get_optimizer_state_dict(resumed.model, resumed.optimizer.optimizer)
        dcp.state_dict_loader.load({key: resumed}, checkpoint_id=folder)
        assert resumed.optimizer.round == 3
        assert resumed.optimizer.state_dict()["gossip"]["in_flight"]
        assert resumed.values() != whole
        resumed.take_steps(range(3, 6))
        ends.append(resumed.values())
    return whole, ends


def test_distributed_checkpoint_resumes_every_rank_bit_for_bit(
    tmp_path: Path, four_ranks: KeptRanks
) -> None:
    rows = four_ranks.run(resume_by_distributed_checkpoint, str(tmp_path))
    for whole, ends in rows:
        assert ends == [whole] * 2
    assert len({tuple(whole) for whole, _ in rows}) == 4


def resume_an_average_by_distributed_checkpoint(folder: str) -> tuple[list[float], ...]:
    """What follows an average that is loaded by `load_state_dict`, and by torch's functions."""
    key, outer = f"rank_{dist.get_rank()}", OuterOptimizer(nesterov(0.5))
    run, ends = fresh(seed=0, steps=3, extensions=[outer]), []
    own = run.values()
    with run.optimizer.averaged():
        assert run.values() != own
        state = copy.deepcopy(run.state_dict())
        dcp.state_dict_saver.save({key: run}, checkpoint_id=folder)
    dcp.state_dict_saver.save({key: run}, checkpoint_id=f"{folder}/own")
    for source in (None, folder, f"{folder}/own"):
        resumed = fresh(seed=1, extensions=[outer])
        get_optimizer_state_dict(resumed.model, resumed.optimizer.optimizer)
        # Also a rank that has an average in place loads what was saved without one.
        with resumed.optimizer.averaged() if source != folder else nullcontext():
            if source is None:
                resumed.load_state_dict(state)
            else:
                dcp.state_dict_loader.load({key: resumed}, checkpoint_id=source)
        resumed.take_steps(range(3, 6))
        resumed.optimizer.synchronize()
        ends.append(resumed.values())
    return tuple(ends)


def test_distributed_checkpoint_resumes_from_an_average_as_load_state_dict_does(
    tmp_path: Path, four_ranks: KeptRanks
) -> None:
    rows = four_ranks.run(resume_an_average_by_distributed_checkpoint, str(tmp_path))
    for by_itself, by_torch, own in rows:
        assert by_torch == by_itself != own


# An interrupted rank is gone within 5 s; the rest is for a busy machine.
SECONDS_TO_END = 5 + 8
# What a shell shows of the end by this signal.
INTERRUPTED = 128 + signal.SIGINT
# The end and the rank of a process that imports torch, for three seconds of CPU time.
SCRIPT = ("interrupt", 0)


def train_in_flight(
    topology: str, end: str, env: dict[str, str], rank: int, ready: Connection
) -> DecentOptimWrapper:
    """Take steps until one is interrupted, or two; the wrapper, with a round in flight."""
    os.environ.update(env, RANK=str(rank))
    begin_process()
    # It is ignored where the tests were started in the background of a shell.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group("gloo")
    params = [torch.zeros(100_000, requires_grad=True) for _ in range(3)]
    base = torch.optim.SGD(params, lr=0.1)
    elastic = Elastic() if end == "interrupt-elastic" else None
    options: dict[str, Any] = {"topology": topology, "local_world_size": 1, "bucket_cap_mb": 0.5}
    optimizer = DecentOptimWrapper(base, elastic=elastic, **options)
    for step in range(9 if "interrupt" in end else 2):
        if step == 1:
            ready.send(None)
        if step and rank == 1:
            time.sleep(7)
        optimizer.step()
    return optimizer


def end_in_flight(topology: str, end: str, *args: Any) -> NoReturn:
    """End as a script whose optimizer is there until the interpreter ends."""
    try:
        optimizer = train_in_flight(topology, end, *args)
    except KeyboardInterrupt:
        end_interpreter(INTERRUPTED)
    if end == "threads":
        # They return from C++ one after the other, also while Python is finalised.
        store: Any = store_of(dist.group.WORLD)
        for number in range(20):
            bound = timedelta(seconds=0.02 + 0.04 * number)
            in_background(partial(store.clone().wait, ["never"], bound))
    assert optimizer.state_dict()["gossip"]["in_flight"]
    if end == "destroy":
        dist.destroy_process_group()
    end_interpreter()


def be_interrupted_in_a_script(*args: Any) -> NoReturn:
    """As `end_in_flight`, but an interpreter of its own meets the error that nobody catches."""
    *others, ready = args
    os.set_inheritable(ready.fileno(), True)
    script = f"""
from multiprocessing.connection import Connection
from test_processes import train_in_flight
train_in_flight(*{others}, Connection({ready.fileno()}))
"""
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    print_to(Path(os.devnull))
    os.execv(sys.executable, [sys.executable, "-c", script])


@pytest.mark.parametrize(
    "worlds",
    [
        [("ring", "threads", 2), ("complete", "destroy", 3)],
        [("ring", "interrupt", 2), ("complete", "interrupt-elastic", 3)],
    ],
    ids=["end", "interrupt"],
)
def test_a_script_that_ends_with_a_round_in_flight_exits_cleanly(
    worlds: list[tuple[str, str, int]],
) -> None:
    """Rank 1 takes its last step long after the others have ended, unless it is interrupted.

    All ranks that are interrupted, elastic ones, too, are gone soon.
    """
    stores, ranks, ready = [], {}, []
    for topology, end, size in worlds:
        stores.append(launcher_store())
        env = environment(stores[-1], size, 1)
        for rank in range(size):
            ours, theirs = PROCESSES.Pipe(duplex=False)
            is_script = (end, rank) == SCRIPT
            main = be_interrupted_in_a_script if is_script else end_in_flight
            ranks[topology, end, rank] = start_process(main, topology, end, env, rank, theirs)
            theirs.close()
            ready.append(ours)
    assert all(pipe.poll(60) for pipe in ready)
    # Rank 0 waits for rank 1, which sleeps.
    time.sleep(0.2)
    interrupted = {where for where in ranks if "interrupt" in where[1]}
    for where in interrupted:
        os.kill(ranks[where].pid or 0, signal.SIGINT)
    deadline = time.monotonic() + (SECONDS_TO_END if interrupted else 60)
    for process in ranks.values():
        process.join(max(0.0, deadline - time.monotonic()))
    codes = {where: process.exitcode for where, process in ranks.items()}
    expected = {where: INTERRUPTED if where in interrupted else 0 for where in ranks}
    # The interpreter ends itself by the signal.
    expected.update({where: -signal.SIGINT for where in ranks if where[1:] == SCRIPT})
    assert codes == expected
