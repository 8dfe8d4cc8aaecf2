"""Finds the slow rank and the slow link from the times of the last steps.

A slow rank makes its partners wait and does not wait itself. A slow link makes both of its ends
wait. So the cost of a link is the shorter wait of its two ends. Only rounds in pairs show it: in a
larger group a rank does not know which link it has waited for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from decent_optim_wrapper.gossip.pipeline import Pipeline
from decent_optim_wrapper.planning.tables import table

# Thresholds of a report: how much longer than the others a slow rank computes, and the share of a
# step for which both ends wait for a slow link.
_SLOWER, _WAITS = 1.2, 0.1
_SEND_LESS = (
    "send fewer bits with comm_dtype=torch.int8, or mix less often with Schedule(gossip_every=4)"
)
# What each rank sends, in this order.
_COSTS = ("step_seconds", "computing_seconds", "wait_seconds", "coding_seconds", "bytes_sent")


@dataclass(frozen=True)
class RankReport:
    """The cost of the last steps of one rank.

    Args:
        rank: the rank, as numbered at the start.
        step_seconds: median time from the end of one step to the end of the next.
        computing_seconds: median time of everything except waiting and coding: the forward and
            backward pass, the data, the local update.
        wait_seconds: median time spent waiting for communication.
        coding_seconds: median time to mix, pack and code.
        bytes_sent: mean number of bytes sent per step.
        waits_for: the rank that it waits for longest in rounds in pairs; None if there is none.
    """

    rank: int
    step_seconds: float
    computing_seconds: float
    wait_seconds: float
    coding_seconds: float
    bytes_sent: float
    waits_for: int | None


@dataclass(frozen=True)
class Link:
    """A link between two ranks, and the median seconds per round for which both wait for it."""

    ranks: tuple[int, int]
    wait_seconds: float


@dataclass(frozen=True)
class Report:
    """The cost of the last steps on all ranks; `str` makes a table of it.

    Args:
        ranks: the cost on each rank.
        slow_rank: the rank that computes longest; None unless that is much longer than the others.
        slow_link: the link for which both ends wait longest; None unless that is a large part of a
            step.
        advice: what to change, one sentence or more for each finding.
    """

    ranks: tuple[RankReport, ...]
    slow_rank: int | None
    slow_link: Link | None
    advice: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as dicts, tuples, numbers and strings."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            {
                name.replace("_seconds", "_ms"): 1000 * value if "_seconds" in name else value
                for name, value in vars(each).items()
            }
            | {"waits_for": "-" if each.waits_for is None else each.waits_for}
            for each in self.ranks
        ]
        return "\n".join([table(rows), *self.advice])


def diagnose(rows: Tensor, members: Sequence[int]) -> Report:
    """Find the slow rank and the slow link.

    Args:
        rows: shape (n, 5 + n). For each member the seconds of a step, of computing, waiting and
            coding, the bytes sent, then its median wait in pairs with each member; 0 if there was
            no such round.
        members: the ranks, as numbered at the start.
    """
    ranks, advice = [], []
    for rank, row in zip(members, rows.tolist(), strict=True):
        costs = dict(zip(_COSTS, row[:5], strict=True))
        wait, other = max(zip(row[5:], members, strict=True))
        ranks.append(RankReport(rank=rank, waits_for=other if wait > 0 else None, **costs))
    step = median(each.step_seconds for each in ranks)
    slow_rank, factor = _slow_rank(ranks)
    if slow_rank is not None:
        advice.append(
            f"rank {slow_rank} is slow: it computes {factor:.1f} times as long as the others. Look "
            f"at that machine, give it smaller batches, mix in pairs (if not yet), since only its "
            f"partners wait, or pass overlap=AsItArrives(), so that no rank waits"
        )
    slow_link = _slow_link(rows[:, 5:], members, step)
    if slow_link is not None:
        advice.append(
            f"the link between ranks {slow_link.ranks[0]} and {slow_link.ranks[1]} is slow: both "
            f"wait {1000 * slow_link.wait_seconds:.1f} ms for it in a round. Number the ranks so "
            f"that these two meet less often, {_SEND_LESS}"
        )
    share = median(each.wait_seconds for each in ranks) / max(1e-9, step)
    if share > _WAITS and not advice:
        advice.append(f"no rank is slow, but all wait {share:.0%} of a step: {_SEND_LESS}")
    advice = advice or ["no rank and no link is slow"]
    return Report(
        ranks=tuple(ranks), slow_rank=slow_rank, slow_link=slow_link, advice=tuple(advice)
    )


def _slow_rank(ranks: Sequence[RankReport]) -> tuple[int | None, float]:
    """The rank that computes much longer than the others, and how many times as long."""
    slowest = max(ranks, key=lambda each: each.computing_seconds)
    others = [each.computing_seconds for each in ranks if each is not slowest]
    factor = slowest.computing_seconds / max(median(others or [math.inf]), 1e-9)
    return slowest.rank if factor > _SLOWER else None, factor


def _slow_link(waits: Tensor, members: Sequence[int], step: float) -> Link | None:
    """The link for which both ends wait a large part of a step."""
    both = torch.minimum(waits, waits.T).triu(1)
    wait, (one, other) = both.max().item(), divmod(int(both.argmax()), len(members))
    link = Link(ranks=(members[one], members[other]), wait_seconds=wait)
    return link if wait > _WAITS * step else None


def measure(pipeline: Pipeline) -> Tensor:
    """The costs of the last steps of this rank, as a row for `diagnose`."""
    own, row = pipeline.session.transport.rank, [0.0] * len(_COSTS)
    history = pairwise(pipeline.policy.meter.history)
    steps = [(end - begin, cost, {*group}) for (begin, *_), (end, cost, group) in history]
    if steps:
        costs = [
            (seconds - cost.wait_seconds - cost.mix_seconds, cost.wait_seconds, cost.mix_seconds)
            for seconds, cost, _ in steps
        ]
        row = [median(seconds for seconds, *_ in steps), *map(median, zip(*costs, strict=True))]
        row.append(fmean(cost.bytes_sent for _, cost, _ in steps))
    for place in range(pipeline.session.transport.world_size):
        pair = {place, own} if place != own else None
        row.append(median([cost.wait_seconds for _, cost, group in steps if group == pair] or [0]))
    return torch.tensor(row, dtype=torch.float64, device="cpu")
