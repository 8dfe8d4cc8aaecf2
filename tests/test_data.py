"""Samples of ranks that are lost, killed, and come back, or resumed in another number."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from problem import make_params, take_steps
from problem import wrap as wrap_params
from ranks import run_threads
from restartable_processes import STALE_AFTER, STEP, RestartableProcesses, wrap_elastic
from torch.utils.data import DataLoader, TensorDataset

from decent_optim_wrapper import AsItArrives, DecentOptimWrapper, Schedule
from decent_optim_wrapper.checkpoint import Checkpoints
from decent_optim_wrapper.data import ElasticSampler
from decent_optim_wrapper.elastic.data.dealing import Dealing
from decent_optim_wrapper.gossip.schedule import Pacing

SAMPLES = 203
State = dict[str, Any]
Batch = list[int]
Wrapped = tuple[DecentOptimWrapper, Callable[[], None]]


def wrap(group: dist.ProcessGroup | None = None, rank: int = 0, **options: Any) -> Wrapped:
    """A wrapper, and a function that makes a step."""
    params = make_params()
    optimizer = wrap_params(params, group, **options)
    assert len(optimizer.buckets) >= 2
    return optimizer, lambda: take_steps(optimizer, params, rank, [optimizer.round])


def now(sampler: ElasticSampler) -> State:
    """The state, with the number of steps, which is the same on all ranks."""
    state = sampler.state_dict()
    return {**state, "steps": int(state["steps"][1, 0])}


def dealt(state: State, epochs: int) -> Counter[int]:
    """How often samples have been dealt by the end of an epoch, some of them for the next one."""
    dealing = Dealing(*state["dealing"])
    end = state["steps"]
    begins = dict(chain.from_iterable(change.came for change in dealing.changes))
    left = Counter(
        sample
        for rank in dealing.members
        for step in range(max(end, begins.get(rank, 0)), dealing.pass_end(end))
        for sample in dealing.samples(step, rank)
    )
    return Counter(dict.fromkeys(range(dealing.sampling.length), epochs + 1)) - left


@pytest.mark.slow
@pytest.mark.parametrize("package", ["torch.utils.data", "torchdata.stateful_dataloader"])
def test_what_workers_fetch_ahead_is_not_used(package: str) -> None:
    module = pytest.importorskip(package)
    make_loader = getattr(module, "StatefulDataLoader", DataLoader)
    data = TensorDataset(torch.arange(SAMPLES))
    used: Counter[int] = Counter()
    state: State | None = None
    for steps in (7, None):
        optimizer, step = wrap(overlap=AsItArrives())
        sampler = ElasticSampler(data, optimizer, 8, seed=3)
        if state is not None:
            sampler.load_state_dict(state)
        loader = make_loader(data, batch_sampler=sampler, num_workers=2, prefetch_factor=3)
        assert len(loader) == 26 - (0 if state is None else 7)
        for (batch,) in islice(loader, steps):
            used.update(batch.tolist())
            step()
        state = sampler.state_dict()
    assert used == Counter(range(SAMPLES))
    assert sampler.epoch == 1
    assert [*used] != sorted(used)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "overlap", "worlds"),
    [
        ({"batch_size": 4}, True, [[10] * 4, [2] * 3, [9] * 6]),
        ({"total_batch": 13}, True, [[9] * 4, [9] * 3, [5]]),
        # The fast ranks are in the next epoch.
        ({"batch_size": 4}, AsItArrives(), [[5, 12, 15, 9], [4, 9, 14, 3, 5], [2, 1]]),
    ],
)
def test_a_checkpoint_of_other_ranks_leaves_no_sample_out(
    tmp_path: Path, sizes: State, overlap: Any, worlds: list[list[int]]
) -> None:
    used: Counter[int] = Counter()
    epochs = 3

    def main(rank: int, group: dist.ProcessGroup, steps: list[int]) -> tuple[list[Batch], str, int]:
        optimizer, step = wrap(group, rank, topology="complete", overlap=overlap)
        sampler = ElasticSampler(SAMPLES, optimizer, **sizes)
        checkpoints = Checkpoints(tmp_path, optimizer)
        found = checkpoints.load()
        if found is not None:
            sampler.load_state_dict(found.state["sampler"])
        batches: list[Batch] = []
        # The last ranks train to the end.
        while len(batches) < steps[rank] if steps else sampler.epoch < epochs:
            # A new iterator begins with the next step.
            batches.append(next(iter(sampler)))
            step()
        optimizer.synchronize()
        state = sampler.state_dict()
        checkpoints.save(found.step + 1 if found else 1, {"sampler": state})
        return batches, str(state), sampler.repeated

    for steps in (*worlds, worlds[1], []):
        results = run_threads(len(steps) or 3, partial(main, steps=steps))
        by_rank, states, repeated = zip(*results, strict=True)
        used.update(sample for batches in by_rank for batch in batches for sample in batch)
        assert not any(repeated)
        if overlap is True:
            assert len({*states}) == 1
            counts = [[len(batch) for batch in step] for step in zip(*by_rank, strict=True)]
            assert max(max(step) - min(step) for step in counts) <= 1
            assert steps is not worlds[0] or {*map(sum, counts)} == {sizes.get("total_batch", 16)}
    assert used == Counter(dict.fromkeys(range(SAMPLES), epochs))


def test_a_state_without_the_steps_of_all_ranks_is_refused_by_others() -> None:
    options: Any = {"topology": "complete", "overlap": AsItArrives()}

    def save(rank: int, group: dist.ProcessGroup) -> tuple[State, int]:
        optimizer, step = wrap(group, rank, **options)
        sampler = ElasticSampler(SAMPLES, optimizer, 4)
        for _ in range(3 + rank):
            step()
        optimizer.synchronize()
        state, again = sampler.state_dict(), ElasticSampler(SAMPLES, optimizer, 4)
        again.load_state_dict(state)
        return state, len(again)

    def refuse(rank: int, group: dist.ProcessGroup) -> int:
        sampler = ElasticSampler(SAMPLES, wrap(group, **options)[0], 4)
        with pytest.raises(ValueError, match="which reads the states of all ranks"):
            sampler.load_state_dict(states[rank])
        return len(sampler)

    states, left = zip(*run_threads(4, save), strict=True)
    # The same ranks go on, each with its own number of steps.
    assert left == (10, 9, 8, 7)
    assert run_threads(3, refuse) == [17] * 3


def test_other_samples_or_sizes_are_refused() -> None:
    optimizer, _ = wrap()
    make = partial(ElasticSampler, optimizer=optimizer)
    state = make(SAMPLES, batch_size=4).state_dict()
    with pytest.raises(ValueError, match="pass the same data, seed and sizes"):
        make(SAMPLES, batch_size=4, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="either batch_size or total_batch"):
        make(SAMPLES)
    with pytest.raises(ValueError, match="a sample for each of 1 ranks"):
        make(3, batch_size=4, drop_last=True)


def ahead(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    """As a loader whose workers fetch so many batches ahead."""
    waiting = [*islice(batches, count)]
    while waiting:
        yield waiting.pop(0)
        waiting += islice(batches, 1)


EPOCHS = 3


class Rank:
    """A rank whose loader fetches ahead, and which sends heartbeats now and then."""

    def __init__(self, number: int, members: Iterable[int], world: World) -> None:
        self.number, self.ahead = number, world.chance.randrange(4)
        self.count_step: list[Callable[[], None]] = []
        optimizer: Any = SimpleNamespace(
            rank=number,
            members=tuple(sorted(members)),
            world_size=world.size,
            pacing=Pacing(),
            schedule=Schedule(gossip_every=world.lead),
            recovery=self,
            after_step=self.count_step.append,
        )
        self.sampler = ElasticSampler(optimizer=optimizer, **world.arguments)
        self.last_beat, self.done = self.said, 0
        self.batches: Iterator[Batch] = iter(())
        self.waiting: list[Batch] = []
        self.used: list[Batch] = []
        # Those used of which nobody has heard, and those that were dealt to others meanwhile.
        self.unheard: list[Batch] = []
        self.foreign: list[Batch] = []

    def attach(self, follower: object) -> None:
        """As of `Recovery`."""

    def say(self, text: str) -> None:
        self.said = text

    def beat(self) -> None:
        self.last_beat = self.said
        self.unheard.clear()

    @property
    def ended(self) -> bool:
        return not self.waiting and self.sampler.epoch >= EPOCHS

    def fetch_again(self) -> None:
        """Begin another pass of the loader in the middle of one."""
        self.batches = iter(self.sampler)
        self.waiting = [*islice(self.batches, 1)]

    def step(self) -> None:
        while len(self.waiting) <= self.ahead:
            batch = next(self.batches, None)
            if batch is not None:
                assert batch
                self.waiting.append(batch)
            elif self.waiting:
                break
            else:
                self.fetch_again()
        self.used.append(self.waiting.pop(0))
        self.unheard.append(self.used[-1])
        self.done += 1
        for count in self.count_step:
            count()

    def own(self, batches: list[Batch]) -> list[int]:
        """The samples that were not dealt to others."""
        foreign = {id(batch) for batch in self.foreign}
        return [sample for batch in batches if id(batch) not in foreign for sample in batch]

    def follow(self, summaries: dict[int, Any], newcomers: list[int]) -> None:
        if self.number in newcomers:
            self.foreign += self.waiting
        self.sampler.follow(summaries, newcomers)
        # Another pass of the loader returns these.
        self.foreign += now(self.sampler)["kept"]
        self.done = now(self.sampler)["steps"]


class World:
    """Ranks in steps together, some of which are lost and come back at any time.

    No rank is more than `lead` steps ahead of the others.
    """

    def __init__(self, chance: random.Random, lead: int) -> None:
        self.chance, self.lead, self.size = chance, lead, chance.randrange(2, 6)
        batch = chance.choice([1, 2, 3, 8])
        total = chance.choice([None, self.size * batch + 1])
        self.arguments: dict[str, Any] = {
            "data": chance.randrange(40, 200),
            "batch_size": None if total else batch,
            "total_batch": total,
            "seed": chance.randrange(10),
            "shuffle": chance.random() < 0.8,
        }
        self.ranks = {rank: Rank(rank, range(self.size), self) for rank in range(self.size)}
        # Also those that are gone for good.
        self.lives = [*self.ranks.values()]
        # Stopped or cut off for so long that the others have dropped them.
        self.stopped: dict[int, Rank] = {}
        # The samples that are used twice, and how many the ranks report.
        self.twice: Counter[int] = Counter()
        self.reported = 0
        self.beat_chance = chance.choice([0.1, 0.7])

    def run(self, faults: int) -> None:
        when = sorted(self.chance.sample(range(2, 60), faults))
        turn = 0
        while not all(each.ended for each in self.ranks.values()):
            turn += 1
            assert turn < 5000
            least = min(each.done for each in self.ranks.values())
            ready = [each for each in self.ranks.values() if each.done < least + self.lead]
            rank = self.chance.choice(ready)
            if not rank.ended:
                rank.step()
            if self.chance.random() < self.beat_chance:
                rank.beat()
            if self.chance.random() < 0.02 and rank.waiting:
                rank.fetch_again()
            if when and least >= when[0] and not any(e.ended for e in self.ranks.values()):
                when.pop(0)
                self.fault()

    def fault(self) -> None:
        absent = [rank for rank in range(self.size) if rank not in self.ranks]
        kinds = ["lose", "return"] * (len(self.ranks) > 1) + ["join"] * bool(absent)
        kinds += ["go on"] * 2 * bool(self.stopped) + ["meet"]
        kind = self.chance.choice(kinds)
        beats = {rank: each.last_beat for rank, each in self.ranks.items()}
        newcomers, before, fetched = [], self.twice.total(), 0
        if kind == "lose":
            count = self.chance.randrange(1, min(3, len(self.ranks)))
            for number in self.chance.sample([*self.ranks], count):
                lost = self.ranks.pop(number)
                self.twice.update(lost.own(lost.unheard))
                if self.chance.random() >= 0.5:
                    self.stopped[number] = lost
        elif kind == "return":
            rank = self.ranks[self.chance.choice([*self.ranks])]
            newcomers = [rank.number]
            self.twice.update(rank.own(rank.unheard))
            fetched = len(rank.own(rank.waiting))
        elif kind == "go on":
            newcomers = [self.chance.choice([*self.stopped])]
            rank = self.ranks[newcomers[0]] = self.stopped.pop(newcomers[0])
            fetched = sum(map(len, rank.waiting))
        elif kind == "join":
            newcomers = [self.chance.choice(absent)]
            # It takes for good the place of one that was stopped.
            self.stopped.pop(newcomers[0], None)
            self.ranks[newcomers[0]] = Rank(newcomers[0], [*self.ranks, *newcomers], self)
            self.lives.append(self.ranks[newcomers[0]])
        summaries: dict[int, Any] = {
            number: None if kind == "join" and number in newcomers else rank.sampler.summary(beats)
            for number, rank in sorted(self.ranks.items())
        }
        if kind != "return" and self.chance.random() < 0.3:
            # The connections fail, and those who have followed speak again.
            first = dict(summaries)
            some = self.chance.sample([*self.ranks], self.chance.randrange(len(self.ranks)))
            for number in some:
                self.ranks[number].follow(first, newcomers)
                summaries[number] = self.ranks[number].sampler.summary(beats)
        for rank in self.ranks.values():
            rank.follow(summaries, newcomers)
            rank.beat()
        samplers = [rank.sampler for rank in self.ranks.values()]
        assert len({str(sampler.state_dict()["dealing"]) for sampler in samplers}) == 1
        (bound,) = {sampler.repeated for sampler in samplers}
        # This change by itself: the bounds of others do not make up for it.
        assert bound - self.reported >= self.twice.total() - before + fetched
        self.reported = bound


@pytest.mark.filterwarnings("ignore:.*samples are used twice")
@pytest.mark.parametrize("lead", [1, 3])
@pytest.mark.parametrize("seed", range(30))
def test_over_drawn_faults_each_sample_is_used_as_often_as_dealt(seed: int, lead: int) -> None:
    chance = random.Random(seed)
    world = World(chance, lead)
    world.run(faults=chance.randrange(7))
    used, own = Counter[int](), Counter[int]()
    for rank in world.lives:
        used.update(sample for batch in rank.used for sample in batch)
        own.update(rank.own(rank.used))
    twice = world.twice + (used - own)
    for rank in world.ranks.values():
        assert used == dealt(now(rank.sampler), EPOCHS) + twice
        assert rank.sampler.repeated >= twice.total()


def train_on(
    rank: int,
    world_size: int,
    store: Any,
    report: Callable[[str, Any], None],
    folder: Path,
    fetches: int,
) -> tuple[int, int, State]:
    """Write down each batch before its step, in a file for each process."""
    params = make_params()
    optimizer = wrap_elastic(params, rank, world_size, store, [], topology="complete")
    sampler = ElasticSampler(SAMPLES, optimizer, 4)
    report("joined", optimizer.round)
    with (folder / f"{rank}-{os.getpid()}").open("a", buffering=1) as file:
        while not store.check(["finish"]) or sampler.epoch < int(store.get("finish")):
            for batch in ahead(iter(sampler), fetches + rank):
                file.write(json.dumps(batch) + "\n")
                take_steps(optimizer, params, rank, [optimizer.round])
                report(f"round {sampler.epoch}", optimizer.members)
                time.sleep(STEP)
    return sampler.epoch, sampler.repeated, now(sampler)


@pytest.mark.slow
def test_a_rank_that_goes_on_uses_what_it_has_fetched_and_no_more_twice(tmp_path: Path) -> None:
    """Another one is then killed and comes back as a new process, and a third is lost for good."""
    with RestartableProcesses(3, train_on, tmp_path, fetches=8) as ranks:
        ranks.all_reach("joined")
        ranks.wait_for(1, "round 1")
        ranks.signal(1, signal.SIGSTOP)
        ranks.wait_for_members(0, (0, 2))
        ranks.signal(1, signal.SIGCONT)
        ranks.wait_for_members(0, (0, 1, 2))
        ranks.kill(0)
        ranks.wait_for_members(2, (1, 2))
        ranks.start(0)
        ranks.wait_for_members(0, (0, 1, 2))
        ranks.kill(2)
        ranks.wait_for_members(0, (0, 1))
        ranks.finish(3)
        ends = ranks.results(0, 1)
    ((epochs, repeated, _),) = {(*end[:2], end[2]["steps"]) for end in ends}
    lines = (line for path in tmp_path.iterdir() for line in path.read_text().splitlines())
    used, expected = Counter(chain.from_iterable(map(json.loads, lines))), dealt(ends[0][2], epochs)
    assert not expected - used, "samples that nobody has used"
    assert 0 < (used - expected).total() <= repeated


def train_twice(
    rank: int, world_size: int, store: Any, report: Callable[[str, Any], None]
) -> tuple[list[int], int]:
    """Train for ten steps, and in a second run, which rank 2 leaves before it has a sampler."""
    is_again = store.add(f"lives of rank {rank}", 1) > 1
    params = make_params()
    optimizer = wrap_elastic(params, rank, world_size, store, [], topology="complete")
    if is_again and rank == 2:
        # Longer than the pause between two heartbeats.
        time.sleep(1.5 * STALE_AFTER)
        os._exit(1)
    # As numpy's generators make them.
    seed: Any = np.int64(7)
    sampler, used = ElasticSampler(90, optimizer, 2, seed=seed), list[int]()
    while sampler.epoch == 0:
        for batch in sampler:
            take_steps(optimizer, params, rank, [optimizer.round])
            used += batch
            if not is_again and optimizer.round == 10:
                # Its heartbeats tell of these steps.
                time.sleep(1.5 * STALE_AFTER)
                report("ten steps", None)
                time.sleep(90)
    return used, sampler.repeated


@pytest.mark.slow
def test_what_an_earlier_run_in_the_same_store_has_used_is_used_again() -> None:
    with RestartableProcesses(3, train_twice) as ranks:
        ranks.all_reach("ten steps")
        for rank in range(3):
            ranks.kill(rank)
        for rank in range(3):
            ranks.start(rank)
        ends = ranks.results(0, 1)
    used = Counter(chain.from_iterable(samples for samples, _ in ends))
    assert set(used) == set(range(90))
    assert used.total() - 90 <= ends[0][1]
