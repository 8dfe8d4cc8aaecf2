"""Each sample is used once in an epoch, whoever is lost and comes back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from decent_optim_wrapper.data.agreement import Agreement, Count, Told, agree
from decent_optim_wrapper.data.dealing import Dealing, Rules

EPOCHS = 3


@dataclass
class Rank:
    """A rank whose loader fetches ahead, as far as the pure dealing is concerned."""

    number: int
    dealing: Dealing
    ahead: int
    done: int = 0
    fetched: int = 0
    begun: int | None = None
    waiting: list[list[int]] = field(default_factory=list)
    # How many of these have been dealt to others meanwhile.
    foreign: int = 0
    # Whether the samples of each step were its own, and which.
    used: list[tuple[bool, list[int]]] = field(default_factory=list)
    last_beat: Count = field(default_factory=lambda: Count(0, 0))

    @property
    def ended(self) -> bool:
        return not self.waiting and self.dealing.epoch(self.done, self.number) >= EPOCHS

    def fetch(self) -> None:
        if not self.waiting and (
            self.begun is None or self.dealing.ends(self.fetched, self.number, self.begun)
        ):
            self.begun = self.fetched = self.done
            self.dealing.open_pass(self.done)
        while len(self.waiting) <= self.ahead and (
            self.fetched == self.begun
            or not self.dealing.ends(self.fetched, self.number, self.begun or 0)
        ):
            batch = self.dealing.samples(self.fetched, self.number)
            assert batch
            self.waiting.append(batch)
            self.fetched += 1

    def step(self) -> None:
        self.fetch()
        self.used.append((self.foreign == 0, self.waiting.pop(0)))
        self.foreign = max(0, self.foreign - 1)
        self.done += 1

    def unheard(self) -> int:
        """The samples of its own that it has used in steps of which nobody has heard."""
        late = self.used[len(self.used) - (self.done - self.last_beat.done) :]
        return sum(len(samples) for own, samples in late if own)

    def beat(self) -> None:
        self.last_beat = Count(len(self.dealing.changes), self.done)

    def tell(self, heard: dict[int, Count]) -> Told:
        packed = [each.pack() for each in self.dealing.changes]
        told = Told(self.dealing.rules, self.dealing.first, packed, self.done, self.fetched, heard)
        return Told.unpack(told.pack())

    def follow(self, agreement: Agreement) -> None:
        self.dealing = agreement.dealing
        if self.number in agreement.came:
            self.foreign = len(self.waiting)
            self.done, self.fetched = agreement.arrival, agreement.starts[self.number]
            self.begun = self.done


class World:
    """Ranks in steps together, some of which are lost and come back at any time."""

    def __init__(self, rules: Rules, size: int, chance: random.Random) -> None:
        self.rules, self.size, self.chance = rules, size, chance
        self.ranks = {rank: self.make(rank, range(size)) for rank in range(size)}
        self.beats: dict[int, Count] = {}
        self.gone: list[Rank] = []
        self.allowed = self.repeated = 0

    def make(self, rank: int, members: range | tuple[int, ...]) -> Rank:
        return Rank(rank, Dealing(self.rules, tuple(members)), self.chance.randrange(4))

    def run(self, faults: int) -> None:
        when = sorted(self.chance.sample(range(2, 60), faults))
        turn = 0
        while not all(each.ended for each in self.ranks.values()):
            turn += 1
            assert turn < 5000
            # No rank is more than a step ahead.
            least = min(each.done for each in self.ranks.values())
            ready = [each for each in self.ranks.values() if each.done == least]
            rank = self.chance.choice(ready)
            if not rank.ended:
                rank.step()
            if self.chance.random() < 0.7:
                rank.beat()
            if when and least >= when[0] and not any(e.ended for e in self.ranks.values()):
                when.pop(0)
                self.fault()

    def fault(self) -> None:
        absent = [r for r in range(self.size) if r not in self.ranks]
        kinds = ["lose"] * (len(self.ranks) > 1) + ["join"] * bool(absent) + ["return"]
        kind = self.chance.choice(kinds)
        beats = {rank: each.last_beat for rank, each in self.ranks.items()}
        newcomers: list[int] = []
        if kind == "lose":
            lost = self.chance.sample(
                [*self.ranks], self.chance.randrange(1, min(3, len(self.ranks)))
            )
            for rank in lost:
                gone = self.ranks.pop(rank)
                self.gone.append(gone)
                self.allowed += gone.unheard()
        elif kind == "join":
            newcomers = [self.chance.choice(absent)]
            for rank in newcomers:
                self.ranks[rank] = self.make(rank, tuple(self.ranks))
        elif len(self.ranks) > 1:
            newcomers = [self.chance.choice([*self.ranks])]
        told: dict[int, Told | None] = {
            rank: None if kind == "join" and rank in newcomers else each.tell(beats)
            for rank, each in sorted(self.ranks.items())
        }
        for member in self.ranks.values():
            agreement = agree(told, newcomers)
            assert agreement is not None
            if member.number in newcomers:
                self.allowed += member.unheard()
            member.follow(agreement)
            member.beat()
            bound = agreement.repeated
        self.repeated += bound

    def ahead(self) -> int:
        """The samples of the epoch after the last that were used before it, in place of none."""
        (end,) = {each.done for each in self.ranks.values()}
        after = next(iter(self.ranks.values())).dealing
        after.open_pass(end)
        left = range(end, after.end(end, after.members[0]))
        return self.rules.length - sum(after.at_most(left, rank) for rank in after.members)

    def all(self) -> Iterator[Rank]:
        yield from self.gone
        yield from self.ranks.values()


def rules(chance: random.Random, size: int) -> Rules:
    batch = chance.choice([1, 2, 3, 8])
    total = chance.choice([None, size * batch + 1])
    return Rules(
        length=chance.randrange(40, 200),
        batch_size=None if total else batch,
        total_batch=total,
        seed=chance.randrange(10),
        shuffle=chance.random() < 0.8,
        drop_last=False,
    )


@pytest.mark.parametrize("seed", range(50))
def test_over_drawn_faults_each_sample_is_used_once_in_an_epoch(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.randrange(2, 6)
    drawn = rules(chance, size)
    world = World(drawn, size, chance)
    world.run(faults=chance.randrange(5))
    steps = [step for rank in world.all() for step in rank.used]
    uses = Counter(sample for _, samples in steps for sample in samples)
    surplus = [uses[sample] - EPOCHS for sample in range(drawn.length)]
    assert min(surplus) >= 0, "a sample was left out"
    repeated = world.allowed + sum(len(samples) for own, samples in steps if not own)
    assert sum(surplus) == repeated + world.ahead()
    assert repeated <= world.repeated
