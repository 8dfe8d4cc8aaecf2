"""The built-in topologies as lists of all groups of every phase: what their formulas must give."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from itertools import accumulate

from decent_optim_wrapper import Group, Topology

Phases = list[list[Group]]


def listed(world_size: int, value: object) -> Topology:
    """A topology whose `phases` are these."""
    kind: type[Topology] = type("Listed", (Topology,), {"phases": lambda self: value})
    return kind(world_size)


def grouped(keys: Iterable[Hashable]) -> list[Group]:
    """Groups of the ranks whose keys are equal."""
    members = defaultdict(list)
    for rank, key in enumerate(keys):
        members[key].append(rank)
    return [Group(ranks) for ranks in members.values()]


def complete(n: int, local: int) -> Phases:
    return [[Group(range(n))]]


def ring(n: int, local: int) -> Phases:
    return [grouped((rank + shift) % n // 2 for rank in range(n)) for shift in (0, 1)]


def one_peer_exponential(n: int, local: int) -> Phases:
    hops = [1 << bit for bit in range(n.bit_length() - 1)]
    return [grouped(rank & ~hop for rank in range(n)) for hop in hops]


def alternating_exponential_ring(n: int, local: int) -> Phases:
    nodes = [rank // local for rank in range(n)]
    phases = []
    pairs = 0
    for hop in (1 << bit for bit in range((n // local).bit_length() - 1)):
        # The first pair of all is joint in the second phase of its hop.
        joint: list[set[int]] = [set(), set()]
        for low in (node for node in range(n // local) if not node & hop):
            pairs += 1
            joint[pairs % 2].add(low)
        for lows in joint:
            keys = (("joint", x & ~hop) if x & ~hop in lows else ("apart", x) for x in nodes)
            phases.append(grouped(keys))
    return phases


def hypercuboid(n: int, local: int) -> Phases:
    phases = []
    stride = 1
    for prime in range(2, n + 1):
        while n // stride % prime == 0:
            phases.append(grouped((r // (prime * stride), r % stride) for r in range(n)))
            stride *= prime
    return phases


def bipartite_exponential(n: int, local: int) -> Phases:
    hops = [1, *(1 + 2**k for k in range(1, n.bit_length()) if 1 + 2**k < n)]
    shifts = dict.fromkeys(shift % n for hop in hops for shift in (hop, -hop))
    return [grouped((i - i % 2 * shift) % n for i in range(n)) for shift in shifts]


def base_2(n: int, local: int) -> Phases:
    direct = binary_split(n)
    odd = n // (n & -n)
    product: Phases = [
        [Group((r + at for r in g.ranks), g.self_weight) for at in range(0, n, odd) for g in groups]
        for groups in binary_split(odd)
    ]
    for hop in (odd << bit for bit in range((n // odd).bit_length() - 1)):
        lower = (r for r in range(n) if not r // odd & hop // odd)
        product.append([Group((r, r + hop)) for r in lower])
    return product if len(product) < len(direct) else direct


def binary_split(n: int) -> Phases:
    sizes = [1 << bit for bit in reversed(range(n.bit_length())) if n >> bit & 1]
    blocks = [range(t - size, t) for t, size in zip(accumulate(sizes), sizes, strict=True)]
    bits = sizes[0].bit_length() - 1
    rounds = []
    for t in range(2 * bits + 1 if len(blocks) > 1 else bits):
        groups: list[Group] = []
        for s, block in enumerate(blocks):
            if t == bits + s and block.stop < n:
                groups += hand_over(block, n)
            elif t < bits:
                groups += xor_round(block, t)
            elif t >= bits + s:
                groups += xor_round(block, t - bits - s - 1)
        rounds.append(groups)
    return rounds


def hand_over(block: range, n: int) -> list[Group]:
    later = range(block.stop, n)
    weight = len(block) / (n - block.start)
    groups = [Group((own, other), 1 - weight) for own, other in zip(block, later, strict=False)]
    rest = block[len(later) :]
    return groups + [Group(pair) for pair in zip(rest[::2], rest[1::2], strict=False)]


def xor_round(block: range, t: int) -> list[Group]:
    size = len(block)
    if size == 1:
        return []
    hop = 1 << t % (size.bit_length() - 1)
    return [Group((block[i], block[i ^ hop])) for i in range(size) if not i & hop]


def random_matching(n: int, local: int) -> Phases:
    draw, order, phases = random.Random(0), [*range(n)], []
    for _ in range(128):
        draw.shuffle(order)
        places = {rank: place for place, rank in enumerate(order)}
        phases.append(grouped(min(places[rank] // 2, n // 2 - 1) for rank in range(n)))
    return phases


def hierarchical(n: int, local: int) -> Phases:
    inside = grouped(rank // local for rank in range(n))
    phases = []
    for groups in hypercuboid(n // local, 1):
        group_of = {node: group for group in groups for node in group.ranks}
        across = grouped((group_of[rank // local], rank % local) for rank in range(n))
        phases += [inside, across] if local > 1 else [across]
    return phases


LISTED: dict[str, Callable[[int, int], Phases]] = {
    "complete": complete,
    "ring": ring,
    "one-peer-exp": one_peer_exponential,
    "alternating-exp-ring": alternating_exponential_ring,
    "hypercuboid": hypercuboid,
    "bipartite-exp": bipartite_exponential,
    "base-2": base_2,
    "random": random_matching,
    "hierarchical": hierarchical,
}
