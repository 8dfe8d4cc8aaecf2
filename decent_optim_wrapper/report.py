"""Finds the slow rank and the slow link from the times of the last steps.

A slow rank makes its partners wait and does not wait itself. A slow link makes both of its ends
wait. So the cost of a link is the shorter wait of its two ends. Only rounds in pairs show it: in a
larger group a rank does not know which link it has waited for.

Bytes need their time in every round, so the fastest rounds show it. Where ranks share cores, both
ends of a link wait long, too, but not in every round, or for few bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from decent_optim_wrapper.gossip.rounds import Rounds

# Thresholds of a report: how much longer than the others a slow rank computes, and the share of a
# step for which it computes longer, or for which both ends wait for a slow link.
_SLOWER, _WAITS = 1.2, 0.1
# The bytes of a step that explain no wait: at 10 Mbit/s, they take 50 ms.
_FEW_BYTES = 1 << 16
_SEND_LESS = "send fewer bits (torch.int2, TopKCodec()), or mix less: Schedule(gossip_every=4)"
_NOT_FOR_BYTES = "they share cores, code slowly, have varying steps, or the latency is long"
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
        wait_seconds: median time spent waiting for communication, which on CPUs includes codes that
            another thread makes meanwhile.
        coding_seconds: median time to mix, pack and, on GPUs, code.
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
    """A link between two ranks, and the seconds that both wait for it in nine rounds of ten."""

    ranks: tuple[int, int]
    wait_seconds: float


@dataclass(frozen=True)
class Report:
    """The cost of the last steps on all ranks; `str` makes a table of it.

    For whom a rank waits, and a slow link, are found only if ranks mix in pairs. A wait is put down
    to a link only if a step sends more than 64 KiB, and nine rounds of ten wait for it.

    Args:
        ranks: the cost on each rank.
        slow_rank: the rank that computes longest; None unless that is much longer than the others,
            by a large part of a step.
        slow_link: the link for which both ends wait longest; None unless that is a large part of a
            step, and explained by the bytes.
        advice: what to change, one sentence or more for each finding.
    """

    ranks: tuple[RankReport, ...]
    slow_rank: int | None
    slow_link: Link | None
    advice: tuple[str, ...]

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
        rows: shape (n, 5 + 2 n), as of `measure`, for each member.
        members: the ranks, as numbered at the start.
    """
    ranks, advice = [], []
    medians, least = rows[:, 5:].chunk(2, dim=1)
    waits = medians.clone().fill_diagonal_(0.0)
    for rank, row, of_rank in zip(members, rows.tolist(), waits.tolist(), strict=True):
        costs = dict(zip(_COSTS, row, strict=False))
        wait, other = max(zip(of_rank, members, strict=True))
        ranks.append(RankReport(rank=rank, waits_for=other if wait > 0 else None, **costs))
    step = median(each.step_seconds for each in ranks)
    slow_rank, factor = _slow_rank(ranks, step)
    if slow_rank is not None:
        advice.append(
            f"rank {slow_rank} is slow: it computes {factor:.1f} times as long as the others. Look "
            f"at it, give it smaller batches, mix in pairs, or pass overlap=AsItArrives()"
        )
    sends_much = fmean(each.bytes_sent for each in ranks) > _FEW_BYTES
    slow_link = _slow_link(least, members, step) if sends_much else None
    if slow_link is not None:
        advice.append(
            f"the link between ranks {slow_link.ranks[0]} and {slow_link.ranks[1]} is slow: both "
            f"wait {1000 * slow_link.wait_seconds:.1f} ms or longer in nine rounds of ten: "
            f"{_SEND_LESS}"
        )
    share = median(each.wait_seconds for each in ranks) / max(1e-9, step)
    if share > _WAITS and not advice:
        for_bytes = sends_much and least.diagonal().median().item() > _WAITS * step
        why = _SEND_LESS if for_bytes else _NOT_FOR_BYTES
        advice.append(f"no rank is slow, but all wait {share:.0%} of a step: {why}")
    found = tuple(advice) or ("no rank and no link is slow",)
    return Report(ranks=tuple(ranks), slow_rank=slow_rank, slow_link=slow_link, advice=found)


def _slow_rank(ranks: Sequence[RankReport], step: float) -> tuple[int | None, float]:
    """The rank that computes much longer than the others, and how many times as long."""
    slowest = max(ranks, key=lambda each: each.computing_seconds)
    usual = median([each.computing_seconds for each in ranks if each is not slowest] or [math.inf])
    is_slow = slowest.computing_seconds > max(_SLOWER * usual, usual + _WAITS * step)
    return slowest.rank if is_slow else None, slowest.computing_seconds / max(usual, 1e-9)


def _slow_link(waits: Tensor, members: Sequence[int], step: float) -> Link | None:
    """The link for which both ends wait a large part of a step."""
    both = torch.minimum(waits, waits.T).triu(1)
    wait, (one, other) = both.max().item(), divmod(int(both.argmax()), len(members))
    link = Link(ranks=(members[one], members[other]), wait_seconds=wait)
    return link if wait > _WAITS * step else None


def measure(rounds: Rounds) -> Tensor:
    """The costs of the last steps of this rank, as a row for `diagnose`.

    The seconds of a step, of computing, waiting and coding, and the bytes sent; the median wait in
    pairs with each member; the longest one that nine of ten such rounds reach. In the place of this
    rank are the waits in all rounds.
    """
    own, row = rounds.session.transport.rank, [0.0] * len(_COSTS)
    history = pairwise(rounds.policy.meter.history)
    steps = [(end - begin, cost, {*group}) for (begin, *_), (end, cost, group) in history]
    if steps:
        costs = [
            (seconds - cost.wait_seconds - cost.mix_seconds, cost.wait_seconds, cost.mix_seconds)
            for seconds, cost, _ in steps
        ]
        row = [median(seconds for seconds, *_ in steps), *map(median, zip(*costs, strict=True))]
        row.append(fmean(cost.bytes_sent for _, cost, _ in steps))
    waits: list[list[float]] = []
    for place in range(rounds.session.transport.world_size):
        of = [cost for _, cost, group in steps if place == own or group == {place, own}]
        waits.append(sorted(cost.wait_seconds for cost in of) or [0.0])
    row += [*map(median, waits), *(each[len(each) // 10] for each in waits)]
    return torch.tensor(row, dtype=torch.float64, device="cpu")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Align rows, which are values by the names of their columns, under these names."""
    shown = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    cells = [[*rows[0]], *shown]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
