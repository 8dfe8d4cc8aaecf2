"""How long the rounds of a method take to send, and how long ranks wait for them."""

from __future__ import annotations

import math
from typing import NamedTuple

from simulated_ranks import Method

from decent_optim_wrapper import TopologyFactory
from decent_optim_wrapper.topo import Group

FLOAT32_BYTES = 4
# What hooks send of the bytes of an all-reduce; PowerSGD of the matrices of `step_time.py`, whose
# 1024 rows and 512 columns become 4 of each.
HOOKS = {"DDP, bf16 hook": 1 / 2, "DDP, PowerSGD 4": 4 * (1024 + 512) / (1024 * 512)}


class Traffic(NamedTuple):
    """What a rank sends, and when.

    Args:
        share: what it sends in a round, over what it sends in an all-reduce of float32.
        every: steps from one round to the next.
        hidden: the computing under which a round travels, over that of a step.
    """

    share: float
    every: int
    hidden: float

    def waits(self, ratio: float) -> float:
        """How long ranks wait in a step, over its computing."""
        return max(0.0, ratio * self.share - self.hidden) / self.every


def traffic(setting: str, name: str, method: Method, ranks: int) -> Traffic:
    """The traffic of a setting of `regret.py` that trains like a method of `time_to_loss.py`."""
    every = method.every
    if setting.startswith("DDP"):
        # Buckets travel under the backward pass, which is two thirds of a step.
        return Traffic(HOOKS.get(name, 1.0), every, 2 / 3)
    if method.streams is not None:
        # Four fragments, each of which has some steps to travel.
        return Traffic(share(method, ranks) / 4, every // 4, method.streams)
    if "as it arrives" in setting:
        return Traffic(share(method, ranks), every, math.inf)
    if method.late:
        return Traffic(share(method, ranks), every, method.late)
    if setting.startswith("the module"):
        # Of the backward and forward pass all but the first and the last module.
        return Traffic(share(method, ranks), every, 3 / 4)
    return Traffic(share(method, ranks), every, 1 / 3 if "wrapper" in setting else 0.0)


def share(method: Method, ranks: int) -> float:
    """The bytes of a round over those of an all-reduce of float32."""
    kind = method.topology
    topology = TopologyFactory.create(kind, ranks) if isinstance(kind, str) else kind(ranks)
    size = max(group.size for group in topology.groups(0))
    if method.codec is None:
        return Group(range(size)).copies_sent / Group(range(ranks)).copies_sent
    codec, means = (
        each.block_bytes / each.block / FLOAT32_BYTES
        for each in (method.codec, method.codec.of_means(size))
    )
    if method.feedback is not None:
        copies = (size - 1) * codec  # all of them are gathered
    elif size == 2:
        copies = codec
    else:
        copies = (size - 1) / size * (codec + means)
    return copies / Group(range(ranks)).copies_sent
