"""Which settings reach DDP's loss first, from measured steps.

The time to DDP's loss is the time of a step, measured for ratios of an all-reduce to computing up
to 8 (`examples/benchmark/step_time.py`), and computed from the bytes above it up to 128, times the
steps until DDP's loss, measured with a small GPT (`examples/benchmark/time_to_loss.py`).
`examples/benchmark/regret.py` writes both to a table, of 4, 8 and 16 ranks.
"""

from __future__ import annotations

import csv
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from decent_optim_wrapper.report import table
from decent_optim_wrapper.topo import Group, Hierarchical, default_name

MEASURED = Path(__file__).with_name("measured.csv")
# Of TCP, IP and Ethernet.
_HEADERS = 1.04
# Settings are fast enough if they take at most this many times as long as the fastest.
_FAST = 1.05
# What an int8 copy of the parameters takes of the time of an all-reduce of 4 ranks, and the steps
# that a round takes longer to DDP's loss for each step that it arrives later.
_INT8_COPY, _LATER = 0.254 / 1.5, 0.16
# What nothing passed gives on as many ranks as were measured.
_DEFAULT = ', topology="complete", comm_dtype=torch.int3'
_FOURS = "Hierarchical({}, 4, inner='complete')"


class Job(NamedTuple):
    """The model, the ranks and the network of a run.

    Args:
        parameters: number of float32 parameters.
        ranks: number of ranks.
        bandwidth: bytes per second that a rank sends, and receives at the same time.
        step: seconds of the forward and backward pass and the update of a step.
        optimizer: "AdamW", "Muon" or "SGD".
        varying: whether the ranks' times vary from step to step.
    """

    parameters: float
    ranks: int
    bandwidth: float
    step: float
    optimizer: str = "AdamW"
    varying: bool = False

    @property
    def ratio(self) -> float:
        """The time of an all-reduce over the time of computing."""
        nbytes = Group(range(self.ranks)).copies_sent * 4 * self.parameters * _HEADERS
        return nbytes / self.bandwidth / self.step


class Measured(NamedTuple):
    """A setting, as it was measured.

    Args:
        settings: what is written.
        ranks: number of ranks of the measurement.
        base: the optimizer.
        rate: the best learning rate over DDP's best.
        steps: the steps until DDP's loss, over DDP's.
        seconds: the time of a step over the time of computing, by ratio.
    """

    settings: str
    ranks: int
    base: str
    rate: float
    steps: float
    seconds: dict[float, float]

    def step(self, ratio: float) -> float:
        """The time of a step over the time of computing, at any ratio."""
        ratios = sorted(self.seconds)
        measured = np.interp(ratio, ratios, [self.seconds[each] for each in ratios])
        # Beyond the last ratio bytes are all that counts, and no setting gains more than there.
        return float(measured) * max(1.0, ratio / ratios[-1])

    def steps_at(self, ratio: float) -> float:
        """The steps until DDP's loss, over DDP's, with what rounds that arrive later need."""
        return self.steps + lateness(self.settings, ratio)

    def loss_time(self, ratio: float) -> float:
        """The time until DDP's loss, for each step of DDP, over the time of computing."""
        return self.step(ratio) * self.steps_at(ratio)


def lateness(settings: str, ratio: float) -> float:
    """How many more steps rounds that arrive later need; 0 if they do not."""
    return ("AsItArrives" in settings) * _LATER * max(0, math.ceil(_INT8_COPY * ratio) - 1)


def written(settings: str, ranks: int) -> str:
    """How so many ranks write the settings of a row; empty where they cannot have the same."""
    # Two ranks are a pair in any topology, so pairs save no bytes. Codes were measured with
    # references, which ranks keep for pairs of at most 16.
    fits = {"one-peer-exp": ranks in (4, 8, 16), "Hierarchical": Hierarchical.fits(ranks, 4)}
    # More ranks would exchange too many messages.
    fits['topology="complete"'] = default_name(ranks, mixes_all=True) == "complete"
    if not all(fit for name, fit in fits.items() if name in settings):
        return ""
    return settings.replace(_DEFAULT, "").replace(_FOURS.format("n"), fours(ranks))


def fours(ranks: int) -> str:
    """How groups of four are written, of four groups of four and so on above 16 ranks."""
    inner = fours(ranks // 4) if ranks > 16 and Hierarchical.fits(ranks // 4, 4) else "'complete'"
    return _FOURS.format(ranks).replace("'complete'", inner)


@cache
def _measured(ranks: int, optimizer: str, varying: bool) -> tuple[Measured, ...]:
    """The rows of the number of ranks that is nearest."""
    with MEASURED.open(newline="") as file:
        head, *rows = csv.reader(file)
    rows = [row for row in rows if row[2:4] == [str(int(varying)), optimizer]]
    nearest = min({int(row[1]) for row in rows}, key=lambda n: abs(math.log(n / ranks)))
    return tuple(
        Measured(
            settings=text,
            ranks=nearest,
            base=base,
            rate=float(rate),
            steps=float(steps),
            seconds={float(r): float(t) for r, t in zip(head[7:], times, strict=True) if t},
        )
        for settings, of, _, _, base, rate, steps, *times in rows
        if int(of) == nearest and (text := written(settings, ranks))
    )


def plan(job: Job) -> str:
    """The seconds of a step by setting, and which to take.

    Args:
        job: the model, the ranks and the network.

    Raises:
        ValueError: a figure is not positive, or there is only one rank.
    """
    if job.ranks < 2 or not all(figure > 0 for figure in job[:4]):
        given = ", ".join(f"{name}={getattr(job, name):g}" for name in job._fields[:4])
        raise ValueError(f"expected positive figures and 2 ranks or more, got {given}")
    rows, ratio = _measured(job.ranks, job.optimizer, job.varying), job.ratio
    taken, ddp = chosen(job), next(row for row in rows if row.settings == "DDP")
    times = "" if taken.rate == 1 else f"{taken.rate:g} times "
    nearest = "" if taken.ranks == job.ranks else f" ({job.ranks} were not measured)"
    # 16 ranks have the times of 8.
    timed, last = min(taken.ranks, 8), 4 if job.varying else 8
    methods = [
        {
            "settings": row.settings,
            "s/step": job.step * row.step(ratio),
            "steps": row.steps_at(ratio),
            "speed-up to DDP's loss": ddp.loss_time(ratio) / row.loss_time(ratio),
        }
        for row in sorted(rows, key=lambda row: row.steps_at(ratio))
    ]
    return "\n".join(
        [
            table(methods),
            f"losses of {taken.ranks} ranks{nearest}, any AdamW with betas=(0.9, 0.95), and "
            f"times of {timed} ranks over gloo, computed below a ratio of 0.25 and above {last}; "
            f"no other row was measured; over NCCL only pairs send codes, larger groups float32",
            f"an all-reduce takes {ratio:.2f} times as long as computing a step",
            f"take {taken.settings} with {taken.base} at {times}DDP's learning rate: "
            f"it has DDP's loss after {taken.steps_at(ratio):.2f} times as many steps, "
            f"{ddp.loss_time(ratio) / taken.loss_time(ratio):.1f} times as fast",
        ]
    )


def chosen(job: Job) -> Measured:
    """Of DDP and what this library has, the settings with the fewest steps that are fast enough.

    Of those with as many steps it is the fastest.
    """
    rows, ratio = _measured(job.ranks, job.optimizer, job.varying), job.ratio
    offered = [row for row in rows if row.settings.startswith(("DDP", "Dec"))]
    least = min(row.loss_time(ratio) for row in offered)
    fast = [row for row in offered if row.loss_time(ratio) <= _FAST * least]
    return min(fast, key=lambda row: (row.steps_at(ratio), row.loss_time(ratio)))
