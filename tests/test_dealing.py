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
    # Whether the samples are its own, and not dealt to others meanwhile, and which.
    waiting: list[tuple[bool, list[int]]] = field(default_factory=list)
    kept: list[tuple[bool, list[int]]] = field(default_factory=list)
    # Whether the samples of each step were its own, and which.
    used: list[tuple[bool, list[int]]] = field(default_factory=list)
    last_beat: Count = field(default_factory=lambda: Count(0, 0))
    repeated: int = 0

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
            if self.fetched < self.dealing.begins(self.number) and self.kept:
                self.waiting.append(self.kept.pop(0))
            else:
                self.waiting.append((True, self.dealing.samples(self.fetched, self.number)))
            assert self.waiting[-1][1]
            self.fetched += 1

    def fetch_again(self) -> None:
        """Begin another pass of the loader in the middle of one."""
        self.kept = self.waiting[: max(0, self.dealing.begins(self.number) - self.done)]
        self.waiting.clear()
        self.begun = self.fetched = self.done
        self.dealing.open_pass(self.done)

    def step(self) -> None:
        self.fetch()
        self.used.append(self.waiting.pop(0))
        self.done += 1

    def unheard(self) -> int:
        """The samples of its own that it has used in steps of which nobody has heard."""
        late = self.used[len(self.used) - (self.done - self.last_beat.done) :]
        return sum(len(samples) for own, samples in late if own)

    def beat(self) -> None:
        self.last_beat = Count(len(self.dealing.changes), self.done)

    def tell(self, heard: dict[int, Count]) -> Told:
        told = Told(
            rules=self.dealing.rules,
            first=self.dealing.first,
            changes=[each.pack() for each in self.dealing.changes],
            done=self.done,
            fetched=self.fetched,
            waiting=sum(len(samples) for _, samples in self.waiting),
            repeated=self.repeated,
            heard=heard,
        )
        return Told.unpack(told.pack())

    def follow(self, agreement: Agreement) -> None:
        self.dealing, self.repeated = agreement.dealing, agreement.repeated
        if self.number in agreement.came:
            self.waiting = [(False, samples) for _, samples in self.waiting]
            self.done, self.fetched = agreement.arrival, agreement.starts[self.number]
            self.begun = self.done


class World:
    """Ranks in steps together, some of which are lost and come back at any time.

    No rank is more than `lead` steps ahead of the others.
    """

    def __init__(self, rules: Rules, size: int, chance: random.Random, lead: int = 1) -> None:
        self.rules, self.size, self.chance, self.lead = rules, size, chance, lead
        self.ranks = {rank: self.make(rank, range(size)) for rank in range(size)}
        self.beats: dict[int, Count] = {}
        self.gone: list[Rank] = []
        # Stopped or cut off for so long that the others have dropped them.
        self.stopped: dict[int, Rank] = {}
        self.allowed = self.reported = 0
        self.beat_chance = chance.choice([0.1, 0.7])

    def make(self, rank: int, members: range | tuple[int, ...]) -> Rank:
        return Rank(rank, Dealing(self.rules, tuple(members)), self.chance.randrange(4))

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
        absent = [r for r in range(self.size) if r not in self.ranks]
        kinds = ["lose"] * (len(self.ranks) > 1) + ["join"] * bool(absent) + ["return"]
        kinds += ["go on"] * 2 * bool(self.stopped)
        kind = self.chance.choice(kinds)
        beats = {rank: each.last_beat for rank, each in self.ranks.items()}
        newcomers: list[int] = []
        before, fetched = self.allowed, 0
        if kind == "lose":
            lost = self.chance.sample(
                [*self.ranks], self.chance.randrange(1, min(3, len(self.ranks)))
            )
            for rank in lost:
                gone = self.ranks.pop(rank)
                self.allowed += gone.unheard()
                if self.chance.random() < 0.5:
                    self.gone.append(gone)
                else:
                    self.stopped[rank] = gone
        elif kind == "go on":
            newcomers = [self.chance.choice([*self.stopped])]
            for rank in newcomers:
                self.ranks[rank] = self.stopped.pop(rank)
                fetched += sum(len(samples) for _, samples in self.ranks[rank].waiting)
        elif kind == "join":
            newcomers = [self.chance.choice(absent)]
            for rank in newcomers:
                if rank in self.stopped:
                    # Another process takes its place for good.
                    self.gone.append(self.stopped.pop(rank))
                self.ranks[rank] = self.make(rank, tuple(self.ranks))
        elif len(self.ranks) > 1:
            newcomers = [self.chance.choice([*self.ranks])]
        told: dict[int, Told | None] = {
            rank: None if kind == "join" and rank in newcomers else each.tell(beats)
            for rank, each in sorted(self.ranks.items())
        }
        for member in self.ranks.values():
            if member.number in newcomers and kind == "return":
                self.allowed += member.unheard()
                fetched += sum(len(samples) for own, samples in member.waiting if own)
        if kind != "return" and self.chance.random() < 0.3:
            # The connections fail, and those who have followed speak again.
            first = agree(told, newcomers, self.lead)
            assert first is not None
            for rank in self.chance.sample([*self.ranks], self.chance.randrange(len(self.ranks))):
                self.ranks[rank].follow(first)
                told[rank] = self.ranks[rank].tell(beats)
        epochs: set[int] = set()
        for member in self.ranks.values():
            agreement = agree(told, newcomers, self.lead)
            assert agreement is not None
            member.follow(agreement)
            member.beat()
            epochs.add(member.dealing.epoch(agreement.arrival, member.number))
            bound = agreement.repeated
        assert len(epochs) == 1
        # This change by itself: the bounds of others do not make up for it.
        assert bound - self.reported >= self.allowed - before + fetched
        self.reported = bound

    def ahead(self) -> int:
        """The samples of the epoch after the last that were used before it, in place of none."""
        (end,) = {each.done for each in self.ranks.values()}
        after = next(iter(self.ranks.values())).dealing
        after.open_pass(end)
        left = range(end, after.end(end, after.members[0]))
        return self.rules.length - sum(after.at_most(left, rank) for rank in after.members)

    def all(self) -> Iterator[Rank]:
        yield from self.gone
        yield from self.stopped.values()
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


def test_the_same_ranks_that_meet_again_go_on_where_they_are() -> None:
    dealing = Dealing(Rules(40, 4, None, 0, True, False), (0, 1))
    ranks = [Rank(number, dealing, ahead=2) for number in range(2)]
    for _ in range(12):
        for rank in ranks:
            rank.step()
    told = {rank.number: rank.tell({}) for rank in ranks}
    for rank in ranks:
        agreement = agree(told, [])
        assert agreement is not None
        rank.follow(agreement)
        assert rank.dealing.epoch(rank.done, rank.number) == 2
        while not rank.ended:
            rank.step()
    used = Counter(sample for rank in ranks for _, samples in rank.used for sample in samples)
    assert used == Counter(dict.fromkeys(range(40), EPOCHS))


def test_a_rank_that_comes_back_begins_its_loader_again_with_what_it_had_fetched() -> None:
    rules = Rules(200, 4, None, 0, True, False)
    ranks = {number: Rank(number, Dealing(rules, (0, 1, 2)), ahead=6) for number in range(3)}

    def steps(count: int, *numbers: int) -> None:
        for _ in range(count):
            for number in numbers:
                ranks[number].step()
                ranks[number].beat()

    def meet(*numbers: int, newcomers: tuple[int, ...] = ()) -> int:
        told: dict[int, Told | None] = {number: ranks[number].tell(beats) for number in numbers}
        again = set()
        for number in numbers:
            agreement = agree(told, newcomers)
            assert agreement is not None
            ranks[number].follow(agreement)
            again.add(agreement.again)
        return again.pop()

    steps(5, 0, 1, 2)
    beats = {number: rank.last_beat for number, rank in ranks.items()}
    # The step in which the others wait for the lost one.
    assert meet(0, 2) == 4
    steps(4, 0, 2)
    assert meet(0, 1, 2, newcomers=(1,)) == 24
    steps(2, 0, 1, 2)
    fetched = [*ranks[1].waiting]
    ranks[1].fetch_again()
    while not all(rank.ended for rank in ranks.values()):
        steps(1, *(number for number, rank in ranks.items() if not rank.ended))
    foreign = [samples for own, samples in ranks[1].used if not own]
    assert len(foreign) == 6
    assert foreign[2:] == [samples for own, samples in fetched if not own]


@pytest.mark.parametrize("lead", [1, 3])
@pytest.mark.parametrize("seed", range(50))
def test_over_drawn_faults_each_sample_is_used_once_in_an_epoch(seed: int, lead: int) -> None:
    chance = random.Random(seed)
    size = chance.randrange(2, 6)
    drawn = rules(chance, size)
    world = World(drawn, size, chance, lead)
    world.run(faults=chance.randrange(7))
    steps = [step for rank in world.all() for step in rank.used]
    uses = Counter(sample for _, samples in steps for sample in samples)
    surplus = [uses[sample] - EPOCHS for sample in range(drawn.length)]
    assert min(surplus) >= 0, "a sample was left out"
    repeated = world.allowed + sum(len(samples) for own, samples in steps if not own)
    assert sum(surplus) == repeated + world.ahead()
    assert all(repeated <= rank.repeated for rank in world.ranks.values())
