"""How much longer a setting takes to DDP's loss than the best one, wherever it is used.

    python examples/benchmark/regret.py

The steps until DDP's loss from `time_to_loss.csv`, times the milliseconds of a step from
`step_time.csv`, is the time to DDP's loss. The regret of a setting at a point of the grid (ranks,
optimizer, ratio of an all-reduce to computing, equal or varying machines) is its time over the best
time of any row there. It takes a second, and --write writes what `python -m decent_optim_wrapper
plan` reads.

Where a row was not trained for other numbers of steps, the steps follow from its loss: DDP's own
loss falls so much in 1.1 times as many steps; a row whose loss is DDP's or better takes as many
steps as DDP. 16 ranks have the step times of 8.

Where no step was measured, as at ratios above 8, its time is computed: computing, the method's own
work as it was measured, and what its rounds take longer to send than the computing under which they
travel (`traffic.py`).
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, product
from pathlib import Path
from typing import NamedTuple

from time_to_loss import METHODS as TRAINED
from time_to_loss import (
    OPTIMIZERS,
    RESULTS,
    SEEDS,
    Best,
    Results,
    Row,
    best,
    goal,
    page,
    rate,
    steps_needed,
)
from traffic import Traffic, traffic

from decent_optim_wrapper.planning import plan

# The time of computing.
COMPUTING_MS = 300
TIMES = Path(__file__).with_name("step_time.csv")
RATIOS = 0.25, 0.5, 1.0, 2.0, 4.0, 8.0
FAR_RATIOS = 8.0, 16.0, 32.0, 64.0, 128.0
ALL_RATIOS = *RATIOS, *FAR_RATIOS[1:]
WRAPPER, MODULE = "DecentOptimWrapper(base, model=model{})", "DecentralizedDataParallel(...{})"
ALL, PAIRS = ', topology="complete"', ', topology="one-peer-exp"'
FOURS = ", topology=Hierarchical(n, 4, inner='complete')"
FLOAT32, INT8, INT4, INT3, INT2 = (
    f", comm_dtype=torch.{name}" for name in ("float32", "int8", "int4", "int3", "int2")
)
TOP_K = ", comm_dtype=TopKCodec()"
# Has the noise of all ranks unless it is told another number.
OWN_ADAMW = "decent_optim_wrapper.optim.AdamW"
# By the name of a method of `methods.py`: how it is written, and the row that trains like it.
SETTINGS = {
    "DDP": ("DDP", "DDP"),
    "DDP, bf16 hook": ("DDP, bf16 hook", "DDP, bf16 hook"),
    "DDP, PowerSGD 4": ("DDP, powerSGD_hook of rank 4", "DDP, PowerSGD 4"),
    "PostLocalSGD 8": ("PostLocalSGD, every 8 steps", "PostLocalSGD 8"),
    "DiLoCo 8": ("DiLoCo, every 8 steps", "DiLoCo 8"),
    "DiLoCo 30": ("DiLoCo, every 30 steps", "DiLoCo 30"),
    "decent-dp": ("decent-dp", "decent-dp"),
    "the wrapper": (WRAPPER.format(ALL + INT3), "ours, complete, int3"),
    "the wrapper, int4": (WRAPPER.format(ALL + INT4), "ours, complete, int4"),
    "the wrapper, pairs, int4": (WRAPPER.format(PAIRS + INT4), "ours, int4"),
    "the wrapper, pairs, int3": (WRAPPER.format(PAIRS + INT3), "ours, int3"),
    "the wrapper, pairs, int8": (WRAPPER.format(PAIRS + INT8), "ours, int8"),
    "the wrapper, pairs, float32": (WRAPPER.format(PAIRS + FLOAT32), "ours"),
    "the wrapper, float32": (WRAPPER.format(ALL + FLOAT32), "ours, complete"),
    "the wrapper, int2": (WRAPPER.format(ALL + INT2), "ours, complete, int2"),
    "the wrapper, pairs, int2": (WRAPPER.format(PAIRS + INT2), "ours, int2"),
    "the wrapper, delayed": (
        WRAPPER.format(", overlap=True" + ALL + INT4),
        "ours, complete, delayed, int4",
    ),
    "the wrapper, as it arrives, int8": (
        WRAPPER.format(", overlap=AsItArrives()" + PAIRS + INT8),
        "ours, delayed, int8",
    ),
    "the module": (MODULE.format(ALL + INT3), "ours, complete, int3"),
    "the module, int4": (MODULE.format(ALL + INT4), "ours, complete, int4"),
    "the module, int8": (MODULE.format(ALL + INT8), "ours, complete, int8"),
    "the module, float32": (MODULE.format(ALL + FLOAT32), "ours, complete"),
    "the module, pairs, int4": (MODULE.format(PAIRS + INT4), "ours, int4"),
    "the module, pairs, int3": (MODULE.format(PAIRS + INT3), "ours, int3"),
    "the module, pairs, int8": (MODULE.format(PAIRS + INT8), "ours, int8"),
    "the module, pairs, float32": (MODULE.format(PAIRS + FLOAT32), "ours"),
    "the module, int2": (MODULE.format(ALL + INT2), "ours, complete, int2"),
    "the module, pairs, int2": (MODULE.format(PAIRS + INT2), "ours, int2"),
    "the module, fours, int4": (MODULE.format(FOURS + INT4), "ours, groups of 4, int4"),
    "the module, fours, int3": (MODULE.format(FOURS + INT3), "ours, groups of 4, int3"),
    "the module, top-k": (MODULE.format(ALL + TOP_K), "ours, complete, top-k"),
}
# Those of the tables up to a ratio of 8.
NEAR = (*SETTINGS,)
FAR_PEERS = {
    "DiLoCo 30, int8": "DiLoCo, every 30 steps, int8",
    "Streaming DiLoCo 30, int4": "Streaming DiLoCo, every 30 steps, int4",
    "DiLoCo 100": "DiLoCo, every 100 steps",
    "DiLoCo 100, int8": "DiLoCo, every 100 steps, int8",
    "SparseLoCo 8": "SparseLoCo, every 8 steps",
    "SparseLoCo 30": "SparseLoCo, every 30 steps",
}
SETTINGS |= {name: (text, name) for name, text in FAR_PEERS.items()}
SETTINGS |= {
    f"the module, pairs, top-k{k}": (
        MODULE.format(PAIRS + f", comm_dtype=TopKCodec({k[1:]})"),
        f"ours, top-k{k}",
    )
    for k in ("", " 4")
}
SETTINGS["the wrapper, pairs, delayed, top-k"] = (
    WRAPPER.format(", overlap=True" + PAIRS + TOP_K),
    "ours, delayed, top-k",
)
SETTINGS["the module, pairs, every 2 steps, top-k"] = (
    MODULE.format(", schedule=Schedule(gossip_every=2)" + PAIRS + TOP_K),
    "ours, every 2 steps, top-k",
)
SETTINGS |= {
    f"the wrapper, {where}{k} steps late, {code}": (
        WRAPPER.format(f", schedule=Schedule(gossip_every={k}), overlap=Late({k})" + options),
        f"ours, {row}{k} steps late, {code}",
    )
    for where, row, topology in (("", "complete, ", ALL), ("pairs, ", "", PAIRS))
    for code, options in (("int4", topology + INT4), ("top-k", topology + TOP_K))
    for k in (2, 4, 8, 16)
}
OFFERED = [name for name, (text, _) in SETTINGS.items() if text.startswith(("DDP", "Dec"))]
# Whose work in a round counts for those that were not measured themselves.
LIKE = dict.fromkeys(("PostLocalSGD 8", "DiLoCo 8", "DiLoCo 30", *FAR_PEERS), "no communication")
for setting in [*SETTINGS][len(NEAR) + len(FAR_PEERS) :]:
    LIKE[setting] = "the module, top-k" if "top-k" in setting else "the wrapper, delayed"
# The worst regret of the defaults; 1.15 was the goal.
MOST_REGRET = {"the wrapper": 1.3, "the module": 1.19}


class Point(NamedTuple):
    """Where a setting is used; `varying` is sigma of the log-normal times of a step."""

    ranks: int
    varying: float
    optimizer: str


class Known(NamedTuple):
    """What a row of the losses says.

    Args:
        base: a key of OPTIMIZERS, of which the best counts.
        rate: the best learning rate, over DDP's.
        steps: until DDP's loss, over DDP's.
    """

    base: str
    rate: float
    steps: float


@cache
def results() -> Results:
    return Results(RESULTS, None)


def from_loss(row: Row, found: Best, wanted: Best) -> float:
    """The steps to DDP's loss from the loss after as many steps as DDP."""
    ddp = Row("DDP", optimizer=row.optimizer.split(",")[0])
    short, longer = (
        results().known(ddp, wanted.variant, wanted.exponent, SEEDS, length)
        for length in (1.0, 1.1)
    )
    gap = math.log(statistics.mean(found.losses) / statistics.mean(wanted.losses))
    if gap <= 0 or not short or not longer:
        return 1.0 if gap <= 0 else math.nan
    fall = math.log(statistics.mean(short) / statistics.mean(longer))
    return float(1.1 ** (gap / fall))


@cache
def known(name: str, ranks: int, optimizer: str, seeds: Sequence[int] = SEEDS) -> Known | None:
    """The steps of a method with the base that needs the fewest."""
    rows = []
    for base in OPTIMIZERS:
        row = Row(name, 4 if name == "DDP" else ranks, base)
        if base.split(",")[0] != optimizer or name not in TRAINED or "first moment" in base:
            continue
        found, wanted = best(results(), row, seeds), goal(results(), row, seeds)
        if found is None or wanted is None:
            continue
        steps = steps_needed(results(), row, seeds)
        relative = rate(found.exponent) / rate(wanted.exponent)
        estimate = from_loss(row, found, wanted) if steps is None else steps
        if not math.isnan(estimate):
            rows.append((estimate, statistics.mean(found.losses), Known(base, relative, estimate)))
    return min(rows, default=(0.0, 0.0, None))[2]


@cache
def step_times() -> dict[tuple[int, float, str], dict[float, float]]:
    """The measured milliseconds by ratio, of ranks, variation and method."""
    found: dict[tuple[int, float, str], dict[float, float]] = {}
    with TIMES.open(newline="") as file:
        for ranks, varying, ratio, method, ms in csv.reader(file):
            found.setdefault((int(ranks), float(varying), method), {})[float(ratio)] = float(ms)
    return found


@cache
def traffic_of(setting: str, ranks: int) -> Traffic:
    """What a setting sends."""
    name = SETTINGS[setting][1]
    method, *_ = TRAINED[name].values()
    return traffic(setting, name, method, ranks)


def row_of(point: Point, setting: str) -> dict[float, float]:
    """Milliseconds of a step by ratio, measured or computed; empty if not known."""
    ranks = min(point.ranks, 8)
    measured = {
        m: row for (*where, m), row in step_times().items() if where == [ranks, point.varying]
    }
    row, idle = measured.get(setting, {}), measured["no communication"]
    source = setting if row else LIKE.get(setting, setting)
    like = measured.get(source, {})
    if not like:
        return {}
    last, of, work = max(like), traffic_of(setting, ranks), 0.0
    if like is not idle:
        own = traffic_of(source, ranks)
        work = like[last] - idle[min(last, max(idle))] - COMPUTING_MS * own.waits(last)
        work *= own.every / of.every
    rest = {r: idle.get(r, idle[max(idle)]) + work for r in {*idle, *FAR_RATIOS[1:]} - {*row}}
    return row | {r: ms + COMPUTING_MS * of.waits(r) for r, ms in rest.items()}


def times(point: Point, method: str, seeds: Sequence[int] = SEEDS) -> dict[float, float]:
    """The time to DDP's loss by ratio, in milliseconds for each step of DDP; empty if not known."""
    of = known(SETTINGS[method][1], point.ranks, point.optimizer, seeds)
    row = row_of(point, method)
    if of is None:
        return {}
    return {r: ms * (of.steps + plan.lateness(SETTINGS[method][0], r)) for r, ms in row.items()}


def points() -> Iterator[Point]:
    for ranks, varying, optimizer in product((4, 8, 16), (0.0, 0.3), ("AdamW", "Muon", "SGD")):
        yield Point(ranks, varying, optimizer)


def regrets(point: Point, settings: Iterable[str] = (*SETTINGS,)) -> dict[str, dict[float, float]]:
    """By method and ratio, the time over the best time of these settings."""
    rows = {method: found for method in settings if (found := times(point, method))}
    known = {r for row in rows.values() for r in row}
    least = {r: min(row[r] for row in rows.values() if r in row) for r in known}
    return {m: {r: ms / least[r] for r, ms in row.items()} for m, row in rows.items()}


def regret_table() -> str:
    """The worst regret of each setting over the ratios, by point."""
    grid = {point: regrets(point) for point in points()}
    names = (f"{p.ranks}, {p.optimizer}{', varying' if p.varying else ''}" for p in grid)
    rows = []
    for method in NEAR:
        near = {
            p: [rows[method].get(r, 0.0) for r in RATIOS]
            for p, rows in grid.items()
            if method in rows
        }
        worst = {p: max(each) for p, each in near.items()}
        cells = [f"{worst[point]:.2f}" if point in worst else "-" for point in grid]
        if worst:
            rows.append([method, *cells, f"{max(worst.values()):.2f}"])
    return page(["worst regret", *names, "worst"], rows)


def step_table(ranks: int, varying: float) -> str:
    """Milliseconds of a step, by method and ratio."""
    found = {m: row for (*where, m), row in step_times().items() if where == [ranks, varying]}
    found["PostLocalSGD 8"] = row_of(Point(ranks, varying, "AdamW"), "PostLocalSGD 8")
    rows = [
        [method, *(f"{row[r]:.0f}" if r in row else "-" for r in RATIOS)]
        for method, row in found.items()
        if not row.keys().isdisjoint(RATIOS)
    ]
    return page(["ms per step", *(f"{ratio:g}" for ratio in RATIOS)], rows)


def speed_table(point: Point, settings: Iterable[str] = NEAR) -> str:
    """DDP's time to its loss over the time of each method, by ratio."""
    rows = []
    for method, row in speeds(point, settings).items():
        rows.append([method, *(f"{row[r]:.2f}" if r in row else "-" for r in RATIOS)])
    return page(["all-reduce / computing", *(f"{ratio:g}" for ratio in RATIOS)], rows)


def speeds(point: Point, settings: Iterable[str]) -> dict[str, dict[float, float]]:
    """By method and ratio, how many times as fast as DDP it reaches DDP's loss."""
    ddp = times(point, "DDP")
    rows = {method: times(point, method) for method in settings}
    return {m: {r: ddp[r] / row[r] for r in row if r in ddp} for m, row in rows.items() if row}


def far_table(optimizer: str) -> str:
    """The same on 4 ranks up to a ratio of 128, after the steps to DDP's loss."""
    point, rows = Point(4, 0.0, optimizer), []
    ddp = times(point, "DDP")
    for method, (_, name) in SETTINGS.items():
        if "float32" in method or method == "decent-dp":
            continue  # as slow as DDP
        seeds = next((each for each in (SEEDS, SEEDS[:1]) if known(name, 4, optimizer, each)), ())
        of = known(name, 4, optimizer, seeds) if seeds else None
        row = times(point, method, seeds) if of else {}
        if of and row:
            cells = [f"{ddp[r] / row[r]:.1f}" for r in FAR_RATIOS]
            rows.append([method, str(len(seeds)), f"{of.steps:.2f}", *cells])
    return page(["all-reduce / computing", "seeds", "steps", *map(str, map(int, FAR_RATIOS))], rows)


def best_table(optimizer: str) -> str:
    """The fastest of this library, and of all others, at larger ratios."""
    found, rows = speeds(Point(4, 0.0, optimizer), SETTINGS), []
    for whose, own in (("ours", True), ("others", False)):
        names = [method for method in found if method.startswith("the ") == own]
        best = [max(names, key=lambda name, r=r: found[name][r]) for r in FAR_RATIOS]  # type: ignore[misc]
        cells = (f"{name}: {found[name][r]:.1f}" for name, r in zip(best, FAR_RATIOS, strict=True))
        rows.append([whose, *cells])
    return page(["all-reduce / computing", *map(str, map(int, FAR_RATIOS))], rows)


def tables() -> dict[str, str]:
    """All tables, by what they show."""
    return {
        "ms per step, 4 ranks": step_table(4, 0.0),
        "ms per step, 4 ranks whose times vary": step_table(4, 0.3),
        "ms per step, 8 ranks": step_table(8, 0.0),
        "ms per step, 8 ranks whose times vary": step_table(8, 0.3),
        "times as fast to DDP's loss, AdamW": speed_table(Point(4, 0.0, "AdamW")),
        "times as fast to DDP's loss, AdamW, 16 ranks": speed_table(Point(16, 0.0, "AdamW")),
        "times as fast to DDP's loss, AdamW, times that vary": speed_table(Point(4, 0.3, "AdamW")),
        "times as fast to DDP's loss, AdamW, 8 ranks whose times vary": speed_table(
            Point(8, 0.3, "AdamW")
        ),
        "times as fast to DDP's loss, Muon": speed_table(Point(4, 0.0, "Muon")),
        "times as fast at larger ratios, AdamW": far_table("AdamW"),
        "times as fast at larger ratios, Muon": far_table("Muon"),
        "the fastest at larger ratios, AdamW": best_table("AdamW"),
        "the fastest at larger ratios, Muon": best_table("Muon"),
        "regret": regret_table(),
    }


# The lines of the picture, each named at its end; ours in colour.
DRAWN = {
    "DDP": "DDP",
    "DDP, bf16 hook": "DDP, bf16 hook",
    "DDP, PowerSGD 4": "DDP, PowerSGD",
    "DiLoCo 30": "DiLoCo 30",
    "the wrapper": "the wrapper",
    "the module": "the module",
}
COLORS = {"the wrapper": "tab:blue", "the module": "tab:orange"}


def apart(heights: Sequence[float], factor: float = 1.2) -> list[float]:
    """Move rising heights apart, so that each is at least `factor` times the one before."""
    above = accumulate(heights, lambda last, height: max(height, factor * last))
    below = accumulate(heights[::-1], lambda last, height: min(height, last / factor))
    return [math.sqrt(high * low) for high, low in zip(above, [*below][::-1], strict=True)]


def draw(path: Path) -> None:
    """Draw how many times as fast as DDP a few methods reach DDP's loss, on 4 and 16 ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, 2, figsize=(11, 4.2), sharex=True, sharey=True, layout="constrained"
    )
    for axis, ranks in zip(axes, (4, 16), strict=True):
        found = speeds(Point(ranks, 0.0, "AdamW"), DRAWN)
        rows = {m: [(r, row[r]) for r in RATIOS if r in row] for m, row in found.items()}
        rows = dict(sorted(rows.items(), key=lambda row: row[1][-1][1]))
        heights = apart([points[-1][1] for points in rows.values()])
        for (method, points), height in zip(rows.items(), heights, strict=True):
            x = points[-1][0]
            color = COLORS.get(method, "0.2" if method == "DDP" else "0.6")
            axis.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3)
            axis.text(1.07 * x, height, DRAWN[method], va="center", color=color)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        ticks = [0.5, 1, 2, 4, 8]
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_xticks(RATIOS, [f"{ratio:g}" for ratio in RATIOS])
        axis.set_xlim(RATIOS[0] * 0.9, RATIOS[-1] * 3.2)
        axis.set(title=f"{ranks} ranks, AdamW", xlabel="seconds of an all-reduce / of computing")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("times as fast as DDP to DDP's loss")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def at_no_ratio(point: Point, method: str, row: dict[float, float]) -> float:
    """The milliseconds of a step where the network takes no time; DDP's are those of computing."""
    if method == "DDP":
        idle = step_times()[min(point.ranks, 8), point.varying, "no communication"]
        return idle[min(idle)]
    (low, least), (high, more) = sorted(row.items())[:2]
    return least - low * max(0.0, (more - least) / (high - low))


def write(path: Path) -> None:
    """Write what a plan reads: a row for each setting and point of the grid."""
    head = ["settings", "ranks", "varying", "optimizer", "base", "rate", "steps", 0.0, *ALL_RATIOS]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        for point in points():
            for method, (settings, name) in SETTINGS.items():
                of = known(name, point.ranks, point.optimizer)
                row = row_of(point, method)
                if of is not None and row:
                    row = {0.0: at_no_ratio(point, method, row), **row}
                    cells = [f"{row[r] / COMPUTING_MS:.3f}" if r in row else "" for r in head[7:]]
                    where = point.ranks, int(bool(point.varying)), point.optimizer
                    base, _, noise = of.base.partition(", noise")
                    if base == "AdamW":
                        base = OWN_ADAMW if noise else "torch.optim.AdamW"
                    elif noise:
                        base += f", the rest with {OWN_ADAMW}"
                    figures = f"{of.rate:.3g}", f"{of.steps:.3f}"
                    writer.writerow([settings, *where, base, *figures, *cells])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write what a plan reads")
    parser.add_argument("--picture", type=Path, help="file for the time to DDP's loss")
    args = parser.parse_args()
    if args.write:
        write(plan.MEASURED)
    if args.picture:
        draw(args.picture)
    for name, text in tables().items():
        print(f"{name}:\n{text}\n")


if __name__ == "__main__":
    main()
