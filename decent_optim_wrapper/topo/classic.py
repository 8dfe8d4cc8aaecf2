"""The topologies of the published systems: complete, ring and the exponential ones."""

from __future__ import annotations

from collections.abc import Sequence

from decent_optim_wrapper.topo.base import Topology


class EvenSizes(Topology):
    """Base class of the topologies that pair every even rank with an odd one."""

    condition = "an even world size"

    @classmethod
    def fits(cls, world_size: int, local_world_size: int = 1) -> bool:
        """Even world sizes."""
        return world_size % 2 == 0


class Complete(Topology):
    """All ranks average in every round: exact after one round."""

    def phase_count(self) -> int:
        """One."""
        return 1

    def own_group(self, rank: int, phase: int) -> Sequence[int]:
        """All ranks."""
        return range(self._world_size)


class Ring(EvenSizes):
    """Neighbours on a ring: (0,1)(2,3)... in even rounds, (1,2)(3,4)...(n-1,0) in odd ones."""

    def phase_count(self) -> int:
        """Two."""
        return 2

    def own_group(self, rank: int, phase: int) -> Sequence[int]:
        """A rank and its neighbour on one side."""
        return rank, (rank + (1 if rank % 2 == phase else -1)) % self._world_size


class OnePeerExponential(Topology):
    """Rank i mixes with i XOR 2^(t mod log2 n): exact after log2 n rounds, from any phase.

    Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training" (2021).
    """

    condition = "a world size that is a power of two"

    @classmethod
    def fits(cls, world_size: int, local_world_size: int = 1) -> bool:
        """Powers of two."""
        return world_size.bit_count() == 1

    def phase_count(self) -> int:
        """One phase per bit of the rank."""
        return self._world_size.bit_length() - 1

    def own_group(self, rank: int, phase: int) -> Sequence[int]:
        """A rank and the one that differs in one bit."""
        return rank, rank ^ 1 << phase


class AlternatingExponentialRing(Topology):
    """Alternates between averaging inside a node and over a pair of nodes; both links stay busy.

    With p = log2(nodes), phases A_i and B_i for i in 0..p-1 use the node pairs (j, j XOR 2^i).
    Every second pair averages each node by itself in A_i and both nodes jointly in B_i; the other
    pairs do it the other way round. The pairs are counted over all i. Exact after 2p rounds.
    Wang et al., "From Promise to Practice: Realizing High-performance Decentralized Training"
    (ICLR 2025).
    """

    condition = "a number of nodes (world_size / local_world_size) that is a power of two above 1"

    @classmethod
    def fits(cls, world_size: int, local_world_size: int = 1) -> bool:
        """2, 4, 8, ... nodes."""
        nodes, rest = divmod(world_size, local_world_size)
        return rest == 0 and nodes > 1 and nodes.bit_count() == 1

    def phase_count(self) -> int:
        """Two phases per bit of the node's number."""
        return 2 * (self._nodes.bit_length() - 1)

    def own_group(self, rank: int, phase: int) -> Sequence[int]:
        """The ranks of the own node, or of two nodes."""
        size = self._local_world_size
        node, bit = rank // size, phase // 2
        low = node & ~(1 << bit)
        # Its number among the pairs of this bit, of which all bits have the same number.
        pair = low & (1 << bit) - 1 | low >> bit + 1 << bit
        number = bit * (self._nodes // 2) + pair
        if number % 2 == phase % 2:
            return range(node * size, (node + 1) * size)
        return [each * size + local for each in (low, low | 1 << bit) for local in range(size)]

    @property
    def _nodes(self) -> int:
        return self._world_size // self._local_world_size
