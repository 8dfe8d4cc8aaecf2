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

    def phases(self) -> Sequence[Sequence[Sequence[int]]]:
        """One group of all ranks."""
        return [[range(self._world_size)]]


class Ring(EvenSizes):
    """Neighbours on a ring: (0,1)(2,3)... in even rounds, (1,2)(3,4)...(n-1,0) in odd ones."""

    def phases(self) -> Sequence[Sequence[Sequence[int]]]:
        """Two phases of disjoint neighbour pairs."""
        n = self._world_size
        return [[(i, (i + 1) % n) for i in range(start, n, 2)] for start in (0, 1)]


class OnePeerExponential(Topology):
    """Rank i mixes with i XOR 2^(t mod log2 n): exact after log2 n rounds, from any phase.

    Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training" (2021).
    """

    condition = "a world size that is a power of two"

    @classmethod
    def fits(cls, world_size: int, local_world_size: int = 1) -> bool:
        """Powers of two."""
        return is_power_of_two(world_size)

    def phases(self) -> Sequence[Sequence[Sequence[int]]]:
        """One phase per bit of the rank."""
        n = self._world_size
        hops = [1 << bit for bit in range(n.bit_length() - 1)]
        return [[(i, i ^ hop) for i in range(n) if not i & hop] for hop in hops]


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
        return rest == 0 and nodes > 1 and is_power_of_two(nodes)

    def phases(self) -> Sequence[Sequence[Sequence[int]]]:
        """Two phases per bit of the node's number."""
        size = self._local_world_size
        count = self._world_size // size
        nodes = [range(node * size, (node + 1) * size) for node in range(count)]
        phases: list[list[Sequence[int]]] = []
        joint_in_second = True
        for hop in (1 << bit for bit in range(count.bit_length() - 1)):
            first: list[Sequence[int]] = []
            second: list[Sequence[int]] = []
            for j in (j for j in range(count) if not j & hop):
                apart: list[Sequence[int]] = [nodes[j], nodes[j ^ hop]]
                joint: list[Sequence[int]] = [[*nodes[j], *nodes[j ^ hop]]]
                first += apart if joint_in_second else joint
                second += joint if joint_in_second else apart
                joint_in_second = not joint_in_second
            phases += [first, second]
        return phases


def is_power_of_two(number: int) -> bool:
    """Whether `number` is 1, 2, 4, 8, ..."""
    return number & (number - 1) == 0
