"""What all tests share."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ranks import KeptRanks

# As torchrun starts its ranks. On a busy machine every operation of several threads waits for the
# thread that has no core: the table of 128 ranks then took 56 s instead of 3. In the environment,
# because the process that starts the workers does without torch, which takes seconds to import.
os.environ["OMP_NUM_THREADS"] = "1"

# Torch asks the name server for the name of every address that connects to a store, and meanwhile
# the store serves nobody: for seconds where an answer is lost. So that glibc asks no server at all.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

# Torch cannot name these addresses then, and says so in a line for each connection: several hundred
# lines, among which nobody would see an error.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# The groups of tests, too, wake threads of gloo that must not preempt the one that sends: see
# `connect_gloo`. Not every sandbox has batch jobs.
with suppress(OSError):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# What is imported and collected stays: each full collection would look at it for a third of a
# second, those of tests and the ten at the end of the session. In the end as usual, or Triton
# would list what cannot be freed, after the dots.
gc.disable()
atexit.register(gc.unfreeze)

# The line that rank 0 logs at its start would stand between the dots.
os.environ.setdefault("DECENT_LOG", "off")

# Set here, before the workers start, so that all of them have the same.
os.environ.setdefault("SOAK_SEED", datetime.now(UTC).strftime("%Y%m%d"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Fork the workers, which would otherwise import torch each for itself."""
    from forked import forked_python

    for spec in specs:
        spec.python = forked_python()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seed of the soak, also where it passes."""
    terminalreporter.write_line(f"SOAK_SEED={os.environ['SOAK_SEED']}")


# The files that take longest, longest first: those that wait and those that compute run beside
# each other from the start, and no worker is left alone with one at the end.
LONGEST = (
    *("test_examples", "test_partitions", "test_recovery", "test_etcd", "test_store", "test_mesh"),
    *("test_soak", "test_launcher", "test_faults", "test_guides"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the files that take longest first, and then other slow ones."""

    def order(item: pytest.Item) -> int:
        if item.path.stem in LONGEST:
            return LONGEST.index(item.path.stem)
        return len(LONGEST) + (item.get_closest_marker("slow") is None)

    items.sort(key=order)


@pytest.fixture(autouse=True)
def coded_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small buckets of tests are coded where those of real models are, if ranks are threads."""
    monkeypatch.setattr("decent_optim_wrapper.wire.coded.FEW", 0)


@pytest.fixture(scope="module")
def ranks_on_a_mesh() -> Iterator[None]:
    """The ranks that `run_on_mesh` keeps for the tests of a file end after the last of them."""
    from meshes import end_ranks

    yield
    end_ranks()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[KeptRanks]:
    """Four processes in one group, for all tests of a file."""
    from ranks import KeptRanks

    kept = KeptRanks(4)
    yield kept
    kept.end()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import what ranks are forked with before the time of a test runs."""
    gc.freeze()
    gc.enable()
    runs = not session.config.option.collectonly
    if runs and any(item.get_closest_marker("slow") for item in session.items):
        from forked import start_process

        start_process(os.getpid).join()
