"""Topologies: which ranks mix with which, round by round, and with what weight.

This module knows nothing of communication and works without a process group.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True, init=False, slots=True)
class Group:
    """The ranks that mix together in one round.

    A member i of a group of m ranks becomes
    ``self_weight * x_i + (1 - self_weight) / (m - 1) * sum of the other members``.

    Args:
        ranks: the members; kept sorted.
        self_weight: weight of the own parameters, in (0, 1); None means 1/m, the plain mean.

    Raises:
        ValueError: no ranks, a rank twice, a negative rank, or a weight outside (0, 1).
    """

    ranks: tuple[int, ...]
    self_weight: float

    def __init__(self, ranks: Iterable[int], self_weight: float | None = None) -> None:
        members = tuple(sorted(operator.index(rank) for rank in ranks))
        if not members or len(set(members)) != len(members) or members[0] < 0:
            raise ValueError(f"a group needs distinct ranks of 0 or more, got {members}")
        weight = 1 / len(members) if self_weight is None else float(self_weight)
        # A rank alone keeps its parameters, whatever weight was meant for it.
        if len(members) > 1 and not 0 < weight < 1:
            raise ValueError(f"self_weight must lie in (0, 1), got {weight} for ranks {members}")
        object.__setattr__(self, "ranks", members)
        object.__setattr__(self, "self_weight", weight if len(members) > 1 else 1.0)

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)


class Topology(ABC):
    """A periodic schedule of groups: a partition of the ranks for every phase.

    Subclasses implement `assign_groups`; the constructor validates what it returns. The mixing
    matrix of every phase is then symmetric and doubly stochastic by construction. A world of one
    rank has nobody to mix with: every topology accepts it, as one idle phase.

    Args:
        world_size: number of ranks.
        local_world_size: ranks per node; divides `world_size`.

    Raises:
        ValueError: the sizes do not fit the topology, or the groups are not a valid schedule.
    """

    condition: ClassVar[str] = "any world size"

    def __init__(self, world_size: int, local_world_size: int = 1) -> None:
        self._world_size = _size("world_size", world_size)
        self._local_world_size = _size("local_world_size", local_world_size)
        if self._world_size % self._local_world_size:
            raise ValueError(
                f"local_world_size must divide world_size, "
                f"got {self._local_world_size} and {self._world_size}"
            )
        alone = self._world_size == 1
        if not alone and not self.fits(self._world_size, self._local_world_size):
            raise ValueError(self._misfit())
        table = [[[0]]] if alone else self.assign_groups()
        self._schedules = _validated(table, self._world_size)

    @abstractmethod
    def assign_groups(self) -> Sequence[Sequence[Group | Sequence[int]]]:
        """The whole schedule.

        Returns:
            `groups[rank][phase]`: the ranks that mix with `rank` in that phase, itself included,
            as a list of ranks or a `Group`.
        """

    @classmethod
    def fits(cls, world_size: int, local_world_size: int = 1) -> bool:
        """Whether the topology is defined for these sizes; `condition` says it in words."""
        return True

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
        return len(self._schedules[0])

    def group_of(self, rank: int, round: int) -> Group:
        """The group that `rank` mixes with in `round`; the phase is ``round % period``."""
        return self._schedules[rank][round % self.period]

    def schedule(self, rank: int) -> tuple[Group, ...]:
        """The groups of `rank`, phase by phase."""
        return self._schedules[rank]

    def groups(self, round: int) -> tuple[Group, ...]:
        """All groups of `round`, ordered by their first rank."""
        phase = round % self.period
        column = [schedule[phase] for schedule in self._schedules]
        return tuple(group for rank, group in enumerate(column) if group.ranks[0] == rank)

    def mixing_matrix(self, round: int) -> torch.Tensor:
        """The matrix W of `round` with x <- W x.

        Returns:
            float64 tensor of shape (world_size, world_size), symmetric and doubly stochastic.
        """
        matrix = torch.eye(self._world_size, dtype=torch.float64)
        for group in self.groups(round):
            if group.size == 1:
                continue
            index = torch.tensor(group.ranks)
            matrix[index.unsqueeze(1), index] = (1 - group.self_weight) / (group.size - 1)
            matrix[index, index] = group.self_weight
        return matrix

    def _misfit(self) -> str:
        sizes = (self._world_size, self._local_world_size)
        fitting = [name for name, kind in TopologyFactory.registered() if kind.fits(*sizes)]
        return (
            f"{type(self).__name__} needs {self.condition}, got world_size={sizes[0]} and "
            f"local_world_size={sizes[1]}; topologies that fit: {', '.join(fitting)}"
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(world_size={self._world_size}, "
            f"local_world_size={self._local_world_size})"
        )


class Complete(Topology):
    """All ranks average in every round: exact after one."""

    def assign_groups(self) -> Sequence[Sequence[Group]]:
        """One group of all ranks."""
        return _table([[range(self._world_size)]], self._world_size)


class Ring(Topology):
    """Neighbours on a ring: (0,1)(2,3)... in even rounds, (1,2)(3,4)...(n-1,0) in odd ones."""

    condition = "an even world size"

    @classmethod
    def fits(cls, world_size: int, local_world_size: int = 1) -> bool:
        """Even world sizes."""
        return world_size % 2 == 0

    def assign_groups(self) -> Sequence[Sequence[Group]]:
        """Two phases of disjoint neighbour pairs."""
        n = self._world_size
        phases = [[(i, (i + 1) % n) for i in range(start, n, 2)] for start in (0, 1)]
        return _table(phases, n)


class OnePeerExponential(Topology):
    """Rank i mixes with i XOR 2^(t mod log2 n): exact after log2 n rounds, from any phase.

    Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training" (2021).
    """

    condition = "a world size that is a power of two"

    @classmethod
    def fits(cls, world_size: int, local_world_size: int = 1) -> bool:
        """Powers of two."""
        return _is_power_of_two(world_size)

    def assign_groups(self) -> Sequence[Sequence[Group]]:
        """One phase per bit of the rank."""
        n = self._world_size
        hops = [1 << bit for bit in range(n.bit_length() - 1)]
        return _table([[(i, i ^ hop) for i in range(n) if not i & hop] for hop in hops], n)


class AlternatingExponentialRing(Topology):
    """Averages inside a node and over pairs of nodes in turn, so that both links are always busy.

    With p = log2(nodes), phases A_i and B_i for i in 0..p-1 look at the node pairs (j, j XOR 2^i).
    Every second pair averages each node inside itself in A_i and both nodes jointly in B_i, the
    other pairs the other way round; the count runs on over all i. Exact after 2p rounds.
    Wang et al., "From Promise to Practice: Realizing High-performance Decentralized Training"
    (ICLR 2025).
    """

    condition = "a number of nodes (world_size / local_world_size) that is a power of two above 1"

    @classmethod
    def fits(cls, world_size: int, local_world_size: int = 1) -> bool:
        """2, 4, 8, ... nodes."""
        nodes, rest = divmod(world_size, local_world_size)
        return rest == 0 and nodes > 1 and _is_power_of_two(nodes)

    def assign_groups(self) -> Sequence[Sequence[Group]]:
        """Two phases per bit of the node's number."""
        size = self._local_world_size
        count = self._world_size // size
        nodes = [range(node * size, (node + 1) * size) for node in range(count)]
        phases: list[list[Iterable[int]]] = []
        joint_in_second = True
        for hop in (1 << bit for bit in range(count.bit_length() - 1)):
            first: list[Iterable[int]] = []
            second: list[Iterable[int]] = []
            for j in (j for j in range(count) if not j & hop):
                apart: list[Iterable[int]] = [nodes[j], nodes[j ^ hop]]
                joint: list[Iterable[int]] = [[*nodes[j], *nodes[j ^ hop]]]
                first += apart if joint_in_second else joint
                second += joint if joint_in_second else apart
                joint_in_second = not joint_in_second
            phases += [first, second]
        return _table(phases, self._world_size)


class TopologyFactory:
    """The topologies that can be asked for by name."""

    _registry: ClassVar[dict[str, type[Topology]]] = {
        "complete": Complete,
        "ring": Ring,
        "one-peer-exp": OnePeerExponential,
        "alternating-exp-ring": AlternatingExponentialRing,
    }

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The known names."""
        return tuple(cls._registry)

    @classmethod
    def registered(cls) -> tuple[tuple[str, type[Topology]], ...]:
        """The known names with their classes."""
        return tuple(cls._registry.items())

    @classmethod
    def create(cls, name: str, world_size: int, local_world_size: int = 1) -> Topology:
        """Build the topology of that name.

        Raises:
            ValueError: the name is unknown, or the sizes do not fit the topology.
        """
        if name not in cls._registry:
            known = ", ".join(cls.names())
            raise ValueError(f"unknown topology {name!r}; the known ones are {known}")
        return cls._registry[name](world_size, local_world_size)

    @classmethod
    def add_topology(cls, name: str, kind: type[Topology], overwrite: bool = False) -> None:
        """Make `kind` available as `name`.

        Args:
            name: what `topology=` takes.
            kind: a subclass of `Topology` whose constructor takes the two sizes.
            overwrite: replace a topology of that name.

        Raises:
            TypeError: `kind` is not a subclass of `Topology`.
            ValueError: the name is taken and `overwrite` is False.
        """
        if not (isinstance(kind, type) and issubclass(kind, Topology)):
            raise TypeError(f"add_topology expects a subclass of Topology, got {kind!r}")
        if name in cls._registry and not overwrite:
            raise ValueError(
                f"a topology named {name!r} exists ({cls._registry[name].__name__}); "
                f"choose another name or pass overwrite=True"
            )
        cls._registry[name] = kind


def _size(name: str, value: int) -> int:
    size = operator.index(value)
    if size < 1:
        raise ValueError(f"{name} must be 1 or more, got {size}")
    return size


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _table(phases: Sequence[Iterable[Iterable[int]]], world_size: int) -> list[list[Group]]:
    """Turn a partition per phase into `groups[rank][phase]`."""
    table: list[list[Group]] = [[] for _ in range(world_size)]
    for phase in phases:
        for group in map(Group, phase):
            for rank in group.ranks:
                table[rank].append(group)
    return table


def _validated(
    table: Sequence[Sequence[Group | Sequence[int]]], world_size: int
) -> tuple[tuple[Group, ...], ...]:
    """Prove that the table is a partition of the ranks in every phase."""
    if len(table) != world_size:
        raise ValueError(f"expected groups for {world_size} ranks, got {len(table)}")
    period = len(table[0])
    lengths = {rank: len(row) for rank, row in enumerate(table) if len(row) != period}
    if period == 0 or lengths:
        raise ValueError(
            f"every rank needs the same number of phases, 1 or more; rank 0 has {period}"
            + "".join(f", rank {rank} has {length}" for rank, length in lengths.items())
        )
    columns = [_validated_phase(phase, [row[phase] for row in table]) for phase in range(period)]
    return tuple(zip(*columns, strict=True))


def _validated_phase(phase: int, entries: Sequence[Group | Sequence[int]]) -> list[Group]:
    """Prove that the ranks' entries of one phase are the groups of a partition."""
    column = [
        _validated_entry(phase, rank, entry, len(entries)) for rank, entry in enumerate(entries)
    ]
    for rank, group in enumerate(list(column)):
        leader = group.ranks[0]
        for member in group.ranks if leader == rank else (leader,):
            if column[member] != group:
                raise ValueError(
                    f"phase {phase}: rank {rank} lists {group}, but its member {member} lists "
                    f"{column[member]}; all members of a group must list the same one"
                )
            # One object per group: thousands of ranks may have listed it each on their own.
            column[member] = column[leader]
    return column


def _validated_entry(phase: int, rank: int, entry: Group | Sequence[int], world_size: int) -> Group:
    try:
        group = entry if isinstance(entry, Group) else Group(entry)
    except (TypeError, ValueError) as error:
        raise ValueError(f"phase {phase}, rank {rank}: {error}") from error
    if group.ranks[-1] >= world_size:
        raise ValueError(
            f"phase {phase}, rank {rank}: ranks {group.ranks} reach beyond world size {world_size}"
        )
    # By bisection: a scan of every rank's group would be quadratic for large groups.
    if group.ranks[bisect_left(group.ranks, rank, hi=group.size - 1)] != rank:
        raise ValueError(f"phase {phase}, rank {rank}: not a member of its group {group.ranks}")
    return group
