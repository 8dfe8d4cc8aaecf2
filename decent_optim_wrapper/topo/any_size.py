"""Topologies for world sizes that are not powers of two, and for nodes of several ranks."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from decent_optim_wrapper.topo.base import Topology, build
from decent_optim_wrapper.topo.classic import EvenSizes
from decent_optim_wrapper.topo.group import Group


class Hypercuboid(Topology):
    """Ranks as points of a box whose sides are the prime factors of the world size.

    Round i averages along side i: the ranks that are equal in all mixed-radix digits but digit i.
    Exact after as many rounds as there are factors, from any phase. A prime size is complete.
    """

    def phases(self) -> Sequence[Sequence[Sequence[int]]]:
        """One phase per prime factor."""
        phases = []
        stride = 1
        for prime in _prime_factors(self._world_size):
            starts = (r for r in range(self._world_size) if r // stride % prime == 0)
            phases.append([range(s, s + prime * stride, stride) for s in starts])
            stride *= prime
        return phases


class BipartiteExponential(EvenSizes):
    """Pairs every even rank i with i + s mod n, for s = 1, -1, 3, -3, 5, -5, 9, -9, ... below n.

    Beyond 1 the shifts s are +-(1 + 2^k); shifts that are equal modulo n count once.
    """

    def phases(self) -> Sequence[Sequence[Sequence[int]]]:
        """Two phases per hop, there and back."""
        n = self._world_size
        hops = [1, *(1 + 2**k for k in range(1, n.bit_length()) if 1 + 2**k < n)]
        shifts = dict.fromkeys(shift % n for hop in hops for shift in (hop, -hop))
        return [[(i, (i + s) % n) for i in range(0, n, 2)] for s in shifts]


class Base2(Topology):
    """Exact averaging of any number of ranks in pairs, from phase 0 on.

    The ranks are split into blocks of descending powers of two (`_binary_split`). For a world size
    of 2^a q there is a second schedule: that of q in every block of q, then XOR hops across the
    blocks. The shorter one is taken. Takezawa et al., "Beyond Exponential Graph:
    Communication-Efficient Topologies for Decentralized Learning via Finite-time Convergence"
    (2023).
    """

    def phases(self) -> Sequence[Sequence[Group]]:
        """The shorter of the two schedules."""
        n = self._world_size
        direct = _binary_split(n)
        odd = n // (n & -n)
        blocks = n // odd
        inner = _binary_split(odd) if odd > 1 else []
        product: list[list[Group]] = [
            [Group((r + b * odd for r in g.ranks), g.self_weight) for b in range(blocks) for g in p]
            for p in inner
        ]
        for hop in (odd << bit for bit in range(blocks.bit_length() - 1)):
            lower = (r for r in range(n) if not r // odd & hop // odd)
            product.append([Group((r, r + hop)) for r in lower])
        return product if len(product) < len(direct) else direct


class RandomMatching(Topology):
    """Uniform random disjoint pairs in every round; with an odd number of ranks, one triple.

    Args:
        world_size: number of ranks.
        local_world_size: ranks per node.
        seed: seed of the random pairs, the same on every rank.
        period: number of rounds until the schedule repeats.
    """

    def __init__(
        self, world_size: int, local_world_size: int = 1, *, seed: int = 0, period: int = 128
    ) -> None:
        self._seed = operator.index(seed)
        self._rounds = period
        super().__init__(world_size, local_world_size)

    def _parameters(self) -> dict[str, Any]:
        return {"seed": self._seed, "period": self._rounds}

    def phases(self) -> Sequence[Sequence[Sequence[int]]]:
        """`period` random matchings."""
        draw = random.Random(self._seed)
        ranks = list(range(self._world_size))
        phases = []
        for _ in range(self._rounds):
            draw.shuffle(ranks)
            pairs = [ranks[i : i + 2] for i in range(0, len(ranks) - 1, 2)]
            if len(ranks) % 2:
                pairs[-1].append(ranks[-1])
            phases.append(pairs)
        return phases


class Hierarchical(Topology):
    """Alternates between averaging inside every node and gossip between nodes.

    Between nodes, ranks with the same local rank mix, so that all links of a node are used.

    Args:
        world_size: number of ranks.
        local_world_size: ranks per node.
        inner: the topology over the nodes, of one rank per node: a name or an instance.

    Raises:
        ValueError: the sizes do not fit, the name is unknown, or the number of ranks of the
            instance is not the number of nodes.
    """

    condition = "more than one node (world_size / local_world_size)"

    def __init__(
        self,
        world_size: int,
        local_world_size: int = 1,
        *,
        inner: str | Topology = "hypercuboid",
    ) -> None:
        self._inner = inner
        super().__init__(world_size, local_world_size)

    @classmethod
    def fits(cls, world_size: int, local_world_size: int = 1) -> bool:
        """Two nodes or more."""
        return world_size % local_world_size == 0 and world_size > local_world_size

    def phases(self) -> Sequence[Sequence[Group]]:
        """A phase inside the nodes before every phase of the inner topology."""
        local = self._local_world_size
        nodes = self._nodes()
        inside = [
            Group(range(node * local, (node + 1) * local)) for node in range(nodes.world_size)
        ]
        phases = []
        for phase in range(nodes.period):
            across = [
                Group((node * local + rank for node in group.ranks), group.self_weight)
                for group in nodes.groups(phase)
                for rank in range(local)
            ]
            phases += [inside, across] if local > 1 else [across]
        return phases

    def _parameters(self) -> dict[str, Any]:
        return {"inner": self._inner}

    def _nodes(self) -> Topology:
        count = self._world_size // self._local_world_size
        if isinstance(self._inner, Topology):
            if self._inner.world_size != count:
                raise ValueError(
                    f"inner must be a topology of {count} nodes, got {self._inner!r}; build it "
                    f"with world_size={count} or pass its name"
                )
            return self._inner
        return build(self._inner, count)


def _binary_split(n: int) -> list[list[Group]]:
    """The base-2 schedule of n ranks.

    The blocks V_0, V_1, ... have descending powers of two as sizes. First every block averages
    itself on an XOR hypercube. Then, for each block V_s except the last, every rank of the later
    blocks mixes with a different rank of V_s. The weights are such that the later blocks then hold
    the average of V_s and themselves. The other ranks of V_s form pairs. Blocks that have had their
    turn average themselves once more.
    """
    sizes = [1 << bit for bit in reversed(range(n.bit_length())) if n >> bit & 1]
    stops = accumulate(sizes)
    blocks = [range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
    bits = sizes[0].bit_length() - 1
    rounds = []
    for t in range(2 * bits + 1 if len(blocks) > 1 else bits):
        groups: list[Group] = []
        for s, block in enumerate(blocks):
            if t == bits + s and block.stop < n:
                groups += _hand_over(block, n)
            elif t < bits:
                groups += _xor_round(block, t)
            elif t >= bits + s:
                groups += _xor_round(block, t - bits - s - 1)
        rounds.append(groups)
    return rounds


def _hand_over(block: range, n: int) -> list[Group]:
    """Pair every rank of the later blocks with one of this block, and the others of it in twos."""
    later = range(block.stop, n)
    weight = len(block) / (n - block.start)
    groups = [Group((own, other), 1 - weight) for own, other in zip(block, later, strict=False)]
    rest = block[len(later) :]
    return groups + [Group(pair) for pair in zip(rest[::2], rest[1::2], strict=False)]


def _xor_round(block: range, t: int) -> list[Group]:
    """Pairs of a block whose size is a power of two, along bit t of the position in it."""
    size = len(block)
    if size == 1:
        return []
    hop = 1 << t % (size.bit_length() - 1)
    return [Group((block[i], block[i ^ hop])) for i in range(size) if not i & hop]


def _prime_factors(n: int) -> list[int]:
    factors = []
    divisor = 2
    while n > 1:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return factors
