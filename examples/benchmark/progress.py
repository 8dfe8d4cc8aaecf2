"""How far a benchmark is, on a terminal."""

from __future__ import annotations

import sys

from tqdm import tqdm

# tqdm would start a thread, and ranks are forked from this process.
tqdm.monitor_interval = 0


def bar(total: int, unit: str) -> tqdm:
    """A bar to `update()` after each unit."""
    return tqdm(total=total, unit=unit, disable=None)


def show(row: str) -> None:
    """Print a row of a table above the bar."""
    tqdm.write(row)
    # A rank that is forked with the row in its buffer would print it again.
    sys.stdout.flush()
