"""Ranks that train in a framework: forked from one process that has imported it."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from forked import PROCESSES
from framework_problem import RANKS
from ranks import begin_process, environment, launcher_store

# Runs a function of the rank on all ranks, and returns their results.
Run = Callable[..., list[Any]]
EXAMPLES = Path(__file__).parent.parent / "examples" / "integrations"
# Less than what pytest allows a test, and enough for a machine that is busy.
SECONDS = 110


@contextmanager
def ranks_with(*modules: str) -> Iterator[Run]:
    """Import modules in one process, and run functions on ranks that are forked from it.

    The preloads of `forked.PROCESSES` would import them for every worker.
    """
    host = ProcessPoolExecutor(1, PROCESSES, _import, modules)
    pid = host.submit(os.getpid).result(SECONDS)

    def run(main: Callable[..., Any], *args: Any) -> list[Any]:
        store = launcher_store()
        return host.submit(_fork, environment(store, RANKS, RANKS), main, args).result(SECONDS)

    try:
        yield run
    finally:
        os.kill(pid, signal.SIGKILL)
        host.shutdown()


def _import(*modules: str) -> None:
    for module in modules:
        importlib.import_module(module)
    begin_process()


def _fork(env: dict[str, str], main: Callable[..., Any], args: Any) -> list[Any]:
    with multiprocessing.get_context("fork").Pool(RANKS) as ranks:
        # Each waits for the other one, so that no process takes both.
        return ranks.starmap(_rank, [(env, rank, main, args) for rank in range(RANKS)], 1)


def _rank(env: dict[str, str], rank: int, main: Callable[..., Any], args: Any) -> Any:
    # Lightning takes the group's rank as the sign of torchrun.
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0")
    return main(rank, *args)


def run_example(_: int, path: Path, folder: Path, *options: str) -> str:
    """Run an example as this rank; what it prints."""
    os.chdir(folder)
    sys.argv[:] = [str(path), *options]
    # A bar of progress goes to stderr.
    with redirect_stdout(StringIO()) as printed, redirect_stderr(StringIO()):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()
