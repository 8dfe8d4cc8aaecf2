"""Samples of ranks that are lost, killed, and come back, or resumed in another number."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from problem import TINY_CAP_MB, backward, make_params, sgd
from ranks import run_threads
from restartable_processes import RestartableProcesses, wrap_elastic
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from decent_optim_wrapper import DecentOptimWrapper, Schedule
from decent_optim_wrapper.checkpoint import Checkpoints
from decent_optim_wrapper.data import ElasticSampler
from decent_optim_wrapper.data.agreement import Told
from decent_optim_wrapper.data.dealing import Change, Dealing, Rules

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
        assert all(str(other) == str(state) for _, other, _ in others)
    while epoch < 2:
        results = run_threads(2, main)
        used.update(sample for batches, *_ in results for batch in batches for sample in batch)
        _, state, epoch = results[0]
    assert used == Counter(dict.fromkeys(range(SAMPLES), 2))


@pytest.mark.parametrize(
    ("gossip_every", "worlds"),
    [
        (1, [[10, 10, 10, 10], [2, 2, 2], [9] * 6]),
        ("auto", [[10, 12, 11, 9], [1, 2, 1], [9] * 6]),
        # The fast ranks are in the next epoch.
        ("auto", [[5, 12, 15, 9], [4, 9, 14, 3, 5], [2, 1]]),
    ],
)
def test_a_checkpoint_of_other_ranks_leaves_no_sample_out(
    tmp_path: Path, gossip_every: Any, worlds: list[list[int]]
) -> None:
    used: Counter[int] = Counter()
    epochs = 3

    def main(rank: int, group: dist.ProcessGroup, steps: list[int]) -> tuple[list[int], int]:
        schedule = Schedule(gossip_every=gossip_every)
        params, optimizer = wrap(group, topology="complete", schedule=schedule)
        sampler = ElasticSampler(SAMPLES, optimizer, 4)
        checkpoints = Checkpoints(tmp_path, optimizer)
        found = checkpoints.load()
        if found is not None:
            sampler.load_state_dict(found.state["sampler"])
        samples: list[int] = []
        count = 0
        # The last ranks train to the end.
        while count < steps[rank] if steps else sampler.epoch < epochs:
            samples += next(iter(sampler))
            backward(params, rank, count)
            optimizer.step()
            count += 1
        optimizer.synchronize()
        checkpoints.save(found.step + 1 if found else 1, {"sampler": sampler.state_dict()})
        return samples, sampler.repeated

    for steps in (*worlds, worlds[1], []):
        for samples, repeated in run_threads(len(steps) or 3, partial(main, steps=steps)):
            used.update(samples)
            assert repeated == 0
    assert used == Counter(dict.fromkeys(range(SAMPLES), epochs))


def test_a_state_without_the_steps_of_all_ranks_is_refused_by_others() -> None:
    def wrapped(group: dist.ProcessGroup) -> tuple[list[Tensor], ElasticSampler, Any]:
        schedule = Schedule(gossip_every="auto")
        params, optimizer = wrap(group, topology="complete", schedule=schedule)
        return params, ElasticSampler(SAMPLES, optimizer, 4), optimizer

    def save(rank: int, group: dist.ProcessGroup) -> State:
        params, sampler, optimizer = wrapped(group)
        for _ in range(3 + rank):
            backward(params, rank, 0)
            optimizer.step()
        optimizer.synchronize()
        return sampler.state_dict()

    def load(rank: int, group: dist.ProcessGroup) -> tuple[int, bool]:
        _, sampler, _ = wrapped(group)
        try:
            sampler.load_state_dict(states[rank])
        except ValueError as error:
            return len(sampler), "Checkpoints, which reads those of all ranks" in str(error)
        return len(sampler), False

    states = run_threads(4, save)
    # The same ranks go on, each with its own number of steps.
    assert run_threads(4, load) == [(10, False), (9, False), (8, False), (7, False)]
    assert run_threads(3, load) == [(17, True)] * 3


def test_what_a_rank_comes_back_with_is_in_its_next_pass_and_in_its_state() -> None:
    params, optimizer = wrap(None)
    sampler = ElasticSampler(SAMPLES, optimizer, 4)
    batches = iter(sampler)
    fetched = [next(batches) for _ in range(6)]
    for _ in range(2):
        backward(params, 0, optimizer.round)
        optimizer.step()
    own = Told.unpack(sampler.tell({}))
    # The others have gone on without it.
    loss = Change(starts={1: 2}, done={0: 1})
    other = own._replace(changes=[loss.pack()], done=9, fetched=9, waiting=0, repeated=8)
    with pytest.warns(UserWarning, match="at most 16 samples are used twice"):
        sampler.follow({0: own.pack(), 1: other.pack()}, [0])
    assert sampler.repeated == 8 + 4 * 4
    assert sampler.state_dict()["kept"] == fetched[2:]
    # Four batches that it has, and then those that were dealt to two ranks from step 13 on.
    again = [*sampler]
    assert again[:4] == fetched[2:]
    assert not {sample for batch in again[4:] for sample in batch} & {*fetched[0]}
    assert len(again) == len(sampler)


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


class Line(NamedTuple):
    """A step, as written down before it is made.

    Args:
        version: number of changes of the dealing.
        step: number of steps made before.
        samples: the batch.
    """

    version: int
    step: int
    samples: list[int]

    def __str__(self) -> str:
        return " ".join(map(str, [self.version, self.step, *self.samples]))

    @classmethod
    def read(cls, text: str) -> Line:
        version, step, *samples = map(int, text.split())
        return cls(version, step, samples)


class End(NamedTuple):
    """What a rank knows at the end."""

    epoch: int
    step: int
    repeated: int
    state: State


def train_on(
    rank: int,
    world_size: int,
    store: Any,
    report: Callable[[str, Any], None],
    folder: Path,
    fetches: int = 1,
) -> End:
    """Write down each step before it is made, in a file for each process."""
    params = make_params()
    optimizer = wrap_elastic(params, rank, world_size, store, [], topology="complete")
    sampler = ElasticSampler(SAMPLES, optimizer, 4)

    def now() -> tuple[State, int]:
        state = sampler.state_dict()
        return state, int(state.pop("steps")[1, 0])

    report("joined", optimizer.round)
    with (folder / f"{rank}-{os.getpid()}").open("a", buffering=1) as file:
        while not store.check(["finish"]) or sampler.epoch < int(store.get("finish")):
            for batch in ahead(iter(sampler), fetches + rank):
                state, step = now()
                file.write(f"{Line(len(state['changes']), step, batch)}\n")
                backward(params, rank, optimizer.round)
                optimizer.step()
                report(f"round {sampler.epoch}", optimizer.members)
                time.sleep(0.01)
    state, step = now()
    return End(sampler.epoch, step, sampler.repeated, state)


def is_dealt_twice(line: Line, rank: int, first: list[int], changes: list[Change]) -> bool:
    """Whether the samples that a rank has used were dealt to others, too."""
    begins, members = 0, {*first}
    for change in changes[: line.version]:
        if rank in change.starts and (rank in change.done or rank not in members):
            begins = change.starts[rank]
        members = {*change.starts}
    if line.step < begins:
        # It came back in the same process, with what it had fetched.
        return True
    losses = (change.done[rank] for change in changes[line.version :] if rank in change.done)
    return line.step >= next(losses, line.step + 1)


def check_samples(folder: Path, ends: list[End]) -> int:
    """Whether each sample was used as often as the ranks have agreed on, and no more is reported.

    Returns:
        The number of samples that were used twice.
    """
    assert len({(end.epoch, end.step) for end in ends}) == 1
    epochs, end, _, state = ends[0]
    changes = [*map(Change.unpack, state["changes"])]
    used: Counter[int] = Counter()
    twice: Counter[int] = Counter()
    for path in folder.iterdir():
        rank = int(path.name.split("-")[0])
        for line in map(Line.read, path.read_text().splitlines()):
            used.update(line.samples)
            if is_dealt_twice(line, rank, state["first"], changes):
                twice.update(line.samples)
    dealing = Dealing(Rules(*state["rules"]), state["first"], changes)
    dealing.open_pass(end)
    left = {
        sample
        for rank in dealing.members
        for step in range(end, dealing.end(end, rank))
        for sample in dealing.samples(step, rank)
    }
    # Near the end of an epoch, ranks may have used samples of the next one.
    early = Counter({*range(SAMPLES)} - left)
    assert used == Counter(dict.fromkeys(range(SAMPLES), epochs)) + twice + early
    (repeated,) = {each.repeated for each in ends}
    assert twice.total() <= repeated
    return twice.total()


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
        ends = ranks.results(1, 2)
    assert ends[0].epoch > 4
    assert len([*tmp_path.iterdir()]) == 4
    check_samples(tmp_path, ends)


@pytest.mark.slow
def test_a_rank_that_goes_on_uses_what_it_has_fetched_and_no_more_twice(tmp_path: Path) -> None:
    with RestartableProcesses(3, train_on, tmp_path, fetches=8) as ranks:
        ranks.all_reach("joined")
        ranks.wait_for(1, "round 1")
        ranks.signal(1, signal.SIGSTOP)
        ranks.wait_for_members(0, (0, 2))
        ranks.signal(1, signal.SIGCONT)
        ranks.wait_for_members(0, (0, 1, 2))
        ranks.finish(3)
        ends = ranks.results()
    # A loader may have fetched fewer, at the end of an epoch.
    assert check_samples(tmp_path, ends) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_over_drawn_kills_and_stops_each_sample_is_used_as_agreed(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    everyone = (0, 1, 2, 3)
    with RestartableProcesses(4, train_on, tmp_path, fetches=chance.randrange(1, 8)) as ranks:
        ranks.all_reach("joined")
        ranks.wait_for(0, "round 1")
        for _ in range(2):
            lost = chance.choice(everyone)
            others = tuple(rank for rank in everyone if rank != lost)
            kills = chance.random() < 0.5
            time.sleep(0.3 * chance.random())
            if kills:
                ranks.kill(lost)
            else:
                ranks.signal(lost, signal.SIGSTOP)
            ranks.wait_for_members(others[0], others)
            time.sleep(0.3 * chance.random())
            if kills:
                ranks.start(lost)
            else:
                ranks.signal(lost, signal.SIGCONT)
            ranks.wait_for_members(lost, everyone)
        ranks.finish(2)
        check_samples(tmp_path, ranks.results())
