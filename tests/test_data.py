"""Samples of ranks that are lost, killed, and come back, or resumed in another number."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problem import TINY_CAP_MB, backward, make_params, sgd
from ranks import run_threads
from restartable_processes import RestartableProcesses, wrap_elastic
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from decent_optim_wrapper import DecentOptimWrapper
from decent_optim_wrapper.data import ElasticSampler

SAMPLES = 203
State = dict[str, Any]


def wrap(group: dist.ProcessGroup | None, **options: Any) -> tuple[list[Tensor], Any]:
    params = make_params()
    optimizer = DecentOptimWrapper(
        sgd(params), process_group=group, bucket_cap_mb=TINY_CAP_MB, **options
    )
    assert len(optimizer.buckets) >= 2
    return params, optimizer


def test_what_workers_fetch_ahead_is_not_used() -> None:
    data = TensorDataset(torch.arange(SAMPLES))
    used: Counter[int] = Counter()
    state: State | None = None
    for steps in (7, None):
        params, optimizer = wrap(None)
        sampler = ElasticSampler(data, optimizer, 8, seed=3)
        if state is not None:
            sampler.load_state_dict(state)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=2, prefetch_factor=3)
        assert len(loader) == 26 - (0 if state is None else 7)
        for (batch,) in islice(loader, steps):
            used.update(batch.tolist())
            backward(params, 0, optimizer.round)
            optimizer.step()
        state = sampler.state_dict()
    assert used == Counter(range(SAMPLES))
    assert sampler.epoch == 1
    assert [*used] != sorted(used)


@pytest.mark.parametrize("sizes", [{"batch_size": 4}, {"total_batch": 13}])
def test_a_state_is_right_for_another_number_of_ranks(sizes: dict[str, Any]) -> None:
    state: State = {}
    used: Counter[int] = Counter()

    def main(rank: int, group: dist.ProcessGroup) -> tuple[list[list[int]], State, int]:
        params, optimizer = wrap(group, topology="complete")
        sampler = ElasticSampler(SAMPLES, optimizer, **sizes)
        if state:
            sampler.load_state_dict(state)
        batches: list[list[int]] = []
        while sampler.epoch < 2 and len(batches) < 9:
            # A new iterator begins with the next step.
            batches.append(next(iter(sampler)))
            backward(params, rank, optimizer.round)
            optimizer.step()
        return batches, sampler.state_dict(), sampler.epoch

    for ranks in (4, 3, 6, 1, 5):
        results = run_threads(ranks, main)
        assert len({len(batches) for batches, *_ in results}) == 1
        for step in zip(*(batches for batches, *_ in results), strict=True):
            dealt = [len(batch) for batch in step]
            assert max(dealt) - min(dealt) <= 1
            used.update(sample for batch in step for sample in batch)
        if "total_batch" in sizes and results[0][2] == 0:
            assert sum(dealt) == 13
        (_, state, epoch), *others = results
        assert all(other == state for _, other, _ in others)
    while epoch < 2:
        results = run_threads(2, main)
        used.update(sample for batches, *_ in results for batch in batches for sample in batch)
        _, state, epoch = results[0]
    assert used == Counter(dict.fromkeys(range(SAMPLES), 2))


def test_other_samples_or_sizes_are_refused() -> None:
    _, optimizer = wrap(None)
    sampler = ElasticSampler(SAMPLES, optimizer, 4)
    with pytest.raises(ValueError, match="pass the same data, seed and sizes"):
        ElasticSampler(SAMPLES, optimizer, 4, seed=1).load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match="either batch_size or total_batch"):
        ElasticSampler(SAMPLES, optimizer)
    with pytest.raises(ValueError, match="a sample for each of 1 ranks"):
        ElasticSampler(3, optimizer, 4, drop_last=True)


def ahead(batches: Iterator[list[int]], count: int) -> Iterator[list[int]]:
    """As a loader whose workers fetch so many batches ahead."""
    waiting = [*islice(batches, count)]
    while waiting:
        yield waiting.pop(0)
        waiting += islice(batches, 1)


def train_on(
    rank: int,
    world_size: int,
    store: Any,
    report: Callable[[str, Any], None],
    folder: Path,
) -> tuple[int, int]:
    """Write down the samples of each step before it is made, in a file for each process."""
    params = make_params()
    optimizer = wrap_elastic(params, rank, world_size, store, [], topology="complete")
    sampler = ElasticSampler(SAMPLES, optimizer, 4)
    report("joined", optimizer.round)
    with (folder / f"{rank}-{os.getpid()}").open("a", buffering=1) as file:
        while not store.check(["finish"]) or sampler.epoch < int(store.get("finish")):
            report(f"round {sampler.epoch}", optimizer.members)
            for batch in ahead(iter(sampler), 1 + rank):
                file.write(" ".join(map(str, batch)) + "\n")
                backward(params, rank, optimizer.round)
                optimizer.step()
                time.sleep(0.01)
    return sampler.epoch, sampler.repeated


@pytest.mark.slow
def test_ranks_that_are_killed_and_come_back_leave_no_sample_out(tmp_path: Path) -> None:
    with RestartableProcesses(3, train_on, tmp_path) as ranks:
        ranks.all_reach("joined")
        ranks.wait_for(1, "round 1")
        ranks.kill(1)
        ranks.wait_for_members(0, (0, 2))
        ranks.start(1)
        ranks.wait_for(1, "joined")
        ranks.wait_for_members(2, (0, 1, 2))
        ranks.kill(0)
        ranks.wait_for_members(2, (1, 2))
        ranks.finish(3)
        (epochs, repeated), other = ranks.results(1, 2)
    assert other[0] == epochs > 4
    files = [*tmp_path.iterdir()]
    assert len(files) == 4
    used = Counter(int(sample) for each in files for sample in each.read_text().split())
    surplus = [used[sample] - epochs for sample in range(SAMPLES)]
    assert min(surplus) == 0
    # Rank 2 has seen both losses.
    assert sum(surplus) <= other[1]
    assert repeated <= other[1]
