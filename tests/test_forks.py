"""Processes that a rank forks, such as the workers of a DataLoader."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modules import Training, flat, loss_of
from ranks import end_interpreter, run_processes
from torch.utils.data import DataLoader, TensorDataset

from decent_optim_wrapper import Elastic
from decent_optim_wrapper.data import ElasticSampler

pytestmark = pytest.mark.slow
SECONDS = 30
ELASTIC: list[dict[str, Any]] = [{}, {"elastic": Elastic()}]


def collect(_: int) -> None:
    """In a worker: what would happen there sooner or later."""
    gc.collect()


def load_and_drop(rank: int) -> None:
    dist.init_process_group("gloo")
    gc.disable()
    for attempt, options in enumerate([*ELASTIC, *ELASTIC]):
        training = Training(rank, None, timeout=SECONDS, **options)
        optimizer = training.optimizer
        sampler = ElasticSampler(40, optimizer, 4)
        loader = DataLoader(
            TensorDataset(torch.arange(40)),
            batch_sampler=sampler,
            num_workers=2,
            worker_init_fn=collect,
            multiprocessing_context="fork",
            persistent_workers=bool(attempt % 2),
        )
        steps = 0
        for steps, _ in enumerate(loader, 1):
            training.train([steps])
        assert steps == 5
        optimizer.synchronize()
        alive = [*map(weakref.ref, (optimizer, optimizer.topology, sampler))]
        if attempt < 2:
            del training, optimizer, sampler, loader
            assert [each() for each in alive] == [None] * 3, "a cycle would keep connections alive"
        else:
            # A cycle of the user's, which is collected in the next workers.
            cycle: list[Any] = [training, sampler]
            cycle.append(cycle)
            del training, optimizer, sampler, loader, cycle


def test_workers_live_although_they_collect_a_wrapper() -> None:
    run_processes(2, load_and_drop)


def fork_with_a_round_in_flight(
    rank: int, way: str, overlap: Any, options: dict[str, Any]
) -> list[list[float]]:
    dist.init_process_group("gloo")

    def trained(forks: bool) -> list[float]:
        training = Training(rank, None, way, overlap=overlap, timeout=SECONDS, **options)
        model = training.model
        training.train(range(3))
        # In a forward pass after some modules, and between two steps.
        if forks:
            fork(training)
        training.train([3])
        if forks:
            handles.append(model[2].register_forward_hook(lambda *_: fork(training)))
        training.train([4])
        return training.end().tolist()

    def fork(training: Training) -> None:
        for handle in handles:
            handle.remove()
        if child := os.fork():
            children.append(child)
            return
        # The child finalises Python, with its finalisers.
        signal.alarm(SECONDS)
        try:
            own = flat(training.model)
            assert loss_of(training.model, rank, 3).isfinite()
            assert torch.equal(flat(training.model), own)
            with pytest.raises(RuntimeError, match=r"this process was forked.*in the parent"):
                training.optimizer.global_avg()
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
            os._exit(1)
        end_interpreter()

    children: list[int] = []
    handles: list[Any] = []
    results = [trained(True), trained(False)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    return results


@pytest.mark.parametrize(
    ("way", "overlap", "options"),
    [("step", True, ELASTIC[1]), ("backward", "forward", {"comm_dtype": torch.int8})],
)
def test_a_forked_process_leaves_the_round_to_its_parent(
    way: str, overlap: Any, options: dict[str, Any]
) -> None:
    for with_forks, without in run_processes(2, fork_with_a_round_in_flight, way, overlap, options):
        assert with_forks == without
