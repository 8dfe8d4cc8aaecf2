"""Real processes: the default process group, sub-groups, and scripts that end mid-round."""

from __future__ import annotations

import copy
import os
import signal
import time
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dense import oracle
from modules import Training, adamw, flat, make_model
from problem import flatten, make_params, nesterov, sgd, take_steps, wrap
from ranks import KeptRanks, Processes, end_interpreter
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from decent_optim_wrapper import DecentOptimWrapper, Elastic, OuterOptimizer, TopologyFactory
from decent_optim_wrapper.comm.background import in_background
from decent_optim_wrapper.comm.process_groups import store_of

pytestmark = pytest.mark.slow

STEPS = 5


def train(params: list[Tensor], rank: int, group: Any = None, **options: Any) -> DecentOptimWrapper:
    optimizer = wrap(params, group, **options)
    take_steps(optimizer, params, rank, range(STEPS))
    optimizer.synchronize()
    return optimizer


def train_on_default_group() -> list[float]:
    rank = dist.get_rank()
    params = make_params(seed=rank)
    # In its even and odd halves, no rank shares its node of two ranks with another.
    halves: list[Any] = [dist.new_group([first, first + 2]) for first in (0, 1)]
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        optimizer = train(params, rank, topology="alternating-exp-ring")
        half = wrap(make_params(), halves[rank % 2], topology="hierarchical")
    assert half.topology.local_world_size == 1
    assert (optimizer.rank, optimizer.world_size) == (rank, 4)
    assert optimizer.topology.local_world_size == 2
    return list(flatten(params).tolist())


def test_the_default_group_and_torchruns_variables_are_found(four_ranks: KeptRanks) -> None:
    rows = torch.tensor(four_ranks.run(train_on_default_group), dtype=torch.float64)
    topology = TopologyFactory.create("alternating-exp-ring", 4, 2)
    torch.testing.assert_close(rows, oracle(topology, STEPS, True, sgd), rtol=1e-11, atol=1e-12)


def train_in_part() -> tuple[int, list[float]]:
    """The first three ranks and the last one train in groups of their own."""
    rank = dist.get_rank()
    parts: list[Any] = [dist.new_group(part) for part in ([0, 1, 2], [3])]
    mine, other = parts if rank < 3 else reversed(parts)
    with pytest.raises(TypeError, match="of which this rank is a member"):
        DecentOptimWrapper(sgd(make_params()), process_group=other)
    params = make_params()
    options = {"topology": "greedy" if rank < 3 else "complete", "local_world_size": 1}
    optimizer = train(params, rank, mine, **options)
    return optimizer.rank, list(flatten(params).tolist())


def test_a_process_group_restricts_the_gossip_to_its_ranks(four_ranks: KeptRanks) -> None:
    places, values = zip(*four_ranks.run(train_in_part), strict=True)
    assert places == (0, 1, 2, 0)
    rows = torch.tensor(values, dtype=torch.float64)
    expected = oracle(TopologyFactory.create("greedy", 3), STEPS, True, sgd)
    torch.testing.assert_close(rows[:3], expected, rtol=1e-11, atol=1e-12)
    assert (rows[0] - rows[3]).abs().max() > 1e-3


class Saved(Training):
    """An object with a model and its wrapper, as the guide saves it."""

    def values(self) -> list[float]:
        return list(flat(self.model).tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def resume_by_distributed_checkpoint(folder: str) -> tuple[list[float], ...]:
    """The end of a run, and of those that load an average by themselves, or either by torch."""
    rank = dist.get_rank()
    options: dict[str, Any] = {"overlap": True, "extensions": [OuterOptimizer(nesterov(0.5))]}
    build = partial(Saved, rank, None, base=adamw, **options)
    key, run = f"rank_{rank}", build(model=make_model(seed=0))
    run.train(range(3))
    own = run.values()
    dcp.state_dict_saver.save({key: run}, checkpoint_id=f"{folder}/own")
    with run.optimizer.averaged():
        assert run.values() != own
        state = copy.deepcopy(run.state_dict())
        dcp.state_dict_saver.save({key: run}, checkpoint_id=f"{folder}/average")
    run.train(range(3, 6))
    ends = [run.end().tolist()]
    for source in ("", "average", "own"):
        resumed = build(model=make_model(seed=1))
        get_optimizer_state_dict(resumed.model, resumed.optimizer.optimizer)
        # Also a rank that has an average in place loads what was saved without one.
        with resumed.optimizer.averaged() if source != "average" else nullcontext():
            if source:
                dcp.state_dict_loader.load({key: resumed}, checkpoint_id=f"{folder}/{source}")
            else:
                resumed.load_state_dict(state)
        assert resumed.optimizer.round == 3
        assert resumed.optimizer.state_dict()["gossip"]["in_flight"] == (source == "own")
        assert resumed.values() != ends[0]
        resumed.train(range(3, 6))
        ends.append(resumed.end().tolist())
    return tuple(ends)


def test_distributed_checkpoint_resumes_every_rank_as_load_state_dict_does(
    tmp_path: Path, four_ranks: KeptRanks
) -> None:
    rows = four_ranks.run(resume_by_distributed_checkpoint, str(tmp_path))
    for whole, by_itself, by_torch, own in rows:
        assert own == whole
        assert by_torch == by_itself != own
    assert len({tuple(whole) for whole, *_ in rows}) == 4


# An interrupted rank is gone within 5 s; the rest is for a busy machine.
SECONDS_TO_END = 5 + 8
# What a shell shows of the end by this signal.
INTERRUPTED = 128 + signal.SIGINT


def end_in_flight(rank: int, pipe: Connection, topology: str, end: str) -> NoReturn:
    """End by an interrupt in a step, or after two, as a script whose wrapper is still there."""
    # It is ignored where the tests were started in the background of a shell.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group("gloo")
    params = [torch.zeros(100_000, requires_grad=True) for _ in range(3)]
    base = torch.optim.SGD(params, lr=0.1)
    elastic = Elastic() if end == "interrupt-elastic" else None
    options: dict[str, Any] = {"topology": topology, "local_world_size": 1, "bucket_cap_mb": 0.5}
    optimizer = DecentOptimWrapper(base, elastic=elastic, **options)
    try:
        for step in range(9 if "interrupt" in end else 2):
            if step == 1:
                pipe.send(("ready", None))
            if step and rank == 1:
                time.sleep(7)
            optimizer.step()
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


WORLDS = [
    *(("ring", "threads", 2), ("complete", "destroy", 3)),
    *(("ring", "interrupt", 2), ("complete", "interrupt-elastic", 3)),
]


def test_a_script_that_ends_with_a_round_in_flight_exits_cleanly() -> None:
    """Rank 1 takes its last step long after the others have ended, unless it is interrupted.

    All ranks that are interrupted, elastic ones, too, are gone soon.
    """
    with ExitStack() as stack:
        worlds = {}
        for topology, end, size in WORLDS:
            ranks = Processes(size, end_in_flight, topology, end, local_world_size=1)
            worlds[end] = stack.enter_context(ranks)
        for ranks in worlds.values():
            for rank in ranks.workers:
                ranks.wait_for(rank, "ready")
        # Rank 0 waits for rank 1, which sleeps.
        time.sleep(0.2)
        for code, seconds in ((INTERRUPTED, SECONDS_TO_END), (0, 60)):
            deadline, codes = time.monotonic() + seconds, set()
            workers = [
                each
                for end, ranks in worlds.items()
                for each in ranks.workers.values()
                if ("interrupt" in end) == bool(code)
            ]
            for worker in workers if code else ():
                os.kill(worker.pid, signal.SIGINT)
            for worker in workers:
                worker.join(max(0.0, deadline - time.monotonic()))
                codes.add(worker.exitcode)
            assert codes == {code}
