"""The base class of topologies: a periodic schedule of groups, checked to be partitions."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import cached_property
from typing import Any, ClassVar

import torch

from decent_optim_wrapper.topo.group import Group

# Worlds up to this size are checked and compared as a whole, also where a formula gives the groups.
_SMALL = 64
# Ranks whose groups are compared in larger worlds.
_COMPARED = 8
_DEFINITIONS = ("phases", "assign_groups", "own_group")


class Topology:
    """A periodic schedule of groups, which are a partition of the ranks in every phase.

    A subclass defines `phases`, the list of groups of every phase::

        class Star(Topology):
            def phases(self):
                return [[[0, leaf]] for leaf in range(1, self.world_size)]

    or `assign_groups`, if the groups are easier to list by rank. The constructor checks that every
    phase is a partition of the ranks. The mixing matrix of every phase is then symmetric and doubly
    stochastic by construction. Every topology accepts a world of one rank, as one idle phase.

    These list the groups of all ranks. For many thousands of ranks define `phase_count` and
    `own_group` instead, a formula for the group of one rank; all built-in topologies but greedy do.
    It is checked in worlds of up to 64 ranks, and in larger ones for the groups of this rank.

    Args:
        world_size: number of ranks.
        local_world_size: ranks per node; must divide `world_size`.

    Raises:
        ValueError: the sizes do not fit the topology, or the groups are not a valid schedule.
        TypeError: the class defines none of `phases`, `assign_groups` and `own_group`.
    """

    condition: ClassVar[str] = "any world size"

    def __init__(self, world_size: int, local_world_size: int = 1) -> None:
        self._world_size = _size("world_size", world_size)
        self._local_world_size = _size("local_world_size", local_world_size)
        if not self.accepts(self._world_size, self._local_world_size):
            raise ValueError(self._misfit())
        self._built_schedules: tuple[tuple[Group, ...], ...] | None = None
        self._phases_per_period = 1
        if self._world_size > 1:
            self._phases_per_period = self._check_schedule()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "phases" in vars(cls) and cls.assign_groups is not Topology.assign_groups:
            raise TypeError(
                f"{cls.__name__} defines phases(), but its assign_groups() would take precedence; "
                f"define one of them"
            )

    def phases(self) -> Sequence[Sequence[Group | Sequence[int]]]:
        """The groups of every phase of one period.

        Returns:
            A list of phases, each of which is a list of groups. A group is a list of ranks, which
            mix as their mean, or a `Group` with its own weight. A rank that is in no group of a
            phase is idle in it.
        """
        if type(self).own_group is Topology.own_group:
            raise TypeError(
                f"{type(self).__name__} must define phases(), assign_groups() or own_group()"
            )
        phases = range(self.phase_count())
        return [[*self._partition(phase, self._group_by_formula)] for phase in phases]

    def assign_groups(self) -> Sequence[Sequence[Group | Sequence[int]]]:
        """The same schedule, listed by rank; by default it is made from `phases`.

        Returns:
            `groups[rank][phase]`: the ranks that mix with `rank` in that phase, itself included,
            as a list of ranks or a `Group`.
        """
        return _by_rank(self.phases(), self._world_size)

    def phase_count(self) -> int:
        """Number of phases of a schedule that `own_group` gives."""
        raise TypeError(f"{type(self).__name__} must define phase_count() beside own_group()")

    def own_group(self, rank: int, phase: int) -> Group | Sequence[int]:
        """The group of one rank in one phase, without those of the others.

        Args:
            rank: from 0 to ``world_size - 1``.
            phase: from 0 to ``phase_count() - 1``.
        """
        raise TypeError(f"{type(self).__name__} has no formula for the groups of one rank")

    @classmethod
    def fits(cls, world_size: int, local_world_size: int = 1) -> bool:
        """Whether the topology is defined for these sizes; `condition` describes them in words."""
        return True

    @classmethod
    def accepts(cls, world_size: int, local_world_size: int = 1) -> bool:
        """Whether the topology can be built: it fits, or there is a single rank.

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

    @property
    def _schedules(self) -> tuple[tuple[Group, ...], ...]:
        """`groups[rank][phase]` of all ranks, checked to be partitions; built on first use."""
        if self._built_schedules is None:
            n = self._world_size
            if self._definition() == "assign_groups":
                phases: Iterable[Sequence[Group | Sequence[int]]] = _by_phase(
                    self.assign_groups(), n
                )
            else:
                phases = self.phases()
            self._built_schedules = _by_rank(phases, n)
        return self._built_schedules

    @classmethod
    def _definition(cls) -> str:
        """Which of the methods that define a schedule the most derived class has."""
        for kind in cls.__mro__[: cls.__mro__.index(Topology)]:
            for name in _DEFINITIONS:
                if name in vars(kind):
                    return name
        return ""

    @property
    def _has_formula(self) -> bool:
        return self._definition() == "own_group"

    def _check_schedule(self) -> int:
        """Check the groups as far as this takes little time; the number of phases."""
        if not self._has_formula:
            return len(self._schedules[0])
        count = operator.index(self.phase_count())
        if count < 1:
            raise ValueError(f"expected 1 or more phases, got phase_count() = {count}")
        if self._world_size <= _SMALL:
            for phase in range(count):
                self._check_partition(phase)
        return count

    def _check_partition(self, phase: int) -> None:
        """Check that the formula gives all ranks of a group the same one."""
        groups: dict[int, Group] = {}
        for rank in range(self._world_size):
            group = self._group_by_formula(rank, phase)
            for each in group.ranks:
                _check_same(phase, each, groups.setdefault(each, group), group)

    def _group_by_formula(self, rank: int, phase: int) -> Group:
        place = f"phase {phase}, rank {rank}"
        group = _as_group(self.own_group(rank, phase), place, self._world_size)
        if rank not in group.ranks:
            raise ValueError(
                f"{place}: not a member of its group {group.ranks}; list the rank itself, too"
            )
        return group

    def _agreed_group(self, rank: int, phase: int) -> Group:
        """The group of a rank by the formula, if its first and last rank have the same."""
        group = self._group_by_formula(rank, phase)
        for other in {group.ranks[0], group.ranks[-1]} - {rank}:
            _check_same(phase, other, group, self._group_by_formula(other, phase))
        return group

    def release(self) -> None:
        """Free what is kept of schedules; it is built again when it is needed."""
        self._built_schedules = None

    @cached_property
    def digest(self) -> str:
        """A hash of the ranks and weights of all groups, as 16 hexadecimal digits.

        Where a formula gives the groups of more than 64 ranks, it is one of `repr` and the groups
        of a few ranks.
        """
        digest = hashlib.sha256()
        for phase in range(self.period):
            groups = [(group.ranks, group.self_weight) for group in self._compared(phase)]
            digest.update(repr(groups).encode())
        if self._is_large:
            digest.update(repr(self).encode())
        return digest.hexdigest()[:16]

    @property
    def _is_large(self) -> bool:
        return self._has_formula and self._world_size > _SMALL

    def _compared(self, phase: int) -> Iterable[Group]:
        """The groups of a phase in which the ranks are compared."""
        if not self._is_large:
            return self.groups(phase)
        ranks = (self._world_size * number // _COMPARED for number in range(_COMPARED))
        return (self.group_of(rank, phase) for rank in ranks)

    def group_of(self, rank: int, round: int) -> Group:
        """The group that `rank` mixes with in `round`; the phase is ``round % period``."""
        phase = round % self.period
        if self._world_size == 1:
            return Group([0])
        if self._has_formula:
            return self._group_by_formula(rank, phase)
        return self._schedules[rank][phase]

    def schedule(self, rank: int) -> tuple[Group, ...]:
        """The groups of `rank`, phase by phase."""
        if self._world_size == 1:
            return (Group([0]),)
        if self._has_formula:
            return tuple(self._agreed_group(rank, phase) for phase in range(self.period))
        return self._schedules[rank]

    def groups(self, round: int) -> tuple[Group, ...]:
        """All groups of `round`, ordered by their first rank."""
        return tuple(self._partition(round % self.period, self.group_of))

    def _partition(self, phase: int, group_of: Callable[[int, int], Group]) -> Iterator[Group]:
        placed = bytearray(self._world_size)
        for rank in range(self._world_size):
            if not placed[rank]:
                group = group_of(rank, phase)
                yield group
                for each in group.ranks:
                    placed[each] = True

    def mixing_matrix(self, round: int) -> torch.Tensor:
        """The matrix W of `round` with x <- W x.

        Returns:
            float64 tensor of shape (world_size, world_size), symmetric and doubly stochastic.
        """
        matrix = torch.eye(self._world_size, dtype=torch.float64, device="cpu")
        for group in self.groups(round):
            if group.size == 1:
                continue
            index = torch.tensor(group.ranks, device="cpu")
            matrix[index.unsqueeze(1), index] = (1 - group.self_weight) / (group.size - 1)
            matrix[index, index] = group.self_weight
        return matrix

    def _parameters(self) -> dict[str, Any]:
        """The parameters in addition to the sizes, for `repr`."""
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


def _by_rank(
    phases: Iterable[Iterable[Group | Iterable[int]]], world_size: int
) -> tuple[tuple[Group, ...], ...]:
    """Turn the groups of every phase into `groups[rank][phase]`, if they are partitions."""
    columns = [_column(f"phase {number}", each, world_size) for number, each in enumerate(phases)]
    if not columns:
        raise ValueError("expected the groups of 1 or more phases, got none")
    return tuple(zip(*columns, strict=True))


def _column(place: str, phase: Iterable[Group | Iterable[int]], world_size: int) -> list[Group]:
    """The group of every rank in one phase."""
    if not isinstance(phase, Iterable):
        raise ValueError(f"{place}: expected a list of groups, got {phase!r}")
    group_of: dict[int, Group] = {}
    for entry in phase:
        group = _as_group(entry, place, world_size)
        for rank in group.ranks:
            if rank in group_of:
                raise ValueError(
                    f"{place}: rank {rank} is in two groups, {group_of[rank]} and {group}; put "
                    f"every rank into at most one group of a phase"
                )
            group_of[rank] = group
    return [group_of.get(rank) or Group([rank]) for rank in range(world_size)]


def _by_phase(
    table: Sequence[Sequence[Group | Sequence[int]]], world_size: int
) -> list[list[Group]]:
    """Turn `groups[rank][phase]` into the groups of every phase, each of them once."""
    if len(table) != world_size:
        raise ValueError(
            f"expected groups for {world_size} ranks, got them for {len(table)}; assign_groups() "
            f"must return a list for every rank"
        )
    periods = [len(row) for row in table]
    if len(set(periods)) > 1:
        raise ValueError(f"every rank needs the same number of phases, got {periods} by rank")
    phases = []
    for number, column in enumerate(zip(*table, strict=True)):
        groups: dict[Group, None] = {}
        for rank, entry in enumerate(column):
            place = f"phase {number}, rank {rank}"
            group = _as_group(entry, place, world_size)
            if rank not in group.ranks:
                raise ValueError(
                    f"{place}: not a member of its group {group.ranks}; list the rank itself, too"
                )
            groups[group] = None
        phases.append([*groups])
    return phases


def _check_same(phase: int, rank: int, group: Group, other: Group) -> None:
    if group != other:
        raise ValueError(
            f"phase {phase}: rank {rank} is in two groups, {group} and {other}; own_group() must "
            f"give the same group for all its ranks"
        )


def _as_group(entry: Group | Iterable[int], place: str, world_size: int) -> Group:
    try:
        group = entry if isinstance(entry, Group) else Group(entry)
    except TypeError as error:
        raise ValueError(f"{place}: expected a Group or a list of ranks, got {entry!r}") from error
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
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
