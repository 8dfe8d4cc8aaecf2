"""Topologies for world sizes that are not powers of two, and for nodes of several ranks."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

from decent_optim_wrapper.topo.base import Group, Topology, build
from decent_optim_wrapper.topo.classic import EvenSizes


class Hypercuboid(Topology):
    """Ranks as points of a box whose sides are the prime factors of the world size.

    Round i averages along side i: ranks mix if their mixed-radix digits differ in digit i only.
    Exact after as many rounds as there are factors, from any phase. A prime size is complete.
    """

    def phase_count(self) -> int:
        """One phase per prime factor."""
        return len(_prime_factors(self._world_size))

    def own_group(self, rank: int, phase: int) -> Sequence[int]:
        """The ranks that differ from `rank` in one digit at most."""
        *smaller, prime = _prime_factors(self._world_size)[: phase + 1]
        stride = math.prod(smaller)
        start = rank - rank // stride % prime * stride
        return range(start, start + prime * stride, stride)


class BipartiteExponential(EvenSizes):
    """Pairs every even rank i with i + s mod n, for s = 1, -1, 3, -3, 5, -5, 9, -9, ... below n.

    After 1, the shifts s are +-(1 + 2^k). Shifts that are equal modulo n count once.
    """

    def phase_count(self) -> int:
        """Two phases per hop, there and back."""
        return len(_shifts(self._world_size))

    def own_group(self, rank: int, phase: int) -> Sequence[int]:
        """A rank and its partner at one distance."""
        shift = _shifts(self._world_size)[phase]
        return rank, (rank + (-shift if rank % 2 else shift)) % self._world_size


class Base2(Topology):
    """Exact averaging of any number of ranks in pairs, from phase 0 on.

    The ranks are split into blocks of descending powers of two (`_split_group`). For a world size
    of 2^a q there is a second schedule: the schedule of q in every block of q, then XOR hops
    across the blocks. The shorter one is taken. Takezawa et al., "Beyond Exponential Graph:
    Communication-Efficient Topologies for Decentralized Learning via Finite-time Convergence"
    (2023).
    """

    def phase_count(self) -> int:
        """The phases of the shorter schedule."""
        return min(_split_phases(self._world_size), sum(self._product()[1:]))

    def own_group(self, rank: int, phase: int) -> Group:
        """The group in the shorter schedule."""
        n = self._world_size
        odd, inner, across = self._product()
        if _split_phases(n) <= inner + across:
            return _split_group(n, rank, phase)
        block, place = divmod(rank, odd)
        if phase >= inner:
            return Group((rank, (block ^ 1 << phase - inner) * odd + place))
        group = _split_group(odd, place, phase)
        return Group((block * odd + each for each in group.ranks), group.self_weight)

    def _product(self) -> tuple[int, int, int]:
        """The odd factor q, and the numbers of phases inside the blocks of q and across them."""
        odd = self._world_size // (self._world_size & -self._world_size)
        return odd, _split_phases(odd), (self._world_size // odd).bit_length() - 1


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
        self._period = operator.index(period)
        super().__init__(world_size, local_world_size)

    def _parameters(self) -> dict[str, Any]:
        return {"seed": self._seed, "period": self._period}

    def phases(self) -> Sequence[Sequence[Sequence[int]]]:
        """Neighbours in shuffled orders; the last of an odd number joins the last pair."""
        draw, ranks, phases = random.Random(self._seed), [*range(self._world_size)], []
        for _ in range(self._period):
            draw.shuffle(ranks)
            pairs = [ranks[place : place + 2] for place in range(0, len(ranks) - 1, 2)]
            pairs[-1] += ranks[2 * len(pairs) :]
            phases.append(pairs)
        return phases


class Hierarchical(Topology):
    """Alternates between averaging inside every node and gossip between nodes.

    Between nodes, ranks with the same local rank mix, so that all links of a node are used.

    Args:
        world_size: number of ranks.
        local_world_size: ranks per node.
        inner: the topology over the nodes, with one rank per node; a name or an instance.

    Raises:
        ValueError: the sizes do not fit, the name is unknown, or the instance has another number of
            ranks than there are nodes.
    """

    condition = "more than one node (world_size / local_world_size)"

    def __init__(
        self, world_size: int, local_world_size: int = 1, *, inner: str | Topology = "hypercuboid"
    ) -> None:
        self._inner = inner
        super().__init__(world_size, local_world_size)

    @classmethod
    def fits(cls, world_size: int, local_world_size: int = 1) -> bool:
        """Two nodes or more."""
        return world_size % local_world_size == 0 and world_size > local_world_size

    def phase_count(self) -> int:
        """A phase inside the nodes before every phase of the inner topology."""
        return self._nodes.period * (2 if self._local_world_size > 1 else 1)

    def own_group(self, rank: int, phase: int) -> Group:
        """The ranks of the own node, or the ranks with the same local rank on other nodes."""
        local = self._local_world_size
        node, place = divmod(rank, local)
        if local > 1:
            phase, across = divmod(phase, 2)
            if not across:
                return Group(range(node * local, (node + 1) * local))
        group = self._nodes.group_of(node, phase)
        return Group((each * local + place for each in group.ranks), group.self_weight)

    def _parameters(self) -> dict[str, Any]:
        return {"inner": self._inner}

    @cached_property
    def _nodes(self) -> Topology:
        """The inner topology; a world of one rank has none."""
        count = self._world_size // self._local_world_size
        nodes = build(self._inner, count) if isinstance(self._inner, str) else self._inner
        if nodes.world_size != count:
            raise ValueError(
                f"inner must be a topology of {count} nodes, got {self._inner!r}; build it "
                f"with world_size={count} or pass its name"
            )
        return nodes


@cache
def _shifts(n: int) -> tuple[int, ...]:
    hops = [1, *(1 + 2**k for k in range(1, n.bit_length()) if 1 + 2**k < n)]
    return tuple(dict.fromkeys(shift % n for hop in hops for shift in (hop, -hop)))


@cache
def _split_blocks(n: int) -> list[range]:
    """Blocks of the ranks whose sizes are descending powers of two."""
    sizes = [1 << bit for bit in reversed(range(n.bit_length())) if n >> bit & 1]
    return [range(stop - size, stop) for stop, size in zip(accumulate(sizes), sizes, strict=True)]


def _split_phases(n: int) -> int:
    """Number of phases of `_split_group`."""
    bits = n.bit_length() - 1
    return bits if n == 1 << bits else 2 * bits + 1


def _split_group(n: int, rank: int, phase: int) -> Group:
    """The group of a rank in the base-2 schedule of n ranks.

    The blocks V_0, V_1, ... have descending powers of two as sizes. First every block averages
    itself on an XOR hypercube. Then, for each block V_s except the last, every rank of the later
    blocks mixes with a different rank of V_s. The weights are such that the later blocks then have
    the average of V_s and themselves. The other ranks of V_s form pairs. Blocks that have had their
    turn average themselves once more.
    """
    blocks, bits = _split_blocks(n), n.bit_length() - 1
    own = next(number for number, block in enumerate(blocks) if rank in block)
    # The block that hands over in this phase, if one does.
    turn = phase - bits
    if phase < bits:
        return _xor_pair(blocks[own], rank, phase)
    if own < turn or own == len(blocks) - 1 <= turn:
        return _xor_pair(blocks[own], rank, turn - own - 1)
    return _hand_over(blocks[turn], rank, n)


def _hand_over(block: range, rank: int, n: int) -> Group:
    """Pair every rank of the later blocks with one of this block, and the others of it in pairs."""
    later = n - block.stop
    weight = len(block) / (n - block.start)
    if rank >= block.stop:
        return Group((block[rank - block.stop], rank), 1 - weight)
    place = rank - block.start
    if place < later:
        return Group((rank, block.stop + place), 1 - weight)
    other = (place - later ^ 1) + later
    return Group((rank, block[other]) if other < len(block) else (rank,))


def _xor_pair(block: range, rank: int, t: int) -> Group:
    """The pair in a block whose size is a power of two, along bit t of the position in it."""
    size = len(block)
    if size == 1:
        return Group((rank,))
    hop = 1 << t % (size.bit_length() - 1)
    return Group((rank, block[rank - block.start ^ hop]))


@cache
def _prime_factors(n: int) -> tuple[int, ...]:
    smallest = next((each for each in range(2, math.isqrt(n) + 1) if n % each == 0), n)
    return (smallest, *_prime_factors(n // smallest)) if n > 1 else ()
