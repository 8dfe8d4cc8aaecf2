"""The built-in topologies as lists of all groups of every phase: what their formulas must give."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate

from decent_optim_wrapper import Group

Phases = list[list[Group]]


def complete(n: int, local: int) -> Phases:
    return [[Group(range(n))]]


def ring(n: int, local: int) -> Phases:
    return [[Group((i, (i + 1) % n)) for i in range(start, n, 2)] for start in (0, 1)]


def one_peer_exponential(n: int, local: int) -> Phases:
    hops = [1 << bit for bit in range(n.bit_length() - 1)]
    return [[Group((i, i ^ hop)) for i in range(n) if not i & hop] for hop in hops]


def alternating_exponential_ring(n: int, local: int) -> Phases:
    count = n // local
    nodes = [range(node * local, (node + 1) * local) for node in range(count)]
    phases: Phases = []
    joint_in_second = True
    for hop in (1 << bit for bit in range(count.bit_length() - 1)):
        first: list[Group] = []
        second: list[Group] = []
        for j in (j for j in range(count) if not j & hop):
            apart = [Group(nodes[j]), Group(nodes[j ^ hop])]
            joint = [Group([*nodes[j], *nodes[j ^ hop]])]
            first += apart if joint_in_second else joint
            second += joint if joint_in_second else apart
            joint_in_second = not joint_in_second
        phases += [first, second]
    return phases


def hypercuboid(n: int, local: int) -> Phases:
    phases = []
    stride, rest, prime = 1, n, 2
    while rest > 1:
        if rest % prime:
            prime += 1
            continue
        starts = (rank for rank in range(n) if rank // stride % prime == 0)
        phases.append([Group(range(s, s + prime * stride, stride)) for s in starts])
        stride, rest = stride * prime, rest // prime
    return phases


def bipartite_exponential(n: int, local: int) -> Phases:
    hops = [1, *(1 + 2**k for k in range(1, n.bit_length()) if 1 + 2**k < n)]
    shifts = dict.fromkeys(shift % n for hop in hops for shift in (hop, -hop))
    return [[Group((i, (i + s) % n)) for i in range(0, n, 2)] for s in shifts]


def base_2(n: int, local: int) -> Phases:
    direct = binary_split(n)
    odd = n // (n & -n)
    blocks = n // odd
    inner = binary_split(odd) if odd > 1 else []
    product: Phases = [
        [Group((r + b * odd for r in g.ranks), g.self_weight) for b in range(blocks) for g in p]
        for p in inner
    ]
    for hop in (odd << bit for bit in range(blocks.bit_length() - 1)):
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


def random_matching(n: int, local: int, seed: int = 0, period: int = 128) -> Phases:
    draw = random.Random(seed)
    ranks = list(range(n))
    phases = []
    for _ in range(period):
        draw.shuffle(ranks)
        pairs = [ranks[i : i + 2] for i in range(0, n - 1, 2)]
        if n % 2:
            pairs[-1].append(ranks[-1])
        phases.append([Group(pair) for pair in pairs])
    return phases


def hierarchical(n: int, local: int) -> Phases:
    count = n // local
    inside = [Group(range(node * local, (node + 1) * local)) for node in range(count)]
    phases = []
    for groups in hypercuboid(count, 1):
        across = [
            Group((node * local + rank for node in group.ranks), group.self_weight)
            for group in groups
            for rank in range(local)
        ]
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
