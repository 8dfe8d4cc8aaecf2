"""The base class of topologies: a periodic schedule of groups, checked to be partitions."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import Any, ClassVar, Self

import torch

# The groups of a formula are checked for all ranks in worlds up to this size. In larger worlds the
# digest has the groups of this many ranks.
_SMALL = 64
# If one class defines several of them, the first one counts.
_DEFINITIONS = ("own_group", "phases", "assign_groups")


@dataclass(frozen=True, init=False, slots=True)
class Group:
    """The ranks that mix together in one round.

    A member i of a group of m ranks becomes
    ``self_weight * x_i + (1 - self_weight) / (m - 1) * sum of the other members``.

    Args:
        ranks: the members; kept sorted.
        self_weight: weight of a member's own parameters, in (0, 1); None means 1/m, the mean.

    Raises:
        ValueError: no ranks, a rank twice, a negative rank, or a weight outside (0, 1).
    """

    ranks: tuple[int, ...]
    self_weight: float
    # Number of ranks in the group.
    size: int = field(repr=False, compare=False)

    def __init__(self, ranks: Iterable[int], self_weight: float | None = None) -> None:
        members = tuple(sorted(operator.index(rank) for rank in ranks))
        if not members or len(set(members)) != len(members) or members[0] < 0:
            raise ValueError(
                f"a group needs distinct ranks, at least one and none negative, got {members}"
            )
        weight = 1 / len(members) if self_weight is None else float(self_weight)
        # A group of one rank keeps its parameters, whatever its weight.
        if len(members) > 1 and not 0 < weight < 1:
            raise ValueError(f"self_weight must lie in (0, 1), got {weight} for ranks {members}")
        object.__setattr__(self, "ranks", members)
        object.__setattr__(self, "size", len(members))
        object.__setattr__(self, "self_weight", weight if len(members) > 1 else 1.0)

    @property
    def copies_sent(self) -> float:
        """Copies of the parameters that a member sends: 2 (m - 1) / m, which is 1 in a pair."""
        return 2 * (self.size - 1) / self.size


class Topology:
    """A periodic schedule of groups, which are a partition of the ranks in every phase.

    A subclass defines `phases`, the list of groups of every phase::

        class Star(Topology):
            def phases(self):
                return [[[0, leaf]] for leaf in range(1, self.world_size)]

    or `assign_groups`, which lists the same groups by rank, or `phase_count` and `own_group`, a
    formula for the group of one rank, which a rank of a large world computes without the groups of
    the others; all built-in topologies but greedy do. The constructor checks that every phase is a
    partition of the ranks: of a formula, in worlds of up to 64 ranks, and in larger ones for the
    groups of this rank. The mixing matrix of every phase is then symmetric and doubly stochastic by
    construction. Every topology accepts a world of one rank, as one idle phase.

    Args:
        world_size: number of ranks.
        local_world_size: ranks per node; must divide `world_size`.

    Raises:
        ValueError: the sizes do not fit the topology, or the groups are not a valid schedule.
        TypeError: the class defines neither `phases` nor `assign_groups` nor `phase_count` and
            `own_group`.
    """

    condition: ClassVar[str] = "any world size"

    def __init__(self, world_size: int, local_world_size: int = 1) -> None:
        self._world_size = _size("world_size", world_size)
        self._local_world_size = _size("local_world_size", local_world_size)
        if not self.accepts(self._world_size, self._local_world_size):
            raise ValueError(self._misfit())
        self._phases_per_period = self._check_schedule() if self._world_size > 1 else 1

    def phases(self) -> Sequence[Sequence[Group | Sequence[int]]]:
        """The groups of every phase of one period.

        Returns:
            A list of phases, each of which is a list of groups. A group is a list of ranks, which
            mix as their mean, or a `Group` with its own weight. A rank that is in no group of a
            phase is idle in it.
        """
        if self._definition == "assign_groups":
            return [[*dict.fromkeys(groups)] for groups in self._built_schedules]
        phases = range(self.phase_count())
        return [[*self._partition(phase, self._computed_group)] for phase in phases]

    def assign_groups(self) -> Sequence[Sequence[Group | Sequence[int]]]:
        """The groups of every rank.

        Returns:
            A list for every rank, with its group in each phase of one period. A group is a list of
            ranks, this one among them, or a `Group`.
        """
        return [self.schedule(rank) for rank in range(self._world_size)]

    def phase_count(self) -> int:
        """Number of phases of a schedule that `own_group` gives."""
        raise TypeError(
            f"{type(self).__name__} must define phases(), assign_groups(), or phase_count() and "
            f"own_group()"
        )

    def own_group(self, rank: int, phase: int) -> Group | Sequence[int]:
        """The group of one rank in one phase, without the groups of other ranks.

        Args:
            rank: from 0 to ``world_size - 1``.
            phase: from 0 to ``phase_count() - 1``.
        """
        raise TypeError(
            f"{type(self).__name__} must define own_group() beside phase_count(), or phases()"
        )

    @classmethod
    def fits(cls, world_size: int, local_world_size: int = 1) -> bool:
        """Return whether the topology is defined for these sizes, which `condition` describes."""
        return True

    @classmethod
    def accepts(cls, world_size: int, local_world_size: int = 1) -> bool:
        """Return whether the topology can be built: it fits, or there is a single rank.

        Raises:
            ValueError: a size is below 1, or `local_world_size` does not divide `world_size`.
        """
        world_size = _size("world_size", world_size)
        local_world_size = _size("local_world_size", local_world_size)
        if world_size % local_world_size:
            raise ValueError(
                f"local_world_size must divide world_size, got {local_world_size} and "
                f"{world_size}; where nodes have different numbers of ranks, leave it out"
            )
        return world_size == 1 or cls.fits(world_size, local_world_size)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    @property
    def local_world_size(self) -> int:
        """Ranks per node."""
        return self._local_world_size

    @property
    def period(self) -> int:
        """Number of phases after which the schedule repeats."""
        return self._phases_per_period

    @cached_property
    def _definition(self) -> str:
        """The method that defines the schedule: the one that the most derived class has."""
        kinds = type(self).__mro__
        return next(name for kind in kinds for name in _DEFINITIONS if name in vars(kind))

    @cached_property
    def _built_schedules(self) -> list[list[Group]]:
        """`groups[phase][rank]` as they are listed, checked to be partitions."""
        listed = enumerate(self.phases() if self._definition == "phases" else self._by_phase())
        return [_column(f"phase {phase}", each, self._world_size) for phase, each in listed]

    def _by_phase(self) -> list[Iterable[Group]]:
        """The groups of every phase, as `assign_groups` lists them by rank."""
        table, n = [[*row] for row in self.assign_groups()], self._world_size
        if len(table) != n or len({*map(len, table)}) > 1:
            raise ValueError(
                f"assign_groups() expects a list for each of the {n} ranks, with a group for every "
                f"phase, got {len(table)} lists with {sorted({*map(len, table)})} groups"
            )
        columns = enumerate(zip(*table, strict=True))
        return [
            dict.fromkeys(self._joined(each, rank, phase) for rank, each in enumerate(column))
            for phase, column in columns
        ]

    def _check_schedule(self) -> int:
        """Check the groups, of a formula in small worlds only, and return the number of phases."""
        formula, n = self._definition == "own_group", self._world_size
        count = operator.index(self.phase_count()) if formula else len(self._built_schedules)
        if count < 1:
            raise ValueError(f"expected the groups of 1 or more phases, got {count} phases")
        for phase in range(count if formula and n <= _SMALL else 0):
            groups = dict.fromkeys(self._computed_group(rank, phase) for rank in range(n))
            _column(f"phase {phase}", groups, n)
        return count

    def _computed_group(self, rank: int, phase: int) -> Group:
        """The group of a rank by the formula."""
        return self._joined(self.own_group(rank, phase), rank, phase)

    def _joined(self, entry: Group | Sequence[int], rank: int, phase: int) -> Group:
        """The group that is given for a rank, which must be in it."""
        place = f"phase {phase}, rank {rank}"
        group = _as_group(entry, place, self._world_size)
        if rank not in group.ranks:
            raise ValueError(
                f"{place}: not a member of its group {group.ranks}; list the rank itself, too"
            )
        return group

    @cached_property
    def digest(self) -> str:
        """A hash of the ranks and weights of all groups, as 16 hexadecimal digits.

        If a formula gives the groups of more than 64 ranks, it hashes the groups of 64 ranks only.
        """
        digest, n = hashlib.sha256(), self._world_size
        step = -(-n // _SMALL) if self._definition == "own_group" else 1
        for phase in range(self.period):
            groups = dict.fromkeys(self.group_of(rank, phase) for rank in range(0, n, step))
            digest.update(repr([(group.ranks, group.self_weight) for group in groups]).encode())
        return digest.hexdigest()[:16]

    def group_of(self, rank: int, round: int) -> Group:
        """The group that `rank` mixes with in `round`; the phase is ``round % period``."""
        phase = round % self.period
        if self._world_size == 1:
            return Group([0])
        if self._definition == "own_group":
            return self._computed_group(rank, phase)
        return self._built_schedules[phase][rank]

    def schedule(self, rank: int) -> tuple[Group, ...]:
        """The groups of `rank`, phase by phase."""
        groups = tuple(self.group_of(rank, phase) for phase in range(self.period))
        for phase, group in enumerate(groups):
            # The constructor does not check a formula in a large world.
            for member in {group.ranks[0], group.ranks[-1]}:
                if (other := self.group_of(member, phase)) != group:
                    raise _twice(f"phase {phase}", member, group, other)
        return groups

    def groups(self, round: int) -> tuple[Group, ...]:
        """All groups of `round`, ordered by their first rank."""
        return tuple(self._partition(round % self.period, self.group_of))

    def _partition(self, phase: int, group_of: Callable[[int, int], Group]) -> Iterator[Group]:
        placed: set[int] = set()
        for rank in range(self._world_size):
            if rank not in placed:
                group = group_of(rank, phase)
                yield group
                placed.update(group.ranks)

    def mixing_matrix(self, round: int) -> torch.Tensor:
        """The matrix W of `round` with x <- W x.

        Returns:
            float64 tensor of shape (world_size, world_size), symmetric and doubly stochastic.
        """
        matrix = torch.eye(self._world_size, dtype=torch.float64, device="cpu")
        for group in self.groups(round):
            index = torch.tensor(group.ranks, device="cpu")
            # A group of one has no other ranks, and a weight of 1.
            matrix[index.unsqueeze(1), index] = (1 - group.self_weight) / max(1, group.size - 1)
            matrix[index, index] = group.self_weight
        return matrix

    def resized(self, world_size: int, local_world_size: int) -> Self:
        """The topology of this kind, with the same parameters, for other sizes."""
        return type(self)(world_size, local_world_size, **self._parameters())

    def _parameters(self) -> dict[str, Any]:
        """The arguments in addition to the sizes, by name."""
        return {}

    def _misfit(self) -> str:
        sizes = (self._world_size, self._local_world_size)
        fitting = [name for name, kind in REGISTRY.items() if kind.accepts(*sizes)]
        return (
            f"{type(self).__name__} needs {self.condition}, got world_size={sizes[0]} and "
            f"local_world_size={sizes[1]}; topologies that fit: {', '.join(fitting)}"
        )

    def __repr__(self) -> str:
        own = "".join(f", {name}={value!r}" for name, value in self._parameters().items())
        return (
            f"{type(self).__name__}(world_size={self._world_size}, "
            f"local_world_size={self._local_world_size}{own})"
        )


# The topologies that have a name; filled by the factory.
REGISTRY: dict[str, type[Topology]] = {}


def build(name: str, world_size: int, local_world_size: int = 1) -> Topology:
    """Build the topology of that name."""
    if name not in REGISTRY:
        raise ValueError(
            f"unknown topology {name!r}{did_you_mean(name, REGISTRY)}; the known ones are "
            f"{', '.join(REGISTRY)}"
        )
    return REGISTRY[name](world_size, local_world_size)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The known word nearest to a misspelt one, as a part of an error message; often empty."""
    nearest = get_close_matches(str(word).lower(), list(known), n=1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def _column(place: str, phase: Iterable[Group | Iterable[int]], world_size: int) -> list[Group]:
    """The group of every rank in one phase."""
    if not isinstance(phase, Iterable):
        raise ValueError(f"{place}: expected a list of groups, got {phase!r}")
    group_of: dict[int, Group] = {}
    for entry in phase:
        group = _as_group(entry, place, world_size)
        for rank in group.ranks:
            if rank in group_of:
                raise _twice(place, rank, group_of[rank], group)
            group_of[rank] = group
    return [group_of.get(rank) or Group([rank]) for rank in range(world_size)]


def _twice(place: str, rank: int, group: Group, other: Group) -> ValueError:
    return ValueError(
        f"{place}: rank {rank} is in two groups, {group} and {other}; put each rank into at most "
        f"one group of a phase, which own_group() or assign_groups() gives to all its ranks"
    )


def _as_group(entry: Group | Iterable[int], place: str, world_size: int) -> Group:
    try:
        group = entry if isinstance(entry, Group) else Group(entry)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{place}: expected a Group or a list of ranks, got {entry!r}: {error}"
        ) from error
    if group.ranks[-1] >= world_size:
        raise ValueError(
            f"{place}: expected ranks below the world size {world_size}, got {group.ranks}"
        )
    return group


def _size(name: str, value: int) -> int:
    size = operator.index(value)
    if size < 1:
        raise ValueError(f"{name} must be 1 or more, got {size}")
    return size
