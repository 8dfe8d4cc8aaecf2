"""Finds the slow rank and the slow link from the times of the last steps.

A slow rank makes its partners wait and does not wait itself. A slow link makes both of its ends
wait. So the cost of a link is the shorter wait of its two ends. Only rounds in pairs show it: in a
larger group a rank does not know which link it has waited for.
"""

from __future__ import annotations

import atexit
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decent_optim_wrapper.gossip.gossip import Gossip
from decent_optim_wrapper.gossip.pipeline import Pipeline
from decent_optim_wrapper.gossip.schedule import RoundKind
from decent_optim_wrapper.gossip.timing import StepStats

# Thresholds of a report: how much longer than the others a slow rank computes, and the share of a
# step for which both ends wait for a slow link.
_SLOWER, _WAITS = 1.2, 0.1
# What each rank sends, in this order.
_COSTS = ("step_seconds", "computing_seconds", "wait_seconds", "coding_seconds", "bytes_sent")


class RankReport(NamedTuple):
    """The cost of the last steps of one rank.

    Args:
        rank: the rank, as numbered at the start.
        step_seconds: median time from the end of one step to the end of the next.
        computing_seconds: median time of everything except waiting and coding: the forward and
            backward pass, the data, the local update.
        wait_seconds: median time spent waiting for communication.
        waits_for: the rank that it waits for longest; None if it does not wait.
        coding_seconds: median time to mix, pack and code.
        bytes_sent: mean number of bytes sent per step.
    """

    rank: int
    step_seconds: float
    computing_seconds: float
    wait_seconds: float
    waits_for: int | None
    coding_seconds: float
    bytes_sent: float


class Link(NamedTuple):
    """A link between two ranks, and the median seconds per round for which both wait for it."""

    ranks: tuple[int, int]
    wait_seconds: float


class Report(NamedTuple):
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
        """Return the report as dicts, lists, numbers and strings."""
        link = self.slow_link
        return {
            **self._asdict(),
            "ranks": [each._asdict() for each in self.ranks],
            "slow_link": None if link is None else {**link._asdict(), "ranks": [*link.ranks]},
            "advice": [*self.advice],
        }

    def __str__(self) -> str:
        names = ["rank", "step ms", "computing", "waiting", "for", "coding", "KiB sent"]
        rows = [names, *map(_cells, self.ranks)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        return "\n".join([*lines, *self.advice])


def _cells(row: RankReport) -> list[str]:
    times = row.step_seconds, row.computing_seconds, row.wait_seconds, row.coding_seconds
    step, computing, waiting, coding = (f"{1000 * seconds:.1f}" for seconds in times)
    partner = "-" if row.waits_for is None else str(row.waits_for)
    sent = f"{row.bytes_sent / 1024:.1f}"
    return [str(row.rank), step, computing, waiting, partner, coding, sent]


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
    topology = gossip.pipeline.session.topology
    paired = all(
        group.size <= 2 for phase in range(topology.period) for group in topology.groups(phase)
    )
    return diagnose(rows, transport.members, paired)


def diagnose(rows: Tensor, members: Sequence[int], paired: bool) -> Report:
    """Find the slow rank and the slow link.

    Args:
        rows: shape (n, 5 + 2 n). For each member the seconds of a step, of computing, waiting and
            coding, the bytes sent, then its median wait in rounds with each member, and in pairs
            with each member; NaN if there was no such round.
        members: the ranks, as numbered at the start.
        paired: whether all groups are pairs.
    """
    size = len(members)
    costs, waits, pairs = rows[:, :5].tolist(), rows[:, 5 : 5 + size], rows[:, 5 + size :]
    found = [_longest(row, costs, members) for row in waits.tolist()]
    ranks = tuple(
        RankReport(rank=rank, waits_for=longest, **dict(zip(_COSTS, cost, strict=True)))
        for rank, longest, cost in zip(members, found, costs, strict=True)
    )
    slow_rank, factor = _slowest(ranks)
    step = median(each.step_seconds for each in ranks)
    slow_link = _slowest_link(pairs, members, step)
    advice = []
    if slow_rank is not None:
        remedy = "Look at that machine, give it smaller batches"
        if not paired:
            remedy = 'Use a topology of pairs, such as "ring", so that only its partners wait'
        advice.append(
            f"rank {slow_rank} is slow: it computes {factor:.1f} times as long as the others. "
            f"{remedy}, or pass overlap=AsItArrives(), so that no rank waits"
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
        advice.append(_otherwise(share, paired))
    return Report(ranks=ranks, slow_rank=slow_rank, slow_link=slow_link, advice=tuple(advice))


def _longest(waits: list[float], costs: list[Any], members: Sequence[int]) -> int | None:
    """The rank that is waited for longest; in a group, the rank that computes longest."""
    rows = zip(waits, costs, members, strict=True)
    found = [(wait, cost[1], rank) for wait, cost, rank in rows if wait > 0]
    return max(found)[-1] if found else None


def _slowest(ranks: Sequence[RankReport]) -> tuple[int | None, float]:
    if len(ranks) < 2:
        return None, 1.0
    slowest = max(ranks, key=lambda each: each.computing_seconds)
    others = median(each.computing_seconds for each in ranks if each is not slowest)
    factor = slowest.computing_seconds / max(others, 1e-9)
    return (slowest.rank, factor) if factor > _SLOWER else (None, factor)


def _slowest_link(pairs: Tensor, members: Sequence[int], step: float) -> Link | None:
    both = torch.minimum(pairs, pairs.T).nan_to_num(0.0).tolist()
    links = [
        Link((members[i], members[j]), both[i][j]) for i, j in combinations(range(len(members)), 2)
    ]
    slowest = max(links, key=lambda each: each.wait_seconds, default=None)
    return slowest if slowest is not None and slowest.wait_seconds > _WAITS * step else None


def _otherwise(share: float, paired: bool) -> str:
    """The advice if no rank and no link stands out, and all wait for this share of a step."""
    if share <= _WAITS:
        return "no rank and no link is slow"
    text = f"no rank is slow, but all wait {share:.0%} of a step. Send fewer bits with comm_dtype"
    return text if paired else f'{text}, or take a topology of pairs, such as "ring"'


def _measure(pipeline: Pipeline) -> Tensor:
    """This rank's row for `diagnose`."""
    transport = pipeline.session.transport
    steps = [
        (later - earlier, stats)
        for (earlier, _), (later, stats) in pairwise(pipeline.policy.meter.history)
    ]
    costs = [
        (s, s - each.wait_seconds - each.mix_seconds, each.wait_seconds, each.mix_seconds)
        for s, each in steps
    ]
    row = [0.0] * 5
    if steps:
        row = [*map(median, zip(*costs, strict=True)), fmean(each.bytes_sent for _, each in steps)]
    waits = [
        ({*_mixed_with(pipeline, each)} - {transport.rank}, each.wait_seconds) for _, each in steps
    ]
    for most in (math.inf, 1):
        for place in range(transport.world_size):
            found = [wait for others, wait in waits if place in others and len(others) <= most]
            row.append(median(found or [math.nan]))
    return torch.tensor(row, dtype=torch.float64, device="cpu")


def _mixed_with(pipeline: Pipeline, stats: StepStats) -> Sequence[int]:
    """The positions of the ranks in the group that a step has waited for."""
    pacing, schedule = pipeline.policy.pacing, pipeline.session.schedule
    number = stats.rounds - 1
    if stats.staleness:
        # With `AsItArrives`, rounds are counted at their launch, after the one that is mixed.
        number -= stats.staleness if pacing.synchronous else 1
    elif pacing.mixes_early:
        number -= 1
    elif not pacing.mixes_in_step(number):
        return ()
    if number < 0 or schedule.kind(number) is RoundKind.IDLE:
        return ()
    return schedule.plan(number, 1.0).group.ranks


def print_at_exit(owner: Any, report: Callable[[Any], Report], rank: int) -> None:
    """Print a report on the first rank when the process ends without an error.

    Args:
        owner: the wrapper; nothing is printed if it no longer exists.
        report: makes the report of the owner; collective.
        rank: this rank.
    """
    reference = weakref.ref(owner)

    def show() -> None:
        here = reference()
        if here is None or hasattr(sys, "last_value"):
            return
        try:
            made = report(here)
        except Exception as error:
            # The training is over, so a missing report is not an error.
            print(f"rank {rank}: no report, because not all ranks have made one: {error}")
        else:
            if made.ranks and rank == made.ranks[0].rank:
                print(made, flush=True)

    atexit.register(show)
