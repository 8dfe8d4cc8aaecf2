"""References: vectors that are the same on all ranks of a group, for coding differences.

A reference starts as the values with which all ranks start, or at zero if these may differ. Every
round of the group moves it to the mean of the sent values. So the differences become smaller from
round to round, and with them the rounding errors. After a start at zero the first rounds send whole
values. The errors of a coarse codec would throw ranks apart that agree, so with such a codec these
rounds move the reference only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.codecs import wide
from decent_optim_wrapper.topo import Topology
from decent_optim_wrapper.wire.bucket import Bucket, as_real

# The most copies of the parameters that a rank keeps as references, one per group.
MOST_REFERENCES = 4
# In int4, with which int3 and int2 begin, each leaves about a seventh of the largest differences.
_ROUNDS_FROM_ZERO = 3


def keeps_references(topology: Topology) -> bool:
    """Return whether there are references: no rank has any if one would have too many."""
    ranks, most = range(topology.world_size), MOST_REFERENCES
    return topology.period <= most or all(len(_groups(topology, r)) <= most for r in ranks)


class SavedReference(NamedTuple):
    """The saved references of one group.

    Args:
        coded_rounds: as in `GroupReference`.
        values: the references by parameter.
    """

    coded_rounds: int
    values: dict[Tensor, Tensor]


class GroupReference:
    """The references of one group, the same on all its ranks.

    Args:
        size: number of its ranks.
        is_used: whether there are any; otherwise the values themselves are coded.
        coded_rounds: number of coded rounds since the references were zero; counted from 3 if they
            began as the parameters.
    """

    def __init__(self, size: int, is_used: bool, coded_rounds: int = 0) -> None:
        self._size = size
        self._is_used = is_used
        # Ranks with different numbers would decode wrong values.
        self.coded_rounds = coded_rounds
        self._vectors: dict[Bucket, Tensor] = {}
        # The members that start at zero, until the next launch, and then the number of coded rounds
        # at that launch: it is the same on all ranks then, and only then. By member, as buckets may
        # be replaced meanwhile.
        self._fresh: set[Tensor] = set()
        self._begun: dict[Tensor, int] = {}

    def is_far(self, bucket: Bucket) -> bool:
        """Whether a part of the reference was zero a few rounds ago; called at each launch."""
        if self._fresh:
            starting = self._fresh.intersection(bucket.members)
            self._begun |= dict.fromkeys(starting, self.coded_rounds)
            self._fresh -= starting
        begun = max(self._begun.get(each, 0) for each in bucket.members) if self._begun else 0
        return self.coded_rounds - begun < _ROUNDS_FROM_ZERO

    def _is_new(self, bucket: Bucket) -> bool:
        """Whether a part was added to the bucket, and rounds only move its reference so far."""
        codec = bucket.codec(self._size)
        if codec is None or not uses_reference(bucket, self._size) or not codec.of_first_rounds():
            return False
        begun = max(self._begun.get(each, 0) for each in bucket.members)
        is_far = begun > 0 and self.coded_rounds - begun < _ROUNDS_FROM_ZERO
        return is_far or bucket not in self._vectors or not self._fresh.isdisjoint(bucket.members)

    def of(self, bucket: Bucket) -> Tensor | None:
        """The reference of a bucket; None if its values themselves are coded."""
        if not (self._is_used and uses_reference(bucket, self._size)):
            return None
        if bucket not in self._vectors:
            self._vectors[bucket] = bucket.on_device.new(wide(bucket.dtype)).data.zero_()
            self._fresh.update(bucket.members)
        return self._vectors[bucket]

    def parts(self) -> dict[Tensor, Tensor]:
        """The references by parameter, complex ones as pairs of reals."""
        parts: dict[Tensor, Tensor] = {}
        for bucket, vector in self._vectors.items():
            parts |= _parts(bucket, vector)
        return parts

    def saved(self, params: Sequence[Tensor], buckets: Sequence[Bucket]) -> dict[str, Any]:
        """The state for a checkpoint, which begins at zero while a part of a bucket is new."""
        source = GroupReference(self._size, False) if any(map(self._is_new, buckets)) else self
        # Copies, in the shapes of the parameters.
        values = [torch.zeros_like(param, dtype=wide(param.dtype)) for param in params]
        _copy(source.parts(), dict(zip(params, map(as_real, values), strict=True)))
        return {"coded_rounds": source.coded_rounds, "values": values}

    def fill(self, buckets: Sequence[Bucket], parts: Mapping[Tensor, Tensor]) -> None:
        """Replace all references by these, for these buckets; the others start at zero."""
        known = parts.keys() - self._fresh
        self._vectors, self._fresh = {}, set()
        for bucket in buckets:
            if any(member in parts for member in bucket.members):
                vector = self.of(bucket)
                _copy(parts, {} if vector is None else _parts(bucket, vector))
        self._fresh -= known

    def count_round(self) -> None:
        """Count a coded round that has arrived.

        It is counted before it is mixed, since some ranks send the next header before the mixing.
        """
        self.coded_rounds += 1

    def settle(self, bucket: Bucket, vector: Tensor) -> None:
        """Copy the reference of a bucket that was replaced in flight to its members' new buckets.

        Args:
            bucket: the bucket as it was sent.
            vector: its reference then. Only the round in flight keeps a replaced one, which is
                freed with it.
        """
        if self._vectors.get(bucket) is not vector:
            _copy(_parts(bucket, vector), self.parts())


class References:
    """The references of one rank, from a session's start to its end.

    A rank that is lost or comes back starts a new session, with new references on all ranks.

    Args:
        topology: the groups.
        rank: this rank.
    """

    def __init__(self, topology: Topology, rank: int) -> None:
        self.are_used = keeps_references(topology)
        groups = _groups(topology, rank)
        self.groups = {ranks: GroupReference(len(ranks), self.are_used) for ranks in groups}

    @torch.no_grad()
    def state(
        self, params: Sequence[Tensor], members: Sequence[int], buckets: Sequence[Bucket]
    ) -> dict[str, Any]:
        """The state for a checkpoint, by group.

        Args:
            params: the parameters that have references.
            members: the ranks of the session, as numbered at the start.
            buckets: the buckets of the parameters.
        """
        groups = sorted(self.groups.items())
        return {_name(ranks, members): group.saved(params, buckets) for ranks, group in groups}

    @torch.no_grad()
    def load(
        self, saved: Mapping[str, SavedReference], buckets: Sequence[Bucket], members: Sequence[int]
    ) -> None:
        """Continue with saved references; the references of other groups start at zero.

        Args:
            saved: by group, as `state` names them.
            buckets: the buckets of the parameters.
            members: as in `state`.
        """
        for ranks in self.groups:
            found = saved.get(_name(ranks, members), SavedReference(0, {}))
            values = {param: as_real(value) for param, value in found.values.items()}
            group = GroupReference(len(ranks), self.are_used, found.coded_rounds)
            group.fill(buckets, values)
            self.groups[ranks] = group

    @torch.no_grad()
    def begin(self, buckets: Sequence[Bucket]) -> None:
        """Start from the parameters, which are the same on all ranks now."""
        params = {member: as_real(member) for bucket in buckets for member in bucket.members}
        for ranks in self.groups:
            self.groups[ranks] = GroupReference(len(ranks), self.are_used, _ROUNDS_FROM_ZERO)
            self.groups[ranks].fill(buckets, params)

    @torch.no_grad()
    def replan(self, buckets: Sequence[Bucket]) -> None:
        """Keep the references of the parameters when their buckets are replaced."""
        for group in self.groups.values():
            group.fill(buckets, group.parts())


def _parts(bucket: Bucket, vector: Tensor) -> dict[Tensor, Tensor]:
    """The parts of a flat vector by member."""
    return dict(zip(bucket.members, bucket.parts(bucket.on_device.view(vector)), strict=True))


def _copy(values: Mapping[Tensor, Tensor], into: Mapping[Tensor, Tensor]) -> None:
    for member, part in into.items():
        if member in values:
            part.copy_(values[member])


def uses_reference(bucket: Bucket, size: int) -> bool:
    """Return whether the difference to a reference is sent in a group of this size."""
    codec = bucket.codec(size)
    return codec is not None and codec.uses_reference and bucket.may_use_reference


def with_references(buckets: Iterable[Bucket]) -> set[Tensor]:
    """The parameters that have references."""
    coded = [b for b in buckets if uses_reference(b, 2) or uses_reference(b, 3)]
    return {member for bucket in coded for member in bucket.members}


def _name(ranks: tuple[int, ...], members: Sequence[int]) -> str:
    return "-".join(str(members[rank]) for rank in ranks)


def _groups(topology: Topology, rank: int) -> set[tuple[int, ...]]:
    return {group.ranks for group in topology.schedule(rank) if group.size > 1}
