"""Finds the slow rank and the slow link from the times of the last steps.

A slow rank makes its partners wait and does not wait itself. A slow link makes both of its ends
wait. So the cost of a link is the shorter wait of its two ends. Only rounds in pairs show it: in a
larger group a rank does not know which link it has waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from decent_optim_wrapper.gossip.gossip import Gossip
from decent_optim_wrapper.gossip.pipeline import Pipeline
from decent_optim_wrapper.planning.tables import table

# Thresholds of a report: how much longer than the others a slow rank computes, and the share of a
# step for which both ends wait for a slow link.
_SLOWER, _WAITS = 1.2, 0.1
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


def build_report(gossip: Gossip, shards: int) -> Report:
    """Compare the last steps of all ranks; collective.

    Args:
        gossip: the gossip of this rank.
        shards: number of ranks of a replica.

    Raises:
        PeerError: a rank did not answer.
    """
    transport = gossip.pipeline.session.transport
    own = _measure(gossip.pipeline)
    # The shards of a replica have waited for each other, so the first one is enough.
    rows = gossip.all_gather(own)[::shards]
    return diagnose(rows, transport.members)


def diagnose(rows: Tensor, members: Sequence[int]) -> Report:
    """Find the slow rank and the slow link.

    Args:
        rows: shape (n, 5 + n). For each member the seconds of a step, of computing, waiting and
            coding, the bytes sent, then its median wait in pairs with each member; 0 if there was
            no such round.
        members: the ranks, as numbered at the start.
    """
    costs, waits = rows[:, :5].tolist(), rows[:, 5:]
    longest = [max(zip(own, members, strict=True)) for own in waits.tolist()]
    found = [other if wait > 0 else None for wait, other in longest]
    ranks = tuple(
        RankReport(rank=rank, waits_for=other, **dict(zip(_COSTS, cost, strict=True)))
        for rank, other, cost in zip(members, found, costs, strict=True)
    )
    step = median(each.step_seconds for each in ranks)
    slow_rank, factor = _slowest(ranks)
    slow_link = _slowest_link(waits, members, step)
    advice = []
    if slow_rank is not None:
        advice.append(
            f"rank {slow_rank} is slow: it computes {factor:.1f} times as long as the others. Look "
            f"at that machine, give it smaller batches, mix in pairs (if not yet), since only its "
            f"partners wait, or pass overlap=AsItArrives(), so that no rank waits"
        )
    if slow_link is not None:
        one, other = slow_link.ranks
        advice.append(
            f"the link between ranks {one} and {other} is slow: both wait "
            f"{1000 * slow_link.wait_seconds:.1f} ms for it in a round. Send fewer bits with "
            f"comm_dtype=torch.int8, mix less often with Schedule(gossip_every=4), or number the "
            f"ranks so that these two meet less often"
        )
    if not advice:
        share = median(each.wait_seconds for each in ranks) / max(1e-9, step)
        text = "no rank and no link is slow"
        if share > _WAITS:
            text = (
                f"no rank is slow, but all wait {share:.0%} of a step. Send fewer bits with "
                f"comm_dtype, or mix less often with Schedule(gossip_every=4)"
            )
        advice.append(text)
    return Report(ranks=ranks, slow_rank=slow_rank, slow_link=slow_link, advice=tuple(advice))


def _slowest(ranks: Sequence[RankReport]) -> tuple[int | None, float]:
    if len(ranks) < 2:
        return None, 1.0
    slowest = max(ranks, key=lambda each: each.computing_seconds)
    others = median(each.computing_seconds for each in ranks if each is not slowest)
    factor = slowest.computing_seconds / max(others, 1e-9)
    return (slowest.rank, factor) if factor > _SLOWER else (None, factor)


def _slowest_link(waits: Tensor, members: Sequence[int], step: float) -> Link | None:
    both = torch.minimum(waits, waits.T).triu(1)
    wait, (one, other) = both.max().item(), divmod(int(both.argmax()), len(members))
    if wait <= _WAITS * step:
        return None
    return Link(ranks=(members[one], members[other]), wait_seconds=wait)


def _measure(pipeline: Pipeline) -> Tensor:
    """This rank's row for `diagnose`."""
    transport = pipeline.session.transport
    history = pipeline.policy.meter.history
    steps = [(step[0] - before[0], *step[1:]) for before, step in pairwise(history)]
    costs = [
        (s, s - each.wait_seconds - each.mix_seconds, each.wait_seconds, each.mix_seconds)
        for s, each, _ in steps
    ]
    row = [0.0] * 5
    if steps:
        sent = fmean(each.bytes_sent for _, each, _ in steps)
        row = [*map(median, zip(*costs, strict=True)), sent]
    for place in range(transport.world_size):
        pair = {place, transport.rank} if place != transport.rank else None
        found = [each.wait_seconds for _, each, ranks in steps if {*ranks} == pair]
        row.append(median(found or [0.0]))
    return torch.tensor(row, dtype=torch.float64, device="cpu")
